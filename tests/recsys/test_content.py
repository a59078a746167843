"""ContentIndex against plain Python: terms, weights, cosines and nearest items."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa

from recsys.interactions import Histories
from recsys.retrieval.content import ContentIndex
from recsys.retrieval.rows import WeightedItems, blocked_items, unit
from recsys.retrieval.vectors import nearest

ITEMS = pa.table(
    {
        "item_id": ["a", "b", "c", "d", "e"],
        "title": ["Red wool hat", "Blue wool hat", "Red shoe", "d", "Green sock"],
        "text": ["", None, "a shoe, not a hat", "", ""],
        "brand": ["Acme", "Acme", "Other", None, "Single"],
        "tags": pa.array([["warm", "new"], ["warm"], ["new"], [], None], pa.list_(pa.string())),
        "price": [1.0, 2.0, 3.0, 4.0, 5.0],
    }
)
WORDS = [["red", "wool", "hat"], ["wool", "hat"], ["red", "hat"], [], []]
VALUES = [["Acme", "warm", "new"], ["Acme", "warm"], ["new"], [], []]


def slow_rows() -> list[dict[str, float]]:
    """Terms of at least two items; words and values each scaled to length 1, then both together."""
    rows: list[dict[str, float]] = [{} for _ in range(5)]
    for documents in (WORDS, VALUES):
        for own, terms in zip(rows, documents, strict=True):
            weights = {}
            for term in terms:
                items = sum(term in other for other in documents)
                weights[term] = math.log((1 + 5) / (1 + items)) + 1
            length = math.sqrt(sum(w * w for w in weights.values()))
            own.update({term: w / length for term, w in weights.items()})
    return rows


def cosine(one: dict[str, float], other: dict[str, float]) -> float:
    lengths = [math.sqrt(sum(w * w for w in row.values())) for row in (one, other)]
    dot = sum(weight * other.get(term, 0.0) for term, weight in one.items())
    return dot / lengths[0] / lengths[1] if all(lengths) else 0.0


def queries(index, asked) -> np.ndarray:
    return unit(WeightedItems.decayed(asked, 5, 0.5).dense(index.rows))


def test_cosines_equal_those_of_plain_tf_idf():
    index, rows = ContentIndex.of(ITEMS), slow_rows()
    asked = Histories.of([[0], [1], [2], [3], []])
    found = index.cosines(queries(index, asked))
    for i in range(3):
        wanted = [cosine(rows[i], other) for other in rows]
        np.testing.assert_allclose(found[i], wanted, atol=1e-6)
    assert not found[3:].any()


def test_a_history_is_the_decayed_sum_of_its_items():
    index, rows = ContentIndex.of(ITEMS), slow_rows()
    found = index.cosines(queries(index, Histories.of([[2, 1]])))
    whole: dict[str, float] = {}
    for row, weight in ((rows[2], 0.5), (rows[1], 1.0)):
        length = math.sqrt(sum(w * w for w in row.values()))
        for term, value in row.items():
            whole[term] = whole.get(term, 0.0) + weight * value / length
    np.testing.assert_allclose(found[0, 0], cosine(whole, rows[0]), atol=1e-6)


def test_nearest_items_are_allowed_and_share_a_term():
    index = ContentIndex.of(ITEMS)
    cosines = index.cosines(queries(index, Histories.of([[0], [0], [3]])))
    masks = [None, np.array([True, False, True, True, True]), None]
    blocked = blocked_items(3, 5, [Histories.of([[0], [0], []])], masks)
    assert nearest(cosines, 3, blocked).tolist() == [[1, 2, -1], [2, -1, -1], [-1] * 3]


def test_a_query_has_the_same_cosines_alone():
    index = ContentIndex.of(ITEMS)
    asked = queries(index, Histories.of([[0, 1], [2], [1, 3, 0]]))
    alone = [index.cosines(asked[i : i + 1]) for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(alone), index.cosines(asked))


def test_items_without_shared_terms_have_no_index():
    table = pa.table({"item_id": ["a", "b"], "title": ["a", "b"], "text": ["", ""]})
    assert ContentIndex.of(table) is None
