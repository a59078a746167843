"""The gate: paired differences by kind of target, and the rule by which a challenger is offered."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recsys.errors import ConfigError
from recsys.evaluation.compare import compare_rankers
from recsys.evaluation.verdict import GateConfig, decide


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


def test_a_kind_of_target_without_users_has_no_rows():
    rows = compare_rankers(users_table([1, 2], [2, 1], [4, 5]), "a", "b", resamples=10)
    assert {row["target"] for row in rows} == {"all", "warm"}


def found(low=-0.001, high=0.01, *, users=500, coverage=0.5, p50=10.0, warm=(-0.01, 0.01)):
    about = {"metric": "ndcg", "mean": (low + high) / 2, "a": 0.1, "b": 0.1}
    return {
        "window": {"users": users},
        "comparisons": [
            {**about, "target": "all", "low": low, "high": high},
            {**about, "target": "warm", "low": warm[0], "high": warm[1]},
        ],
        "coverage": {"challenger": coverage, "champion": 0.5},
        "latency_ms": {"challenger": {"p50": p50}, "champion": {"p50": 10.0}},
    }


def test_a_challenger_that_is_as_good_is_offered():
    assert decide(found(), GateConfig()) == []
    assert decide(found(low=-0.0099), GateConfig(margin=0.1)) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"low": -0.0101}, "not shown"),
        ({"low": -0.005, "high": -0.001}, "The challenger is worse"),
        ({"warm": (-0.05, -0.01)}, "worse: ndcg@10 of warm"),
        ({"users": 99}, "Only 99 users"),
        ({"coverage": 0.39}, "cover 39.0%"),
        ({"p50": 15.1}, "15.1 ms"),
    ],
    ids=["margin", "worse", "warm", "users", "coverage", "latency"],
)
def test_a_challenger_is_refused_for_a_reason_in_words(change, says):
    (reason,) = decide(found(**change), GateConfig())
    assert says in reason


def test_latency_that_is_not_measured_refuses_nothing():
    given = found() | {"latency_ms": {"challenger": None, "champion": None}}
    assert decide(given, GateConfig(requests=0)) == []


@pytest.mark.parametrize("wrong", [{"window": 0.5}, {"margin": -1.0}, {"users": 0}], ids=str)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        GateConfig(**wrong)
