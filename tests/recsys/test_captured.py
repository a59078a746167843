"""A whole beam search as one graph: the answers of beam search, whatever fills up its shape."""

import numpy as np
import pytest
import torch
from captured_suite import (
    BATCH,
    CANDIDATES,
    LONGEST,
    MASKS,
    NODES,
    RNG,
    SHAPES,
    TRIE,
    CapturedSuite,
    K,
    same,
    weights_of,
)
from oracles import RecordedRun, random_catalog, random_prompts, tiny_model

from recsys import transfers
from recsys.constraint import ItemTrie
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.mask import RowMask
from recsys.decoding import Engine, Search, SearchRequest, beam_search
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_inputs import MOST_DECODES, DecodeShape, MaskTable
from recsys.decoding.planner import Plan
from recsys.models.graphs import PassGraphs
from recsys.models.tree_forward import TreeModel


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Copies and selections take the way of a GPU, which never looks at a value."""
    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)


def recorded(run):
    return RecordedRun(run).replay


def captured(weights, trie=TRIE, shapes=SHAPES, capture=recorded, *, kept=False, **sizes):
    model = TreeModel(weights)
    model._native = None
    if kept:
        model.keep_prefixes(1 << 20)
    passes = PassGraphs.attach(model, batch=BATCH, slots=128, capture=capture)
    decodes = DecodeGraphs(
        passes, trie, prompt=LONGEST, num_beams=K, **{"excluded": 12, "masks": 2} | sizes
    )
    decodes.warm_up(shapes)
    return model, decodes


class TestDecodes(CapturedSuite):
    kinds = (("llama-gqa", ""), ("mistral-window", ""), ("qwen3-mixed-window", ""))

    def capture(self, weights, kind, capture, trie=TRIE, shapes=SHAPES, *, kept=False, **sizes):
        model, decodes = captured(weights, trie, shapes, capture, kept=kept, **sizes)
        return [model], [decodes.passes], decodes

    @classmethod
    def engine(cls, weights):
        each = Engine(weights, TRIE, prefix_bytes=1 << 22, prompt_slots=LONGEST, graphs=True)
        each.captures.capture_decodes(
            cls.most, LONGEST, K, candidates=[(0, 0), (CANDIDATES, NODES)]
        )
        return each


def test_counters_are_those_of_a_search_on_captured_passes():
    weights = weights_of()
    model, decodes = captured(weights, kept=True)
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
            for mine, theirs in zip(found, expected, strict=True):
                for name in ("target_passes", "target_tokens", "kv_slots", "cached_tokens"):
                    assert getattr(mine, name) == getattr(theirs, name), name


def test_what_was_returned_outlives_the_next_decode():
    weights = weights_of()
    model, decodes = captured(weights, shapes=[DecodeShape(1, 32)])
    first = decodes.run(Search.of([[1, 2, 3]], model, TRIE), K)
    scores = first.scores.clone()
    decodes.run(Search.of([[9, 8, 7]], model, TRIE), K)
    assert torch.equal(first.scores, scores)


def test_a_catalog_of_one_level_is_searched():
    trie, weights = ItemTrie.build([[1], [4], [9], [2], [3], [30], [5]]), weights_of()
    model, decodes = captured(weights, trie, [DecodeShape(2, 8)])
    request = SearchRequest([[1, 2], [3]], exclude=[[0, 5], []])
    found = decodes.run(Search.of(request, model, trie), K)
    same(found, beam_search(weights, request, trie, K))


def test_masks_take_the_place_of_the_one_not_used_for_longest():
    weights = weights_of()
    model, decodes = captured(weights, shapes=[DecodeShape(BATCH, 32)])
    prompts = random_prompts(np.random.default_rng(1), 2, LONGEST)
    for pair in ([0, 1], [1, 2], [0, None], [2, 0], [1, 1], [None, 0], [2, 1]):
        masks = [None if i is None else MASKS[i] for i in pair]
        request = SearchRequest(prompts, masks=masks)
        found = decodes.run(Search.of(request, model, TRIE), K)
        same(found, beam_search(weights, request, TRIE, K))


def test_what_cannot_be_captured_is_refused():
    weights = weights_of()
    model, decodes = captured(weights, shapes=[])
    with pytest.raises(ValueError, match="at most 128 are captured"):
        decodes.warm_up([DecodeShape(1, n) for n in range(MOST_DECODES + 1)])
    with pytest.raises(ValueError, match="4 requests with 128 slots; make it larger"):
        decodes.warm_up([DecodeShape(BATCH + 1, 8)])
    with pytest.raises(ValueError, match="make it larger"):
        decodes.warm_up([DecodeShape(1, 8, False, 4, 90)])
    with model.pool.lend(1, 8, 8), pytest.raises(RuntimeError, match="warm up before decoding"):
        decodes.warm_up(SHAPES)


def test_a_decode_that_fails_leaves_nothing_behind(monkeypatch):
    weights = weights_of()
    shapes = [DecodeShape(1, 8, kept) for kept in (False, True)]
    model, decodes = captured(weights, shapes=shapes, kept=True)

    def broken(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(model.prefixes, "insert", broken)
        with pytest.raises(KeyboardInterrupt):
            decodes.run(Search.of([[1, 2, 3, 4, 5]], model, TRIE), K)
    assert model.pool.lent == model.prefixes.held == model.prefixes.used == 0
    for cached in (0, 4):
        found = decodes.run(Search.of([[1, 2, 3, 4, 5]], model, TRIE), K)
        same(found, beam_search(weights, [[1, 2, 3, 4, 5]], TRIE, K))
        assert found.stats[0].cached_tokens == cached


@pytest.mark.parametrize(
    "other",
    [
        ItemTrie.build(random_catalog(np.random.default_rng(9), 340, 4)),
        ItemTrie.build(random_catalog(np.random.default_rng(9), 20, 3)),
        ItemTrie.build([[1, 2, 3, n] for n in range(64)]),
        ItemTrie.build([[1, 2, 3, 1000]]),
    ],
    ids=["states", "levels", "children", "token"],
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
    each.captures.capture_passes(1, 8, K, [Plan()])
    passes = each.captures.statistics().passes
    # candidates need a larger storage, in which passes are captured again
    each.captures.capture_decodes(1, 8, K, [(0, 0), (CANDIDATES, NODES)])
    assert each.captures.statistics().passes == passes
    small, large = (ItemTrie.build(random_catalog(rng, n, 4)) for n in (30, 900))
    for trie, replays in ((TRIE, 1), (small, 2), (large, 2), (TRIE, 3)):
        each.use(trie)
        found = each.decode([[1, 2]], K, mode="beam").beams
        assert torch.equal(found.rows, beam_search(each.target, [[1, 2]], trie, K).rows)
        assert each.captures.statistics().replays == replays
    told = each.captures.statistics()
    assert told.fallbacks == {"catalog": 1}
    assert told.decodes == 2
    assert told.seconds > 0
    assert told.device_bytes is None
    each.captures.capture_passes(2, 8, K, [Plan()])
    assert not each.captures.decodes
    assert each.captures.statistics().passes > told.passes
    each.decode([[1, 2]], K, mode="beam")
    assert each.captures.statistics().eager_passes == {}


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
