"""A fair clock: every side once a round, ratios within rounds."""

import pytest
from measuring import Side, compare_times, summarize, time_interleaved


def test_every_side_is_prepared_and_run_once_a_round():
    log = []
    sides = {
        name: Side(lambda r, n=name: log.append((n, r)), lambda r, n=name: log.append((n, -r)))
        for name in "abc"
    }
    times = time_interleaved(sides, 20)
    for taken in times.values():
        assert len(taken.wall) == len(taken.cpu) == 20
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert all(before == (name, -number) for before, (name, number) in pairs)
    for number in range(20):
        here = [name for _, (name, r) in pairs if r == number]
        assert sorted(here) == ["a", "b", "c"]
    first = {pairs[3 * number][1][0] for number in range(20)}
    assert first == {"a", "b", "c"}, "the order changes"


def test_a_side_of_few_rounds_takes_part_in_the_first():
    met = []
    time_interleaved({"slow": Side(met.append, rounds=2), "fast": Side(lambda _: None)}, 5)
    assert met == [0, 1]


def test_preparation_is_not_timed(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("measuring.time.perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    side = Side(lambda _: wait(2.0), lambda _: wait(100.0))
    assert time_interleaved({"only": side}, 3)["only"].wall == [2.0, 2.0, 2.0]


def test_a_spread_has_median_quartiles_and_p99():
    assert summarize([1, 2, 3, 4, 5]) == {"p50": 3.0, "p25": 2.0, "p75": 4.0, "p99": 4.96}


def test_a_ratio_is_over_the_rounds_that_both_sides_have():
    assert compare_times([10, 30], [1, 1, 500])["p50"] == pytest.approx(20)
    assert compare_times([], [1, 2]) is None
