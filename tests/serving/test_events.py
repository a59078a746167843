"""Events, histories and erasure over HTTP."""

import asyncio
import gc
import json
import time
from unicodedata import normalize

import pytest

from recsys.serving import service as service_module
from recsys.serving.errors import KINDS
from recsys.serving.schemas.events import MAX_EVENTS
from recsys.serving.schemas.recommendations import RecommendationsRequest
from recsys.serving.stores.records import Event

URL = "/v1/events"
NONE = {"accepted": 0, "duplicates": 0, "ignored": 0, "unlinked": 0}


def is_problem(response, code):
    body = response.json()
    assert (response.status_code, body["code"]) == (KINDS[code].status, code), response.text
    assert response.headers["content-type"] == "application/problem+json"
    return body


async def post(client, *events):
    response = await client.post(URL, json={"events": list(events)})
    assert response.status_code == 200, response.text
    return response.json()


async def items(client, user):
    """The history, oldest first."""
    response = await client.get(f"/v1/users/{user}/history")
    return [event["item"] for event in reversed(response.json().get("events", []))]


async def recommended(client, user, **options):
    response = await client.post("/v1/recommendations", json={"user": user, **options})
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


async def test_an_event_is_in_the_very_next_recommendation(client, recommender):
    history = ["item-1", "item-2"]
    assert await recommended(client, "ada") == recommender.expected(history)
    for i in range(3, 20):
        item = f"item-{i}"
        assert await post(client, {"event_id": f"e{i}", "user": "ada", "item": item}) == {
            **NONE, "accepted": 1,
        }  # fmt: skip
        history.append(item)
        assert await recommended(client, "ada") == recommender.expected(history)


async def test_events_with_an_id_count_once_and_others_each_time(client):
    named = {"event_id": "1", "user": "eve", "item": "item-1"}
    assert await post(client, named, named) == {**NONE, "accepted": 1, "duplicates": 1}
    await asyncio.sleep(0.01)  # the default time is another one, the event is not
    assert await post(client, named) == {**NONE, "duplicates": 1}
    nameless = {"user": "eve", "item": "item-2"}
    assert await post(client, nameless, nameless) == {**NONE, "accepted": 2}
    assert await items(client, "eve") == ["item-1", "item-2", "item-2"]
    assert await post(client) == NONE


async def test_a_known_id_with_other_content_stores_nothing(client):
    await post(client, {"event_id": "1", "user": "eve", "item": "item-1"})
    batch = [
        {"event_id": "2", "user": "eve", "item": "item-2"},
        {"event_id": "1", "user": "eve", "item": "item-3"},
    ]
    body = is_problem(await client.post(URL, json={"events": batch}), "event_conflict")
    assert [field["pointer"] for field in body["errors"]] == ["/events/1/event_id"]
    assert await items(client, "eve") == ["item-1"]


async def test_bad_bodies_are_reported_and_not_stored(client):
    good = {"user": "eve", "item": "a"}
    for event, text in (
        ("a", "/events/1"),
        ({"user": "eve"}, "/events/1/item: Field required"),
        ({"user": "eve", "item": "b", "color": 1}, "unknown field"),
    ):
        response = await client.post(URL, json={"events": [good, event]})
        assert text in is_problem(response, "invalid_request")["detail"]
    for content in ("[]", "{}", '{"events": {}}', ""):
        headers = {"content-type": "application/json"}
        is_problem(await client.post(URL, content=content, headers=headers), "invalid_request")
    is_problem(await client.get("/v1/users/eve/history"), "unknown_user")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("user", "", "at least 1"),
        ("item", "a\0b", "control characters"),
        ("type", "Buy now!", "want a type: up to 32 letters"),
        ("timestamp", "2026-01-01T00:00:00", "no time zone"),
        ("timestamp", "yesterday", "neither a number nor a time"),
        ("timestamp", 1_700_000_000_000, "1700000000000 is after 2100; send seconds"),
        ("timestamp", -1, "-1 is before 1970"),
        ("timestamp", True, "valid number"),
        ("value", -1, "-1 of a purchase; send what was taken back as a `return`"),
        ("value", 0, "no event where nothing was bought"),
    ],
)
async def test_a_field_out_of_bounds_is_named(client, field, value, text):
    event = {"user": "eve", "item": "a", "type": "Kauf", field: value}
    body = is_problem(
        await client.post(URL, json={"events": [{"user": "u", "item": "i"}, event]}),
        "invalid_request",
    )
    assert body["errors"][0]["pointer"] == f"/events/1/{field}"
    assert text in body["detail"]


async def test_a_refused_batch_leaves_memory_at_once(client):
    """Without waiting for a garbage collection, which comes after a million objects."""
    event = {"event_id": "1", "user": "bob", "item": "item-1"}
    await post(client, event)
    gc.collect()
    gc.disable()
    try:
        for number in range(5):
            other = [{**event, "item": f"item-{number + 2}"}] * 100
            is_problem(await client.post(URL, json={"events": other}), "event_conflict")
        left = sum(type(one) is Event for one in gc.get_objects())
    finally:
        gc.enable()
    assert left <= 100  # the writing thread may hold the last batch


async def test_too_many_events_are_refused(client):
    events = [{"user": "u", "item": "i"}] * (MAX_EVENTS + 1)
    is_problem(await client.post(URL, json={"events": events}), "invalid_request")
    assert (await post(client, *events[1:]))["accepted"] == MAX_EVENTS


async def test_a_time_in_the_future_counts_as_now(client):
    far = {"event_id": "1", "user": "eve", "item": "far", "timestamp": "2090-01-01T00:00:00Z"}
    await post(client, far)
    await asyncio.sleep(0.01)
    await post(client, {"user": "eve", "item": "later"})
    assert await items(client, "eve") == ["far", "later"]
    assert await post(client, far) == {**NONE, "duplicates": 1}
    history = (await client.get("/v1/users/eve/history")).json()["events"]
    assert abs(history[1]["timestamp"] - time.time()) < 60
    assert history[1]["type"] == "view"  # as it has none


async def test_times_may_be_seconds_or_text_and_milliseconds_order(client):
    await post(
        client,
        {"user": "eve", "item": "c", "timestamp": 1_700_000_000.5},
        {"user": "eve", "item": "b", "timestamp": "2023-11-14T22:13:20.250Z"},
        {"user": "eve", "item": "a", "timestamp": "2023-11-14T23:13:20+01:00"},
    )
    assert await items(client, "eve") == ["a", "b", "c"]


async def test_feedback_is_linked_to_the_answer_it_is_about(client):
    answer = (await client.post("/v1/recommendations", json={"user": "ada"})).json()
    click = {
        "user": "ada", "item": answer["items"][0]["item_id"], "type": "click",
        "recommendation_id": answer["recommendation_id"],
    }  # fmt: skip
    assert await post(client, click) == {**NONE, "accepted": 1}
    stray = {**click, "recommendation_id": "of another shop"}
    assert await post(client, stray) == {**NONE, "accepted": 1, "unlinked": 1}
    events = (await client.get("/v1/users/ada/history?limit=2")).json()["events"]
    assert [event["linked"] for event in events] == [False, True]


async def test_impressions_are_not_part_of_a_history(client, recommender):
    before = await recommended(client, "ada")
    await post(client, {"user": "ada", "item": "item-9", "type": "impression"})
    await post(client, {"user": "ada", "item": "item-8", "type": "dismiss"})
    assert await recommended(client, "ada") == before
    assert await items(client, "ada") == ["item-1", "item-2", "item-9", "item-8"]


async def test_a_history_is_read_page_by_page(client):
    await post(
        client, *({"user": "eve", "item": f"item-{i}", "timestamp": i // 2} for i in range(5))
    )
    found, query = [], "limit=2"
    while True:
        page = (await client.get(f"/v1/users/eve/history?{query}")).json()
        found += [event["item"] for event in page["events"]]
        if page["next"] is None:
            break
        query = f"limit=2&before={page['next']}"
    assert found == [f"item-{i}" for i in (4, 3, 2, 1, 0)]
    first = (await client.get("/v1/users/ada/history?limit=1")).json()
    assert first["events"] == [
        {
            "event_id": None, "item": "item-2", "title": "Thing no. 2", "type": "interaction",
            "timestamp": 20.0, "value": None, "recommendation_id": None, "linked": None,
        }
    ]  # fmt: skip
    is_problem(await client.get("/v1/users/ada/history?before=x"), "invalid_request")
    is_problem(await client.get("/v1/users/ada/history?limit=0"), "invalid_request")
    is_problem(await client.get("/v1/users/nobody/history"), "unknown_user")


async def test_an_erased_user_is_unknown_and_erasing_twice_is_fine(client, service):
    event = {"event_id": "1", "user": "ada", "item": "item-5", "timestamp": 50}
    await post(client, event)
    for _ in range(2):
        response = await client.delete("/v1/users/ada")
        assert (response.status_code, response.content) == (204, b"")
    is_problem(await client.get("/v1/users/ada/history"), "unknown_user")
    assert {event.user for event in service.store.history.export()} == {"bob"}
    assert await post(client, event) == {**NONE, "ignored": 1}
    assert await post(client, {"user": "ada", "item": "item-6"}) == {**NONE, "accepted": 1}
    assert await items(client, "ada") == ["item-6"]


async def test_the_types_of_events_reach_the_recommender(client, monkeypatch):
    asked = []
    plain = RecommendationsRequest.request

    def spy(body, history, recommender):
        asked.append((list(history.items), list(history.types)))
        return plain(body, history, recommender)

    monkeypatch.setattr(RecommendationsRequest, "request", spy)
    await post(
        client,
        {"user": "newcomer", "item": "item-1", "type": "view"},
        {"user": "newcomer", "item": "item-2", "type": "purchase"},
    )
    await recommended(client, "newcomer")
    body = {"history": ["item-3", "item-4"], "history_types": ["Add to cart", None]}
    assert (await client.post("/v1/recommendations", json=body)).status_code == 200
    assert asked == [
        (["item-1", "item-2"], ["view", "purchase"]),
        (["item-3", "item-4"], ["Add to cart", None]),
    ]
    wrong = {"history": ["item-3"], "history_types": ["cart", "view"]}
    problem = is_problem(await client.post("/v1/recommendations", json=wrong), "invalid_request")
    assert "one type for each item" in json.dumps(problem)
    is_problem(
        await client.post("/v1/recommendations", json={"user": "ada", "history_types": ["view"]}),
        "invalid_request",
    )


async def test_a_purchase_long_ago_is_not_recommended_again(client, monkeypatch):
    monkeypatch.setattr(service_module, "MAX_HISTORY", 3)
    first = (await client.post("/v1/recommendations", json={"history": ["item-7"]})).json()
    best, second = (item["item_id"] for item in first["items"][:2])
    ago = [("order", best), ("view", second), ("order", "item-8")]
    events = [*ago, ("view", "item-9"), ("view", "item-9"), ("view", "item-7")]
    await post(client, *({"user": "eva", "item": item, "type": name} for name, item in events))

    async def ask(**options):
        answer = await client.post("/v1/recommendations", json={"user": "eva", **options})
        return {item["item_id"] for item in answer.json()["items"]}

    everything = await ask(k=200, exclude_seen=False)
    assert {best, second, "item-8"} <= everything
    listed = await ask(k=200)
    assert second in listed
    assert not listed & {best, "item-8"}


@pytest.mark.parametrize("name", ["dislike", "dismiss", "thumbs_down", "refund", "Retoure"])
async def test_negative_events_of_a_request_are_no_history(client, monkeypatch, name):
    asked = []
    plain = RecommendationsRequest.request

    def spy(body, history, recommender):
        asked.append((list(history.items), list(history.types), list(history.disliked)))
        return plain(body, history, recommender)

    monkeypatch.setattr(RecommendationsRequest, "request", spy)
    body = {"history": ["item-7", "item-3", "item-4"], "history_types": [name, "view", None]}
    found = (await client.post("/v1/recommendations", json=body)).json()
    assert found["history_items"] == 2
    body = {"history": ["item-7"], "history_types": [name]}
    empty = (await client.post("/v1/recommendations", json=body)).json()
    assert empty["note"]["code"] == "empty_history"
    hidden = ["item-7"]
    assert asked == [(["item-3", "item-4"], ["view", None], hidden), ([], [], hidden)]


@pytest.mark.parametrize("name", ["return", "Refund", "Retoure"])
async def test_what_a_user_returned_last_is_not_recommended_to_them(client, name):
    """The purchase of the item may be in an older export, so that the store does not know it."""

    async def ask() -> list[str]:
        body = {"user": "ida", "k": 5, "exclude_seen": False}
        answer = await client.post("/v1/recommendations", json=body)
        return [item["item_id"] for item in answer.json()["items"]]

    async def send(item: str, kind: str) -> None:
        body = {"events": [{"user": "ida", "item": item, "type": kind}]}
        assert (await client.post("/v1/events", json=body)).status_code < 300

    await send("item-7", "view")
    first, *rest = await ask()
    await send(first, f"partial {name}")
    assert await ask() == [first, *rest], "the others are kept"
    await send(first, name)
    assert (await ask())[:4] == rest, "and it is no dislike of what is like it"
    page = (await client.get("/v1/users/ida/history")).json()["events"]
    assert [event["type"] for event in page] == [name.lower(), f"partial {name}".lower(), "view"]
    await send(first, "purchase")
    page = (await client.post("/v1/recommendations", json={"user": "ida", "k": 5})).json()
    assert page["history_items"] == 2, "bought again, so it counts again"


async def test_both_spellings_of_an_id_are_one_in_paths_too(client):
    """An erasure reaches the events of its user, and what is as long as may be can be removed."""
    for spelling in ("cafe\u0301", "\ufb2c" * 85):  # the last is three times as long in NFC
        item = {"item_id": spelling, "like": "item-1"}
        assert (await client.post("/v1/items", json={"items": [item]})).status_code == 200
        await client.post("/v1/events", json={"events": [{"user": spelling, "item": spelling}]})
        for path in (f"/v1/users/{spelling}/history", f"/v1/items/{spelling}"):
            assert (await client.get(path)).status_code == 200
        for path in (f"/v1/users/{spelling}", f"/v1/items/{spelling}"):
            assert (await client.delete(path)).status_code == 204
        for path in (f"/v1/users/{normalize('NFC', spelling)}/history", f"/v1/items/{spelling}"):
            assert (await client.get(path)).status_code == 404
    long = {"user": "u", "item": "\ufb2c" * 86}
    assert (await client.post("/v1/events", json={"events": [long]})).status_code == 422


async def test_both_spellings_of_an_id_are_one_in_requests(client):
    """In filters, exclusions, pins and given items, sent in the one or the other."""
    item, new = {"like": "item-1"}, "cafe\u0301-7"
    added = await client.post("/v1/items", json={"items": [{"item_id": new, **item}]})
    assert added.status_code == 200
    name = "caf\u00e9-7"

    async def listed(**more):
        body = {"history": ["item-2"], "k": 5, **more}
        answer = await client.post("/v1/recommendations", json=body)
        assert answer.status_code == 200, answer.text
        return [item["item_id"] for item in answer.json()["items"]]

    for spelling in (new, name):
        for test in ({"match": spelling}, {"any": [spelling]}, {"any": [new, spelling, name]}):
            clause = {"key": "item_id", **test}
            only = {"must": [clause]}
            assert await listed(filter=only) == [name]
            assert await listed(filter=only, exclude_items=[spelling]) == []
            assert await listed(filter={"must": [clause], "must_not": [clause]}) == []
            rule = {"filter": only, "pin": [spelling]}  # the pin is in the catalog
            assert (await client.put("/v1/rules/one", json=rule)).status_code == 200
            assert await listed(rules=["one"]) == [name]
            listing = await client.get(
                "/v1/lists/latest", params={"filter": json.dumps(only), "k": 5}
            )
            assert [one["item_id"] for one in listing.json()["items"]] == [name]
        given = {"history": [spelling], "items": [spelling]}
        ranked = (await client.post("/v1/rank", json=given)).json()
        assert (ranked["items"][0]["item_id"], ranked["history_items"]) == (name, 1)


async def test_a_stored_type_can_be_sent_again(client):
    """A letter may have more characters in lower case."""
    event = {"user": "ada", "item": "item-1", "type": "\u0130" * 20}
    assert (await client.post("/v1/events", json={"events": [event]})).status_code == 422
    event["type"] = "\u0130" * 16
    for _ in range(2):
        assert (await client.post("/v1/events", json={"events": [event]})).status_code == 200
        history = await client.get("/v1/users/ada/history")
        event["type"] = history.json()["events"][0]["type"]
