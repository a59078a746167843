"""A whole beam search as one graph: the answers of beam search, whatever fills up its shape."""

import numpy as np
import pytest
import torch
import transformers

from recsys import transfers
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.mask import RowMask
from recsys.decoding import Engine, Search, SearchRequest, beam_search
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_inputs import MOST_DECODES, DecodeShape, MaskTable
from recsys.decoding.grid import Grid
from recsys.decoding.planner import Plan
from recsys.errors import NonFiniteError
from recsys.models.graphs import BATCHES, PassGraphs, run_again
from recsys.models.tree_forward import TreeModel
from recsys.testing import (
    ARCHITECTURES,
    RecordedRun,
    random_catalog,
    random_prompts,
    tiny_model,
)

RNG = np.random.default_rng(3)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
K, LONGEST, BATCH, EXCLUDED = 5, 28, 4, 12
CANDIDATES, NODES = 10, 32
MASKS = [RowMask.of(TRIE, RNG.random(TRIE.num_items) < share) for share in (0.5, 0.02, 0.9)]
BOOST = Boost.of(TRIE, RNG.random(TRIE.num_items).astype(np.float32))
BROKEN = 63
CLOSE = {"atol": 1e-10, "rtol": 0}
SHAPES = [
    DecodeShape(batch, new, kept, *extra)
    for batch in (1, BATCH)
    for new in (8, 32)
    for kept in (False, True)
    for extra in ((0, 0), (CANDIDATES, NODES))
]


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Copies and selections take the way of a GPU, which never looks at a value."""
    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)


def recorded(run):
    return RecordedRun(run).replay


def captured(weights, trie=TRIE, shapes=SHAPES, capture=recorded, *, kept=True, **sizes):
    model = TreeModel(weights)
    model._native = None
    if kept:
        model.keep_prefixes(1 << 20)
    passes = PassGraphs.attach(model, batch=BATCH, slots=128, capture=capture)
    decodes = DecodeGraphs(
        passes, trie, prompt=LONGEST, num_beams=K, **{"excluded": EXCLUDED, "masks": 2} | sizes
    )
    decodes.warm_up(shapes)
    return model, decodes


@torch.inference_mode()
def spoil(decodes):
    """Other values, as an earlier decode may leave them, in all memory that a decode shares."""
    decodes.passes.pool.storage.values.normal_(std=100)
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


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-window", "qwen3-mixed-window"])
def test_replays_give_the_answers_of_beam_search(architecture):
    """Without Python of the capture, over spoiled memory, in an order that mixes all shapes."""
    weights = tiny_model(architecture, layers=2, hidden=16, dtype=torch.float64)
    model, decodes = captured(weights)
    rng = np.random.default_rng(5)
    histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
    same(
        decodes.run(Search.of(histories, model, TRIE), K), beam_search(weights, histories, TRIE, K)
    )
    cached = set()
    for shape in [SHAPES[i] for i in rng.permutation(2 * len(SHAPES)) % len(SHAPES)]:
        request = random_request(rng, shape, histories)
        expected = beam_search(weights, request, TRIE, K)
        spoil(decodes)
        search = Search.of(request, model, TRIE)
        begun = model.prefixes.known("", search.prompts.host_tokens, search.prompts.host_lengths)
        assert decodes._find(search, begun) == shape
        found = decodes.run(search, K)
        same(found, expected)
        cached |= {stats.cached_tokens for stats in found.stats}
    assert decodes.statistics().replays == 1 + 2 * len(SHAPES)
    assert not decodes.statistics().fallbacks
    assert cached >= {0, 4, 8, 12}
    assert model.pool.lent == model.prefixes.pinned == 0


def test_counters_are_those_of_a_search_on_captured_passes():
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights)
    plain = TreeModel(weights)
    plain.keep_prefixes(1 << 20)
    rng = np.random.default_rng(0)
    for _ in range(12):
        prompts = random_prompts(rng, 3, LONGEST)
        candidates = [rng.integers(0, TRIE.num_rows, 4) for _ in prompts]
        for history in (prompts, [np.append(p, 1)[-LONGEST:] for p in prompts]):
            request = SearchRequest(history, candidates=candidates)
            expected = beam_search(plain, request, TRIE, K).stats
            found = decodes.run(Search.of(request, model, TRIE), K).stats
            padded = {stats.padded_tokens for stats in found}
            assert len(padded) == 1
            assert min(padded) >= 0
            for mine, theirs in zip(found, expected, strict=True):
                for name in ("target_passes", "target_tokens", "kv_slots", "cached_tokens"):
                    assert getattr(mine, name) == getattr(theirs, name), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_in_a_captured_decode_looks_at_its_data(architecture):
    """Meta tensors have no data: whatever waited for a value would raise."""
    config = tiny_model(architecture).config
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shapes = [s for s in SHAPES if s.batch == BATCH and s.kept]
    _, decodes = captured(model.eval(), shapes=shapes, capture=run_again)
    assert decodes.statistics().graphs == len(shapes)


def test_what_was_returned_outlives_the_next_decode():
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights, shapes=[DecodeShape(1, 32)], kept=False)
    first = decodes.run(Search.of([[1, 2, 3]], model, TRIE), K)
    scores = first.scores.clone()
    decodes.run(Search.of([[9, 8, 7]], model, TRIE), K)
    assert torch.equal(first.scores, scores)


TRIES = {
    "one level": ItemTrie.build([[1], [4], [9], [2], [3], [30], [5]]),
    "fewer states than beams": ItemTrie.build([[1, 2], [1, 3], [4, 2]]),
    "one row": ItemTrie.build([[1, 2, 3]]),
    "dense": ItemTrie.build(np.add(RNG.integers(0, 16, (900, 3)), [1, 17, 33])),
    "rows that end early": ItemTrie.build([[1, 2, 3], [1], [4, 2, 3], [5], [5, 6]], end=9),
}


@pytest.mark.parametrize("name", TRIES)
def test_catalogs_of_any_form_are_searched(name):
    trie = TRIES[name]
    weights = tiny_model("llama", dtype=torch.float64)
    shapes = [DecodeShape(2, 8), DecodeShape(2, 8, False, 4, 10)]
    model, decodes = captured(weights, trie, shapes, kept=False)
    assert any(d is not None for d in trie.dense)  # and TRIE has depths that are not
    assert any(d is None for d in TRIE.dense)
    rng = np.random.default_rng(1)
    for batch in (1, 2, 2):
        rows = [rng.integers(0, trie.num_rows, 2) for _ in range(batch)]
        masks = [None, RowMask.of(trie, rng.random(trie.num_items) < 0.6)][:batch]
        for kinds in ({}, {"exclude": rows, "masks": masks}, {"candidates": rows}):
            request = SearchRequest(random_prompts(rng, batch, 8), **kinds)
            found = decodes.run(Search.of(request, model, trie), K)
            same(found, beam_search(weights, request, trie, K))


def test_a_batch_of_no_requests_needs_no_graph():
    model, decodes = captured(tiny_model("llama", dtype=torch.float64), shapes=[DecodeShape(1, 8)])
    assert decodes.run(Search.of([], model, TRIE), K) is None
    assert not decodes.statistics().fallbacks


def test_masks_take_the_place_of_the_one_not_used_for_longest():
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights, shapes=[DecodeShape(BATCH, 32)], kept=False)
    prompts = random_prompts(np.random.default_rng(1), 2, LONGEST)
    for pair in ([0, 1], [1, 2], [0, None], [2, 0], [1, 1], [None, 0], [2, 1]):
        masks = [None if i is None else MASKS[i] for i in pair]
        request = SearchRequest(prompts, masks=masks)
        found = decodes.run(Search.of(request, model, TRIE), K)
        same(found, beam_search(weights, request, TRIE, K))


def test_what_fits_no_graph_is_counted_with_the_reason():
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights, shapes=[DecodeShape(2, 8)], kept=False)
    one, many = [[1, 2, 3]], np.arange(60)
    requests = {
        "kind": [
            SearchRequest(one, seeds=[1]),
            SearchRequest(one, boosts=[BOOST]),
            SearchRequest(one, normalize="allowed"),
        ],
        "prompt": [[np.arange(1, LONGEST + 2)], SearchRequest(one, prompt_slots=LONGEST + 1)],
        "excluded": [SearchRequest(one, exclude=[many])],
        "masks": [SearchRequest(one * 3, masks=MASKS)],
        "shape": [one * 3, [np.arange(9)], SearchRequest(one, candidates=[[1]])],
    }
    for tried in requests.values():
        for request in tried:
            assert decodes.run(Search.of(request, model, TRIE), K) is None
    assert decodes.run(Search.of(one, model, TRIE), K - 1) is None
    other = ItemTrie.build(random_catalog(np.random.default_rng(9), 30, 4))
    assert decodes.run(Search.of(one, model, other), K) is None
    with model.pool.lend(1, 8, 8):
        assert decodes.run(Search.of(one, model, TRIE), K) is None
    model.most_padding = 1
    assert decodes.run(Search.of([[1, 2, 3, 4, 5], [1]], model, TRIE), K) is None
    model.keep_prefixes(1 << 20)
    assert decodes.run(Search.of(one, model, TRIE), K) is None
    counts = {name: len(tried) for name, tried in requests.items()}
    assert decodes.statistics().fallbacks == counts | {
        "beams": 1, "catalog": 1, "busy": 1, "padding": 1, "replaced": 1,
    }  # fmt: skip
    assert decodes.statistics().replays == 0


def test_what_cannot_be_captured_is_refused():
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights, shapes=[], kept=False)
    with pytest.raises(ValueError, match="at most 128 are captured"):
        decodes.warm_up([DecodeShape(1, n) for n in range(MOST_DECODES + 1)])
    with pytest.raises(ValueError, match="4 requests with 128 slots; make it larger"):
        decodes.warm_up([DecodeShape(BATCH + 1, 8)])
    with pytest.raises(ValueError, match="make it larger"):
        decodes.warm_up([DecodeShape(1, 8, False, 4, 90)])
    with model.pool.lend(1, 8, 8), pytest.raises(RuntimeError, match="warm up before decoding"):
        decodes.warm_up(SHAPES)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_error_names_requests_that_are_not_finite(value):
    """On a device, an index that a NaN made would be out of range."""
    weights = tiny_model("llama", dtype=torch.float64)
    with torch.no_grad():
        weights.model.embed_tokens.weight[BROKEN] = value
    model, decodes = captured(weights)
    clean = [[1, 2, 3, 4, 5, 6], [4, 5]]
    expected = beam_search(weights, clean, TRIE, K)
    for _ in range(2):
        mixed = [clean[0], [1, 2, 3, 4, BROKEN, 5, 6, 7, 8], [BROKEN]]
        with pytest.raises(NonFiniteError) as caught:
            decodes.run(Search.of(mixed, model, TRIE), K)
        assert caught.value.requests == (1, 2)
        same(decodes.run(Search.of(clean, model, TRIE), K), expected)
    assert model.prefixes.known("", np.array(mixed[1:2]), [9]).tolist() == [4]
    assert model.pool.lent == model.prefixes.pinned == 0


def test_tokens_outside_all_beams_are_never_run():
    """Captures run token 0, and padding is a token of the prompt."""
    trie = ItemTrie.build([[2, 3, 4], [2, 3, 5], [7, 3, 4]])
    weights = tiny_model("llama", dtype=torch.float64)
    request = SearchRequest([[5, 6], [4]], exclude=[[2], [0, 1]])
    expected = beam_search(weights, request, trie, K)
    with torch.no_grad():
        weights.model.embed_tokens.weight[[0, 1, 9]] = torch.nan
    model, decodes = captured(weights, trie, [DecodeShape(BATCH, 8)], kept=False)
    for _ in range(2):
        same(decodes.run(Search.of(request, model, trie), K), expected)


def test_a_decode_that_fails_leaves_nothing_behind(monkeypatch):
    weights = tiny_model("llama", dtype=torch.float64)
    model, decodes = captured(weights, shapes=[DecodeShape(1, 8, kept) for kept in (False, True)])

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.prefixes, "insert", broken)
        with pytest.raises(KeyboardInterrupt):
            decodes.run(Search.of([[1, 2, 3, 4, 5]], model, TRIE), K)
    assert model.pool.lent == model.prefixes.pinned == model.prefixes.statistics().used == 0
    for cached in (0, 4):
        found = decodes.run(Search.of([[1, 2, 3, 4, 5]], model, TRIE), K)
        same(found, beam_search(weights, [[1, 2, 3, 4, 5]], TRIE, K))
        assert found.stats[0].cached_tokens == cached


MOST = 32
HISTORIES = [RNG.integers(1, 64, LONGEST) for _ in range(MOST)]


@pytest.fixture(scope="module")
def engine():
    weights = tiny_model("llama-gqa", layers=1, hidden=16, dtype=torch.float64)
    each = Engine(weights, TRIE, prefix_bytes=1 << 22, prompt_slots=LONGEST, graphs=True)
    each.capture_decodes(MOST, LONGEST, K, candidates=[(0, 0), (CANDIDATES, NODES)])
    return each


def test_no_batch_of_1_to_32_requests_decodes_without_a_graph(engine):
    """Kept and new prompts in one batch, exclusions, masks and candidates."""
    rng = np.random.default_rng(1)
    for batch in range(1, MOST + 1):
        prompts = [h[: LONGEST - rng.integers(0, 5)] for h in HISTORIES[:batch]]
        engine.forget()
        if batch % 4:
            engine.decode([history[:-4] for history in HISTORIES[:batch]], K, mode="beam")
            if batch % 4 == 2:
                prompts[batch // 2] = rng.integers(1, 64, rng.integers(1, LONGEST))
        rows = [rng.integers(0, TRIE.num_rows, 6) for _ in range(batch)]
        request = SearchRequest(
            prompts,
            exclude=rows if batch % 5 else None,
            masks=[[None, *MASKS][i % 4] for i in range(batch)] if batch % 3 else None,
            candidates=rows if batch % 2 else None,
        )
        found = engine.decode(request, K, mode="beam").beams
        same(found, beam_search(engine.target._model, request, TRIE, K))
        if batch % 4 == 1:
            assert min(s.cached_tokens for s in found.stats) > 0
    told = engine.decodes[Plan()].statistics()
    assert not told.fallbacks
    assert told.replays == MOST + MOST * 3 // 4
    assert told.graphs == len(BATCHES) * 3 * 2 * 2  # 8, 16 and 32 new tokens
    passes = engine.graphs[0].statistics()
    assert (passes.replays, passes.fallbacks) == (0, {})


def test_another_k_is_decoded_as_before_and_counted(engine):
    before = engine.decodes[Plan()].statistics()
    found = engine.decode([[1, 2, 3]], K - 1, mode="beam").beams
    same(found, beam_search(engine.target._model, [[1, 2, 3]], TRIE, K - 1))
    after = engine.decodes[Plan()].statistics()
    assert (after.replays, after.fallbacks) == (before.replays, {"beams": 1})


def grown(rng, changes):
    """Catalogs: each has some items more than the one before it, and lacks some of those."""
    items, found = random_catalog(rng, 200, 4), []
    for more, fewer in changes:
        items = np.concatenate([items, random_catalog(rng, more, 4)])
        items = items[np.sort(rng.permutation(len(items))[fewer:])]
        found.append(ItemTrie.build(items))
    return found


def test_items_come_and_go_in_the_same_graphs():
    """Each catalog is copied over the one before, and the capture's Python is not run again."""
    rng = np.random.default_rng(7)
    tries = grown(rng, [(0, 0), (6, 0), (9, 20), (0, 60), (25, 0), (8, 2)])
    weights = tiny_model("llama", layers=1, hidden=16, dtype=torch.float64)
    catalog = FixedTrie(tries[0], tokens=64)
    shapes = [DecodeShape(2, 8), DecodeShape(2, 8, False, 4, 12)]
    model, decodes = captured(weights, catalog, shapes, kept=False)
    for i, trie in enumerate([*tries, tries[1]]):
        assert trie is tries[0] or decodes.run(Search.of([[1]], model, trie), K) is None
        assert catalog.use(trie)
        for batch in (1, 2):
            rows = [rng.integers(0, trie.num_rows, rng.integers(0, 4)) for _ in range(batch)]
            masks = [RowMask.of(trie, rng.random(trie.num_items) < 0.4), None][:batch]
            for kinds in ({}, {"exclude": rows, "masks": masks}, {"candidates": rows}):
                request = SearchRequest(random_prompts(rng, batch, 8), **kinds)
                found = decodes.run(Search.of(request, model, trie), K)
                same(found, beam_search(weights, request, trie, K))
        assert decodes.statistics().fallbacks == ({"catalog": i} if i else {})
    assert decodes.statistics().replays == 6 * 7


@pytest.mark.parametrize(
    "other",
    [
        ItemTrie.build(random_catalog(np.random.default_rng(9), 340, 4)),
        ItemTrie.build(random_catalog(np.random.default_rng(9), 20, 3)),
        ItemTrie.build([[1, 2, 3, n] for n in range(64)]),
        ItemTrie.build([[1, 2, 3], [4]], end=9),
        ItemTrie.build([[1, 2, 3, 1000]]),
    ],
    ids=["states", "levels", "children", "end", "token"],
)
def test_a_catalog_without_room_is_not_copied(other):
    first = ItemTrie.build(random_catalog(np.random.default_rng(2), 200, 4))
    catalog = FixedTrie(first)
    before = {n: t.clone() for n, t in vars(catalog.trie).items() if isinstance(t, torch.Tensor)}
    assert not catalog.use(other)
    assert catalog.catalog is first
    assert all(torch.equal(getattr(catalog.trie, name), t) for name, t in before.items())


def test_what_has_no_room_falls_back_until_it_has():
    """Another catalog costs no capture; a larger storage does."""
    rng = np.random.default_rng(9)
    each = Engine(tiny_model("llama", layers=1, hidden=16), TRIE, graphs=True)
    each.capture(1, 8, K, [Plan()])
    each.capture_decodes(1, 8, K)
    small, large = (ItemTrie.build(random_catalog(rng, n, 4)) for n in (30, 900))
    for trie, replays in ((TRIE, 1), (small, 2), (large, 2), (TRIE, 3)):
        each.use(trie)
        found = each.decode([[1, 2]], K, mode="beam").beams
        assert torch.equal(found.rows, beam_search(each.target, [[1, 2]], trie, K).rows)
        assert each.statistics().replays == replays
    told = each.statistics()
    assert told.fallbacks == {"catalog": 1}
    assert told.decodes == 1
    assert told.seconds > 0
    assert told.device_bytes is None
    each.capture(2, 8, K, [Plan()])  # needs a larger storage, in which passes are captured again
    assert not each.decodes
    assert each.statistics().passes > told.passes
    each.decode([[1, 2]], K, mode="beam")
    assert each.statistics().eager_passes == {}


def test_sizes_of_prompts_are_fewer_if_there_are_many_kinds():
    grid = Grid(batch=32, prompt=1208, widths=(20, 20, 20), patch=148, first_level=256)
    shapes = grid.of_decodes(Plan(), kept=True)
    assert len(shapes) <= MOST_DECODES
    sizes = sorted({shape.new for shape in shapes})
    assert sizes[-1] == 1208
    assert len({(s.batch, s.kept) for s in shapes}) == 2 * len(BATCHES)
    small = Grid(batch=32, prompt=208, widths=(20, 20, 20), patch=148, first_level=256)
    assert {s.new for s in small.of_decodes(Plan(), kept=True)} == {8, 16, 32, 64, 128, 208}


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_cuda_graphs_give_the_answers_of_beam_search():
    weights = tiny_model("llama-gqa", dtype=torch.float64).cuda()
    model, decodes = captured(weights, capture=None)
    rng = np.random.default_rng(5)
    histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
    decodes.run(Search.of(histories, model, TRIE), K)
    for shape in SHAPES:
        request = random_request(rng, shape, histories)
        expected = beam_search(weights, request, TRIE, K)
        same(decodes.run(Search.of(request, model, TRIE), K), expected)
    assert decodes.statistics().replays == 1 + len(SHAPES)


def test_a_mask_that_cannot_be_copied_takes_no_place(monkeypatch):
    masks = [RowMask.of(TRIE, RNG.random(TRIE.num_items) < 0.3) for _ in range(4)]
    catalog = FixedTrie(TRIE)
    table = MaskTable(catalog, 2)
    table.places(masks[:2])

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(RowMask, "to", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            table.places(masks[2:3])
    for wanted in ([3], [1], [3, 1], [0, 2]):
        chosen = [masks[i] for i in wanted]
        for mask, start in zip(chosen, table.places(chosen)[:, 0].tolist(), strict=True):
            flags = table.flags[start : start + len(catalog.places)]
            there = catalog.places < TRIE.num_states
            assert not flags[~there].any()
            assert torch.equal(flags[there], torch.from_numpy(mask.alive[: TRIE.num_states]))
