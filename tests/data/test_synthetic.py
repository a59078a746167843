from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from recsys.data.prepare import DataConfig, build
from recsys.data.synthetic import LENGTHS, SyntheticConfig, generate
from recsys.dataset import Dataset

SMALL = SyntheticConfig(users=800, items=400)


@pytest.fixture(scope="module")
def shop() -> Dataset:
    """A small shop, split leave-one-out."""
    return build(DataConfig(synthetic=SMALL), seed=3).dataset


def test_one_seed_gives_one_shop() -> None:
    one, same, other = (generate(SMALL, seed).gather() for seed in (1, 1, 2))
    assert one.events.equals(same.events)
    assert one.items.equals(same.items)
    assert not one.events.equals(other.events)


@pytest.mark.parametrize(("users", "items"), [(1, 240), (50, 241), (300, 5_000)])
def test_the_shop_has_the_size_that_was_asked_for(users: int, items: int) -> None:
    raw = generate(SyntheticConfig(users=users, items=items)).gather()
    assert raw.items.num_rows == items
    assert len(raw.events["user"].unique()) == users
    titles = raw.items["title"].to_pylist()
    assert len(set(titles)) == items


@pytest.mark.parametrize(
    "config", [{"users": 0}, {"items": 239}, {"items": 100_001}, {"mean_length": 5}]
)
def test_a_shop_without_room_is_refused(config: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        SyntheticConfig(**config)


def test_people_do_not_buy_twice_and_time_moves_on(shop: Dataset) -> None:
    for history in shop.interactions.histories:
        assert len(np.unique(history)) == len(history) <= LENGTHS[1]
    assert shop.interactions.has_time
    lengths = shop.interactions.histories.lengths
    assert np.median(lengths) >= 8
    assert abs(lengths.mean() - 12) < 1
    assert set(np.unique(shop.interactions.rating)) <= {1, 2, 3, 4, 5}


def test_the_next_volume_is_the_most_likely_next_event(shop: Dataset) -> None:
    rows = shop.items.to_pylist()
    followed = chances = 0
    for history in shop.interactions.histories:
        for item, following in pairwise(history):
            last = item + 1 == len(rows) or rows[item + 1]["volume"] in (None, 1)
            chances += not last
            followed += not last and following == item + 1
    assert followed / chances > 0.3


def test_there_is_far_more_to_find_than_popularity(shop: Dataset) -> None:
    """Recall@10 of counting successors within the last three events against that of popularity."""
    n = len(shop.item_ids)
    train, test = shop.train_histories, shop.examples("test")
    popular = np.bincount(train.items, minlength=n).astype(float)
    successors = np.zeros((n, n))
    for gap in (1, 2, 3):
        same = train.rows[gap:] == train.rows[:-gap]
        np.add.at(successors, (train.items[:-gap][same], train.items[gap:][same]), 1 / gap)
    scores = np.zeros((len(test), n))
    for gap in (1, 2, 3):
        scores += 0.6**gap * successors[[h[-gap] for h in test.histories]]
    recall = {}
    for name, score in (("popular", np.tile(popular, (len(test), 1))), ("successors", scores)):
        for row, history in enumerate(test.histories):
            score[row, history] = -1
        top = np.argpartition(-score, 10, axis=1)[:, :10]
        recall[name] = (top == test.targets.items[:, None]).any(axis=1).mean()
    assert recall["successors"] > 0.35
    assert recall["successors"] > 3 * recall["popular"]
