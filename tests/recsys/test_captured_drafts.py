"""A whole speculative decode as one graph: beam search's answers, accepted or patched."""

from copy import deepcopy

import numpy as np
import pytest
import torch
import transformers

from recsys import transfers
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.mask import RowMask
from recsys.decoding import (
    Engine,
    ModelDrafter,
    Search,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan
from recsys.decoding.speculative import Answers
from recsys.errors import NonFiniteError
from recsys.models.graphs import BATCHES, PassGraphs, run_again
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode
from recsys.testing import (
    ARCHITECTURES,
    RecordedRun,
    random_catalog,
    random_prompts,
    reference_beam_search,
    tiny_model,
)

RNG = np.random.default_rng(3)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
K, LONGEST, BATCH, NODES = 5, 28, 4, 30
CANDIDATES, EXTRA = 10, 32
MASKS = [RowMask.of(TRIE, RNG.random(TRIE.num_items) < share) for share in (0.5, 0.02, 0.9)]
BOOST = Boost.of(TRIE, RNG.random(TRIE.num_items).astype(np.float32))
BROKEN = 65  # in no prefix of the catalog
CLOSE = {"atol": 1e-10, "rtol": 0}
SHAPES = [
    DecodeShape(batch, new, kept, *extra)
    for batch, new in ((1, 8), (BATCH, 8), (BATCH, 32))
    for kept in (False, True)
    for extra in ((0, 0), (CANDIDATES, EXTRA))
]
COLD = [DecodeShape(BATCH, 32)]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Copies and selections take the way of a GPU, which never looks at a value."""
    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)


@pytest.fixture
def recorded(monkeypatch):
    """A capture whose replays run without Python.

    Before patch passes, everything that a graph computed is overwritten, as the graphs of passes
    may do that share its memory.
    """
    runs, run_patches = [], Answers.run_patches

    def capture(run):
        runs.append(RecordedRun(run))
        return runs[-1].replay

    def spoil_first(answers, search, waiting, patch_nodes):
        if waiting is not None:
            for tensor in (t for run in runs for t in run.made):
                tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        run_patches(answers, search, waiting, patch_nodes)

    monkeypatch.setattr(Answers, "run_patches", spoil_first)
    return capture


def draft_of(weights, kind):
    """A draft that is always, often or rarely right."""
    if kind == "other":
        return tiny_model("llama", layers=1, hidden=24, seed=9, dtype=torch.float64)
    draft = deepcopy(weights)
    if kind == "near":
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in draft.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.005 * noise)
    return draft


def captured(weights, draft, capture, trie=TRIE, shapes=COLD, *, kept=(False, False), **sizes):
    models = [TreeModel(weights), TreeModel(draft)]
    passes = []
    for model, keeps in zip(models, kept, strict=True):
        model._native = None
        if keeps:
            model.keep_prefixes(1 << 20)
        passes.append(PassGraphs.attach(model, batch=BATCH, slots=576, capture=capture))
    drafter = ModelDrafter(models[1], NODES)
    decodes = DraftGraphs(
        *passes, drafter, trie, prompt=LONGEST, num_beams=K, **{"excluded": 12, "masks": 2} | sizes
    )
    decodes.warm_up(shapes)
    return *models, decodes


@torch.inference_mode()
def spoil(decodes):
    """Other values, as an earlier decode may leave them, in all memory that a decode shares."""
    for part in decodes._parts:
        part.passes.pool.storage.values.normal_(std=100)
    for graph in decodes._graphs.values():
        graph._output.fill_(torch.nan)
        graph.inputs._memory.fill_(0x7F)


def same(found, expected):
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.is_global, expected.is_global)
    torch.testing.assert_close(found.scores, expected.scores, **CLOSE)
    assert (found.candidate_scores is None) == (expected.candidate_scores is None)
    if expected.candidate_scores is not None:
        torch.testing.assert_close(found.candidate_scores, expected.candidate_scores, **CLOSE)


def random_request(rng, shape, histories):
    """A request for a graph of this shape; stored histories and new prompts may be in one batch."""
    batch = 1 if shape.batch == 1 else int(rng.integers(2, BATCH + 1))
    least = 1 if shape.new == 8 else 9
    prompts = []
    for i in range(batch):
        new = rng.integers(1, 60, rng.integers(least, min(shape.new, LONGEST - 12) + 1))
        if shape.kept and (i == 0 or rng.random() < 0.6):
            history = histories[rng.integers(len(histories))]
            new = np.append(history[: 4 * rng.integers(1, 4)], new)
        prompts.append(new)
    rows = [rng.integers(0, TRIE.num_rows, rng.integers(0, 7)) for _ in range(batch)]
    kinds = {
        "exclude": rows,
        "masks": [[None, *MASKS[:2]][i] for i in rng.integers(0, 3, batch)],
    }
    chosen = {name: kind for name, kind in kinds.items() if rng.random() < 0.6}
    return SearchRequest(prompts, candidates=rows if shape.candidates else None, **chosen)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("llama-gqa", "same"),
        ("llama-gqa", "near"),
        ("mistral-window", "near"),
        ("qwen3-mixed-window", "other"),
    ],
)
def test_replays_give_the_answers_of_beam_search(architecture, kind, recorded):
    """Over spoiled memory, in an order that mixes all shapes; patched where it is not accepted."""
    weights = tiny_model(architecture, layers=2, hidden=16, dtype=torch.float64)
    draft = draft_of(weights, kind)
    *models, decodes = captured(weights, draft, recorded, shapes=SHAPES, kept=(True, True))
    rng = np.random.default_rng(5)
    histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
    first = decodes.run(Search.of(histories, models[0], TRIE), K)
    same(first, beam_search(weights, histories, TRIE, K))
    levels = set()
    for shape in [SHAPES[i] for i in rng.permutation(len(SHAPES))]:
        request = random_request(rng, shape, histories)
        expected = beam_search(weights, request, TRIE, K)
        spoil(decodes)
        search = Search.of(request, models[0], TRIE)
        assert decodes._find(search, decodes._begun(search)) == shape
        found = decodes.run(search, K)
        same(found, expected)
        plain = speculative_beam_search(weights, ModelDrafter(draft, NODES), request, TRIE, K)
        for mine, theirs in zip(found.stats, plain.stats, strict=True):
            for name in ("target_passes", "accepted_levels", "drafted_nodes", "draft_passes"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert mine.kv_slots == theirs.kv_slots
            assert mine.target_tokens + mine.cached_tokens == theirs.target_tokens
            assert mine.padded_tokens >= 0
            levels.add(mine.accepted_levels)
    told = decodes.statistics()
    assert (told.replays, told.fallbacks) == (1 + len(SHAPES), {})
    if kind == "same":
        assert (told.patched, levels) == (0, {TRIE.num_levels - 1})
    else:
        assert told.patched
        assert kind == "other" or len(levels) > 1
    for model in models:
        assert model.pool.lent == model.prefixes.pinned == 0


@pytest.mark.parametrize("kind", ["same", "near"])
def test_answers_are_those_of_plain_python(kind, recorded):
    weights = tiny_model("llama-gqa", layers=1, hidden=16, dtype=torch.float64)
    model, _, decodes = captured(weights, draft_of(weights, kind), recorded)
    rng = np.random.default_rng(2)
    prompts = random_prompts(rng, 3, 12)
    exclude = [rng.integers(0, TRIE.num_rows, 6) for _ in prompts]
    masks = [None, MASKS[0], MASKS[1]]
    request = SearchRequest(prompts, exclude=exclude, masks=masks)
    found = decodes.run(Search.of(request, model, TRIE), K)
    for i, prompt in enumerate(prompts):
        allowed = np.ones(TRIE.num_rows, bool) if masks[i] is None else np.diff(masks[i].before) > 0
        allowed[exclude[i]] = False
        expected = reference_beam_search(weights, prompt, TRIE.rows[allowed].astype(np.int64), K)
        rows = found.rows[i] >= 0
        assert [tuple(t) for t in found.tokens[i][rows].tolist()] == [t for t, _ in expected]
        scores = torch.tensor([score for _, score in expected], dtype=torch.float64)
        torch.testing.assert_close(found.scores[i][rows], scores, **CLOSE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_in_a_captured_decode_looks_at_its_data(architecture):
    """Meta tensors have no data: whatever waited for a value would raise."""
    config = tiny_model(architecture).config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        draft = transformers.AutoModelForCausalLM.from_config(tiny_model("llama", layers=1).config)
    shapes = [s for s in SHAPES if s.batch == BATCH and s.kept]
    _, _, decodes = captured(
        model.eval(), draft.eval(), run_again, shapes=shapes, kept=(True, True)
    )
    assert decodes.statistics().graphs == len(shapes)


@pytest.mark.parametrize("kept", [(True, False), (False, True), (True, True)])
def test_both_models_begin_behind_what_both_have_stored(kept, recorded):
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    draft = draft_of(weights, "near")
    model, drafting, decodes = captured(weights, draft, recorded, shapes=SHAPES, kept=kept)
    rng = np.random.default_rng(4)
    for batch in (1, 3):
        prompts = [rng.integers(1, 60, 21) for _ in range(batch)]
        for stored, ready in ((8, model), (16, drafting)):
            if ready.prefixes is not None:
                beam_search(ready, [prompt[: stored + 1] for prompt in prompts], TRIE, K)
        for cached in (8, 20):
            spoil(decodes)
            request = SearchRequest(prompts, exclude=[[1, 2]] * batch)
            found = decodes.run(Search.of(request, model, TRIE), K)
            same(found, beam_search(weights, request, TRIE, K))
            assert {s.cached_tokens for s in found.stats} == {cached if all(kept) else 0}


def test_a_store_that_is_cold_for_the_draft_alone_costs_limited_padding(recorded):
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    model, drafting, decodes = captured(weights, weights, recorded, kept=(True, True))
    prompts = [np.arange(1, 21) + i for i in range(2)]
    beam_search(model, prompts, TRIE, K)
    model.most_padding = 31  # 16 tokens of each prompt are stored for the target alone
    assert decodes.run(Search.of(prompts, model, TRIE), K) is None
    assert decodes.statistics().fallbacks == {"padding": 1}
    model.most_padding = 32
    expected = beam_search(weights, prompts, TRIE, K)
    same(decodes.run(Search.of(prompts, model, TRIE), K), expected)
    known = drafting.prefixes.known("", np.array(prompts), [20, 20])
    assert known.tolist() == [16, 16]


TRIES = {
    "fewer states than beams": ItemTrie.build([[1, 2], [1, 3], [4, 2]]),
    "one row": ItemTrie.build([[1, 2, 3]]),
    "dense": ItemTrie.build(np.add(RNG.integers(0, 16, (900, 3)), [1, 17, 33])),
    "rows that end early": ItemTrie.build([[1, 2, 3], [1], [4, 2, 3], [5], [5, 6]], end=9),
}


@pytest.mark.parametrize("name", TRIES)
def test_catalogs_of_any_form_are_searched(name, recorded):
    trie = TRIES[name]
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    shapes = [DecodeShape(2, 8), DecodeShape(2, 8, False, 4, 10)]
    model, _, decodes = captured(weights, draft_of(weights, "other"), recorded, trie, shapes)
    rng = np.random.default_rng(1)
    for batch in (1, 2):
        rows = [rng.integers(0, trie.num_rows, 2) for _ in range(batch)]
        masks = [None, RowMask.of(trie, rng.random(trie.num_items) < 0.6)][:batch]
        for kinds in ({}, {"exclude": rows, "masks": masks}, {"candidates": rows}):
            request = SearchRequest(random_prompts(rng, batch, 8), **kinds)
            found = decodes.run(Search.of(request, model, trie), K)
            same(found, beam_search(weights, request, trie, K))


def test_what_fits_no_graph_is_counted_with_the_reason(recorded):
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    model, drafting, decodes = captured(weights, weights, recorded, shapes=[DecodeShape(2, 8)])
    one = [[1, 2, 3]]
    requests = {
        "kind": [
            SearchRequest(one, seeds=[1]),
            SearchRequest(one, boosts=[BOOST]),
            SearchRequest(one, normalize="allowed"),
        ],
        "prompt": [[np.arange(1, LONGEST + 2)]],
        "excluded": [SearchRequest(one, exclude=[np.arange(60)])],
        "masks": [SearchRequest(one * 3, masks=MASKS)],
        "shape": [one * 3, [np.arange(9)], SearchRequest(one, candidates=[[1]])],
    }
    for tried in requests.values():
        for request in tried:
            assert decodes.run(Search.of(request, model, TRIE), K) is None
    assert decodes.run(Search.of(one, model, TRIE), K - 1) is None
    for busy in (model, drafting):
        with busy.pool.lend(1, 8, 8):
            assert decodes.run(Search.of(one, model, TRIE), K) is None
    drafting.keep_prefixes(1 << 20)
    assert decodes.run(Search.of(one, model, TRIE), K) is None
    counts = {name: len(tried) for name, tried in requests.items()}
    assert decodes.statistics().fallbacks == counts | {"beams": 1, "busy": 2, "replaced": 1}
    assert decodes.statistics().replays == 0
    assert model.pool.lent == drafting.pool.lent == 0


def test_what_cannot_be_captured_is_refused(recorded):
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    model, drafting, decodes = captured(weights, weights, recorded, shapes=[])
    for ready in (model, drafting):
        with ready.pool.lend(1, 8, 8), pytest.raises(RuntimeError, match="before decoding"):
            decodes.warm_up(COLD)
    target, draft = (part.passes for part in decodes._parts)
    sizes = {"prompt": LONGEST, "num_beams": K}
    drafter = ModelDrafter(drafting, NODES)
    with pytest.raises(ValueError, match="one level"):
        DraftGraphs(target, draft, drafter, ItemTrie.build([[1], [2]]), **sizes)
    with pytest.raises(ValueError, match="the drafter's model"):
        DraftGraphs(target, target, drafter, TRIE, **sizes)
    small = PassGraphs.attach(drafting, batch=BATCH, slots=32)
    with pytest.raises(ValueError, match="4 requests with 32 slots; make it larger"):
        DraftGraphs(target, small, drafter, TRIE, **sizes).warm_up(COLD)


def test_tokens_that_the_draft_does_not_know_are_refused(recorded):
    weights = tiny_model("llama", 80, layers=1, dtype=torch.float64)
    draft = tiny_model("llama", 64, layers=1, dtype=torch.float64)
    model, _, decodes = captured(weights, draft, recorded)
    with pytest.raises(ValueError, match=r"the draft knows 0 \.\. 63"):
        decodes.run(Search.of([[1, 70]], model, TRIE), K)
    assert not decodes.statistics().fallbacks


@pytest.mark.parametrize("who", ["target", "draft"])
def test_the_error_names_requests_that_are_not_finite(who, recorded):
    """A draft that is not finite drafts nothing, and its prompts are not kept."""
    weights = tiny_model("llama", 66, layers=1, dtype=torch.float64)
    draft = tiny_model("llama", 66, layers=1, seed=9, dtype=torch.float64)
    clean = [[1, 2, 3, 4, 5, 6], [4, 5]]
    expected = beam_search(weights, clean, TRIE, K)
    with torch.no_grad():
        (draft if who == "draft" else weights).model.embed_tokens.weight[BROKEN] = torch.nan
    kept = (True, True)
    model, drafting, decodes = captured(weights, draft, recorded, shapes=SHAPES, kept=kept)
    mixed = [clean[0], [1, 2, 3, 4, BROKEN, 5, 6, 7, 8], [BROKEN]]
    ready = drafting if who == "draft" else model
    for _ in range(2):
        search = Search.of(mixed, model, TRIE)
        if who == "target":
            with pytest.raises(NonFiniteError) as caught:
                decodes.run(search, K)
            assert caught.value.requests == (1, 2)
        else:
            same(decodes.run(search, K), beam_search(weights, mixed, TRIE, K))
        same(decodes.run(Search.of(clean, model, TRIE), K), expected)
    assert ready.prefixes.known("", np.array(mixed[1:2]), [9]).tolist() == [4]
    assert model.pool.lent == model.prefixes.pinned == drafting.prefixes.pinned == 0


def test_patch_passes_that_are_not_finite_are_reported(recorded):
    """Only a token of a beam that was not drafted is broken, so that the graph saw none."""
    weights = tiny_model("llama", layers=1, dtype=torch.float64)
    draft = draft_of(weights, "other")
    prompts = random_prompts(np.random.default_rng(8), BATCH, 12)
    model, _, decodes = captured(weights, draft, recorded)
    plain = speculative_beam_search(weights, ModelDrafter(draft, NODES), prompts, TRIE, K)
    assert max(s.target_passes for s in plain.stats) > 1

    def no_patch(*_):
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answers, "run_patches", no_patch)
        with pytest.raises(KeyboardInterrupt):
            decodes.run(Search.of(prompts, model, TRIE), K)
    assert model.pool.lent == 0
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        run = TreeModel.forward

        def broken(tree_model, *args, **kwargs):
            return run(tree_model, *args, **kwargs).fill_(torch.nan)

        patch.setattr(TreeModel, "forward", broken)  # a replay runs no Python
        with pytest.raises(NonFiniteError):
            decodes.run(Search.of(prompts, model, TRIE), K)
    same(decodes.run(Search.of(prompts, model, TRIE), K), beam_search(weights, prompts, TRIE, K))


@pytest.mark.parametrize("kind", ["same", "other"])
def test_items_come_and_go_in_the_same_graphs(recorded, kind):
    """Patch passes read the numbers of states that the graph wrote."""
    rng = np.random.default_rng(7)
    items = random_catalog(rng, 330, 4)
    tries = [ItemTrie.build(items[part]) for part in (slice(300), slice(320), slice(15, None))]
    weights = tiny_model("llama", layers=1, hidden=16, dtype=torch.float64)
    catalog = FixedTrie(tries[0], tokens=64)
    model, _, decodes = captured(
        weights, draft_of(weights, kind), recorded, catalog, [DecodeShape(2, 8, False, 4, 12)]
    )
    for trie in tries:
        assert catalog.use(trie)
        for batch in (1, 2):
            request = SearchRequest(
                random_prompts(rng, batch, 8),
                exclude=[rng.integers(0, trie.num_rows, 5) for _ in range(batch)],
                masks=[RowMask.of(trie, rng.random(trie.num_items) < 0.6), None][:batch],
                candidates=[rng.integers(0, trie.num_rows, 3) for _ in range(batch)],
            )
            found = decodes.run(Search.of(request, model, trie), K)
            same(found, beam_search(weights, request, trie, K))
    told = decodes.statistics()
    assert (told.replays, told.fallbacks) == (6, {})
    assert bool(told.patched) == (kind != "same")


MOST = 8
HISTORIES = [RNG.integers(1, 64, LONGEST) for _ in range(MOST)]
DRAFTED = Plan(Mode.DRAFT, NODES)


@pytest.fixture(scope="module")
def engine():
    weights = tiny_model("llama-gqa", layers=1, hidden=16, dtype=torch.float64)
    each = Engine(
        weights, TRIE, draft=draft_of(weights, "near"), draft_nodes=NODES, prefix_bytes=1 << 22,
        prompt_slots=LONGEST, graphs=True,
    )  # fmt: skip
    each.capture_decodes(MOST, LONGEST, K, plans=[Plan(), DRAFTED])
    each.capture(MOST, LONGEST, K, [DRAFTED])
    return each


def test_an_engine_drafts_in_one_graph(engine, monkeypatch):
    """Patch passes run on captured passes, in the same storage."""
    monkeypatch.setattr("recsys.decoding.speculative.counts_nodes", lambda device: False)
    rng = np.random.default_rng(1)
    for batch in range(1, MOST + 1):
        prompts = [h[: LONGEST - rng.integers(0, 5)] for h in HISTORIES[:batch]]
        engine.forget()
        if batch % 2:
            engine.decode([history[:-4] for history in HISTORIES[:batch]], K, mode="draft")
        request = SearchRequest(
            prompts, exclude=[rng.integers(0, TRIE.num_rows, 6) for _ in prompts]
        )
        expected = beam_search(engine.target._model, request, TRIE, K)
        decoded = engine.decode(request, K, mode="draft")
        same(decoded.beams, expected)
        assert decoded.plan == DRAFTED
        same(engine.decode(request, K, mode="beam").beams, expected)
    told, plain = engine.decodes[DRAFTED].statistics(), engine.decodes[Plan()].statistics()
    assert (told.replays, told.fallbacks) == (MOST + MOST // 2, {})
    assert (plain.replays, plain.patched, plain.fallbacks) == (MOST, 0, {})
    assert 0 < told.patched < told.replays
    assert told.graphs == sum(b <= MOST for b in BATCHES) * 3 * 2
    passes = [graphs.statistics() for graphs in engine.graphs]
    assert [p.fallbacks for p in passes] == [{}, {}]
    assert passes[0].replays >= told.patched
    assert passes[1].replays == 0


def test_what_is_traced_or_of_another_size_is_decoded_as_before(engine):
    before = engine.decodes[DRAFTED].statistics()
    found = engine.decode([[1, 2, 3]], K, mode="draft", traced=True).beams
    assert found.traces
    same(found, beam_search(engine.target._model, [[1, 2, 3]], TRIE, K))
    found = engine.decode([[1, 2, 3]], K - 1, mode="draft").beams
    same(found, beam_search(engine.target._model, [[1, 2, 3]], TRIE, K - 1))
    after = engine.decodes[DRAFTED].statistics()
    assert (after.replays, after.fallbacks) == (before.replays, {"beams": 1})


def test_plans_that_cannot_be_captured_are_refused(engine):
    with pytest.raises(ValueError, match="exhaustive cannot be captured"):
        engine.capture_decodes(1, 8, K, plans=[Plan(Mode.EXHAUSTIVE)])
    alone = Engine(tiny_model("llama", layers=1), TRIE, graphs=True)
    with pytest.raises(ValueError, match="draft-30 cannot be captured"):
        alone.capture_decodes(1, 8, K, plans=[DRAFTED])


def test_large_batches_of_large_trees_are_not_captured(engine):
    grid = engine._grid(32, LONGEST, K)
    plan = Plan(Mode.DRAFT, 256)
    assert {s.batch for s in grid.of_decodes(plan, kept=False)} == {1, 2, 4, 8}
    assert {s.batch for s in grid.of_decodes(Plan(), kept=False)} == set(BATCHES)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["same", "near"])
def test_cuda_graphs_give_the_answers_of_beam_search(kind):
    weights = tiny_model("llama-gqa", dtype=torch.float64)
    draft = draft_of(weights, kind).cuda()
    weights = weights.cuda()
    model, _, decodes = captured(weights, draft, None, shapes=SHAPES, kept=(True, True))
    rng = np.random.default_rng(5)
    histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
    decodes.run(Search.of(histories, model, TRIE), K)
    for shape in SHAPES:
        request = random_request(rng, shape, histories)
        expected = beam_search(weights, request, TRIE, K)
        same(decodes.run(Search.of(request, model, TRIE), K), expected)
    assert decodes.statistics().replays == 1 + len(SHAPES)
    assert bool(decodes.statistics().patched) == (kind == "near")
