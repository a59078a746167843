"""Retrieval against slow twins: probabilities, candidates, similar items, reasons, files."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from recsys.errors import ArtifactError
from recsys.interactions import Histories
from recsys.retrieval import ItemItem, Reranker, Retrieval, VectorIndex, decayed_counts
from recsys.retrieval.content import ContentIndex, Terms
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.related import similar, together
from recsys.retrieval.reranker import Network
from recsys.retrieval.rows import blocked_items

ITEMS = 9
UNITS = np.arange(12.0).reshape(3, 4)  # of a network of two features
histories = st.lists(st.lists(st.integers(0, ITEMS - 1), max_size=7), min_size=1, max_size=6).map(
    Histories.of
)


def fitted(trained: Histories, smoothing: float = 0.2, vectors=None) -> Retrieval:
    counts = decayed_counts(trained.items, ITEMS)
    return Retrieval(ItemItem.count(trained, ITEMS), counts, smoothing, vectors)


def slow_probabilities(retrieval: Retrieval, history) -> list[float]:
    weights, decay = retrieval.item_item.weights.toarray(), retrieval.item_item.decay
    evidence = np.zeros(ITEMS)
    for age, item in enumerate(reversed(list(history))):
        evidence += decay**age * weights[item]
    popularity = (retrieval.counts + 1) / (retrieval.counts + 1).sum()
    if evidence.sum() == 0:
        return popularity.tolist()
    s = retrieval.smoothing
    return ((1 - s) * evidence / evidence.sum() + s * popularity).tolist()


@given(histories, st.lists(st.integers(-1, ITEMS + 2), max_size=5))
@settings(max_examples=60, deadline=None)
def test_companions_are_counted_over_pairs_of_events(trained, basket):
    walks = [walk.tolist() for walk in trained]
    count = {item: sum(walk.count(item) for walk in walks) for item in range(ITEMS)}
    given_, pairs = {item for item in basket if 0 <= item < ITEMS}, {}
    for walk in walks:
        for i, first in enumerate(walk):
            for gap, second in enumerate(walk[i + 1 : i + 6], start=1):
                for a, b, value in ((first, second, 1 / gap), (second, first, 0.5 / gap)):
                    if a in given_ and b not in given_:
                        pairs[a, b] = pairs.get((a, b), 0) + value / count[a] ** 0.5
    total = sum(pairs.values())
    found = together(fitted(trained), np.array(basket, np.int64))
    shares = dict(zip(found.items.tolist(), found.shares.tolist(), strict=True))
    expected = {b: sum(v for (_, c), v in pairs.items() if c == b) / total for _, b in pairs}
    assert shares == pytest.approx(expected, rel=1e-5)
    assert (np.diff(found.shares) <= 0).all()
    for item, because in zip(found.items.tolist(), found.because.tolist(), strict=True):
        most = max(value for (_, b), value in pairs.items() if b == item)
        assert pairs[because, item] == pytest.approx(most, rel=1e-5)


@given(histories, histories, st.integers(1, 12), st.booleans(), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_candidates_are_the_most_probable_of_what_is_allowed(trained, asked, k, seen, seed):
    rng = np.random.default_rng(seed)
    retrieval = fitted(trained)
    excluded = [rng.integers(0, ITEMS, rng.integers(0, 3)) for _ in asked]
    allowed = [None if rng.random() < 0.5 else rng.random(ITEMS) < 0.6 for _ in asked]
    hidden = Histories.of([[*a, *b] for a, b in zip(excluded, asked.left_out(seen), strict=True)])
    blocked = blocked_items(ITEMS, hidden, allowed)
    found = retrieval.candidates(Evidence(retrieval, asked), k, blocked)
    assert found.items.shape == found.log_probs.shape == found.supported.shape == (len(asked), k)
    for i, history in enumerate(asked):
        probs = slow_probabilities(retrieval, history)
        gone = {*excluded[i].tolist(), *(history.tolist() if seen else ())}
        mask = np.ones(ITEMS, bool) if allowed[i] is None else allowed[i]
        left = [j for j in range(ITEMS) if mask[j] and j not in gone]
        wanted = sorted((probs[j] for j in left), reverse=True)[:k]
        mine = found.items[i][found.items[i] >= 0]
        assert len(set(mine.tolist())) == len(mine) == len(wanted)
        assert set(mine.tolist()) <= set(left)
        np.testing.assert_allclose(found.log_probs[i, : len(mine)], np.log(wanted), rtol=1e-5)
        np.testing.assert_allclose(np.log([probs[j] for j in mine]), np.log(wanted), rtol=1e-5)
        assert (found.log_probs[i, len(mine) :] == -np.inf).all()


def test_evidence_of_very_long_ago_is_none():
    follows = ItemItem(sparse.csr_array(([1.0], ([0], [1])), (3, 3), np.float32), 0.6)
    retrieval = Retrieval(follows, np.array([4.0, 2.0, 0.0]))
    histories = Histories.of([[0, *[2] * 300]])  # 0.6 to this age is 0 in float32
    found = retrieval.candidates(Evidence(retrieval, histories), 3, np.zeros((1, 3), np.bool_))
    assert found.items.tolist() == [[0, 1, 2]]
    assert np.exp(found.log_probs).sum() == pytest.approx(1)
    assert not found.supported.any()


def test_items_beyond_the_catalog_have_no_events_and_say_nothing():
    retrieval = fitted(Histories.of([[0, 1, 2], [0, 1]]))
    asked = Histories.of([[0, ITEMS + 3]])
    blocked = blocked_items(ITEMS, asked)
    assert retrieval.candidates(Evidence(retrieval, asked), 3, blocked).items.max() < ITEMS
    assert because(retrieval, [ITEMS + 1], [1]) == [-1]
    assert because(retrieval, [0], [ITEMS, 1]) == [-1, 0]


def because(retrieval, history, items):
    return retrieval.because(Histories.of([history]), np.array([items])).tolist()[0]


def test_the_history_item_that_speaks_most_is_the_reason():
    weights = np.zeros((4, 4), np.float32)
    weights[0, 3], weights[1, 3] = 1.0, 0.7  # item 0 came one event before item 1
    retrieval = Retrieval(ItemItem(sparse.csr_array(weights), 0.6), np.ones(4))
    assert because(retrieval, [0, 1], [3, 2]) == [1, -1]  # 0.6 against 0.7
    assert because(retrieval, [1, 0], [3]) == [0]
    assert because(retrieval, [], [3]) == [-1]
    together = Histories.of([[0, 1], [], [1, 0], [2]])
    asked = np.array([[3, 2], [3, 0], [3, -1], [3, 3]])
    wanted = [[1, -1], [-1, -1], [0, -1], [-1, -1]]
    assert retrieval.because(together, asked).tolist() == wanted


@given(histories, st.integers(0, 10**6), st.integers(0, ITEMS))
@settings(max_examples=60, deadline=None)
def test_similar_items_follow_or_lie_near_in_one_order_for_all_k(trained, seed, k):
    rng, everything = np.random.default_rng(seed), np.arange(ITEMS)
    index = VectorIndex.of(rng.integers(-2, 3, (ITEMS, 2)))
    retrieval, allowed = fitted(trained, vectors=index), rng.random(ITEMS) < 0.8
    items, scores = similar(retrieval, everything, ITEMS, allowed)
    np.testing.assert_array_equal(similar(retrieval, everything, k, allowed)[0], items[:, :k])
    weights = retrieval.item_item.weights.toarray()
    wanted = weights / np.maximum(weights.max(1, keepdims=True), 1e-9)
    wanted += np.maximum(index.vectors @ index.vectors.T, 0)
    wanted[:, ~allowed] = wanted[everything, everything] = 0
    np.testing.assert_allclose(scores, -np.sort(-wanted), rtol=1e-5)
    found = np.where(items >= 0, np.take_along_axis(wanted, items, axis=1), 0)
    np.testing.assert_allclose(scores, found, rtol=1e-5)


def test_an_event_that_is_a_half_life_older_counts_half():
    items, days = np.array([0, 0, 1], np.int32), np.array([0, 10, 20]) * 86_400
    plain = decayed_counts(items, 3)
    assert plain.tolist() == [2, 1, 0]
    counts = decayed_counts(items, 3, timestamps=days, half_life_days=10)
    np.testing.assert_allclose(counts, [0.75, 1.0, 0.0])
    assert decayed_counts(items, 3, half_life_days=10).tolist() == [2, 1, 0]  # only an order
    with pytest.raises(ValueError, match="half_life_days"):
        decayed_counts(items, 3, half_life_days=0)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    """The values of the parts are compared by the suite of sources."""
    content = ContentIndex(
        sparse.csr_array(np.eye(ITEMS, 12, dtype=np.float32)),
        Terms(list("abcdefg"), np.arange(1, 8, dtype=np.float32)),
        Terms(list("hijkl"), np.ones(5, np.float32)),
    )
    network = Network(("popularity", "seen:view"), UNITS)
    reranker = Reranker({"popularity": 0.5, "model": 1.5}, 20, 30, network)
    retrieval = replace(fitted(Histories.of([[0, 1]]), 0.3), content=content, reranker=reranker)
    retrieval.save(tmp_path)
    assert {f.suffix for f in tmp_path.iterdir()} == {".npy", ".json"}
    again = Retrieval.load(tmp_path)
    assert again.smoothing == 0.3
    assert replace(again.reranker, network=None) == replace(reranker, network=None)
    assert again.reranker.network.features == network.features
    np.testing.assert_array_equal(again.reranker.network.units, UNITS)
    later = pa.table({"item_id": ["x", "y"], "title": ["a c, c", "b"], "text": ["", "z"]})
    wanted = content.encode(later).toarray()
    np.testing.assert_array_equal(again.content.encode(later).toarray(), wanted)


@pytest.mark.parametrize(
    ("features", "units", "fault"),
    [
        (["popular"], UNITS[:, :3], "unknown feature 'popular'"),
        (["new.model"], UNITS[:, :3], "unknown feature 'new.model'"),
        (["popularity"], UNITS, r"units of \(3, 4\) do not fit 1 features"),
        (["popularity"], UNITS[:0, :3], "1 to 256 units, got 0"),
        (["popularity"], np.ones((257, 3)), "1 to 256 units, got 257"),
        (["popularity"], UNITS[:, :3] * np.nan, "not finite"),
    ],
)
def test_networks_that_do_not_fit_are_refused(tmp_path, features, units, fault):
    found = fitted(Histories.of([[0, 1, 2], [2, 3]]))
    replace(found, reranker=Reranker({"popularity": 1.0})).save(tmp_path)
    settings = json.loads((tmp_path / "retrieval.json").read_text())
    settings["reranker"]["network"] = features
    (tmp_path / "retrieval.json").write_text(json.dumps(settings))
    np.save(tmp_path / "reranker_network.npy", units)
    with pytest.raises(ArtifactError, match=fault):
        Retrieval.load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "short", "settings", "version", "indices"])
def test_damaged_files_are_refused(tmp_path, damage):
    trained = Histories.of([[0, 1, 2], [2, 3]])
    fitted(trained).save(tmp_path)
    if damage == "missing":
        (tmp_path / "popularity.npy").unlink()
    elif damage == "short":
        np.save(tmp_path / "popularity.npy", np.ones(3))
    elif damage == "settings":
        (tmp_path / "retrieval.json").write_text('{"format": 6, "decay": 0.6}')
    elif damage == "version":
        settings = json.loads((tmp_path / "retrieval.json").read_text())
        (tmp_path / "retrieval.json").write_text(json.dumps(settings | {"format": 4}))
    else:
        file = tmp_path / "item_item.indices.npy"
        np.save(file, np.load(file) + ITEMS)
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        Retrieval.load(tmp_path)


@pytest.mark.parametrize("name", ["popularity.npy", "item_item.data.npy", "vectors.npy"])
@pytest.mark.parametrize("kind", [str, np.nan, np.inf])
def test_files_without_finite_numbers_are_refused(tmp_path, name, kind):
    vectors = VectorIndex.of(np.eye(ITEMS, 4))
    fitted(Histories.of([[0, 1, 2], [2, 3]]), vectors=vectors).save(tmp_path)
    found = np.load(tmp_path / name)
    np.save(tmp_path / name, found.astype(str) if kind is str else np.full_like(found, kind))
    with pytest.raises(ArtifactError, match=name):
        Retrieval.load(tmp_path)
