"""The gate: paired differences by kind of target, and the rule by which a challenger is offered."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from recsys.dataset import Dataset
from recsys.evaluation.compare import compare_rankers
from recsys.evaluation.gate import (
    ENOUGH,
    REPLAYS,
    Served,
    compare_coverage,
    replays,
    with_enough_users,
)
from recsys.evaluation.metrics import coverage_gap
from recsys.evaluation.verdict import GateConfig, decide
from recsys.interactions import Histories, Interactions


def users_table(ranks_a, ranks_b, popularity):
    rows = []
    for ranker, ranks in (("a", ranks_a), ("b", ranks_b)):
        for user, (rank, count) in enumerate(zip(ranks, popularity, strict=True)):
            rows.append(
                {"ranker": ranker, "seen": "masked", "user_id": f"u{user}", "rank": rank,
                 "target_popularity": count, "targets": 1, "hits_at_10": int(bool(rank))}
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def test_cold_and_warm_targets_are_compared_apart():
    rng = np.random.default_rng(0)
    ranks = [[int(r) if r <= 10 else None for r in rng.integers(1, 20, 60)] for _ in range(2)]
    popularity = [int(c) for c in rng.integers(0, 3, 60)]
    rows = compare_rankers(users_table(*ranks, popularity), "a", "b", resamples=50)

    def gain(rank):
        return 0.0 if rank is None else 1 / np.log2(1 + rank)

    for target, inside in (
        ("all", [True] * 60),
        ("cold", [c == 0 for c in popularity]),
        ("warm", [c > 0 for c in popularity]),
    ):
        (row,) = [r for r in rows if (r["target"], r["metric"]) == (target, "ndcg")]
        means = [
            np.mean([gain(r) for r, there in zip(side, inside, strict=True) if there])
            for side in ranks
        ]
        assert row["users"] == sum(inside)
        assert (row["a"], row["b"]) == pytest.approx(means)
        assert row["mean"] == pytest.approx(means[0] - means[1], abs=1e-6)
        assert row["low"] <= row["mean"] <= row["high"]


def test_a_user_who_is_asked_for_several_events_counts_once():
    """By hand: u0 gains 1, 0 and 0.5, u1 gains 0 with a and 1 with b."""
    rows = []
    for ranker, ranks in (("a", [1, None, 3, None]), ("b", [None, None, None, 1])):
        for user, rank in zip(["u0", "u0", "u0", "u1"], ranks, strict=True):
            rows.append(
                {"ranker": ranker, "seen": "masked", "user_id": user, "rank": rank,
                 "target_popularity": 1, "targets": 1}
            )  # fmt: skip
    found = compare_rankers(pa.Table.from_pylist(rows), "a", "b", resamples=50)
    (row,) = [r for r in found if (r["target"], r["metric"]) == ("all", "ndcg")]
    assert (row["users"], row["events"]) == (2, 4)
    assert (row["a"], row["b"]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert (row["low"], row["high"]) == (-1, 0.5), "draws of whole users"


def test_differences_are_those_of_the_mode_of_the_table():
    table = users_table([1, None], [None, None], [1, 1])
    unmasked = table.set_column(1, "seen", pa.array(["unmasked"] * len(table)))
    found = compare_rankers(unmasked, "a", "b", resamples=50)
    assert {(row["seen"], row["a"], row["b"]) for row in found} == {("unmasked", 0.5, 0.0)}


def test_each_recommender_treats_seen_items_as_it_does_in_service(monkeypatch):
    asked = []

    def rank(recommender, histories, k, modes):
        asked.extend(modes)
        return [("lists", None)]

    monkeypatch.setattr("recsys.evaluation.gate.rank_histories", rank)
    for by_default, by_mode in ((True, True), (True, False), (False, False)):
        recommender = SimpleNamespace(exclude_seen=by_default, retrieval=None)
        Served(recommender).rank(Histories.of([[1]]), 10, by_mode)
    assert asked == [True, True, False]


def window(*users, train=1, valid=1):
    """A data set of one user for each number, who has that many events of the test."""
    user = np.repeat(np.arange(len(users)), [train + valid + n for n in users]).astype(np.int32)
    split = np.concatenate([[0] * train + [1] * valid + [2] * n for n in users]).astype(np.uint8)
    step = np.arange(len(user)) - np.searchsorted(user, user)
    items = [f"i{n}" for n in range(int(step.max()) + 1)]
    interactions = Interactions(
        user, step.astype(np.int32), 100 * step, np.full(len(user), np.nan, np.float32),
        np.array([f"u{n}" for n in range(len(users))]), np.array(items), True,
    )  # fmt: skip
    table = pa.table({"item_id": items, "title": items, "text": items})
    return Dataset(interactions, split, table)


def asked(dataset):
    """User -> (number of the item that is asked for, events before it)."""
    found = dataset.examples("test")
    places = zip(found.targets, found.histories, strict=True)
    return {int(u): (int(t[0]), len(h)) for u, (t, h) in zip(found.users, places, strict=True)}


def test_users_are_asked_for_later_events_with_what_came_before():
    found = [asked(replay) for replay in replays(window(3, 1, 2))]
    assert found == [
        {0: (2, 2), 1: (2, 2), 2: (2, 2)},
        {0: (3, 3), 2: (3, 3)},
        {0: (4, 4)},
    ]
    assert len(list(replays(window(9)))) == REPLAYS
    assert len(list(replays(window(0)))) == 1


def test_the_window_of_validation_is_asked_for_where_the_test_has_few_users():
    few, all_ = window(1, 0, valid=2), np.ones(4, bool)
    assert asked(with_enough_users(few, all_)) == {0: (1, 1), 1: (1, 1)}
    many = window(*[1] * ENOUGH, valid=2)
    assert with_enough_users(many, all_) is many
    gone = all_.copy()
    gone[3] = False  # the next item of the test
    assert with_enough_users(many, gone) is not many


def is_offered(rng, lost):
    """Whether a challenger passes in an invented shop: 2,000 users, five events of each.

    The champion lists .12 of the next items. The challenger loses .35 of these, and the share
    `lost`, and lists as many others as it needs for the true difference.
    """
    names = np.arange(2000).repeat(5)
    liking = rng.beta(1, 1 / 0.12 - 1, 2000).repeat(5)
    champion = np.where(rng.random(len(liking)) < liking, rng.integers(1, 11, len(liking)), 0)
    stays = (champion > 0) & (rng.random(len(liking)) >= 0.35 + lost)
    comes = (champion == 0) & (rng.random(len(liking)) < liking * 0.35 / (1 - liking).clip(1e-9))
    challenger = np.where(comes, rng.integers(1, 11, len(liking)), np.where(stays, champion, 0))
    tables = [
        pa.table(
            {
                "ranker": [name] * len(names), "seen": ["masked"] * len(names), "user_id": names,
                "rank": ranks, "target_popularity": [1] * len(names), "targets": [1] * len(names),
            }
        )
        for name, ranks in (("challenger", challenger), ("champion", champion))
    ]  # fmt: skip
    rows = compare_rankers(pa.concat_tables(tables), "challenger", "champion", resamples=300)
    return not decide(compared(users=2000) | {"comparisons": rows}, GateConfig())


@pytest.mark.parametrize(("lost", "least", "most"), [(0.0, 0.93, 1.0), (0.2, 0.0, 0.01)])
def test_a_shop_of_some_size_promotes_what_is_as_good_and_refuses_what_is_worse(lost, least, most):
    rng = np.random.default_rng(round(100 * lost))
    assert least <= np.mean([is_offered(rng, lost) for _ in range(60)]) <= most


def compared(low=-0.001, high=0.01, *, users=500, gap=(2.0, 12.0), warm=(-0.01, 0.01), a=0.1):
    about = {"metric": "ndcg", "mean": (low + high) / 2, "a": a, "b": 0.1}
    return {
        "window": {"users": users},
        "comparisons": [
            {**about, "target": "all", "low": low, "high": high},
            {**about, "target": "warm", "low": warm[0], "high": warm[1]},
        ],
        "coverage": {
            "challenger": 0.31,
            "champion": 0.5,
            "taken": 0.42,
            "items": 100,
            "gap": {"mean": sum(gap) / 2, "low": gap[0], "high": gap[1]},
        },
    }


def test_a_challenger_that_is_as_good_is_offered():
    assert decide(compared(), GateConfig()) == []
    assert decide(compared(low=-0.0052, high=0.0071), GateConfig()) == []
    assert decide(compared(low=-0.1, high=0.0), GateConfig()) == [], "it may be as good"
    assert decide(compared(warm=(-0.05, -0.0099)), GateConfig(margin=0.1)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"low": 0.0, "high": 0.0, "a": 0.0}, "Nothing was measured"),
        ({"low": -0.005, "high": -0.001}, "The challenger is worse"),
        ({"warm": (-0.05, -0.0101)}, "worse: ndcg@10 of warm"),
        ({"users": 29}, "Only 29 users"),
        (
            {"gap": (-4.2, -0.1)},
            "have 31 of the 100 items, those of the champion 50, and the users took 42; at least "
            "34 are wanted (gate.coverage), and the gap of -2 items (-4 to -0) is more than chance",
        ),
    ],
    ids=["nothing", "worse", "warm", "users", "coverage"],
)
def test_a_challenger_is_refused_for_a_reason_in_words(change, says):
    (reason,) = decide(compared(**change), GateConfig())
    assert says in reason


def test_coverage_that_may_be_chance_refuses_nothing():
    assert decide(compared(gap=(-9.0, 0.0)), GateConfig()) == []


def ranked(*lists):
    return np.array(lists, np.int32)


def test_the_gap_of_coverage_by_hand():
    """Item 2 of mine, and items 1 to 4 of theirs, have one user each."""
    mine = ranked([0, 1], [0, 2], [0, 1])
    theirs = ranked([0, 1], [2, 3], [4, 0])
    # 3 - 0.8 * 5 items. Without a user: 3 - 0.8 * 4, 2 - 0.8 * 3, 3 - 0.8 * 4.
    without = np.array([-0.2, -0.4, -0.2])
    error = (2 / 3 * ((without - without.mean()) ** 2).sum()) ** 0.5
    gap = coverage_gap(mine, theirs, 0.8)
    ends = (-1, -1 - 1.96 * error, -1 + 1.96 * error)
    assert (gap.mean, gap.low, gap.high) == pytest.approx(ends, abs=0.005)


def test_padding_is_no_item_and_one_user_gives_no_interval():
    gap = coverage_gap(ranked([3, -1]), ranked([7]), 0.5)
    assert (gap.mean, gap.low, gap.high) == (0.5, 0.5, 0.5)
    assert coverage_gap(ranked([3, -1], [-1, -1]), ranked([-1], [-1]), 0.5).mean == 1


def result_of(challenger, champion, taken):
    lists = {"challenger": challenger, "champion": champion}
    return SimpleNamespace(
        rankings={name: {"masked": SimpleNamespace(items=items)} for name, items in lists.items()},
        targets={"next": SimpleNamespace(items=np.array(taken, np.int32))},
        popularity=np.zeros(10),
    )


def test_coverage_is_compared_with_the_champion_or_with_what_users_took():
    narrow = ranked([0, 1], [0, 1], [1, 0], [0, 1])
    wide = ranked([0, 1], [2, 3], [4, 5], [6, 7])
    config = GateConfig(k=2, coverage=0.5)
    few = compare_coverage(result_of(narrow, wide, [3, 3, 3, 4]), config)
    assert (few["challenger"], few["champion"], few["taken"]) == (0.2, 0.8, 0.2)
    assert few["gap"]["mean"] == 2 - 0.5 * 2, (
        "the users took two items, fewer than the champion has"
    )
    many = compare_coverage(result_of(wide, narrow, [3, 2, 1, 0]), config)
    assert many["gap"]["mean"] == 8 - 0.5 * 2, "the champion's lists have two"
