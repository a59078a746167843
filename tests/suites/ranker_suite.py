"""What every ranker of an evaluation promises; a ranker gets these tests by a subclass.

`Recommender`, SASRec and the baselines are ranked by the same call (`recsys.evaluation.protocol`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from recsys.interactions import Histories


class RankerSuite:
    """Tests of one ranker, whose bits are the same for a user alone if it is `exact`.

    A subclass has `ranker`; items are the numbers from 0 to `ITEMS` - 1.
    """

    ITEMS = 8
    exact = True

    @pytest.fixture
    def ranker(self) -> Any:
        """The ranker under test, of `TRAINED` if it learns."""
        raise NotImplementedError

    TRAINED = Histories.of([[0, 1, 2], [2, 3, 0, 1], [4, 5, 4], [1, 2], [7, 6, 0], [3]])
    ASKED = Histories.of([[0, 1], [], [2, 3, 2], [5], [7, 6, 5, 4, 3, 2, 1, 0], [4, 0]])

    @pytest.mark.parametrize("exclude_seen", [True, False])
    @pytest.mark.parametrize("k", [1, 3, 20])
    def test_lists_are_distinct_items_by_falling_score(
        self, ranker: Any, k: int, exclude_seen: bool
    ) -> None:
        """Longer lists than there are items end in -1; shorter ones are their beginnings."""
        items, scores = ranker.rank(self.ASKED, k, exclude_seen)
        whole, _ = ranker.rank(self.ASKED, self.ITEMS, exclude_seen)
        assert items.shape == scores.shape == (len(self.ASKED), k)
        for row, values, history, full in zip(items, scores, self.ASKED, whole, strict=True):
            count = int((row >= 0).sum())
            assert set(row[:count].tolist()) <= set(range(self.ITEMS))
            assert len(set(row[:count].tolist())) == count
            assert (row[count:] == -1).all()
            assert np.isneginf(values[count:]).all()
            assert (np.diff(values[:count]) <= 0).all()
            assert not exclude_seen or set(row[:count].tolist()).isdisjoint(history.tolist())
            if self.exact:
                assert row[: self.ITEMS].tolist() == full[:k].tolist()

    def test_no_users_have_no_lists(self, ranker: Any) -> None:
        items, scores = ranker.rank(Histories.of([]), 3, True)
        assert items.shape == scores.shape == (0, 3)

    def test_a_user_gets_the_same_list_alone_and_among_others(self, ranker: Any) -> None:
        together, values = ranker.rank(self.ASKED, 4, True)
        for row in range(len(self.ASKED)):
            alone, own = ranker.rank(self.ASKED.take([row]), 4, True)
            assert alone[0].tolist() == together[row].tolist()
            assert not self.exact or own[0].tolist() == values[row].tolist()

    @pytest.mark.parametrize("exclude_seen", [True, False])
    def test_hidden_items_are_left_out(self, ranker: Any, exclude_seen: bool) -> None:
        hidden = Histories.of([[3, 0], [1], [], [5, 6], [2], [0, 0]])
        plain, _ = ranker.rank(self.ASKED, self.ITEMS, exclude_seen)
        asked = replace(self.ASKED, hidden=hidden)
        found, _ = ranker.rank(asked, self.ITEMS, exclude_seen)
        for before, after, left_out in zip(plain, found, hidden, strict=True):
            kept = [item for item in before.tolist() if item >= 0 and item not in left_out]
            assert [item for item in after.tolist() if item >= 0] == kept

    def test_what_was_only_viewed_is_not_left_out_as_seen(self, ranker: Any) -> None:
        """Of the history 4, 2, 3 only item 2 counts as seen."""
        asked = replace(Histories.of([[4, 2, 3]]), seen=np.array([False, True, False]))
        items, _ = ranker.rank(asked, self.ITEMS, True)
        everything, _ = ranker.rank(asked, self.ITEMS, False)
        listed = {item for item in everything[0].tolist() if item >= 0}
        assert {item for item in items[0].tolist() if item >= 0} == listed - {2}
