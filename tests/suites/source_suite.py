"""What every source of the blend promises; a source gets these tests by a subclass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from recsys.interactions import Behaviour, Histories
from recsys.retrieval import ItemItem, PairRules, Retrieval, VectorIndex, decayed_counts
from recsys.retrieval.content import ContentIndex
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.rows import blocked_items
from recsys.training.sasrec import SasRecConfig, SasRecModel

ITEMS = 9
VIEW, BUY = 0, 1  # types of events
WALKS = [[0, 1, 2, 0], [2, 3, 0, 4], [4, 5, 4], [6, 2], [7, 0, 6, 1], [3]]
IS_TARGET = [[0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1], [0, 1], [1, 1, 0, 1], [0]]
VECTORS = np.random.default_rng(0).normal(size=(ITEMS, 4))
RECENT = np.arange(ITEMS) % 4 / 2.0
SASREC = SasRecModel(ITEMS, SasRecConfig(1, hidden=8), None).frozen()
WORDS = [["red", "hat"], ["red", "shoe"], ["hat"], [], ["shoe"], ["red"], [], ["hat", "shoe"], []]
TABLE = pa.table(  # a title that is the id says nothing, and a list is of several values
    {
        "item_id": [f"i{n}" for n in range(ITEMS)],
        "title": [f"{' '.join(w).title()} {n}" if n % 2 else f"i{n}" for n, w in enumerate(WORDS)],
        "text": [None if n % 2 else f"{', '.join(words)}!" for n, words in enumerate(WORDS)],
        "tags": pa.array([[f"kind{n % 3}", f"only{n}"] for n in range(ITEMS - 1)] + [None]),
        "price": np.arange(ITEMS) / 2,
    }
)
# An empty history, one with repeated items, and two with items that the catalog does not have.
ASKED = replace(
    Histories.of([[0, 3, 0], [], [5, ITEMS + 2], [ITEMS, 2, 2, 7], [7]]),
    behaviours=np.array([VIEW, BUY, VIEW, VIEW, BUY, BUY, BUY, VIEW, VIEW, BUY], np.uint8),
)
VALUED = np.arange(-1, ITEMS + 2)  # none, the items of the catalog, and two that it does not have


TO_TARGETS = PairRules(reverse=0.0)


def fitted() -> Retrieval:
    trained, targets = Histories.of(WALKS), np.concatenate(IS_TARGET).astype(np.bool_)
    types = (Behaviour("view", "context", 0.2), Behaviour("purchase", "target", 1.0))
    return Retrieval(
        ItemItem.count(trained, ITEMS),
        decayed_counts(trained.items, ITEMS),
        0.1,
        VectorIndex.of(VECTORS),
        ContentIndex.of(TABLE),
        SASREC,
        EventTypes(
            types,
            ItemItem.count(trained, ITEMS, TO_TARGETS, targets),
            np.bincount(trained.items[targets], minlength=ITEMS).astype(np.float64),
        ),
        RECENT,
    )


class SourceSuite:
    """Tests of one source.

    A subclass has `source`, its name; `value`, its value of an item; `beyond`, that of items which
    it does not know (or `unknown`, by the history); and `proposed`, the share of k items that it
    proposes.
    """

    source: str
    beyond = 0.0
    proposed = 0.0

    def value(self, history: Sequence[int], types: Sequence[int], item: int) -> float:
        """The value of an item of the catalog, in plain Python."""
        raise NotImplementedError

    def unknown(self, history: Sequence[int]) -> float:
        """The value of an item that the source does not know."""
        return self.beyond

    def values(self, retrieval: Retrieval, asked: Histories) -> NDArray[np.float64]:
        items = np.tile(VALUED, (len(asked), 1))
        return Evidence(retrieval, asked).values(items, [self.source])[self.source]

    def expected(self) -> NDArray[np.float64]:
        bounds = ASKED.offsets
        return np.array([
            [
                self.value(ASKED[n].tolist(), ASKED.behaviours[bounds[n] : bounds[n + 1]], item)
                if 0 <= item < ITEMS else self.unknown(ASKED[n].tolist()) for item in VALUED
            ]
            for n in range(len(ASKED))
        ])  # fmt: skip

    def test_values_are_those_of_plain_python(self) -> None:
        assert self.source in fitted().sources
        found = self.values(fitted(), ASKED)
        np.testing.assert_allclose(found, self.expected(), rtol=1e-5, atol=1e-6)

    def test_values_have_the_same_bits_alone(self) -> None:
        retrieval = fitted()
        together = self.values(retrieval, ASKED)
        for row in range(len(ASKED)):
            alone = self.values(retrieval, ASKED.take([row]))
            np.testing.assert_array_equal(alone[0], together[row])

    def test_values_are_the_same_after_a_restart(self, tmp_path: Path) -> None:
        fitted().save(tmp_path)
        again = replace(Retrieval.load(tmp_path), sasrec=SASREC)  # which a bundle keeps elsewhere
        found = self.values(fitted(), ASKED)
        np.testing.assert_array_equal(self.values(again, ASKED), found)

    @pytest.mark.parametrize("k", [2, 5])
    def test_the_best_of_what_is_allowed_are_proposed(self, k: int) -> None:
        masks = [None if n % 2 else np.arange(ITEMS) % 4 > 0 for n in range(len(ASKED))]
        excluded = [[4], [4, 5], [], [1], [0]]
        hidden = Histories.of([[*a, *b] for a, b in zip(excluded, ASKED, strict=True)])
        blocked = blocked_items(ITEMS, hidden, masks)
        found = fitted().propose(Evidence(fitted(), ASKED), k, blocked).items
        values = self.expected()[:, 1 : 1 + ITEMS]
        for row, mask, left_out, history, worth in zip(
            found, masks, excluded, ASKED, values, strict=True
        ):
            free = (np.ones(ITEMS, bool) if mask is None else mask).copy()
            free[[item for item in (*left_out, *history) if item < ITEMS]] = False
            listed = row[row >= 0].tolist()
            assert len(set(listed)) == len(listed)
            assert free[listed].all()
            best = sorted(np.flatnonzero(free & (worth > 1e-6)), key=lambda i, w=worth: -w[i])
            assert set(best[: int(self.proposed * k)]) <= set(listed)
