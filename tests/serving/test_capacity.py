"""The capacity plan: traffic, the simulated fleet against the real batcher, costs, the search."""

import asyncio
import json
import math
import selectors
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG
from recsys.catalog import Catalog
from recsys.errors import ArtifactError, ConfigError
from recsys.serving.batcher import Batcher
from recsys.serving.capacity.check import Trial, check, compare
from recsys.serving.capacity.commands import capacity
from recsys.serving.capacity.costs import DRAWS, ENOUGH, Costs, Level
from recsys.serving.capacity.measure import (
    COLUMNS,
    Seen,
    estimate_cold_ms,
    estimate_rate_alone,
    fit_costs,
    measure_one,
)
from recsys.serving.capacity.memory import EVENT, Memory
from recsys.serving.capacity.plan import Needs, find_rate, plan
from recsys.serving.capacity.report import report
from recsys.serving.capacity.simulation import (
    ANSWERED,
    EXPIRED,
    FAILED,
    REFUSED,
    Fleet,
    Loss,
    simulate,
)
from recsys.serving.capacity.traffic import NEW_USERS, Traffic, assign_owners

QUIET = Fleet(max_batch=1, max_wait_ms=0.0, queue_limit=10**9, deadline_ms=1e12)


def constant(batch_ms, *, request_ms=0.0, other_ms=0.0):
    """A batch of n takes `batch_ms + n request_ms`, and a request `other_ms` besides."""
    sizes = np.repeat([1, 2], ENOUGH)
    batch = batch_ms + request_ms * sizes
    return Costs((Level(0.0, sizes, batch, np.full(len(sizes), other_ms)),))


def test_requests_come_at_their_rate_in_order():
    times = Traffic(50.0, 20_000).arrivals(np.random.default_rng(0))
    assert (np.diff(times) >= 0).all()
    assert len(times) / times[-1] == pytest.approx(50, rel=0.03)
    gaps = np.diff(times)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "Poisson"


def test_bursts_keep_the_mean_rate_and_crowd_the_requests():
    traffic = Traffic(100.0, 200_000, burst=5.0, burst_s=2.0, burst_share=0.2)
    times = traffic.arrivals(np.random.default_rng(1))
    assert len(times) / times[-1] == pytest.approx(100, rel=0.1)
    a_second = np.bincount(times.astype(int))[:-1]
    assert a_second.var() > 3 * a_second.mean(), "a Poisson process has variance = mean"
    assert np.percentile(a_second, 10) == pytest.approx(100 / 1.8, rel=0.2), "the calm rate"


def test_new_users_are_all_different():
    asked = Traffic(1.0, 10_000, users=5, new=0.3).askers(np.random.default_rng(0))
    strangers = asked[asked >= NEW_USERS]
    assert len(strangers) == pytest.approx(3000, rel=0.1)
    assert len(set(strangers.tolist())) == len(strangers)


def test_users_are_spread_evenly_and_keep_their_place():
    where = assign_owners(np.arange(80_000), 8)
    assert np.bincount(where).min() > 9500
    assert (assign_owners(np.array([17, 17]), 8) == assign_owners(np.array([17]), 8)).all()
    assert (assign_owners(np.arange(100), 8) != assign_owners(np.arange(100), 8, salt=1)).any()


@pytest.mark.parametrize("busy", [0.2, 0.5, 0.8])
def test_constant_times_one_by_one_are_an_m_d_1_queue(busy):
    found = simulate(constant(10.0), Traffic(busy * 100, 200_000), QUIET, seed=3)
    # Pollaczek and Khinchine: mean wait = busy x service / (2 (1 - busy))
    assert found.queue_s.mean() == pytest.approx(0.010 * busy / (2 * (1 - busy)), rel=0.06)
    assert found.busy_s[0] / found.arrived[-1] == pytest.approx(busy, rel=0.02)


class _Clock(selectors.SelectSelector):
    """A selector that sleeps by moving the clock of its loop."""

    now = 0.0

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout:
            self.now += timeout
        return ready


class _Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while it would have slept."""

    def __init__(self):
        self.clock = _Clock()
        super().__init__(self.clock)

    def time(self):
        return self.clock.now


def by_the_batcher(times, batch_s, fleet):
    """(end, batch size) of each request, by `recsys.serving.batcher` on a virtual clock."""
    loop = _Loop()
    found: dict[int, tuple[float, int]] = {}

    async def run(batch):
        await asyncio.sleep(batch_s[len(batch)])
        return list(batch)

    async def play():
        batcher: Batcher[int, int] = Batcher(
            run,
            max_batch=fleet.max_batch,
            max_wait_ms=fleet.max_wait_ms,
            queue_limit=fleet.queue_limit,
        )
        batcher.start()

        async def one(number):
            await asyncio.sleep(times[number])
            answer = await batcher.submit(number, deadline=1e9)
            found[number] = loop.time(), answer.batch_size

        await asyncio.gather(*(one(number) for number in range(len(times))))
        await batcher.close()

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
    return [found[number] for number in range(len(times))]


class Given(Traffic):
    def __init__(self, times):
        super().__init__(1.0, len(times))
        object.__setattr__(self, "times", times)

    def arrivals(self, rng):
        return np.array(self.__dict__["times"])


def sizes_of(batch_ms, request_ms, most):
    return {size: (batch_ms + request_ms * size) / 1e3 for size in range(1, most + 1)}


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(0, 30), min_size=1, max_size=60),
    batch_ms=st.integers(1, 20),
    request_ms=st.integers(0, 5),
    wait_ms=st.sampled_from([0, 3, 10]),
    most=st.sampled_from([1, 3, 32]),
)
def test_batches_start_and_end_as_the_batchers_do(gaps, batch_ms, request_ms, wait_ms, most):
    # Odd parts of a millisecond, so that no two things happen at the same time.
    times = np.cumsum([gap + 0.017 * (n % 13 + 1) for n, gap in enumerate(gaps)]) / 1e3
    times += 1.0
    fleet = Fleet(max_batch=most, max_wait_ms=wait_ms + 0.0071, deadline_ms=1e9)
    costs = constant(batch_ms + 0.00031, request_ms=request_ms)
    found = simulate(costs, Given(times.tolist()), fleet)
    expected = by_the_batcher(times.tolist(), sizes_of(batch_ms + 0.00031, request_ms, most), fleet)
    assert found.batch.tolist() == [size for _, size in expected]
    ends = found.arrived + found.latency_s
    assert ends == pytest.approx([end for end, _ in expected], abs=1e-6)


@st.composite
def fleets(draw):
    replicas = draw(st.integers(1, 5))
    losses = []
    for replica in draw(st.sets(st.integers(0, replicas - 1))):
        at = draw(st.floats(0, 3))
        back = draw(st.one_of(st.floats(0.01, 3), st.just(math.inf)))
        losses.append(Loss(replica, at, at + back))
    return (
        Traffic(
            rate=draw(st.floats(20, 2000)),
            requests=draw(st.integers(1, 800)),
            users=draw(st.integers(1, 200)),
            new=draw(st.floats(0, 1)),
            burst=draw(st.sampled_from([1.0, 4.0])),
        ),
        Fleet(
            replicas,
            max_batch=draw(st.integers(1, 8)),
            queue_limit=draw(st.sampled_from([1, 5, 10**6])),
            deadline_ms=draw(st.sampled_from([20.0, 500.0, 1e9])),
            losses=tuple(losses),
            detect_ms=draw(st.sampled_from([0.0, 50.0, 1000.0])),
            tries=draw(st.integers(1, 4)),
        ),
    )


COSTS = Costs(constant(8.0, request_ms=1.0, other_ms=2.0).levels, cold_ms=1.5)


@settings(max_examples=80, deadline=None)
@given(fleets())
def test_every_request_ends_once_and_after_its_arrival(both):
    traffic, fleet = both
    found = simulate(COSTS, traffic, fleet)
    assert sum(found.counts().values()) == traffic.requests
    assert set(found.status.tolist()) <= {ANSWERED, REFUSED, EXPIRED, FAILED}
    good = found.status == ANSWERED
    assert (found.latency_s[good] >= 0.011 - 1e-9).all(), "at least a batch of one and the rest"
    assert (found.latency_s >= -1e-9).all()
    assert (found.batch[good] >= 1).all()
    assert (found.batch <= fleet.max_batch).all()
    assert (found.tries >= 1).all()
    assert (found.tries <= fleet.tries).all()
    each = (fleet.deadline_ms + fleet.detect_ms) / 1e3
    assert (found.latency_s[good] <= found.tries[good] * each + 0.002 + 1e-6).all()
    if not fleet.losses:
        assert found.counts()["failed"] == 0
        assert (found.tries == 1).all()


def test_a_replica_that_dies_costs_time_and_no_answer():
    fleet = Fleet(3, losses=(Loss(1, 5.0, 15.0),), detect_ms=200.0)
    found = simulate(COSTS, Traffic(60.0, 1500, users=500), fleet, seed=1)
    assert found.counts()["answered"] == 1500
    meanwhile = (found.arrived > 5.2) & (found.arrived < 15)
    assert not (found.replica[meanwhile] == 1).any()
    assert (found.replica[found.arrived > 15] == 1).any()
    again = found.tries > 1
    assert again.any()
    assert (found.arrived[again] <= 5.2).all()
    assert (found.latency_s[again] >= 0.2).all()


def test_users_of_a_dead_replica_go_to_all_others():
    fleet = Fleet(5, losses=(Loss(0, 0.0),), detect_ms=0.0)
    found = simulate(COSTS, Traffic(50.0, 5000, users=5000), fleet)
    counts = np.bincount(found.replica, minlength=5)
    assert counts[0] == 0
    assert counts[1:].min() > 1000


def test_requests_fail_after_their_tries_without_replicas():
    fleet = Fleet(2, losses=(Loss(0, 0.0), Loss(1, 0.0)), detect_ms=100.0, tries=3)
    found = simulate(COSTS, Traffic(10.0, 20), fleet)
    assert found.counts() == {"answered": 0, "refused": 0, "expired": 0, "failed": 20}
    assert found.latency_s == pytest.approx(np.full(20, 0.3))
    assert math.isnan(found.latency_ms(50)[0])


def test_a_restarted_replica_caches_no_histories():
    fleet = Fleet(1, losses=(Loss(0, 10.0, 10.5),), detect_ms=1000.0)
    found = simulate(COSTS, Traffic(20.0, 600, users=10), fleet)
    assert not found.cold[found.arrived < 9].any(), "they were known from the start"
    assert found.cold.sum() == 10


def test_full_queues_refuse_and_late_requests_expire():
    crowd = Given([1.0] * 10)
    found = simulate(constant(10.0), crowd, Fleet(max_batch=1, queue_limit=4))
    assert found.counts() == {"answered": 4, "refused": 6, "expired": 0, "failed": 0}
    late = simulate(constant(10.0), crowd, Fleet(max_batch=1, deadline_ms=35.0))
    assert late.counts() == {"answered": 3, "refused": 0, "expired": 7, "failed": 0}
    assert late.latency_s[late.status == EXPIRED] == pytest.approx(np.full(7, 0.035))
    assert late.busy_s[0] == pytest.approx(0.040), "what has expired in the queue is not computed"


def measured(rate, *, batch=8.0, count=400, seed=0):
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 4, count)
    batch_ms = batch + 2.0 * size + rng.exponential(0.5, count)
    return Level(rate, size, batch_ms, rng.uniform(1, 3, count))


def test_draws_are_the_measured_values():
    level = measured(10.0)
    table = Costs((level,)).draws(10.0, 4, np.random.default_rng(0))
    for size in (1, 2, 3):
        seen = level.batch_ms[level.size == size] / 1e3
        drawn = np.unique(table[size][0])
        assert drawn == pytest.approx(np.unique(seen))
        median = np.median(table[size][0])
        assert median == pytest.approx(np.median(seen), rel=0.01), "each as often as any other"
    assert len(table[1][0]) == len(table[1][1]) == DRAWS


def test_unmeasured_sizes_are_scaled_along_the_line():
    costs = Costs((measured(10.0),))
    offset, slope = costs.line
    assert (offset, slope) == pytest.approx((8.5, 2.0), abs=0.15)
    table = costs.draws(10.0, 32, np.random.default_rng(0))
    assert np.mean(table[32][0]) * 1e3 == pytest.approx(offset + 32 * slope, rel=0.05)


def test_between_two_rates_the_nearer_gives_more_draws():
    costs = Costs((measured(10.0, batch=8.0), measured(30.0, batch=80.0)))
    for rate, share in ((5.0, 0.0), (10.0, 0.0), (15.0, 0.25), (30.0, 1.0), (99.0, 1.0)):
        times = np.array(costs.draws(rate, 1, np.random.default_rng(0))[1][0])
        assert (times > 0.05).mean() == pytest.approx(share, abs=0.001)


def test_costs_are_read_back_as_they_were_written(tmp_path):
    costs = Costs((measured(10.0), measured(20.0)), 1.25, {"bundle": "demo"})
    costs.save(tmp_path / "new" / "costs.json")
    again = Costs.load(tmp_path / "new" / "costs.json")
    assert (again.cold_ms, again.about) == (1.25, {"bundle": "demo"})
    for first, second in zip(costs.levels, again.levels, strict=True):
        assert first.rate == second.rate
        assert first.batch_ms == pytest.approx(second.batch_ms, abs=1e-4)
    (tmp_path / "odd.json").write_text('{"schema": 99}')
    for name in ("odd.json", "gone.json"):
        with pytest.raises(ArtifactError, match="recsys benchmark capacity"):
            Costs.load(tmp_path / name)


def seen_of(rows):
    """Answers of replica, batch time, size, cold; nothing queued, 2 ms for all else."""
    replica, batch, size, cold = map(np.array, zip(*rows, strict=True))
    values = (replica, batch + 2.0, np.zeros(len(rows)), batch, size, cold)
    return Seen(pd.DataFrame(dict(zip(COLUMNS, values, strict=True))), 1.0, 0, 1.0, 0.1)


def test_batches_are_recognised_by_adjacent_answers():
    rows = [(0, 9.0, 2, True), (1, 8.0, 1, True), (0, 9.0, 2, False), (0, 9.0, 2, True)]
    assert seen_of(rows).cold_in_batch().tolist() == [1, 1, 1, -1], "the last one's mate is lost"


def test_the_cost_of_a_new_history_is_measured():
    rng = np.random.default_rng(0)
    rows = [(0, 8.0 + 1.5 * cold + rng.uniform(0, 0.2), 1, bool(cold)) for cold in [0, 1] * 200]
    seen = seen_of(rows)
    assert estimate_cold_ms([seen]) == pytest.approx(1.5, abs=0.05)
    costs = fit_costs([(20.0, seen)], {})
    assert costs.levels[0].batch_ms.max() < 8.3, "as if all had been kept"
    assert costs.levels[0].other_ms == pytest.approx(np.full(400, 2.0))
    assert estimate_rate_alone(seen) == pytest.approx(1e3 / 8.9, rel=0.05)
    assert estimate_cold_ms([seen_of(rows[:4])]) == 0.0, "too few to tell"


def test_loads_of_one_rate_count_together():
    seen = seen_of([(0, 8.0, 1, False)] * 5)
    costs = fit_costs([(20.0, seen), (10.0, seen), (20.0, seen)], {})
    assert [(level.rate, len(level.size)) for level in costs.levels] == [(10.0, 5), (20.0, 10)]


@pytest.fixture
def briefly(monkeypatch):
    monkeypatch.setattr("recsys.serving.capacity.plan.LEAST", 4000)


MEMORY = Memory(
    weights=1000, token=2048, levels=3, table_item=100, retrieval_item=50, prefix=1 << 20
)


def test_the_rate_of_a_replica_keeps_its_latency_limits():
    costs = constant(10.0)
    needs = Needs(1000, 100, 500.0, p99_ms=60.0, new=0.0)
    rate = find_rate(costs, needs, QUIET)
    found = simulate(costs, Traffic(rate, 20_000), QUIET)
    assert found.latency_ms(99)[0] == pytest.approx(60, rel=0.12)
    assert rate < 100, "one at a time of 10 ms each"
    batched = find_rate(costs, needs, Fleet())
    assert batched > 3 * rate, "a batch costs what one request does"


@pytest.mark.usefixtures("briefly")
def test_the_fleet_has_enough_replicas_and_spare_ones():
    costs = constant(6.0, request_ms=2.0, other_ms=2.0)
    needs = Needs(10**6, 10**5, 400.0, p99_ms=50.0, spare=2, per_machine=2)
    found = plan(costs, needs, MEMORY)
    assert found["replicas"] == math.ceil(400 / found["rate_each"]) + 2
    assert found["machines"] == math.ceil(found["replicas"] / 2)
    assert found["peak"]["p99_ms"] <= 50
    assert found["outage"]["failed"] == found["outage"]["refused"] == 0
    assert found["outage"]["retried"] > 0
    assert found["drivers"]["bursts of three times"]["rate_each"] < found["rate_each"]
    json.dumps(found)
    shown = report({"plan": found, "costs": costs.summary(), "bundle": {"name": "demo"}})
    assert [len(table.rows) for table in shown.tables] == [2, 7, 4]
    assert "requests a second" in " ".join(shown.sentences)


def test_a_limit_below_an_idle_replica_is_an_error():
    with pytest.raises(ConfigError, match=r"answers in 12\.0 ms"):
        plan(constant(10.0, other_ms=2.0), Needs(10, 10, 5.0, p99_ms=9.0), MEMORY)


def test_memory_is_the_sum_of_its_parts():
    # 2048 bytes a token, 1 + 3 x 20 tokens a history
    assert MEMORY.histories(20) == (1 << 20) // (2048 * 61)
    found = MEMORY.of(1000, 50, 20, Fleet(3), 2)
    assert found["replica_bytes"] == sum(found["replica"].values())
    assert found["fleet_bytes"] == 3 * found["replica_bytes"]
    assert found["machine_bytes"] == 2 * found["replica_bytes"]
    assert found["store_bytes"] == EVENT * 20 * 50
    more = MEMORY.of(2000, 50, 20, Fleet(3), 2)
    assert more["replica_bytes"] - found["replica_bytes"] == 1000 * found["item_bytes"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    with write_artifact(path, "bundle", info={"items": 50, "levels": 3}) as folder:
        for name in (CATALOG, "target", "retrieval"):
            (folder / name).mkdir()
        table = pa.table({name: ["x"] * 50 for name in ("item_id", "title", "text")})
        codes = np.stack(np.unravel_index(np.arange(50), (4, 4, 4)), axis=1)
        Catalog(table, codes.astype(np.int32)).save(folder / CATALOG)
        (folder / "target" / "config.json").write_text(json.dumps(config))
        (folder / "target" / "model.safetensors").write_bytes(b"0" * 4000)
        np.save(folder / "retrieval" / "popularity.npy", np.zeros(50))
    return path


def test_memory_of_a_bundle_is_read_from_its_files(bundle):
    memory = Memory.of_bundle(bundle, prefix_mb=2)
    assert (memory.weights, memory.levels, memory.prefix) == (4000, 3, 2 << 20)
    assert memory.token == 2 * 4 * 2 * 4 * 16, "keys and values, float32, layers, heads, width"
    assert memory.retrieval_item == (50 * 8 + 128) // 50


def test_a_check_shows_prediction_beside_measurement():
    seen = replace(seen_of([(0, 8.0, 1, False)] * 100), bad=1)
    level = {"load": 0.5, "rate": 60.0, **compare([11.0, 9.0], seen)}
    assert (level["p50_measured_ms"], level["p50_predicted_ms"]) == (10.0, 11.0)
    assert (level["p50_error"], level["p99_error"], level["bad"]) == (0.1, -0.1, 1)
    document = {
        "check": {"levels": [level], "worst": 0.1, "bound": 0.15, "met": False},
        "costs": constant(8.0).summary(),
        "bundle": {"name": "demo"},
    }
    shown = report(document)
    assert [len(table.rows) for table in shown.tables] == [1]
    assert "MISSED" in " ".join(shown.sentences)


@pytest.fixture
def stand_ins(answering, monkeypatch):
    """Replicas that start at once: only their batches take time, behind the real batcher."""

    async def run(batch):
        await asyncio.sleep(0.004)
        return list(batch)

    @asynccontextmanager
    async def start():
        batcher: Batcher[int, int] = Batcher(run, max_batch=32, max_wait_ms=5.0, queue_limit=99)
        batcher.start()

        async def answer(head, body):
            assert json.loads(body)["include"] == ["timing"]
            found = await batcher.submit(0, deadline=1e12)
            times = {"queue_ms": found.queue_s * 1e3, "compute_ms": found.compute_s * 1e3}
            return {"timing": {**times, "batch_size": found.batch_size}}

        async with answering(answer) as server:
            yield server
        await batcher.close()

    @asynccontextmanager
    async def start_replicas(bundle, count, settings=()):
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(start()) for _ in range(count)]

    for name in ("check", "measure"):
        monkeypatch.setattr(f"recsys.serving.capacity.{name}.start_replicas", start_replicas)


@pytest.mark.usefixtures("stand_ins")
async def test_two_replicas_are_measured_and_predicted(bundle, monkeypatch):
    monkeypatch.setattr("recsys.serving.capacity.check.ALONE_S", 0.1)
    monkeypatch.setattr("recsys.serving.capacity.check.SIMULATED", 2000)
    found = await check(bundle, Trial.quick(3))
    (level,) = found["levels"]
    assert (level["requests"], level["bad"]) == (60, 0)
    assert level["p50_measured_ms"] >= 4
    assert level["p50_predicted_ms"] >= 4
    costs = found["costs"]
    assert [len(level.size) > 30 for level in costs.levels] == [True, True]


@pytest.mark.usefixtures("stand_ins")
async def test_one_replica_is_measured_at_all_sizes(bundle):
    costs = await measure_one(bundle, seconds=0.3)
    assert len(costs.levels) == 4, "three open loads and the crowds"
    assert costs.levels[-1].size.max() > 8
    assert all((level.batch_ms > 0).all() for level in costs.levels)


def run_command(capsys, **options):
    capacity(**{"as_json": True, "seed": 0, "settings": None, **options})
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.usefixtures("briefly")
def test_the_command_plans_from_a_cost_model(bundle, tmp_path, capsys):
    Costs((measured(10.0), measured(40.0))).save(tmp_path / "costs.json")
    options = {"bundle": bundle, "costs": tmp_path / "costs.json", "out": tmp_path / "out"}
    found = run_command(capsys, daily_users=864_000.0, p99=80.0, **options)
    assert found["plan"]["needs"]["rate"] == pytest.approx(300)
    assert found["plan"]["needs"]["items"] == 50
    assert json.loads((tmp_path / "out" / "result.json").read_text())["plan"] == found["plan"]
    assert Costs.load(tmp_path / "out" / "costs.json").levels[1].rate == 40
    with pytest.raises(ConfigError, match="one of --rate and --daily-users"):
        run_command(capsys, **options)
