"""The native blend against the arrays that define it: proposals, lists, reasons, bits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact
from scipy import sparse

from recsys.interactions import Histories
from recsys.native import library
from recsys.prompts import PromptConfig
from recsys.retrieval import ItemItem, Pool, Reranker, Retrieval, VectorIndex
from recsys.retrieval.again import Repeats
from recsys.retrieval.content import ContentIndex, Terms
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.later import LaterItems
from recsys.retrieval.native import covers
from recsys.retrieval.reranker import ADDED, FEATURES, Network
from recsys.retrieval.rows import blocked_items
from recsys.training.sasrec import SasRecConfig, SasRecModel

pytestmark = pytest.mark.skipif(
    isinstance(library.find_library(), str), reason=f"{library.find_library()}"
)
FEATURE_ERROR = 1e-6  # some roundings of a cosine or a share in float32
PARTS = ("vectors", "content", "sasrec", "recent", "repeats")


def sparse_rows(rng, rows, columns, share):
    """Positive weights, few of them distinct, so that many are equal."""
    dense = rng.integers(1, 4, (rows, columns)) * (rng.random((rows, columns)) < share)
    return sparse.csr_array(dense.astype(np.float32) / 3)


def make_retrieval(rng, size, parts):
    """A retrieval of random numbers with some parts; a third of the items has no events."""
    counts = rng.integers(0, 3, size).astype(np.float64)
    terms = int(rng.integers(1, 9))
    content = sparse_rows(rng, size, terms, 0.4).tolil()
    content[: size // 2] = content[size - size // 2 :]  # equal contents
    names = Terms([f"t{i}" for i in range(terms)], np.ones(terms, np.float32))
    made = {
        "vectors": VectorIndex.of(rng.normal(size=(size, int(rng.integers(3, 40))))),
        "content": ContentIndex(sparse.csr_array(content.tocsr()), names),
        "sasrec": SasRecModel(size, SasRecConfig(1, hidden=8, window=PromptConfig(6, 2)), None),
        "recent": rng.random(size),
        "repeats": Repeats(rng.normal(size=size + 1), rng.random(size + 1) * 3),
    }
    given_parts = {name: made[name] for name in parts}
    if "sasrec" in given_parts:
        given_parts["sasrec"] = given_parts["sasrec"].frozen()
    item_item = ItemItem(sparse_rows(rng, size, size, 0.1), 0.6)
    return Retrieval(item_item, counts, 0.1, **given_parts)


@st.composite
def questions(draw):
    """A retrieval, histories, what is left out, and k."""
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    size = draw(st.sampled_from([1, 3, 40, 150]))
    retrieval = make_retrieval(rng, size, draw(st.sets(st.sampled_from(PARTS))))
    n = draw(st.sampled_from([1, 2, 5, 18]))
    lengths = rng.integers(0, 12, n)
    histories = Histories.of([rng.integers(0, size + 2, length) for length in lengths])
    excluded = Histories.of([rng.integers(0, size, rng.integers(0, 4)) for _ in lengths])
    share = draw(st.sampled_from([0.1, 0.9, 1]))
    allowed = [rng.random(size) < share if rng.random() < 0.8 else None for _ in lengths]
    return rng, retrieval, histories, excluded, allowed, draw(st.sampled_from([1, 4, 40]))


def ask(drawn):
    _, retrieval, histories, excluded, allowed, k = drawn
    blocked = blocked_items(len(retrieval), excluded, allowed)
    return retrieval.propose(Evidence(retrieval, histories), k, blocked)


def by_arrays(monkeypatch, function, *arguments):
    """What the reference returns."""
    with monkeypatch.context() as patch:
        patch.setenv(library.OFF, "0")
        return function(*arguments)


def slow_reasons(retrieval, histories, items):
    """The item of each history with the most evidence, by loops over plain numbers."""
    weights, found = retrieval.item_item.weights.toarray(), np.full(items.shape, -1)
    for (row, place), item in np.ndenumerate(items):
        past, best = histories[row].tolist(), 0.0
        for age, seen in enumerate(reversed(past)):
            if 0 <= item < len(retrieval) and seen < len(retrieval):
                evidence = np.float32(float(weights[seen, item]) * 0.6**age)
                if evidence >= best and evidence > 0:  # of equal ones the oldest
                    found[row, place], best = seen, evidence
    return found


def test_proposals_and_reasons_are_those_of_the_arrays(monkeypatch):
    @settings(max_examples=150, deadline=None)
    @given(questions())
    def check(drawn):
        found, expected = ask(drawn), by_arrays(monkeypatch, ask, drawn)
        rng, retrieval, histories = drawn[:3]
        width = found.items.shape[1]
        np.testing.assert_array_equal(found.items, expected.items[:, :width])
        assert (expected.items[:, width:] < 0).all()
        there = found.items >= 0
        np.testing.assert_array_equal(found.supported[there], expected.supported[:, :width][there])
        items = rng.integers(-1, len(retrieval) + 2, (len(histories), 7))
        np.testing.assert_array_equal(
            retrieval.because(histories, items), slow_reasons(retrieval, histories, items)
        )

    check()


def make_reranker(rng):
    """Random weights of some features."""
    names = sorted(name for name in FEATURES if "target" not in name)
    chosen = [name for name in names if rng.random() < 0.8]
    weights = {name: float(rng.normal()) for name in chosen}
    read = [name for name in names if name != "model" and name.split(".")[0] not in ADDED]
    inputs = [name for name in read if rng.random() < 0.5]
    units = rng.normal(size=(int(rng.integers(1, 40)), len(inputs) + 2))
    network = (
        Network(tuple(rng.permutation(inputs)), units) if inputs and rng.random() < 0.7 else None
    )
    return Reranker(weights, candidates=12, network=network)


def test_lists_are_those_of_the_arrays(monkeypatch):
    @settings(max_examples=150, deadline=None)
    @given(questions(), st.booleans())
    def check(drawn, boosted):
        rng, retrieval, histories = drawn[:3]
        reranker, proposals = make_reranker(rng), ask(drawn)
        size, n, k = len(retrieval), len(histories), drawn[-1]
        own = np.stack([rng.permutation(size)[:9] for _ in range(n)]).astype(np.int32)
        own[:, 5:] = -1  # fewer than wanted
        scores = np.where(own >= 0, -rng.random(own.shape), -np.inf).astype(np.float32)
        scored = -rng.random((n, 3)).astype(np.float32)[:, : proposals.items.shape[1]]
        pool = Pool.of(own, scores, proposals, scored)
        if boosted:
            pool = replace(pool, gains=rng.integers(0, 3, pool.items.shape) * 2.0)
        assert covers(reranker)
        found, score, origin = retrieval.native.rank(pool, reranker, k)
        items, expected, sources = by_arrays(monkeypatch, pool.rank, reranker, k)
        real = items >= 0
        np.testing.assert_array_equal(found >= 0, real)
        # Features are rounded to float32 in both, which weights of this sum may enlarge.
        weights = sum(map(abs, reranker.weights.values()))
        if reranker.network is not None:
            units = np.abs(reranker.network.units)
            weights += (units[:, :-1].sum(1) * units[:, -1]).sum()
        allowed = FEATURE_ERROR * (1 + weights)
        np.testing.assert_allclose(score[real], expected[real], rtol=1e-6, atol=allowed)
        assert (score[~real] == -np.inf).all()
        # Of equal scores, rounding may decide.
        plain = np.where(real, expected, -1e30)
        apart = max(1e-3, 2 * allowed)
        clear = real & (np.diff(plain, axis=1, append=-1e31) < -apart)
        clear &= np.diff(plain, axis=1, prepend=1e31) < -apart
        np.testing.assert_array_equal(found[clear], items[clear])
        np.testing.assert_array_equal(origin[clear], sources[clear])

    check()


def answers(retrieval, histories, reranker):
    """Bytes of proposals, lists and reasons of each history."""
    blocked = blocked_items(len(retrieval), histories)
    proposals = retrieval.propose(Evidence(retrieval, histories), 20, blocked)
    items, source = proposals.items, proposals.supported.astype(np.int8)
    pool = Pool(items, np.full(items.shape, -1.5, np.float32), source, proposals.evidence)
    found = retrieval.native.rank(pool, reranker, 10)
    parts = (items, *found, retrieval.because(histories, found[0]))
    return [tuple(part[i].tobytes() for part in parts) for i in range(len(histories))]


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("hidden", [8, 24, 64])
def test_states_of_sasrec_are_those_of_the_arrays(layers, hidden, monkeypatch):
    rng = np.random.default_rng(layers)
    config = SasRecConfig(1, hidden=hidden, layers=layers, window=PromptConfig(7, 3))
    model = SasRecModel(30, config, None).frozen()
    weights = {  # norms and biases are not what training begins with
        name: rng.normal(size=array.shape).astype(np.float32)
        for name, array in model.weights.items()
    }
    model = replace(model, weights=weights)
    histories = Histories.of([rng.integers(0, 33, length) for length in range(20)])
    found = model.states(histories)
    expected = by_arrays(monkeypatch, model.states, histories)
    doubles = {name: array.astype(np.float64) for name, array in weights.items()}
    exact = by_arrays(monkeypatch, replace(model, weights=doubles).states, histories)
    assert_as_exact(found, expected, exact)  # `exact` is rounded at its end alone
    for i in range(len(histories)):
        np.testing.assert_array_equal(model.states(histories.take([i]))[0], found[i])


def many_histories(*parts):
    rng = np.random.default_rng(4)
    retrieval = make_retrieval(rng, 90, parts)
    histories = Histories.of([rng.integers(0, 90, rng.integers(0, 9)) for _ in range(37)])
    return retrieval, histories, make_reranker(rng)


def test_bits_are_the_same_alone_and_in_a_batch():
    retrieval, histories, reranker = many_histories(*PARTS)
    together = answers(retrieval, histories, reranker)
    for i, expected in enumerate(together):
        assert answers(retrieval, histories.take([i]), reranker) == [expected]


def test_bits_are_the_same_on_every_instruction_set():
    native = library.find_library()
    retrieval, histories, reranker = many_histories(*set(PARTS) - {"sasrec"})
    best = answers(retrieval, histories, reranker)
    try:
        for variant in native.variants:
            native.choose(variant)
            assert answers(retrieval, histories, reranker) == best
    finally:
        native.choose(native.variants[0])


def test_types_and_later_items_are_left_to_the_arrays():
    retrieval = make_retrieval(np.random.default_rng(0), 9, ("content",))
    histories = Histories.of([[1, 2]])
    assert retrieval.native is not None
    assert Evidence(retrieval, histories).native is retrieval.native
    assert Evidence(retrieval, histories, LaterItems(retrieval.content.rows[:2])).native is None
    types = EventTypes((), retrieval.item_item, retrieval.counts)
    assert Retrieval(retrieval.item_item, retrieval.counts, types=types).native is None
    assert not covers(Reranker({"seen:view": 1.0}))
