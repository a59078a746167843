"""Items over HTTP: browsed, put, taken away, compared, ranked, and kept over a restart."""

import threading
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pytest
from shared_changes_suite import SharedChangesSuite
from toy_bundle import code

from recsys.catalog import Catalog
from recsys.errors import RequestError
from recsys.live import Epochs
from recsys.serving import catalog_changes, lists, service
from recsys.serving.schemas.items import DescribedItem
from recsys.serving.stores.records import StoreError
from recsys.vocabulary import Vocabulary

URL = "/v1/recommendations"
LAMP = {"title": "Lamp", "attributes": {"price": 9.5, "categories": ["light"]}, "like": "item-7"}


def ids(response):
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


async def test_the_catalog_is_browsed_by_prefix_and_page(client):
    page = (await client.get("/v1/items?limit=2")).json()
    assert [item["item_id"] for item in page["items"]] == ["item-0", "item-1"]
    assert (page["total"], page["prefix"]) == (300, [])
    assert [child["items"] for child in page["children"]] == [81, 81, 81, 57]
    page = (await client.get(f"/v1/items?limit=2&cursor={page['next']}")).json()
    assert [item["item_id"] for item in page["items"]] == ["item-2", "item-3"]
    page = (await client.get("/v1/items?prefix=3.6")).json()
    assert [item["semantic_id"] for item in page["items"]] == [[3, 6, 0], [3, 6, 1], [3, 6, 2]]
    assert (page["next"], page["children"]) == (None, [{"code": c, "items": 1} for c in range(3)])
    assert (await client.get("/v1/items?prefix=3,6,1")).json()["children"] == []
    assert (await client.get("/v1/items?prefix=9")).json()["total"] == 0


@pytest.mark.parametrize("q", ["", "item"])
async def test_pages_join_while_items_come_and_go(client, q):
    shown, cursor = [], ""
    for step in range(100):
        found = await client.get("/v1/items", params={"limit": 7, "cursor": cursor, "q": q})
        page = found.json()
        shown += [item["item_id"] for item in page["items"]]
        cursor = page["next"]
        if cursor is None:
            break
        if step % 2:  # one that was shown, and one that is not yet
            assert (await client.delete(f"/v1/items/{shown[-1]}")).status_code == 204
            assert (await client.delete(f"/v1/items/item-{299 - step}")).status_code == 204
        else:  # it has the codes of an item that was shown, and its place
            new = {"title": "New", "like": shown[0]}
            assert (await client.put_item(f"item-new-{step}", new)).status_code == 200
    gone = {f"item-{299 - step}" for step in range(1, 100, 2)}
    assert len(set(shown)) == len(shown)
    assert {f"item-{i}" for i in range(300)} - set(shown) <= gone
    assert not any("new" in item for item in shown[7:])


async def test_the_catalog_is_searched_by_words_in_any_case(client):
    page = (await client.get("/v1/items", params={"q": "NO. 29"})).json()
    assert page["total"] == 11  # 29 and 290 to 299
    page = (await client.get("/v1/items", params={"q": "item-29", "prefix": "0"})).json()
    assert [item["item_id"] for item in page["items"]] == ["item-29"]
    assert (await client.get("/v1/items", params={"q": ".*"})).json()["total"] == 0


@pytest.mark.parametrize(
    "query",
    [
        "prefix=a",
        "prefix=1..2",
        "limit=0",
        "cursor=-1",
        "cursor=1",
        "cursor=1.-2",
        "page=2",
        "cursor=\U00010d41",
        "prefix=٣",
    ],
)
async def test_an_invalid_query_is_reported(client, query):
    assert code(await client.get(f"/v1/items?{query}")) == (422, "invalid_request")


async def test_a_patch_changes_what_it_names_and_keeps_the_rest(client):
    await client.put_item("lamp", LAMP)
    before = (await client.get("/v1/items/lamp")).json()
    changed = {"title": "Big lamp", "attributes": {"price": None, "categories": ["lamps"]}}
    answer = await client.patch("/v1/items/lamp", json=changed)
    assert answer.status_code == 200, answer.text
    wanted = before | {"title": "Big lamp", "metadata": {"price": None, "categories": ["lamps"]}}
    assert answer.json()["item"] == (await client.get("/v1/items/lamp")).json() == wanted
    nothing = (await client.patch("/v1/items/lamp", json={})).json()
    assert nothing["item"] == wanted
    assert code(await client.patch("/v1/items/gone", json={})) == (404, "unknown_item")
    assert code(await client.patch("/v1/items/lamp", json={"like": "x"})) == (
        422,
        "invalid_request",
    )


async def test_availability_is_set_live_in_any_catalog(client):
    body = {"history": ["item-1"], "k": 2}
    first = (await client.post("/v1/recommendations", json=body)).json()["items"][0]["item_id"]
    assert "available" not in (await client.get(f"/v1/items/{first}")).json()["metadata"]
    answer = await client.patch(f"/v1/items/{first}", json={"attributes": {"available": False}})
    assert answer.json()["item"]["metadata"]["available"] is False
    left = (await client.post("/v1/recommendations", json={**body, "k": 100})).json()["items"]
    assert first not in [item["item_id"] for item in left]
    await client.patch(f"/v1/items/{first}", json={"attributes": {"available": None}})
    back = (await client.post("/v1/recommendations", json=body)).json()["items"]
    assert back[0]["item_id"] == first
    other = await client.patch(f"/v1/items/{first}", json={"attributes": {"in_stock": False}})
    assert other.status_code == 422
    assert "'available': true or false" in other.text
    dated = await client.patch(f"/v1/items/{first}", json={"attributes": {"available_from": 1}})
    assert (dated.status_code, dated.json()["code"]) == (422, "invalid_item")


async def test_derived_columns_follow_their_source(fake, settings, running):
    shop, paths = fake(), [["Kitchen", "Pans"], ["Garden"]]
    items = pa.table({"item_id": ["a", "b"], "title": ["A", "B"], "text": [""] * 2,
                      "category": paths, "category_top": ["Kitchen", "Garden"]})  # fmt: skip
    catalog = Catalog(items, np.array([[0, 0], [0, 1]], np.int32))
    shop.bundle = replace(shop.bundle, catalog=catalog, vocabulary=Vocabulary.from_levels([4, 9]))
    shop.epochs = Epochs(shop.bundle)
    async with running(settings, recommender=shop) as (client, _):
        for category, top in ((["Garden", "Pots"], "Garden"), (None, None)):
            body = {"attributes": {"category": category}}
            a = (await client.patch("/v1/items/a", json=body)).json()["item"]["metadata"]
            assert a == {"category": category, "category_top": top}
        own = {"attributes": {"category": ["Tea"], "category_top": "Coffee"}}
        b = (await client.patch("/v1/items/b", json=own)).json()["item"]["metadata"]
        assert b["category_top"] == "Coffee"


async def test_similar_items_have_scores(client, recommender):
    body = (await client.get("/v1/items/item-7/similar?k=2")).json()
    assert [(item["item_id"], item["score"]) for item in body["items"]] == [
        ("item-8", 1.0),
        ("item-9", 0.5),
    ]
    assert code(await client.get("/v1/items/gone/similar")) == (404, "unknown_item")
    recommender.retrieval = None
    assert code(await client.get("/v1/items/item-7/similar")) == (409, "unsupported_by_model")


async def test_given_items_are_ranked_and_unknown_ones_listed(client):
    request = {"history": ["item-1", "gone"], "items": ["item-9", "lost", "item-3", "item-9"]}
    body = (await client.post("/v1/rank", json=request)).json()
    assert [(item["item_id"], item["score"], item["rank"]) for item in body["items"]] == [
        ("item-3", -5.0, 1),
        ("item-9", -11.0, 2),
    ]
    assert (body["unknown_items"], body["history_items"]) == (["lost"], 1)
    body = (await client.post("/v1/rank", json={"user": "ada", "items": ["lost"]})).json()
    assert (body["items"], body["history_items"]) == ([], 2)
    response = await client.post("/v1/rank", json={"user": "eve", "items": ["item-1"]})
    assert code(response) == (404, "unknown_user")


async def test_an_item_is_added_recommended_and_removed(client):
    light = {"must": [{"key": "categories", "match": "light"}]}
    body = (await client.put_item("lamp", LAMP)).json()
    assert body["epoch"] == 1
    (item,) = body["items"]
    assert item["metadata"] == {"price": 9.5, "categories": ["light"]}
    assert (await client.get("/v1/items/lamp")).json() == item | {"text": ""}
    answer = await client.post(URL, json={"history": ["item-1"], "filter": light})
    assert (ids(answer), answer.json()["eligible_items"]) == (["lamp"], 1)
    assert answer.json()["model"]["epoch"] == 1
    assert (await client.delete("/v1/items/lamp")).status_code == 204
    assert code(await client.delete("/v1/items/lamp")) == (404, "unknown_item")
    assert code(await client.get("/v1/items/lamp")) == (404, "unknown_item")
    answer = await client.post(URL, json={"history": ["item-1"], "filter": light})
    assert (ids(answer), answer.json()["eligible_items"]) == ([], 0)


@pytest.mark.parametrize("item_id", ["a/b", "a%2Fb/c", "%25", "a?b".replace("?", "%3F"), "ä ö"])
async def test_any_item_id_can_be_reached(client, item_id):
    put = await client.put_item(unquote(item_id), LAMP)
    assert put.status_code == 200
    item = (await client.get(f"/v1/items/{item_id}")).json()
    assert item.items() >= put.json()["items"][0].items()
    assert (await client.get(f"/v1/items/{item_id}/similar?k=1")).status_code == 200
    assert (await client.delete(f"/v1/items/{item_id}")).status_code == 204


async def test_a_batch_of_items_is_added_whole_or_not_at_all(client):
    news = [{"item_id": "new-1", **LAMP}, {"item_id": "new-2", "like": "nothing"}]
    response = await client.post("/v1/items", json={"items": news})
    assert code(response) == (422, "invalid_item")
    assert "new-2" in response.json()["detail"]
    assert code(await client.get("/v1/items/new-1")) == (404, "unknown_item")
    many = [{"item_id": f"new-{number}", "like": "item-1"} for number in range(1_001)]
    response = await client.post("/v1/items", json={"items": many})
    assert code(response) == (422, "invalid_request")
    response = await client.post("/v1/items", json={"items": news[:1]})
    assert (response.json()["epoch"], len(response.json()["items"])) == (1, 1)


@pytest.mark.parametrize(
    "body",
    [
        {"attributes": {"colour": "red"}, "like": "item-1"},  # no such column
        {"attributes": {"price": "cheap"}, "like": "item-1"},
        {"semantic_id": [1, 2]},
        {"semantic_id": [4, 0, 0]},
        {},
    ],
)
async def test_a_refused_item_is_reported_with_the_reason(client, body):
    response = await client.put_item("new", body)
    assert code(response) == (422, "invalid_item")
    assert "'new'" in response.json()["detail"]


async def test_what_answers_show_of_an_item_is_bounded(client, monkeypatch):
    monkeypatch.setattr(catalog_changes, "MOST_SHOWN", 2_000)
    large = {"attributes": {"categories": ["x" * 900] * 2}}
    larger = {"attributes": {"categories": ["\u20ac" * 900]}}  # three bytes each
    refused = await client.put_item("lamp", LAMP | larger)
    assert code(refused) == (422, "invalid_item")
    assert (
        "'lamp': the texts and lists of its attributes have more than 2,000 bytes as JSON"
        in refused.json()["detail"]
    )
    assert (await client.put_item("lamp", LAMP | large)).status_code == 200
    assert code(await client.patch("/v1/items/lamp", json=larger)) == (422, "invalid_item")
    monkeypatch.setattr(catalog_changes, "MOST_SHOWN", 100)  # as an item of a bundle may be
    cheaper = {"attributes": {"price": 1.0}}
    assert (await client.patch("/v1/items/lamp", json=cheaper)).status_code == 200
    for change in (client.put_item("lamp", LAMP | {"title": "x" * 1_001}),
                   client.patch("/v1/items/lamp", json={"title": "x" * 1_001})):  # fmt: skip
        assert code(await change) == (422, "invalid_request")


async def test_a_page_of_large_items_ends_early(client, monkeypatch):
    whole = (await client.get("/v1/items?limit=200&q=no. 1")).json()
    monkeypatch.setattr(catalog_changes, "PAGE", 1_000)
    found, cursor = [], ""
    while cursor is not None:
        params = {"limit": 200, "q": "no. 1", "cursor": cursor}
        page = (await client.get("/v1/items", params=params)).json()
        assert 0 < len(page["items"]) < 12
        found, cursor = found + page["items"], page["next"]
    assert found == whole["items"]


async def test_many_items_do_not_occupy_the_event_loop(client, monkeypatch):
    loop, at_work = threading.get_ident(), set()

    def spy(module, name):
        function = getattr(module, name)

        def called(*arguments, **named):
            at_work.add((name, threading.get_ident() == loop))
            return function(*arguments, **named)

        monkeypatch.setattr(module, name, called)

    for module, name in (
        (DescribedItem, "of"),
        (catalog_changes, "_record"),
        (lists, "_scored"),
        (lists, "as_json"),
        (catalog_changes, "as_json"),
        (service, "as_json"),
    ):
        spy(module, name)
    items = [{"item_id": f"n{i}", "like": "item-7"} for i in range(3)]
    assert (await client.post("/v1/items", json={"items": items})).status_code == 200
    await client.post("/v1/rank", json={"history": ["item-1"], "items": ["item-2"]})
    await client.get("/v1/items")
    shown = {"history": ["item-1"], "include": ["metadata"]}
    await client.post("/v1/recommendations", json=shown)
    names = ("of", "_record", "_scored", "as_json")
    assert at_work == {(name, False) for name in names}


class TestSharedChanges(SharedChangesSuite):
    async def put(self, client, number):
        return await client.put_item("lamp", LAMP | {"title": f"Lamp {number}"})

    async def take_away(self, client):
        return await client.delete("/v1/items/lamp")

    async def state(self, client):
        answer = await client.get("/v1/items/lamp")
        return answer.json()["title"] if answer.status_code == 200 else None

    async def stored(self, store):
        return (await store.journal.read("catalogue"))[-1][1]["title"]


async def test_a_removed_item_of_the_bundle_stays_away(settings, fake, running):
    async with running(settings, recommender=fake()) as (client, _):
        await client.delete("/v1/items/item-3")
    async with running(settings, recommender=fake()) as (client, _):
        assert code(await client.get("/v1/items/item-3")) == (404, "unknown_item")


async def test_another_model_replays_the_journal_except_refused_items(
    settings, fake, running, caplog
):
    async with running(settings, recommender=fake()) as (client, service):
        await client.put_item("lamp", LAMP)
        await client.put_item("coded", {"semantic_id": [3, 6, 2]})
        ((_, record), _) = await service.store.journal.read("catalogue")
        strange = record | {"item_id": "strange", "attributes": {"colour": "red"}}
        later = record | {"item_id": "later"}
        await service.store.journal.append("catalogue", [strange, later])
    async with running(settings, recommender=fake("other")) as (client, _):
        # placed anew by what it is like; codes of the other model mean nothing here, but items
        # that had the like do
        found = {name: await client.get(f"/v1/items/{name}") for name in ("lamp", "coded", "later")}
        assert [answer.status_code for answer in found.values()] == [200, 200, 200]
        assert found["coded"].json()["semantic_id"][:2] == [3, 6]
        assert (await client.get("/v1/items/strange")).status_code == 404
    assert "refuses item 'strange'" in caplog.text


async def test_items_like_removed_or_moved_ones_reach_other_models(settings, fake, running):
    async def put(client, name, **fields):
        assert (await client.put_item(name, fields)).status_code == 200

    async with running(settings, recommender=fake()) as (client, _):
        await put(client, "lamp", like="item-7")
        await put(client, "lamp-2", like="lamp")
        await client.delete("/v1/items/lamp")  # what lamp-2 is like
        await put(client, "desk", like="item-9")
        await client.delete("/v1/items/item-9")  # an item of the bundle
        await put(client, "chair", like="desk")
        await put(client, "desk", title="Moved", semantic_id=[3, 0, 0])  # has a later place now
    async with running(settings, recommender=fake("other")) as (client, _):
        found = {
            name: (await client.get(f"/v1/items/{name}")).json().get("semantic_id")
            for name in ("lamp", "item-9", "lamp-2", "desk", "chair")
        }
        assert found["lamp"] is None
        assert found["item-9"] is None
        assert found["lamp-2"][:2] == [0, 0]  # beside item-7
        assert found["desk"][:2] == [3, 0]
        assert found["chair"] is not None


async def test_own_changes_are_not_made_twice(client, service, until, monkeypatch):
    monkeypatch.setattr("recsys.serving.shared_changes.LOOK_S", 0.01)
    await client.put_item("lamp", LAMP)
    await client.delete("/v1/items/item-3")
    places: list[int] = []
    read = service.store.journal.read

    async def watched(model, after=0):
        if model == "catalogue":
            places.append(after)
        return await read(model, after)

    monkeypatch.setattr(service.store.journal, "read", watched)
    await until(lambda: len(places) > 2)
    assert (await client.delete("/v1/items/unknown")).status_code == 404
    assert min(places) > 0
    assert service.state.models.get().recommender.epoch.number == 2


async def test_a_removal_that_the_store_cannot_take_changes_nothing(
    settings, fake, running, monkeypatch
):
    async with running(settings, recommender=fake()) as (client, service):
        await client.put_item("lamp", LAMP)
        with monkeypatch.context() as broken:

            async def full(model, records):
                raise StoreError("disk full")

            broken.setattr(service.store.journal, "append", full)
            for item in ("lamp", "item-3"):
                response = await client.delete(f"/v1/items/{item}")
                assert code(response) == (503, "store_unavailable")
                assert (await client.get(f"/v1/items/{item}")).status_code == 200
        for item in ("lamp", "item-3"):
            assert (await client.delete(f"/v1/items/{item}")).status_code == 204
            assert code(await client.delete(f"/v1/items/{item}")) == (404, "unknown_item")
    async with running(settings, recommender=fake()) as (client, _):
        for item in ("lamp", "item-3"):
            assert code(await client.get(f"/v1/items/{item}")) == (404, "unknown_item")


async def test_an_item_removed_during_its_ranking_is_unknown(client, recommender):
    rank = recommender.rank

    def late(histories, items):
        recommender.rank = rank
        recommender.remove(["item-3"])
        raise RequestError("item 'item-3' is not in the catalog")

    recommender.rank = late
    body = {"history": ["item-1"], "items": ["item-2", "item-3"]}
    answer = (await client.post("/v1/rank", json=body)).json()
    assert [item["item_id"] for item in answer["items"]] == ["item-2"]
    assert answer["unknown_items"] == ["item-3"]


@pytest.mark.parametrize(
    ("given", "pointer", "text"),
    [
        ({"filter": {"must": [{"key": "size", "match": 1}]}}, "/filter/must/0/key", "no attribute"),
        ({"filter": {"must": [{"key": "price"}]}}, "/filter/must/0", "exactly one"),
        ({"filter": {"any": []}}, "/filter", "unknown key"),
        ({"boosts": [{"filter": {"must": 1}, "weight": 1}]}, "/boosts/0/filter/must", "list"),
    ],
)
async def test_an_invalid_filter_is_reported_with_its_pointer(client, given, pointer, text):
    response = await client.post(URL, json={"history": ["item-1"], **given})
    assert code(response) == (422, "invalid_filter")
    (problem,) = response.json()["errors"]
    assert problem["pointer"] == pointer
    assert text in problem["detail"]
