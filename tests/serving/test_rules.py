"""Rules over HTTP: applied as their parts inline, kept, and never left dangling."""

import asyncio
import json
import threading

import pytest
from oracles import PATIENCE_S
from shared_changes_suite import SharedChangesSuite
from toy_bundle import code

from recsys.serving import auth
from recsys.serving.rules import Rules
from recsys.serving.schemas.rules import RuleBody

URL = "/v1/recommendations"
ITEMS = 60
CHEAP = {"must": [{"key": "price", "range": {"lt": 40}}]}
ACME = {"must": [{"key": "brand", "match": "Acme"}]}
BURY = [{"filter": ACME, "weight": -3.0}]
SUMMER = {"filter": CHEAP, "boosts": BURY}
BROKEN = {"pin": "a"}
DECOMPOSED = "gro\u0308sse"  # the name of a column, as some systems write it
ASK = {"history": ["B0003", "B0020"], "k": 8}


@pytest.fixture(scope="module")
def bundles(random_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    brands = [["Acme", "Bolt", "Coil"][i * i % 3] for i in range(ITEMS)]
    prices = [float(i) for i in range(ITEMS)]
    random_bundle(folder / "one", ITEMS, brand=brands, price=prices)
    random_bundle(folder / "two", ITEMS, seed=1, brand=brands, price=prices)
    random_bundle(folder / "bare", ITEMS, seed=2, **{DECOMPOSED: prices})
    return folder


@pytest.fixture
def real(bundles, settings_of):
    return settings_of(bundle=bundles / "one")


@pytest.fixture
async def client(real, running):
    async with running(real) as (client, _):
        yield client


async def put(client, name, value, status=200):
    response = await client.put(f"/v1/rules/{name}", json=value)
    assert response.status_code == status, response.text
    return response.json()


async def stand(client, alias, *names, **more):
    response = await client.put(f"/v1/aliases/{alias}", json={"rules": list(names), **more})
    assert response.status_code == 200, response.text
    assert response.json()["rules"] == list(names)


async def ask(client, **fields):
    """The items with their scores, and the certificate."""
    response = await client.post(URL, json=ASK | fields)
    assert response.status_code == 200, response.text
    answer = response.json()
    found = [(item["item_id"], item["score"], item["source"]) for item in answer["items"]]
    return found, answer["certificate"], answer["eligible_items"]


@pytest.mark.parametrize("more", [{}, {"guarantee": "global"}], ids=str)
async def test_a_rule_answers_like_its_parts_inline(client, more):
    await put(client, "summer", SUMMER)
    inline = await ask(client, **SUMMER, **more)
    assert await ask(client, rules=["summer"], **more) == inline
    assert await ask(client, rules=["summer", "summer"], **more) == inline
    await put(client, "cheap", {"filter": CHEAP})
    assert await ask(client, rules=["cheap"], boosts=BURY, **more) == inline
    assert await ask(client, **more) != inline
    # a filter, boosts and exclusions of the request count as well
    own = {
        "filter": {"must_not": [{"key": "brand", "match": "Coil"}]},
        "boosts": [{"filter": {"must": [{"key": "price", "range": {"gte": 30}}]}, "weight": 1.5}],
        "exclude_items": [inline[0][0][0]],
    }
    whole = own | {"filter": own["filter"] | CHEAP, "boosts": own["boosts"] + BURY}
    assert await ask(client, rules=["summer"], **own, **more) == await ask(client, **whole, **more)


async def test_a_batch_and_a_user_get_rules_too(client):
    await put(client, "summer", SUMMER)
    await put(client, "two", {"max_per": {"brand": 2}})
    events = [{"user": "ada", "item": name} for name in ASK["history"]]
    assert (await client.post("/v1/events", json={"events": events})).status_code == 200
    expected = (await client.post(URL, json=ASK | {"rules": ["summer", "two"]})).json()
    assert expected["rules"] == ["summer", "two"]
    of_user = {"user": "ada", "k": 8, "rules": ["summer", "two"]}
    response = await client.post(URL, json=of_user)
    assert response.json()["items"] == expected["items"]
    bodies = [ASK | {"rules": ["summer", "two"]}, ASK | {"rules": ["winter"]}, ASK]
    batch = (await client.post(f"{URL}/batch", json={"requests": bodies})).json()["results"]
    assert batch[0]["answer"]["items"] == expected["items"]
    assert (batch[1]["status"], batch[1]["problem"]["code"]) == (422, "invalid_request")
    assert "rules" not in batch[2]["answer"]


async def test_pins_come_first_if_they_are_allowed(client):
    pins = ["B0050", "B0003", "B0007", "B0009"]
    await put(client, "campaign", {"pin": pins})
    found, _, eligible = await ask(client, rules=["campaign"])
    plain, _, same = await ask(client)
    labelled = [name for name, score, source in found if (score, source) == (0.0, "pinned")]
    assert labelled == ["B0050", "B0007", "B0009"]  # 3 was seen
    assert (len(found), eligible) == (8, same)
    assert [one for one in plain if one[0] not in labelled][:5] == found[3:]
    for limits, left in (
        ({"exclude_items": ["B0007"]}, ["B0050", "B0009"]),
        ({"filter": CHEAP}, ["B0007", "B0009"]),
        ({"exclude_seen": False}, pins),
        ({"k": 1}, ["B0050"]),
    ):
        found, _, _ = await ask(client, rules=["campaign"], **limits)
        assert [name for name, _, source in found if source == "pinned"] == left
        assert [name for name, _, _ in found][: len(left)] == left
    await client.delete("/v1/items/B0007")
    found, _, _ = await ask(client, rules=["campaign"])
    assert [name for name, _, source in found if source == "pinned"] == ["B0050", "B0009"]


async def test_an_unknown_rule_is_named(client):
    await put(client, "summer", SUMMER)
    response = await client.post(URL, json=ASK | {"rules": ["summer", "sumer"]})
    assert code(response) == (422, "invalid_request")
    assert response.json()["detail"] == (
        "rules[1]: there is no rule 'sumer'; GET /v1/rules lists them"
    )
    place = {"location": "body", "pointer": "/rules/1"}
    assert response.json()["errors"][0].items() >= place.items()
    assert code(await client.delete("/v1/rules/winter")) == (404, "unknown_rule")
    response = await client.put("/v1/aliases/champion", json={"rules": ["winter"]})
    assert code(response) == (422, "invalid_request")
    assert "rules[0]: there is no rule 'winter'" in response.json()["detail"]


async def test_rules_are_listed_by_name_with_their_aliases(client):
    for name in ("b", "c", "a"):
        await put(client, name, SUMMER)
    await stand(client, "champion", "b")
    listed = (await client.get("/v1/rules")).json()["rules"]
    assert [(rule["name"], rule["aliases"]) for rule in listed] == [
        ("a", []), ("b", ["champion"]), ("c", []),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "pointer", "words"),
    [
        ({"filter": {"must": [{"key": "brnd", "match": "A"}]}}, "/filter/must/0/key", "'brnd'"),
        ({"boosts": [{"filter": {"or": []}, "weight": 1}]}, "/boosts/0/filter", "want must"),
        ({"max_per": {"size": 2}}, "/max_per/size", "no attribute 'size'; items have"),
        ({"pin": ["B0001", "B9999"]}, "/pin/1", "'B9999' is not in the catalog; add it with POST"),
    ],
)
async def test_a_rule_is_checked_against_the_catalog(client, value, pointer, words):
    body = await put(client, "wrong", value, 422)
    assert body["code"] == "invalid_rule"
    assert body["errors"][0]["pointer"] == pointer
    assert words in body["errors"][0]["detail"]
    assert (await client.get("/v1/rules")).json() == {"rules": []}


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"filter": {}},
        {"max_per": {"brand": 0}},
        {"max_per": {"brand": "2"}},
        {"max_per": dict.fromkeys("abcdefghi", 1)},
        {"pin": "B0001"},
        {"boosts": [{"filter": {}, "weight": 2000}]},
        {"pins": ["B0001"]},
    ],
    ids=str,
)
async def test_a_malformed_rule_is_refused(client, value):
    assert (await put(client, "wrong", value, 422))["code"] == "invalid_request"


async def test_an_empty_name_is_reported_at_its_entry(client):
    body = await put(client, "wrong", {"max_per": {"": 1}}, 422)
    assert [error["pointer"] for error in body["errors"]] == ["/max_per/"]


async def test_an_alias_applies_its_rules_to_all_requests(client):
    await put(client, "summer", SUMMER)
    await put(client, "first", {"pin": ["B0007"]})
    plain, inline = await ask(client), await ask(client, **SUMMER)
    assert inline != plain
    given = {"history": ASK["history"], "items": ["B0050", "B0001", "B0007"]}
    ranked = (await client.post("/v1/rank", json=given)).json()["items"]
    await stand(client, "champion", "summer")
    assert await ask(client) == inline
    assert (await client.post("/v1/rank", json=given)).json()["items"] == ranked  # without rules
    found, _, _ = await ask(client, rules=["first"])
    assert found == [("B0007", 0.0, "pinned"), *(i for i in inline[0] if i[0] != "B0007")][:8]
    await stand(client, "other", "first", bundle="two")
    found, _, _ = await ask(client, model="other")
    assert found[0][0] == "B0007"
    aliases = (await client.get("/v1/models")).json()["aliases"]
    assert {a["name"]: a["rules"] for a in aliases} == {
        "champion": ["summer"],
        "other": ["first"],
    }
    # a bundle is changed without touching them, and they go with their alias
    response = await client.put("/v1/aliases/champion", json={"bundle": "two"})
    assert response.json()["rules"] == ["summer"]
    assert (await client.delete("/v1/aliases/other")).status_code == 204
    assert (await client.delete("/v1/rules/first")).status_code == 204
    for body in ({}, {"bundle": None, "rules": None}):
        response = await client.put("/v1/aliases/champion", json=body)
        assert code(response) == (422, "invalid_request")
    response = await client.put("/v1/aliases/nobody", json={"rules": []})
    assert code(response) == (404, "unknown_model")


async def test_standing_rules_leave_room_for_requests(client):
    """Rules that would make every request of an alias invalid are refused when they are set."""

    def large(boosts: int, ids: int) -> dict[str, object]:
        wanted = {"filter": {"must": [{"key": "brand", "match": "Acme"}]}, "weight": 1.0}
        names = [f"gone-{number}" for number in range(ids)]
        unwanted = {"must_not": [{"key": "item_id", "any": names}]}
        return {"boosts": [wanted] * boosts, "filter": unwanted}

    await put(client, "some", large(60, 5_000))
    await put(client, "boosts", large(41, 0))
    await put(client, "ids", large(0, 5_000))
    for other in ("boosts", "ids"):
        both = await client.put("/v1/aliases/champion", json={"rules": ["some", other]})
        assert both.status_code == 422
        assert "the standing rules of an alias together" in both.json()["detail"]
    await stand(client, "champion", "some")
    await put(client, "boosts", large(100, 9_980))
    for name in ("some", "boosts"):  # the one that stands, and one that requests name
        assert (await client.put(f"/v1/rules/{name}", json=large(100, 9_980))).status_code == 200
        body = ASK | large(100, 9_980) | {"rules": ["boosts"]}
        assert (await client.post(URL, json=body)).status_code == 200
    await put(client, "more", {"pin": ["B0007"]})
    await stand(client, "champion", "some", "more")
    await put(client, "more", large(1, 100), 422)
    await put(client, "one", large(1, 100))
    both = await client.post(URL, json=ASK | {"rules": ["boosts", "one"]})
    assert code(both) == (422, "invalid_filter")
    assert "want at most 10,000 values together" in both.json()["detail"]


async def test_samples_are_drawn_without_the_boosts_of_standing_rules(client):
    await put(client, "bury", {"boosts": BURY})
    drawn = await ask(client, seed=7)
    await stand(client, "champion", "bury")
    assert await ask(client, seed=7) == drawn
    await put(client, "cheap", {"filter": CHEAP})
    drawn = await ask(client, seed=7, filter=CHEAP)
    await stand(client, "champion", "bury", "cheap")
    assert await ask(client, seed=7) == drawn


async def test_the_number_and_the_size_of_all_rules_are_bounded(client, monkeypatch):
    monkeypatch.setattr("recsys.serving.rules.MOST_CHARACTERS", 4_000)
    large = {"pin": [f"B{number:04d}" for number in range(60)] * 3}
    for name in ("one", "two", "one"):
        await put(client, name, large)
    refused = await client.put("/v1/rules/three", json=large)
    assert code(refused) == (422, "invalid_rule")
    assert "with 4,000 characters together" in refused.json()["detail"]
    await put(client, "three", {"pin": ["B0007"]})
    monkeypatch.setattr("recsys.serving.rules.MOST_RULES", 3)
    refused = await client.put("/v1/rules/four", json={"pin": ["B0007"]})
    assert "a service has at most 3 rules" in refused.json()["detail"]
    monkeypatch.setattr("recsys.serving.rules.MOST_CHARACTERS", 100)  # as after a new version
    await put(client, "one", {"pin": large["pin"][:40]})


async def test_a_rule_of_an_alias_is_not_deleted(client):
    await put(client, "summer", SUMMER)
    await stand(client, "champion", "summer")
    response = await client.delete("/v1/rules/summer")
    assert code(response) == (409, "rule_in_use")
    assert "PUT /v1/aliases/champion" in response.json()["detail"]
    assert (await client.rule("summer"))["aliases"] == ["champion"]
    await stand(client, "champion")
    assert (await client.delete("/v1/rules/summer")).status_code == 204
    assert await client.rule("summer") is None


async def test_a_bundle_that_standing_rules_do_not_fit_is_refused(client):
    await put(client, "summer", SUMMER)
    await client.put("/v1/aliases/next", json={"bundle": "bare"})
    response = await client.post(URL, json=ASK | {"model": "next", "rules": ["summer"]})
    assert code(response) == (422, "invalid_request")
    assert "the rule 'summer' does not fit the model 'bare'" in response.json()["detail"]
    response = await client.put("/v1/aliases/next", json={"rules": ["summer"]})
    assert code(response) == (422, "invalid_request")
    await client.delete("/v1/aliases/next")
    await stand(client, "champion", "summer")
    response = await client.put("/v1/aliases/champion", json={"bundle": "bare"})
    assert code(response) == (409, "bundle_refused")
    assert "'summer'" in response.json()["detail"]
    await stand(client, "champion")
    await put(client, "all", {"boosts": BURY * 60})
    await put(client, "more", {"boosts": BURY * 60})
    for rules, refusal in ((["summer"], "bundle_refused"), (["all", "more"], "invalid_request")):
        response = await client.put("/v1/aliases/champion", json={"bundle": "bare", "rules": rules})
        assert response.json()["code"] == refusal
    info = await client.named("aliases", "champion")
    assert (info["bundle"], info["rules"]) == ("one", [])
    assert [m["name"] for m in (await client.get("/v1/models")).json()["models"]] == ["one"]
    await stand(client, "champion", bundle="two")
    response = await client.put("/v1/aliases/champion", json={"bundle": "bare"})
    assert response.status_code == 200


async def test_a_rule_is_checked_against_a_model_that_its_alias_is_getting(
    real, running, until, monkeypatch
):
    async with running(real) as (client, service):
        named = {"must_not": [{"key": "item_id", "match": "B0001"}]}
        await put(client, "summer", {"filter": named})
        await stand(client, "next", "summer", bundle="two")
        aliases, rules, puts = service.state.aliases, service.state.rules, []
        keep = aliases._keep

        async def late(*arguments):  # the old rule fits the new model, which is not yet the alias's
            puts.append(asyncio.create_task(client.put("/v1/rules/summer", json=SUMMER)))
            await until(lambda: puts[0].done() or rules._changing._waiters)
            await keep(*arguments)

        monkeypatch.setattr(aliases, "_keep", late)
        await client.put("/v1/aliases/next", json={"bundle": "bare"})
        assert code(await puts[0]) == (422, "invalid_rule")
        await ask(client, model="next")


async def test_a_rule_has_the_name_of_the_key_that_changed_it_last(real, running, tmp_path):
    file = tmp_path / "keys.json"
    keys = {name: auth.create(file, name, name) for name in ("read", "write", "admin")}
    heads = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    rule = "/v1/rules/summer"
    async with running(real.model_copy(update={"keys": file})) as (client, _):
        for method in ("PUT", "DELETE"):
            response = await client.request(method, rule, json=SUMMER, headers=heads["read"])
            assert code(response) == (403, "forbidden")
        first = (await client.put(rule, json=SUMMER, headers=heads["write"])).json()
        again = (await client.put(rule, json=SUMMER, headers=heads["admin"])).json()
        assert (first, first["by"]) == (again, "write")  # the repetition changes nothing
        other = {"max_per": {"brand": 1}}
        response = await client.put(rule, json=other, headers=heads["admin"])
        assert response.json()["by"] == "admin"
        assert not any(key in response.text for key in keys.values())


class TestSharedChanges(SharedChangesSuite):
    table, reads, writes = "state", "revision", "change"

    async def put(self, client, number):
        return await client.put("/v1/rules/campaign", json={"pin": [f"item-{number}"]})

    async def take_away(self, client):
        return await client.delete("/v1/rules/campaign")

    async def state(self, client):
        rule = await client.rule("campaign")
        return rule and rule["pin"]

    async def stored(self, store):
        return (await store.state.get("rules"))["rules"]["campaign"]["value"]["pin"]

    async def test_a_change_knows_all_changes_before_it(self, neighbours, until):
        one, two, service = neighbours
        await put(one, "first", {"pin": ["item-5"]})
        await stand(one, "champion", "first")
        await until(lambda: service.state.rules.standing("champion") == ["first"])
        found = (await two.post(URL, json={"history": ["item-1"]})).json()
        assert (found["items"][0]["item_id"], found["rules"]) == ("item-5", ["first"])
        await put(one, "second", {"pin": ["item-6"]})
        await stand(two, "champion", "second")
        assert code(await one.delete("/v1/rules/second")) == (409, "rule_in_use")
        assert (await one.delete("/v1/rules/first")).status_code == 204

    async def test_a_change_is_checked_with_all_changes_before_it(self, neighbours, monkeypatch):
        one, two, _ = neighbours
        monkeypatch.setattr("recsys.serving.rules.MOST_RULES", 1)
        checked, both, checks = Rules._checked, threading.Barrier(2), []

        def at_once(rules, *rule):
            value = checked(rules, *rule)
            if len(checks) < 2:
                checks.append(rule)
                both.wait(PATIENCE_S)
            return value

        monkeypatch.setattr(Rules, "_checked", at_once)
        bodies = {one: "/v1/rules/a", two: "/v1/rules/b"}
        puts = (client.put(path, json={"pin": ["item-1"]}) for client, path in bodies.items())
        assert sorted(done.status_code for done in await asyncio.gather(*puts)) == [200, 422]


async def test_what_another_version_stored_is_kept_and_not_applied(client, caplog):
    service = client._transport.app.state.service
    await put(client, "x", {"pin": ["B0007"]})
    strange = {"value": {"pin": "B0007"}, "time_ms": 0, "by": None}

    def change(state):
        state["rules"]["strange"] = strange
        state["aliases"] = {"champion": ["x", "strange"]}

    await service.store.state.change("rules", change)
    await put(client, "y", {"pin": ["B0008"]})
    assert "rule strange of the store cannot be read" in caplog.text
    assert await client.rule("strange") is None
    assert service.state.rules.standing("champion") == ["x"]
    assert (await service.store.state.get("rules"))["rules"]["strange"] == strange


async def test_the_store_has_no_more_than_the_rules_that_are_there(client):
    await put(client, "x", {"pin": ["B0007"]})
    for number in range(5):
        await put(client, f"y{number}", {"pin": ["B0008"]})
        await put(client, "x", {"pin": [f"B000{number}"]})
        await stand(client, "champion", f"y{number}")
        await stand(client, "champion")
        assert (await client.delete(f"/v1/rules/y{number}")).status_code == 204
    stored = await client._transport.app.state.service.store.state.get("rules")
    assert [*stored["rules"]] == ["x"]
    assert stored["rules"]["x"]["value"] == {"pin": ["B0004"]}
    assert stored["aliases"] == {}


async def test_a_column_has_the_name_that_the_bundle_gives_it(bundles, real, running):
    only = {"filter": {"must": [{"key": DECOMPOSED, "match": -1}]}, "max_per": {DECOMPOSED: 1}}
    async with running(real.model_copy(update={"bundle": bundles / "bare"})) as (client, _):
        patch = {"attributes": {DECOMPOSED: -1.0}}
        assert (await client.patch("/v1/items/B0007", json=patch)).status_code == 200
        await put(client, "only", only)
        found, _, _ = await ask(client, rules=["only"])
        assert [name for name, _, _ in found] == ["B0007"]


async def test_an_alias_gets_rules_while_a_history_is_read(client, service, monkeypatch):
    await put(client, "summer", SUMMER)
    read = service.store.history.read

    async def slow(*arguments):
        await stand(client, "champion", "summer")
        return await read(*arguments)

    monkeypatch.setattr(service.store.history, "read", slow)
    response = await client.post(URL, json={"user": "ada"})
    assert response.status_code == 200, response.text
    assert "rules" not in response.json(), "it came before"


async def test_unchanged_rules_are_described_once_for_all_who_ask(client, monkeypatch):
    await put(client, "x", SUMMER)
    first = (await client.get("/v1/rules")).json()
    with monkeypatch.context() as undescribed:
        undescribed.setattr("recsys.serving.rules.RuleInfo", None)
        assert (await client.get("/v1/rules")).json() == first
    await stand(client, "champion", "x")
    (rule,) = (await client.get("/v1/rules")).json()["rules"]
    assert rule == first["rules"][0] | {"aliases": ["champion"]}


async def test_a_change_that_is_given_up_replaces_no_later_one(client, service, monkeypatch):
    rules = service.state.rules
    read, began, gate, ended = rules._read, *(threading.Event() for _ in range(3))

    def slow(stored):
        state = read(stored)
        if not began.is_set():
            began.set()
            gate.wait(PATIENCE_S)
            ended.set()
        return state

    monkeypatch.setattr(rules, "_read", slow)
    change = asyncio.create_task(rules.put("x", RuleBody(pin=["B0007"]), None))
    await asyncio.to_thread(began.wait, PATIENCE_S)
    change.cancel()
    await asyncio.gather(change, return_exceptions=True)
    await put(client, "y", SUMMER)
    gate.set()
    await asyncio.to_thread(ended.wait, PATIENCE_S)
    assert [rule["name"] for rule in json.loads(rules.all())["rules"]] == ["x", "y"]


async def test_rules_do_not_apply_to_similar_items(settings, recommender, running):
    path = "/v1/items/item-1/similar"
    async with running(settings, recommender=recommender) as (client, _):
        similar = (await client.get(path)).json()["items"]
        ids = [item["item_id"] for item in similar]
        await put(client, "none", {"filter": {"must_not": [{"key": "item_id", "any": ids}]}})
        await stand(client, "champion", "none")
        assert ids
        assert (await client.get(path)).json()["items"] == similar


async def test_a_fallback_keeps_pins_and_says_so(settings, recommender, running):
    async with running(settings, recommender=recommender) as (client, _):
        await put(client, "first", {"pin": ["item-7"]})
        body = {"user": "nobody", "k": 3, "rules": ["first"]}
        answer = (await client.post(URL, json=body)).json()
        assert answer["note"]["code"] == "unknown_user"
        assert answer["rules"] == ["first"]
