"""`GET /v1/today`: its figures against plain Python over the same answers and events."""

import math
import random
import time
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from recsys.serving import cached_results, daily_figures, event_columns
from recsys.serving.daily_figures import interval
from recsys.serving.stores import served as stores
from recsys.serving.stores.records import Served

HOUR_MS = 3_600_000
ITEMS = 300
SEEN_ONLY = ("impression", "thumbs_down", "return")  # types that are no sign of interest


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No figures are kept, and pages are small."""
    monkeypatch.setattr(daily_figures, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(cached_results, "REST", 0.0)
    monkeypatch.setattr(event_columns, "PAGE", 7)


def world(seed, now, answers=60, events=90):
    """Answers of the last two days, and events, some of them on answers."""
    draw = random.Random(seed)
    given = []
    for n in range(answers):
        user = draw.choice([None, "ada", "bob", "cyd", "dan"])
        items = tuple(f"item-{i}" for i in draw.sample(range(30), 4))
        time_ms = now - draw.randrange(48 * HOUR_MS)
        given.append(Served(f"r{n}", user, "m", items, time_ms))
    sent = []
    for n in range(events):
        answer = draw.choice([None, *given])
        item = f"item-{draw.randrange(40)}"
        user, time_ms = draw.choice(["ada", "bob", "eve"]), now - draw.randrange(40 * HOUR_MS)
        if answer is not None:
            user = answer.user or user
            user = draw.choice([user, user, user, "eve"])  # others cannot follow an answer
            item = draw.choice([item, *answer.items])
            time_ms = draw.choice([time_ms, min(now, answer.time_ms + 60_000)])
        sent.append(
            {
                "event_id": f"e{n}",
                "user": user,
                "item": item,
                "type": draw.choice(["click", "click", "purchase", "return", *SEEN_ONLY[:2]]),
                "timestamp": time_ms / 1000,
                **({} if answer is None else {"recommendation_id": answer.recommendation_id}),
            }
        )
    return sorted(given, key=lambda one: one.time_ms), sent


async def tell(client, given, sent):
    """Store answers, then events."""
    store = client._transport.app.state.service.store
    for one in given:
        store.served.remember(one)
    await store.state.change("written", dict.clear)
    if sent:
        response = await client.post("/v1/events", json={"events": sent})
        assert response.status_code == 200, response.text


async def ask(client, **query):
    response = await client.get("/v1/today", params=query)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("seed", range(4))
async def test_figures_are_those_of_plain_python(client, seed):
    now = time.time_ns() // 1_000_000
    given, sent = world(seed, now)
    await tell(client, given, sent)
    found = await ask(client)
    since = found["since_ms"]
    assert found["until_ms"] - since == 24 * HOUR_MS

    given = [one for one in given if one.time_ms >= since]
    sent = [one for one in sent if round(one["timestamp"] * 1000) >= since]
    back = [event for event in sent if event["type"] == "return"]

    def is_kept(event):
        return event["type"] in SEEN_ONLY or not any(
            (one["user"], one["item"]) == (event["user"], event["item"])
            and one["timestamp"] >= event["timestamp"]
            for one in back
        )

    followed, chosen = {}, {}
    for one in given:
        for event in filter(is_kept, sent):
            late = round(event["timestamp"] * 1000) >= one.time_ms - HOUR_MS
            theirs = one.user is None or event["user"] == one.user
            if event.get("recommendation_id") == one.recommendation_id and late and theirs:
                followed.setdefault(event["type"], set()).add(one.recommendation_id)
                if event["type"] not in SEEN_ONLY and event["item"] in one.items:
                    chosen.setdefault(event["item"], set()).add(one.recommendation_id)
    shown = {}
    for one in given:
        for item in one.items:
            shown[item] = shown.get(item, 0) + 1
    assert found["answers"] == len(given)
    assert found["people"] == len({one.user for one in given} - {None})
    assert found["answers_without_user"] == sum(one.user is None for one in given)
    assert found["events"] == len(sent)
    assert [row["type"] for row in found["rates"][:2]] == ["click", "purchase"]
    for row in found["rates"]:
        assert row["followed"] == len(followed.get(row["type"], ()))
        assert row["rate"] == pytest.approx(row["followed"] / len(given))
        assert row["low"] <= row["rate"] <= row["high"]
    assert found["coverage"] == {
        "items": ITEMS,
        "shown": len(shown),
        "never_shown": ITEMS - len(shown),
        "never_followed": len(shown.keys() - chosen.keys()),
    }
    for row in (row for part in ("most_shown", "never_followed") for row in found[part]):
        assert row["shown"] == shown[row["item_id"]]
        assert row["followed"] == len(chosen.get(row["item_id"], ()))
    order = [row["shown"] for row in found["never_followed"]]
    assert order == sorted(order, reverse=True)
    ignored = shown.keys() - chosen.keys()
    assert {row["item_id"] for row in found["never_followed"]} <= ignored
    assert order == sorted((shown[item] for item in ignored), reverse=True)[: len(order)]

    pairs = {(e["user"], e["item"]) for e in filter(is_kept, sent) if e["type"] not in SEEN_ONLY}
    users = Counter(item for _, item in pairs)
    wanted = [row for row in found["never_shown"] if row["people"]]
    assert {row["item_id"] for row in wanted} == {item for item in users if item not in shown}
    assert all(row["shown"] == 0 for row in found["never_shown"])


async def test_what_the_store_forgot_is_not_complete(client, monkeypatch):
    now = time.time_ns() // 1_000_000
    monkeypatch.setattr(stores, "SERVED_KEPT", 20)
    monkeypatch.setattr(event_columns, "DEPTH", 28)
    given, sent = world(0, now)
    recent = [one for one in given if one.time_ms > now - 12 * HOUR_MS][:3]
    fresh = [event | {"timestamp": now / 1000} for event in sent]
    await tell(client, recent, [])
    assert (await ask(client))["answers_complete"]
    await tell(client, given * 2, fresh)  # an answer is remembered once
    found = await ask(client)
    assert found["answers"] <= 20
    assert not found["answers_complete"]
    assert found["events"] == 28
    assert not found["events_complete"]


async def test_hidden_items_leave_the_coverage(client):
    now = time.time_ns() // 1_000_000
    await tell(client, [Served("r", "ada", "m", ("item-1", "item-2"), now)], [])
    hidden = await client.patch("/v1/items/item-1", json={"attributes": {"available": False}})
    assert hidden.status_code == 200
    found = await ask(client)
    assert found["coverage"]["items"] == ITEMS - 1
    assert found["coverage"]["shown"] == 1
    assert [row["item_id"] for row in found["never_followed"]] == ["item-2"]


async def test_figures_are_kept_for_a_while(client, service):
    service.state.today.cached.kept_s = 1000.0
    first = await ask(client)
    await tell(client, [Served("r", "ada", "m", ("item-1",), first["until_ms"])], [])
    assert await ask(client) == first
    assert (await ask(client, days=2))["answers"] == 1


def test_the_interval_is_that_of_the_formula():
    followed, answers = [1, 0, 4, 0, 2], [3, 1, 5, 2, 6]
    n, users = sum(answers), len(answers)
    p = sum(followed) / n
    spread = sum((x - p * m) ** 2 for x, m in zip(followed, answers, strict=True))
    variance = spread * users / (users - 1) / n**2
    m = min(n, p * (1 - p) / variance)
    t = stats.t.ppf(0.975, users - 1)
    half = t * math.sqrt(p * (1 - p) / m + t * t / (4 * m * m)) / (1 + t * t / m)
    middle = (p + t * t / (2 * m)) / (1 + t * t / m)
    found = interval(np.array(followed, float), np.array(answers, float))
    assert found == pytest.approx((p, max(0, middle - half), min(1, middle + half)))


def test_one_user_gives_no_interval_and_none_no_rate():
    assert interval(np.array([]), np.array([])) == (None, None, None)
    assert interval(np.array([1.0]), np.array([4.0])) == (0.25, None, None)
    rate, low, high = interval(np.zeros(10), np.full(10, 50.0))
    assert (rate, low) == (0.0, 0.0)
    assert high is not None
    assert 0.2 < high < 0.4  # as ten answers, not as 500


def test_the_interval_covers_the_rate_of_dependent_answers():
    draw = np.random.default_rng(0)
    hits, trials, users, rate = 0, 600, 300, 0.08
    for _ in range(trials):
        likes = draw.beta(rate * 4, (1 - rate) * 4, users)  # of each user
        answers = 1 + draw.poisson(3, users)
        followed = draw.binomial(answers, likes)
        _, low, high = interval(followed.astype(float), answers.astype(float))
        hits += low <= rate <= high
    assert hits / trials > 0.93
