"""Items that are added after retrieval was fitted, and items treated as if they had been."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from oracles import assert_as_exact

from recsys.dataset import Examples
from recsys.interactions import Histories
from recsys.retrieval import ItemItem, Retrieval, VectorIndex, decayed_counts
from recsys.retrieval.as_new import AsNew, without
from recsys.retrieval.content import ContentIndex
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.later import POWER
from recsys.retrieval.rows import blocked_items
from recsys.training.sasrec import SasRecConfig, SasRecModel

KINDS = ("oak lamp", "wool scarf", "steel knife")
ITEMS = 12
TABLE = pa.table(
    {
        "item_id": [f"i{i}" for i in range(ITEMS)],
        "title": [f"{KINDS[i % 3]} {'large' if i % 2 else 'small'}" for i in range(ITEMS)],
        "text": [""] * ITEMS,
        "brand": [f"brand{i % 4}" for i in range(ITEMS)],
    }
)
LATER = pa.table(
    {
        "item_id": ["x", "y", "z"],
        "title": ["oak lamp unheard", "wool scarf large", "nothing known"],
        "text": ["", "", ""],
        "brand": ["brand1", "brandnew", None],
    }
)
TRAINED = Histories.of([np.random.default_rng(i).integers(0, ITEMS, 6) for i in range(30)])
VECTORS = np.random.default_rng(1).normal(size=(ITEMS, 4))
SASREC = SasRecModel(ITEMS, SasRecConfig(1, hidden=8), None).frozen()


def fitted(sasrec=SASREC) -> Retrieval:
    return Retrieval(
        ItemItem.count(TRAINED, ITEMS),
        decayed_counts(TRAINED.items, ITEMS),
        0.1,
        VectorIndex.of(VECTORS),
        ContentIndex.of(TABLE),
        sasrec,
    )


def terms_of(title, brand) -> dict[str, float]:
    """TF-IDF of a title's words and a brand, as `ContentIndex` defines it, without scikit-learn."""
    titles = [set(t.split()) for t in TABLE["title"].to_pylist()]
    brands = [{b} for b in TABLE["brand"].to_pylist()]
    row: dict[str, float] = {}
    for own, others in ((title.split(), titles), ([brand] if brand else [], brands)):
        many = {term: sum(term in other for other in others) for term in own}
        part = {t: math.log((1 + ITEMS) / (1 + n)) + 1 for t, n in many.items() if n > 1}
        length = math.sqrt(sum(w * w for w in part.values()))
        row |= {term: w / length for term, w in part.items()}
    length = math.sqrt(sum(w * w for w in row.values()))
    return {term: w / length for term, w in row.items()}


def rows_of(table) -> list[dict[str, float]]:
    return [terms_of(r["title"], r["brand"]) for r in table.to_pylist()]


def dot(one, other) -> float:
    return sum(weight * other.get(term, 0.0) for term, weight in one.items())


def test_later_items_have_the_cosines_of_their_own_words():
    retrieval = fitted()
    later = retrieval.describe(LATER)
    evidence = Evidence(retrieval, Histories.of([[3, 7]]), later)
    items = np.array([[2, ITEMS, ITEMS + 1, ITEMS + 2, ITEMS + 3, -1]])
    found = evidence.values(items, ["content", "new", "item_item"])
    rows, new = rows_of(TABLE), rows_of(LATER)
    assert np.isnan(found["content"][0, 4:]).all()
    whole = {t: 0.6 * rows[3].get(t, 0) + rows[7].get(t, 0) for t in rows[3] | rows[7]}
    length = math.sqrt(dot(whole, whole))
    wanted = [dot(whole, row) / length for row in (rows[2], *new)]
    np.testing.assert_allclose(found["content"][0, :4], wanted, atol=1e-6)
    assert found["new"][0, :4].tolist() == [0, 1, 1, 1]
    assert not found["item_item"][0, 1:].any()


def test_later_items_have_the_mean_vector_of_their_like():
    retrieval = fitted()
    later = retrieval.describe(LATER)
    for place, own in enumerate(rows_of(LATER)):
        weights = np.array([dot(own, row) ** POWER for row in rows_of(TABLE)])
        if not weights.any():
            assert not later.vectors[place].any()
            assert np.isnan(later.sasrec[place]).all()
            continue
        weights /= weights.sum()
        unit = VECTORS / np.linalg.norm(VECTORS, axis=1, keepdims=True)
        mean = weights @ unit
        np.testing.assert_allclose(later.vectors[place], mean / np.linalg.norm(mean), atol=1e-5)
        np.testing.assert_allclose(later.sasrec[place], weights @ SASREC.vectors, atol=1e-5)
    evidence = Evidence(retrieval, Histories.of([[3, 7]]), later)
    items = np.array([[5, ITEMS, ITEMS + 1, ITEMS + 2]])
    found = evidence.values(items, ["vectors", "sasrec"])
    products = later.vectors @ evidence.vectors[0]
    exact = later.vectors.astype(np.float64) @ evidence.vectors[0].astype(np.float64)
    assert_as_exact(found["vectors"][0, 1:], products, exact)
    rows = np.concatenate([SASREC.vectors[[5]], later.sasrec])
    products = rows @ evidence.states[0]
    exact = rows.astype(np.float64) @ evidence.states[0].astype(np.float64)
    assert_as_exact(found["sasrec"][0, :-1], products[:-1], exact[:-1])
    others = np.delete(SASREC.vectors, [3, 7], axis=0) @ evidence.states[0]
    assert found["sasrec"][0, -1] == pytest.approx(np.sort(others)[-50:].min(), abs=1e-5)  # unknown


@pytest.mark.parametrize("sasrec", [SASREC, None], ids=["sasrec", "vectors"])
def test_the_nearest_later_items_are_proposed_last(sasrec):
    retrieval = fitted(sasrec)
    later = retrieval.describe(LATER)
    asked = Histories.of([[0, 3], [1], [0, ITEMS], []])
    evidence, blocked = Evidence(retrieval, asked, later), blocked_items(ITEMS + 3, asked)
    before = retrieval.propose(Evidence(retrieval, asked), 4, blocked[:, :ITEMS])
    found = retrieval.propose(evidence, 4, blocked)
    for old, now in zip(before.items[[0, 1, 3]], found.items[[0, 1, 3]], strict=True):
        old, now = old[old >= 0].tolist(), now[now >= 0].tolist()
        assert now[: len(old)] == old
        assert all(item >= ITEMS for item in now[len(old) :])
    assert ITEMS in found.items[0]  # an oak lamp after oak lamps
    assert ITEMS + 1 in found.items[1]
    assert ITEMS not in found.items[2]  # it has been seen
    assert not (found.items[3] >= ITEMS).any()
    blocked[0, ITEMS] = True
    assert ITEMS not in retrieval.propose(evidence, 4, blocked).items[0]


def test_a_later_item_in_a_history_counts_by_its_content():
    retrieval = fitted()
    later = retrieval.describe(LATER)
    evidence = Evidence(retrieval, Histories.of([[2, ITEMS]]), later)
    items = np.array([[0, 1]])
    rows, new = rows_of(TABLE), rows_of(LATER)
    found = evidence.values(items, ["content", "item_item"])
    whole = {t: 0.6 * rows[2].get(t, 0) + new[0].get(t, 0) for t in rows[2] | new[0]}
    length = math.sqrt(dot(whole, whole))
    wanted = [dot(whole, rows[0]) / length, dot(whole, rows[1]) / length]
    np.testing.assert_allclose(found["content"][0], wanted, atol=1e-6)
    np.testing.assert_allclose(found["item_item"], evidence.shares.at(items))


def test_items_described_together_or_one_by_one_are_the_same():
    retrieval = fitted()
    whole = retrieval.describe(LATER)
    parts = retrieval.describe(LATER.slice(0, 1)).followed_by(retrieval.describe(LATER.slice(1)))
    for name in ("vectors", "sasrec"):
        np.testing.assert_array_equal(getattr(parts, name), getattr(whole, name))
    assert (parts.content != whole.content).nnz == 0
    swapped = whole.take(np.array([2, 0]))
    np.testing.assert_array_equal(swapped.vectors, whole.vectors[[2, 0]])
    assert len(swapped) == 2


def test_nothing_is_left_of_items_treated_as_new():
    retrieval, gone = fitted(), np.array([2, 5])
    rest = without(retrieval, gone)
    dense = rest.item_item.weights.toarray()
    assert not dense[gone].any()
    assert not dense[:, gone].any()
    others = np.setdiff1d(np.arange(ITEMS), gone)
    kept = np.ix_(others, others)
    before, after = retrieval.item_item.weights.toarray(), rest.item_item.weights.toarray()
    np.testing.assert_array_equal(after[kept], before[kept])
    for rows in (rest.vectors.vectors, rest.sasrec.vectors, rest.content.rows.toarray()):
        assert not rows[gone].any()
        assert rows[others].any(axis=1).all()
    assert not rest.counts[gone].any()


def test_drawn_items_leave_histories_and_get_new_numbers(monkeypatch):
    placed = np.arange(ITEMS * 2, dtype=np.int32).reshape(ITEMS, 2)
    new = AsNew.draw(fitted(), TABLE, placed, share=0.25, seed=3)
    assert len(new.chosen) == len(new.later) == 3
    np.testing.assert_array_equal(new.codes, placed[new.chosen])
    assert np.flatnonzero(~new.alive).tolist() == new.chosen.tolist()
    first, other = int(new.chosen[1]), int(np.setdiff1d(np.arange(ITEMS), new.chosen)[0])
    examples = Examples(
        np.arange(2, dtype=np.int32),
        replace(Histories.of([[first, other], [other]]), hidden=Histories.of([[first], [other]])),
        Histories.of([[other], [first]]),
    )
    found = new.examples(examples)
    assert [h.tolist() for h in found.histories.hidden] == [[ITEMS + 1], [other]]
    assert [h.tolist() for h in found.histories] == [[other], [other]]
    assert found.targets.items.tolist() == [other, ITEMS + 1]
    assert AsNew.draw(fitted(), TABLE, placed, share=0.01, seed=3) is None
    monkeypatch.setattr("recsys.retrieval.as_new.MOST", 2)
    assert len(AsNew.draw(fitted(), TABLE, placed, share=0.25, seed=3).chosen) == 2
