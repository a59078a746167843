"""Experiments over HTTP: sticky arms, what counts, results, and who may see them."""

import hashlib
import hmac
import itertools
import random
import time
from contextlib import asynccontextmanager
from unittest.mock import AsyncMock

import numpy as np
import pytest
import sqlalchemy as sa
from toy_bundle import code

from recsys.serving import cached_results, experiments
from recsys.serving.batcher import DeadlineExceededError, QueueFullError
from recsys.serving.experiments import DAY_MS, Experiment, analyse
from recsys.serving.schemas.experiments import ExperimentBody
from recsys.serving.sequential import compare
from recsys.serving.stores.records import Exposed, Exposure, Served, StoreError
from recsys.serving.stores.served import ServedTable

URL = "/v1/recommendations"
TWO = {"arms": [{"alias": "champion", "weight": 1}, {"alias": "other", "weight": 1}]}
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No results are kept."""
    monkeypatch.setattr(cached_results, "REST", 0.0)


@pytest.fixture
def run(settings, fake, running):
    """Start a service with the aliases `champion`, `other` and `third`."""

    @asynccontextmanager
    async def run(**changed):
        mine = settings.model_copy(update=changed)
        async with running(mine, recommender=fake("demo")) as (client, service):
            for alias in ("other", "third"):
                await service.state.aliases.put(alias, "demo", loaded=fake("demo"))
            yield client, service

    return run


@pytest.fixture
async def shop(run):
    async with run() as started:
        yield started


def made(weights=(1, 1), *, ident="id", name="homepage", time_ms=0, **fields):
    """An experiment with the aliases a, b, ..."""
    arms = [
        {"alias": alias, "weight": float(weight)}
        for alias, weight in zip("abcde", weights, strict=False)
    ]
    body = ExperimentBody.model_validate({"arms": arms} | fields)
    return Experiment(ident, name, body, time_ms, None)


async def put(client, name="homepage", **fields):
    response = await client.put(f"/v1/experiments/{name}", json=TWO | fields)
    assert response.status_code == 200, response.text
    return response.json()


async def arm_of(client, user, name="homepage"):
    response = await client.post(URL, json={"user": user, "k": 2, "model": name})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["experiment"] == {"name": name, "arm": answer["model"]["alias"]}
    return answer["experiment"]["arm"]


async def arms_of(client, users, name="homepage"):
    return [await arm_of(client, user, name) for user in users]


async def results(client, name="homepage"):
    """The results, once the exposures are written that are still in the queue."""
    await client._transport.app.state.service.store.state.change("written", dict.clear)
    response = await client.get(f"/v1/experiments/{name}/results")
    assert response.status_code == 200, response.text
    return response.json()


async def observe(service, name, rates, users=400, hours=3, event="click"):
    """Answers of some hours ago to users in the arms of a hash, who follow them at given rates."""
    experiment = service.state.experiments._find(name)
    window_ms = experiment.body.window_s * 1000
    past = time.time_ns() // 1_000_000 - hours * HOUR_MS
    draw = random.Random(7)
    events = []
    for n in range(users):
        user, answer = f"u{n}", f"{name}-r{n}"
        arm = experiment.arm_of(user, service.store.database.salt)
        exposure = Exposure(experiment.id, arm, window_ms)
        service.store.served.remember(Served(answer, user, "m", ("x",), past + n, exposure))
        if draw.random() < rates[arm]:
            given = {"user": user, "item": "item-1", "type": event, "recommendation_id": answer}
            events.append(given | {"timestamp": (past + n + 1) / 1000})
    return events


async def send(client, events):
    response = await client.post("/v1/events", json={"events": events})
    assert response.status_code == 200, response.text


# Arms


@pytest.mark.parametrize("user", ["shop1:é", "\udcff", *map(str, range(20))], ids=ascii)
def test_an_arm_is_that_of_a_keyed_hash(user):
    experiment = made((3, 1, 4), ident="7f")
    key = b"7f\0" + user.encode("utf-8", "surrogatepass")
    place = int(hmac.new(b"salt", key, hashlib.sha256).hexdigest()[:16], 16) / 2**64
    expected = "a" if place < 3 / 8 else "b" if place < 4 / 8 else "c"
    assert experiment.arm_of(user, b"salt") == expected


async def test_a_user_stays_in_an_arm_over_restarts_and_processes(run):
    users = [f"user-{n}" for n in range(30)]
    async with run() as (client, _):
        await put(client)
        arms = await arms_of(client, users)
        assert set(arms) == {"champion", "other"}
        assert await arms_of(client, reversed(users)) == arms[::-1]
        async with run() as (beside, _):
            assert await arms_of(beside, users) == arms
    async with run() as (client, _):
        assert await arms_of(client, users) == arms
        await client.delete("/v1/experiments/homepage")
        await put(client)  # another experiment, though it has the same name
        assert await arms_of(client, users) != arms


async def test_every_form_of_a_request_has_the_same_arm(shop):
    client, _ = shop
    await put(client)
    for user in ("ada", "bob", "eve", "zoe"):
        arm = await arm_of(client, user)
        body = {"requests": [{"user": user, "model": "homepage"}, {"user": user}]}
        first, second = (await client.post(f"{URL}/batch", json=body)).json()["results"]
        assert first["answer"]["experiment"]["arm"] == arm
        assert "experiment" not in second["answer"]


async def test_requests_without_a_user_get_the_first_arm(shop):
    client, _ = shop
    await put(client)
    for n in range(20):
        body = {"history": [f"item-{n}"], "model": "homepage"}
        answer = (await client.post(URL, json=body)).json()
        assert answer["experiment"] == {"name": "homepage", "arm": "champion"}
    assert [arm["waiting"] for arm in (await results(client))["arms"]] == [0, 0]


async def test_an_experiment_ends_with_the_first_arm(shop, monkeypatch):
    client, _ = shop
    await put(client, days=2)
    users = [f"user-{n}" for n in range(12)]
    assert "other" in await arms_of(client, users)
    before = (await results(client))["arms"]
    now = experiments.now_ms()
    monkeypatch.setattr(experiments, "now_ms", lambda: now + 2 * DAY_MS)
    assert set(await arms_of(client, users)) == {"champion"}
    assert (await client.named("experiments", "homepage"))["status"] == "ended"
    after = (await results(client))["arms"]
    assert sum(arm["exposures"] + arm["waiting"] for arm in after) == 12
    assert sum(arm["waiting"] for arm in before) == 12


async def test_an_arm_without_a_model_is_answered_by_the_first(shop):
    client, service = shop
    await put(client)
    users = [f"user-{n}" for n in range(20)]
    arms = await arms_of(client, users)
    await service.state.aliases.remove("other")  # as in a process that could not load its bundle
    assert set(await arms_of(client, users)) == {"champion"}
    waiting = {arm["alias"]: arm["waiting"] for arm in (await results(client))["arms"]}
    assert waiting == {alias: arms.count(alias) for alias in ("champion", "other")}


# The resource


async def test_an_experiment_is_put_read_listed_and_deleted(shop):
    client, _ = shop
    assert (await client.get("/v1/models")).json()["experiments"] == []
    info = await put(client, event="Purchase", window_s=7200, days=7)
    arms = [(arm["alias"], arm["share"]) for arm in info["arms"]]
    assert arms == [("champion", 0.5), ("other", 0.5)]
    assert (info["event"], info["window_s"], info["status"]) == ("purchase", 7200, "running")
    assert info["ends_ms"] - info["started_ms"] == 7 * DAY_MS
    assert await put(client, event="purchase", window_s=7200, days=7) == info  # it is a repetition
    assert (await client.named("experiments", "homepage")) == info
    second = await put(client, "about")
    listed = (await client.get("/v1/models")).json()["experiments"]
    assert listed == [second, info]
    assert (await client.delete("/v1/experiments/homepage")).status_code == 204
    path = "/v1/experiments/homepage/results"
    assert code(await client.get(path)) == (404, "unknown_experiment")
    assert code(await client.delete("/v1/experiments/homepage")) == (404, "unknown_experiment")
    body = {"user": "ada", "model": "homepage"}
    assert code(await client.post(URL, json=body)) == (404, "unknown_model")


async def test_an_experiment_is_not_changed(shop):
    client, _ = shop
    info = await put(client)
    for changed in ({"event": "cart"}, {"arms": TWO["arms"][::-1]}, {"days": 3}):
        response = await client.put("/v1/experiments/homepage", json=TWO | changed)
        assert code(response) == (409, "experiment_conflict")
    assert (await client.named("experiments", "homepage")) == info


A, B = TWO["arms"]
REFUSED = {
    "one arm": {"arms": [A]},
    "the same alias twice": {"arms": [A, A]},
    "six arms": {"arms": [{"alias": f"a{n}", "weight": 1} for n in range(6)]},
    "no weight": {"arms": [A, {"alias": "other"}]},
    "a weight of nothing": {"arms": [A, B | {"weight": 0}]},
    "a share below 1 %": {"arms": [A, B | {"weight": 0.01}]},
    "no such alias": {"arms": [A, B | {"alias": "nobody"}]},
    "a window of seconds": TWO | {"window_s": 10},
    "too many days": TWO | {"days": 91},
    "no type": TWO | {"event": "?"},
    "an unknown field": TWO | {"metric": "click"},
}


@pytest.mark.parametrize("case", REFUSED)
async def test_a_wrong_experiment_is_refused(shop, case):
    client, _ = shop
    response = await client.put("/v1/experiments/homepage", json=REFUSED[case])
    assert code(response) == (422, "invalid_request")
    assert (await client.get("/v1/models")).json()["experiments"] == []


async def test_names_of_aliases_and_experiments_are_distinct(shop, monkeypatch):
    client, _ = shop
    response = await client.put("/v1/experiments/third", json=TWO)
    assert code(response) == (409, "experiment_conflict")
    await put(client)
    response = await client.put("/v1/aliases/homepage", json={"bundle": "demo"})
    assert code(response) == (409, "alias_conflict")
    assert code(await client.delete("/v1/aliases/other")) == (409, "alias_conflict")
    assert (await client.delete("/v1/aliases/third")).status_code == 204
    monkeypatch.setattr(experiments, "MOST_EXPERIMENTS", 1)
    response = await client.put("/v1/experiments/more", json=TWO)
    assert code(response) == (409, "experiment_conflict")
    await client.delete("/v1/experiments/homepage")
    assert (await client.delete("/v1/aliases/other")).status_code == 204


async def test_what_another_version_stored_is_kept_and_not_used(shop):
    client, service = shop
    info = await put(client)
    strange = {"id": "1", "value": {"arms": "of another version"}, "time_ms": 0, "by": None}
    change = service.store.state.change
    await change("experiments", lambda stored: stored["experiments"].update(later=strange))
    await client.delete("/v1/experiments/homepage")
    assert (await client.get("/v1/models")).json()["experiments"] == []
    stored = await service.store.state.get("experiments")
    assert stored["experiments"] == {"later": strange}
    again = await put(client)
    assert again["started_ms"] >= info["started_ms"]


# Results


def at(arm, first_ms, shown, followed, user=""):
    return Exposed(user or f"{first_ms}-{arm}", arm, first_ms, shown, followed)


def test_results_are_of_users_whose_windows_are_over():
    experiment = made(window_s=60)
    users = [at("a", 10, 4, 1), at("b", 20, 2, 1), at("b", 30, 1, 1), at("a", 40, 1, 0)]
    for now, observed in ((120_019, 1), (120_020, 2), (120_030, 3), (120_039, 3), (120_040, 4)):
        found = analyse(experiment, users[::-1], now).arms
        assert [arm.observed for arm in found] == [
            sum(user.arm == alias for user in users[:observed]) for alias in "ab"
        ]
        assert sum(arm.observed + arm.waiting for arm in found) == 4
    first, second = found
    assert (first.exposures, first.followed, first.rate) == (5, 1, 1 / 8)
    assert (second.exposures, second.followed, second.rate) == (3, 2, 3 / 4)
    assert (first.verdict, first.difference) == ("first", None)
    # before: mean of a is 0, then 1/4; of b 0, then 1/2; each deviation has half of the users
    terms = [-2 * 1 / 4, -1 / 4 + 2 * 1 / 2, 1 / 2 - 1 / 4 + 2 * 1 / 2, 3 / 4 - 1 / 4 + 2 * 1 / 4]
    assert second.difference == pytest.approx(sum(terms) / 4)
    assert (second.low, second.high, second.verdict) == (-1, 1, "undecided")


def draw_users(rates, count, weights, seed=0):
    draw = random.Random(seed)
    arms = draw.choices("abc"[: len(weights)], weights, k=count)
    return [at(arm, n, 1, int(draw.random() < rates[arm])) for n, arm in enumerate(arms)]


def test_each_arm_is_compared_with_the_first_at_its_level():
    rates, weights = {"a": 0.2, "b": 0.4, "c": 0.05}, (2, 1, 1)
    users = draw_users(rates, 3_000, weights)
    found = analyse(made(weights, window_s=60), users, 10**9)
    for place, alias in ((1, "b"), (2, "c")):
        pair = [user for user in users if user.arm in ("a", alias)]
        values = np.array([float(user.followed) for user in pair])
        treated = np.array([user.arm == alias for user in pair])
        expected = compare(values, treated, 1 / 3, 0.05 / 2, [len(pair)])
        arm = found.arms[place]
        assert [arm.difference, arm.low, arm.high] == pytest.approx([e[0] for e in expected])
    assert [arm.verdict for arm in found.arms] == ["first", "better", "worse"]
    assert found.verdict.startswith("b is better than a by ")
    assert "c is worse than a by " in found.verdict
    assert found.ratio_p_value > 0.001


def test_arms_without_their_share_of_users_are_reported():
    users = draw_users({"a": 0.1, "b": 0.1}, 2_000, (6, 4))
    found = analyse(made(), users, 10**12)
    assert found.ratio_p_value < 0.001
    assert found.verdict.endswith("before you trust the differences.")
    fitting = analyse(made((6, 4)), users, 10**12)
    assert fitting.ratio_p_value > 0.001


async def test_feedback_over_http_counts_for_its_arm(shop, monkeypatch):
    client, _ = shop
    await put(client, window_s=60)
    arms = {"champion": [0, 0, 0], "other": [0, 0, 0]}
    for n in range(40):
        user = f"user-{n}"
        for again in range(1 + n % 3):
            body = {"user": user, "k": 2, "model": "homepage"}
            answer = (await client.post(URL, json=body)).json()
            tally = arms[answer["experiment"]["arm"]]
            tally[0] += again == 0
            tally[1] += 1
            if n % 4 == again:
                link = {"recommendation_id": answer["recommendation_id"], "type": "CLICK"}
                item = answer["items"][0]["item_id"]
                await send(client, [{"user": user, "item": item, **link}])
                tally[2] += 1
    waiting = (await results(client))["arms"]
    assert [arm["waiting"] for arm in waiting] == [tally[0] for tally in arms.values()]
    assert all(arm["rate"] is None for arm in waiting)
    now = experiments.now_ms()
    monkeypatch.setattr(experiments, "now_ms", lambda: now + 120_000)
    for arm in (await results(client))["arms"]:
        assert [arm["observed"], arm["exposures"], arm["followed"]] == arms[arm["alias"]]


async def test_results_are_read_page_by_page(shop, monkeypatch):
    client, service = shop
    await put(client, window_s=60)
    await send(client, await observe(service, "homepage", {"champion": 0.5, "other": 0.5}, 40))
    expected = await results(client)
    assert sum(arm["observed"] for arm in expected["arms"]) == 40
    for page in (1, 7, 20, 40):
        monkeypatch.setattr(experiments, "PAGE", page)
        assert await results(client) == expected


async def test_a_full_experiment_counts_no_more(shop, monkeypatch):
    client, service = shop
    monkeypatch.setattr(experiments, "MOST_EXPOSURES", 6)
    await put(client)
    await put(client, "about")
    arms = await arms_of(client, [f"user-{n}" for n in range(6)])
    counted = (await results(client))["arms"]
    await service.state.experiments._look()
    more = [f"user-{n}" for n in range(12)]
    assert (await arms_of(client, more))[:6] == arms  # who is assigned to both, as before
    assert (await results(client))["arms"] == counted
    await arms_of(client, more[:3], "about")  # another one still does
    assert sum(arm["waiting"] for arm in (await results(client, "about"))["arms"]) == 3


async def test_exposures_are_counted_again_after_a_count_that_failed(run, monkeypatch, until):
    failures = StoreError("away"), DeadlineExceededError(), QueueFullError()
    count = AsyncMock(side_effect=itertools.chain(failures, itertools.repeat({})))
    monkeypatch.setattr(ServedTable, "count_exposures", count)
    monkeypatch.setattr(experiments, "LOOK_S", 0.001)
    async with run():
        await until(lambda: count.await_count > len(failures))


# Who may see what


async def test_exposures_go_with_their_user_and_their_experiment(shop, monkeypatch):
    client, service = shop
    await put(client)
    await put(client, "about")
    for name in ("homepage", "about"):
        await arms_of(client, ["ada", "bob"], name)
    assert (await client.delete("/v1/users/ada")).status_code == 204
    for name in ("homepage", "about"):
        assert sum(arm["waiting"] for arm in (await results(client, name))["arms"]) == 1
    await client.delete("/v1/experiments/about")
    await service.state.experiments._look()
    rows = service.store.database.read(sa.text("SELECT user_id FROM exposures"))
    assert [tuple(row) for row in rows] == [("bob",)]
    now = experiments.now_ms() + 180 * DAY_MS + 1
    monkeypatch.setattr(experiments, "now_ms", lambda: now)
    await service.state.experiments._look()
    assert await service.store.served.count_exposures() == {}
