"""Lists for a storefront over HTTP, and recommendations by GET."""

import gc
import json
import time
import weakref
from dataclasses import replace
from urllib.parse import urlencode

import pytest

from recsys.interactions import Behaviour
from recsys.retrieval.event_types import EventTypes
from recsys.serving import cached_results, trending

LISTS = {
    "trending": {},
    "latest": {},
    "together": {"item": "item-20"},
}  # with the query that `fill` has an answer to
EACH = pytest.mark.parametrize("name", LISTS)
HOUR = 3600


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """The store is read for each list of trending items."""
    monkeypatch.setattr(trending, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(cached_results, "REST", 0.0)


async def ask(client, name, **query):
    response = await get(client, name, **query)
    assert response.status_code == 200, response.text
    return response.json()


async def get(client, name, headers=None, **query):
    more = {} if headers is None else {"headers": headers}
    return await client.get(f"/v1/lists/{name}", params=LISTS[name] | query, **more)


def ids(answer):
    assert [item["rank"] for item in answer["items"]] == [*range(1, len(answer["items"]) + 1)]
    return [item["item_id"] for item in answer["items"]]


async def send(client, *events):
    """Send events: (user, item, type, hours ago)."""
    now = time.time()
    body = [
        {"user": user, "item": item, "type": kind, "timestamp": now - HOUR * ago}
        for user, item, kind, ago in events
    ]
    response = await client.post("/v1/events", json={"events": body})
    assert response.json()["accepted"] == len(events), response.text


async def new(client, item_id, **attributes):
    body = {"title": item_id, "like": "item-1", "attributes": attributes}
    assert (await client.put_item(item_id, body)).status_code == 200


async def fill(client):
    """Events and items from which every list has items, item-21 to item-23 among them."""
    await send(
        client, *(("zoe", f"item-{n}", "view", 30 - n) for n in (20, 21, 22, 23)),
        *(("max", f"item-{n}", "purchase", 1) for n in (21, 22, 23)),
    )  # fmt: skip
    await new(client, "first")
    await new(client, "second")


# Trending


async def test_trending_items_are_by_decayed_weights(client):
    await send(
        client,
        ("ada", "item-1", "view", 0), ("bob", "item-1", "view", 12), ("eve", "item-1", "view", 24),
        ("ada", "item-2", "purchase", 6), ("ada", "item-2", "view", 0),
        ("ada", "item-3", "cart", 24 * 8), ("ada", "item-4", "impression", 0),
        ("ada", "gone", "purchase", 0), ("bob", "item-5", "remove_from_cart", 0),
        ("eve", "item-6", "mystery", 0),
    )  # fmt: skip
    found = await ask(client, "trending")
    scores = {item["item_id"]: item["score"] for item in found["items"]}
    expected = {
        "item-2": 1.0 * 2 ** (-6 / 24),
        "item-1": 0.2 * (1 + 2 ** (-12 / 24) + 2 ** (-24 / 24)),
        "item-6": 0.2,
    }
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected, rel=1e-3)
    assert found["since"] == pytest.approx(time.time() - 7 * 24 * HOUR, abs=60)
    assert ids(await ask(client, "trending", k=1)) == ["item-2"]


async def test_events_of_an_erased_user_do_not_count(client):
    await send(client, ("eve", "item-1", "view", 0), ("bob", "item-2", "view", 1))
    assert ids(await ask(client, "trending")) == ["item-1", "item-2"]
    await send(client, ("eve", "item-3", "cart", 0))
    assert (await client.delete("/v1/users/eve")).status_code == 204
    assert ids(await ask(client, "trending")) == ["item-2"]


# Latest


async def test_the_latest_items_are_by_date(settings, random_bundle, tmp_path, running):
    now = int(time.time())
    dates = [None, now - 500, now + 1000, now - 100, now - 500, None, now - 700]
    random_bundle(settings.bundle, len(dates), available_from=dates)
    async with running(settings.model_copy(update={"histories": None})) as (client, _):
        found = await ask(client, "latest")
        assert ids(found) == ["B0003", "B0004", "B0001", "B0006"]
        assert [item["time"] for item in found["items"]] == [
            now - 100,
            now - 500,
            now - 500,
            now - 700,
        ]
        for item_id, more in (("N1", {}), ("N2", {"available_from": now - 200}), ("N3", {})):
            body = {"like": "B0000", "attributes": more}
            assert (await client.put_item(item_id, body)).status_code == 200
        found = await ask(client, "latest", k=4)
        assert ids(found) == ["N3", "N1", "B0003", "N2"]
        assert [item["time"] for item in found["items"]] == [None, None, now - 100, now - 200]


async def test_without_dates_only_added_items_are_new(client):
    found = await ask(client, "latest")
    assert (found["items"], found["note"]["code"]) == ([], "no_dates")
    await new(client, "first")
    await new(client, "second")
    assert ids(await ask(client, "latest")) == ["second", "first"]


# Together


async def test_a_basket_has_companions_that_are_not_in_it(client):
    found = await ask(client, "together", item=["item-3", "item-4", "item-9", "nothing"])
    shares = {item["item_id"]: item["score"] for item in found["items"]}
    # item-n leads to item-n+1 by 1 and to item-n+2 by 0.5
    expected = {"item-5": 1.5, "item-10": 1.0, "item-6": 0.5, "item-11": 0.5}
    assert shares == pytest.approx({item: value / 3.5 for item, value in expected.items()})
    because = {item["item_id"]: item["because"] for item in found["items"]}
    assert because == {
        "item-5": "item-4", "item-10": "item-9", "item-6": "item-4", "item-11": "item-9"
    }  # fmt: skip
    assert found["unknown_items"] == ["nothing"]


async def test_types_of_the_data_set_have_its_meaning(client, recommender):
    of = [("stage1", "context", 0.2), ("stage2", "target", 1.0)]
    behaviours = tuple(Behaviour(*one) for one in of)
    chain = recommender.retrieval
    types = EventTypes(behaviours, chain.item_item, chain.counts)
    recommender.retrieval = replace(chain, types=types)
    await send(client, ("zoe", "item-50", "stage1", 1), ("zoe", "item-60", "stage2", 2))
    assert ids(await ask(client, "trending")) == ["item-60", "item-50"]


# All lists


@EACH
async def test_what_is_hidden_is_never_listed(client, name):
    await fill(client)
    before = ids(await ask(client, name))
    assert len(before) >= 2
    first, second = before[:2]
    patch = {"attributes": {"available": False}}
    assert (await client.patch(f"/v1/items/{first}", json=patch)).status_code == 200
    assert first not in ids(await ask(client, name))
    assert (await client.delete(f"/v1/items/{second}")).status_code == 204
    found = await ask(client, name)
    assert not {first, second} & set(ids(found))
    nothing = json.dumps({"must": [{"key": "item_id", "match": "nothing"}]})
    assert (await ask(client, name, filter=nothing))["items"] == []


@EACH
async def test_filters_and_standing_rules_hold(client, name):
    await fill(client)
    odd = {"must": [{"key": "categories", "match": "odd"}]}
    if name == "latest":
        await new(client, "third", categories=["odd"])
    before = ids(await ask(client, name))
    wanted = ids(await ask(client, name, filter=json.dumps(odd)))
    assert 0 < len(wanted) < len(before)
    assert wanted == [item for item in before if item in wanted]
    rule = {
        "filter": odd, "pin": ["item-77"], "boosts": [{"filter": odd, "weight": 1}],
        "max_per": {"categories": 1},
    }  # fmt: skip
    assert (await client.put("/v1/rules/odd", json=rule)).status_code == 200
    standing = {"rules": ["odd"]}
    assert (await client.put("/v1/aliases/champion", json=standing)).status_code == 200
    found = await ask(client, name)
    assert (ids(found), found["rules"]) == (wanted[:1], ["odd"])


LONG = "x" * 257
OF_ALL = {
    "k=0": "/k", "k=201": "/k", "nothing=1": "/nothing", "filter=x": "/filter",
    "filter={": "/filter", "filter=[]": "/filter", "filter={}" + "+" * 3999: "/filter",
    "include=trace": "/include/0", "model=A": "/model",
}  # fmt: skip
OF_ONE = {
    "trending": {"weight=view:1": "/weight"},
    "latest": {"user=a": "/user"},
    "together": {
        "": "/item", "item=": "/item/0", f"item={LONG}": "/item/0", "item=a%00": "/item/0",
        "&".join(["item=a"] * 51): "/item",
    },
}  # fmt: skip


@EACH
async def test_every_parameter_is_bounded(client, name):
    both = {f"{urlencode(LISTS[name])}&{query}": pointer for query, pointer in OF_ALL.items()}
    for query, pointer in (both | OF_ONE[name]).items():
        response = await client.get(f"/v1/lists/{name}?{query}")
        assert response.status_code == 422, (query, response.text)
        assert response.headers["cache-control"] == "no-store"
        body = response.json()
        assert (body["code"], body["errors"][0]["location"]) == ("invalid_request", "query")
        assert body["errors"][0]["pointer"] == pointer, query


@EACH
async def test_lists_can_be_kept(client, name):
    await fill(client)
    response = await get(client, name)
    assert response.headers["cache-control"] == "public, max-age=60"
    assert response.headers["vary"] == "Authorization"
    assert "etag" not in response.headers


# Caching


async def test_no_page_or_list_keeps_an_old_catalog_in_memory(client, recommender):
    for path in ("/v1/items", "/v1/lists/trending", "/v1/lists/latest"):
        assert (await client.get(path)).status_code == 200
    before = weakref.ref(recommender.epoch)
    assert (await client.put_item("item-1", {"title": "Changed"})).status_code == 200
    gc.collect()
    assert before() is None
