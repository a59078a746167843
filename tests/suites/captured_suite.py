"""What a whole decode in one graph promises; each kind of decode gets these tests by a subclass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracles import RecordedRun, random_catalog, random_prompts, tiny_model

from recsys import transfers
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.mask import RowMask
from recsys.decoding import Engine, Search, SearchRequest, beam_search
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan
from recsys.decoding.speculative import Answers
from recsys.errors import NonFiniteError
from recsys.models.graphs import BATCHES
from recsys.models.tree_forward import TreeModel

RNG = np.random.default_rng(3)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
K, LONGEST, BATCH = 5, 28, 4
CANDIDATES, NODES = 10, 32
AGAIN = 4  # shapes that are replayed twice
MASKS = [RowMask.of(TRIE, RNG.random(TRIE.num_items) < share) for share in (0.5, 0.02, 0.9)]
BOOST = Boost.of(TRIE, RNG.random(TRIE.num_items).astype(np.float32))
BROKEN = 65  # in no sequence of the catalog
CLOSE = {"atol": 1e-10, "rtol": 0}
SHAPES = [
    DecodeShape(batch, new, kept, *extra)
    for batch, new in ((1, 8), (BATCH, 8), (BATCH, 32))
    for kept in (False, True)
    for extra in ((0, 0), (CANDIDATES, NODES))
]
COLD = [DecodeShape(BATCH, 32)]
CATALOGS = {
    "fewer states than beams": ItemTrie.build([[1, 2], [1, 3], [4, 2]]),
    "one row": ItemTrie.build([[1, 2, 3]]),
    "dense": ItemTrie.build(np.add(RNG.integers(0, 16, (900, 3)), [1, 17, 33])),
}


def weights_of(architecture: str = "llama", vocabulary: int = 66, **sizes: Any) -> Any:
    """A small model in float64, so that any difference shows."""
    sizes = {"layers": 1, "hidden": 16} | sizes
    return tiny_model(architecture, vocabulary, dtype=torch.float64, **sizes)


@torch.inference_mode()
def spoil(decodes: Any, passes: list[Any]) -> None:
    """Other values, as an earlier decode may leave them, in all memory that a decode shares."""
    for graphs in passes:
        graphs.pool.storage.values.normal_(std=100)
    for graph in decodes._graphs.values():
        graph._output.fill_(torch.nan)
        graph.inputs._memory.fill_(0x7F)


def same(found: Any, expected: Any) -> None:
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.is_global, expected.is_global)
    torch.testing.assert_close(found.scores, expected.scores, **CLOSE)
    assert (found.candidate_scores is None) == (expected.candidate_scores is None)
    if expected.candidate_scores is not None:
        torch.testing.assert_close(found.candidate_scores, expected.candidate_scores, **CLOSE)


def random_request(rng: Any, shape: DecodeShape, histories: list[Any]) -> SearchRequest:
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


def requests_for(rng: Any, trie: ItemTrie, batch: int, rows: int) -> list[SearchRequest]:
    """Requests of one batch: plain, with exclusions and masks, and with candidates."""
    some = [rng.integers(0, trie.num_rows, rows) for _ in range(batch)]
    masks = [RowMask.of(trie, rng.random(trie.num_items) < 0.6), None][:batch]
    prompts = random_prompts(rng, batch, 8)
    return [
        SearchRequest(prompts),
        SearchRequest(prompts, exclude=some, masks=masks),
        SearchRequest(prompts, candidates=some),
    ]


class CapturedSuite:
    """Tests of one kind of captured decode.

    A subclass has `capture`, and names in `kinds` the architectures and drafts that it is tried
    with.
    """

    kinds: tuple[tuple[str, str], ...] = ()
    plan = Plan()
    most = 32  # requests of an engine

    @pytest.fixture(autouse=True)
    def as_on_a_device(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Copies and selections take the way of a GPU, which never looks at a value."""
        monkeypatch.setattr(transfers, "shares_memory", lambda device: False)

    @pytest.fixture
    def recorded(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A capture whose replays run without Python.

        Before patch passes, everything that a graph computed is overwritten, as the graphs of
        passes may do that share its memory.
        """
        runs, run_patches = [], Answers.run_patches

        def capture(run: Any) -> Any:
            runs.append(RecordedRun(run))
            return runs[-1].replay

        def spoil_first(answers: Any, search: Any, waiting: Any, patch_nodes: int) -> None:
            if waiting is not None:
                for tensor in (t for run in runs for t in run.made):
                    tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
            run_patches(answers, search, waiting, patch_nodes)

        monkeypatch.setattr(Answers, "run_patches", spoil_first)
        return capture

    def capture(
        self, weights: Any, kind: str, capture: Any, trie: Any = TRIE, shapes: Any = COLD,
        *, kept: bool = False, **sizes: Any,
    ) -> tuple[list[TreeModel], list[Any], Any]:  # fmt: skip
        """Models, the target's first; their captured passes; and the captured decodes."""
        raise NotImplementedError

    def check_work(self, weights: Any, kind: str, request: SearchRequest, found: Any) -> None:
        """What else is promised of an answer: what it took."""

    def check_statistics(self, kind: str, statistics: Any) -> None:
        """What else is promised of all answers."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Each kind is one test; graphs of a GPU that is only claimed are tried with the last."""
        if "kind" in metafunc.fixturenames:
            claimed = (
                metafunc.definition.get_closest_marker("gpu") and not torch.cuda.is_available()
            )
            kinds = self.kinds[-1:] if claimed else self.kinds
            metafunc.parametrize(("architecture", "kind"), kinds)

    def test_replays_give_the_answers_of_beam_search(
        self, architecture: str, kind: str, recorded: Any
    ) -> None:
        """Over spoiled memory, in an order that mixes all shapes."""
        weights = weights_of(architecture, layers=2)
        models, passes, decodes = self.capture(weights, kind, recorded, shapes=SHAPES, kept=True)
        rng = np.random.default_rng(5)
        histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
        first = decodes.run(Search.of(histories, models[0], TRIE), K)
        same(first, beam_search(weights, histories, TRIE, K))
        cached = set()
        order = rng.permutation(len(SHAPES) + AGAIN) % len(SHAPES)
        for shape in [SHAPES[i] for i in order]:
            request = random_request(rng, shape, histories)
            expected = beam_search(weights, request, TRIE, K)
            spoil(decodes, passes)
            search = Search.of(request, models[0], TRIE)
            assert decodes._find(search, decodes._begun(search)) == shape
            found = decodes.run(search, K)
            same(found, expected)
            self.check_work(weights, kind, request, found)
            cached |= {stats.cached_tokens for stats in found.stats}
        told = decodes.statistics()
        assert (told.replays, told.fallbacks) == (1 + len(order), {})
        assert cached >= {0, 4, 8, 12}
        self.check_statistics(kind, told)
        for model in models:
            assert model.pool.lent == model.prefixes.held == 0

    @pytest.mark.gpu
    @pytest.mark.usefixtures("gpu")
    def test_cuda_graphs_give_the_answers_of_beam_search(
        self, architecture: str, kind: str
    ) -> None:
        weights = weights_of(architecture, layers=2).cuda()
        models, _, decodes = self.capture(weights, kind, None, shapes=SHAPES[-4:], kept=True)
        rng = np.random.default_rng(5)
        histories = [rng.integers(1, 60, 24) for _ in range(BATCH)]
        decodes.run(Search.of(histories, models[0], TRIE), K)
        for shape in SHAPES[-4:]:
            request = random_request(rng, shape, histories)
            expected = beam_search(weights, request, TRIE, K)
            same(decodes.run(Search.of(request, models[0], TRIE), K), expected)
        assert decodes.statistics().replays == 5

    @pytest.mark.parametrize("name", CATALOGS)
    def test_catalogs_of_any_form_are_searched(self, name: str, recorded: Any) -> None:
        trie, weights = CATALOGS[name], weights_of()
        shapes = [DecodeShape(2, 8), DecodeShape(2, 8, False, 4, 10)]
        models, _, decodes = self.capture(weights, "other", recorded, trie, shapes)
        rng = np.random.default_rng(1)
        for batch in (1, 2):
            for request in requests_for(rng, trie, batch, 2):
                found = decodes.run(Search.of(request, models[0], trie), K)
                same(found, beam_search(weights, request, trie, K))

    def test_items_come_and_go_in_the_same_graphs(self, recorded: Any) -> None:
        """Each catalog is copied over the one before, and the capture's Python is not run again."""
        rng = np.random.default_rng(7)
        items, weights = random_catalog(rng, 330, 4), weights_of()
        parts = (slice(300), slice(320), slice(15, None), slice(0, None, 4), slice(5, 300))
        tries = [ItemTrie.build(items[part]) for part in parts]
        catalog = FixedTrie(tries[0], tokens=64)
        shapes = [DecodeShape(2, 8), DecodeShape(2, 8, False, 4, 12)]
        models, _, decodes = self.capture(weights, "other", recorded, catalog, shapes)
        for i, trie in enumerate(tries):
            assert trie is tries[0] or decodes.run(Search.of([[1]], models[0], trie), K) is None
            assert catalog.use(trie)
            for batch in (1, 2):
                for request in requests_for(rng, trie, batch, 3):
                    found = decodes.run(Search.of(request, models[0], trie), K)
                    same(found, beam_search(weights, request, trie, K))
            assert decodes.statistics().fallbacks == ({"catalog": i} if i else {})
        assert decodes.statistics().replays == 6 * len(tries)

    def test_what_fits_no_graph_is_counted_with_the_reason(self, recorded: Any) -> None:
        models, _, decodes = self.capture(
            weights_of(), "same", recorded, shapes=[DecodeShape(2, 8)]
        )
        one = [[1, 2, 3]]
        requests = {
            "kind": [
                SearchRequest(one, seeds=[1]),
                SearchRequest(one, boosts=[BOOST]),
                SearchRequest(one, normalize="allowed"),
            ],
            "prompt": [
                [np.arange(1, LONGEST + 2)],
                SearchRequest(one, prompt_slots=LONGEST + 1),
            ],
            "excluded": [SearchRequest(one, exclude=[np.arange(60)])],
            "masks": [SearchRequest(one * 3, masks=MASKS)],
            "shape": [one * 3, [np.arange(9)], SearchRequest(one, candidates=[[1]])],
        }

        def falls_back(request: Any, trie: ItemTrie = TRIE, beams: int = K) -> None:
            assert decodes.run(Search.of(request, models[0], trie), beams) is None

        for tried in requests.values():
            for request in tried:
                falls_back(request)
        falls_back(one, beams=K - 1)
        falls_back(one, ItemTrie.build(random_catalog(np.random.default_rng(9), 30, 4)))
        for busy in models:
            with busy.pool.lend(1, 8, 8):
                falls_back(one)
        models[-1].keep_prefixes(1 << 20)
        falls_back(one)
        counts = {name: len(tried) for name, tried in requests.items()}
        assert decodes.statistics().fallbacks == counts | {
            "beams": 1, "catalog": 1, "busy": len(models), "replaced": 1,
        }  # fmt: skip
        assert decodes.statistics().replays == 0
        assert all(model.pool.lent == 0 for model in models)

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    def test_the_error_names_requests_that_are_not_finite(
        self, value: float, recorded: Any
    ) -> None:
        """On a device, an index that a NaN made would be out of range."""
        weights = weights_of()
        with torch.no_grad():
            weights.model.embed_tokens.weight[BROKEN] = value
        models, _, decodes = self.capture(weights, "other", recorded, shapes=SHAPES, kept=True)
        clean = [[1, 2, 3, 4, 5, 6], [4, 5]]
        expected = beam_search(weights, clean, TRIE, K)
        mixed = [clean[0], [1, 2, 3, 4, BROKEN, 5, 6, 7, 8], [BROKEN]]
        for _ in range(2):
            with pytest.raises(NonFiniteError) as caught:
                decodes.run(Search.of(mixed, models[0], TRIE), K)
            assert caught.value.requests == (1, 2)
            same(decodes.run(Search.of(clean, models[0], TRIE), K), expected)
        assert models[0].prefixes.known(np.array(mixed[1:2]), [9]).tolist() == [4]
        assert all(model.pool.lent == model.prefixes.held == 0 for model in models)

    @classmethod
    def engine(cls, weights: Any) -> Engine:
        """An engine with captured decodes of the plan under test."""
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def captured_engine(cls) -> Iterator[Engine]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transfers, "shares_memory", lambda device: False)
            yield cls.engine(weights_of("llama-gqa"))

    def test_no_batch_decodes_without_a_graph(
        self, captured_engine: Engine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kept and new prompts in one batch, exclusions, masks and candidates."""
        monkeypatch.setattr("recsys.decoding.speculative.counts_nodes", lambda device: False)
        engine, mode, rng = captured_engine, self.plan.mode.value, np.random.default_rng(1)
        histories = [rng.integers(1, 64, LONGEST) for _ in range(self.most)]
        warmed = 0
        for batch in range(1, self.most + 1):
            prompts = [h[: LONGEST - rng.integers(0, 5)] for h in histories[:batch]]
            engine.forget()
            if batch % 4:
                engine.decode([history[:-4] for history in histories[:batch]], K, mode=mode)
                warmed += 1
                if batch % 4 == 2:
                    prompts[batch // 2] = rng.integers(1, 64, rng.integers(1, LONGEST))
            rows = [rng.integers(0, TRIE.num_rows, 6) for _ in range(batch)]
            request = SearchRequest(
                prompts,
                exclude=rows if batch % 5 else None,
                masks=[[None, *MASKS][i % 4] for i in range(batch)] if batch % 3 else None,
                candidates=rows if batch % 2 else None,
            )
            decoded = engine.decode(request, K, mode=mode)
            assert decoded.plan == self.plan
            same(decoded.beams, beam_search(engine.target._model, request, TRIE, K))
            if batch % 4 == 1:
                assert min(s.cached_tokens for s in decoded.beams.stats) > 0
        told = engine.captures.decodes[self.plan].statistics()
        assert (told.replays, told.fallbacks) == (self.most + warmed, {})
        # 8, 16 and 32 new tokens, kept or not, with candidates or not
        assert told.graphs == sum(b <= self.most for b in BATCHES) * 3 * 2 * 2
        passes = [graphs.statistics() for graphs in engine.captures.passes]
        assert all(each.fallbacks == {} for each in passes)
        assert passes[-1].replays == 0
        self.check_statistics("near", told)
