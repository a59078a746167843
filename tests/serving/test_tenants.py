"""Keys of tenants: each reads and writes users of its own, on every route."""

import json

import pytest

from recsys.errors import ConfigError
from recsys.serving import auth
from recsys.serving.api.routes import ROUTES
from recsys.serving.app import create_app
from recsys.serving.stores.records import user_hash
from recsys.serving.tenants import MAX_ID, inside

HISTORIES = {None: ["item-1", "item-2"], "shop1": ["item-5"], "shop2": ["item-7", "item-8"]}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys.json"
    made = {name: auth.create(file, name or "all", "write", tenant=name) for name in HISTORIES}
    return file, {name: {"Authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture
async def shops(settings, recommender, running, keys):
    """A client for each tenant, after events of the user `ada` of each."""
    file, headers = keys
    guarded = settings.model_copy(update={"keys": file})
    async with running(guarded, recommender=recommender) as (client, service):

        def of(tenant):
            async def call(method, path, **more):
                response = await client.request(method, path, headers=headers[tenant], **more)
                if tenant is not None and f"{tenant}:" not in path + str(more):
                    assert f"{tenant}:" not in response.text
                return response

            return call

        calls = {tenant: of(tenant) for tenant in HISTORIES}
        for tenant, items in HISTORIES.items():
            if tenant is not None:
                assert (await post(calls[tenant], "ada", items))["accepted"] == len(items)
        calls["service"] = service
        yield calls


async def post(call, user, items):
    events = [
        {"event_id": f"{user[:9]}-{n}", "user": user, "item": item, "timestamp": n}
        for n, item in enumerate(items)
    ]
    response = await call("POST", "/v1/events", json={"events": events})
    return response.json()


def recommended(answer):
    return [item["item_id"] for item in answer["items"]]


# What each route tells of a user: for the check that it is of the tenant's own


async def ask(call, user):
    body = {"user": user, "fallback": False, "k": 5}
    return await call("POST", "/v1/recommendations", json=body)


async def ask_batch(call, user):
    body = {"requests": [{"user": user, "fallback": False, "k": 5}]}
    response = await call("POST", "/v1/recommendations/batch", json=body)
    response.status_code = response.json()["results"][0]["status"]
    return response


async def ask_by_path(call, user):
    return await call("GET", f"/v1/users/{user}/recommendations?fallback=false&k=5")


async def ask_by_get(call, user):
    return await call("GET", f"/v1/recommendations?user={user}&fallback=false&k=5")


async def ask_rank(call, user):
    return await call("POST", "/v1/rank", json={"user": user, "items": ["item-9"]})


async def ask_history(call, user):
    return await call("GET", f"/v1/users/{user}/history")


async def ask_users(call, user):
    response = await call("GET", f"/v1/users?limit=1000&prefix={user}")
    if response.status_code == 200 and user not in response.json()["users"]:
        response.status_code = 404
    return response


PROBES = {
    ("POST", "/v1/recommendations"): ask,
    ("POST", "/v1/recommendations/batch"): ask_batch,
    ("GET", "/v1/users/{user_id}/recommendations"): ask_by_path,
    ("GET", "/v1/recommendations"): ask_by_get,
    ("POST", "/v1/rank"): ask_rank,
    ("GET", "/v1/users/{user_id}/history"): ask_history,
    ("GET", "/v1/users"): ask_users,
    ("POST", "/v1/events"): None,  # in the fixture, and below
    ("DELETE", "/v1/users/{user_id}"): None,  # below
    ("POST", "/v1/explanations"): None,  # in test_explanations
}
READS = [probe for probe in PROBES.values() if probe is not None]


def seen(probe, response, expected):
    """What a probe found, and what it has to find for a history."""
    body = response.json()
    if probe in (ask, ask_by_path, ask_by_get):
        return recommended(body), expected
    if probe is ask_batch:
        return recommended(body["results"][0]["answer"]), expected
    return None, None


def names(schema, components, above=()):
    """All names of fields in a schema, which may be part of itself."""
    if reference := schema.get("$ref"):
        if reference in above:
            return set()
        above, schema = (*above, reference), components[reference.rsplit("/", 1)[1]]
    found = set(schema.get("properties", ()))
    inner = [*schema.get("properties", {}).values()]
    inner += [schema["items"]] if "items" in schema else []
    inner += [one for word in ("anyOf", "allOf", "oneOf") for one in schema.get(word, ())]
    for one in inner:
        found |= names(one, components, above)
    return found


def test_every_route_that_takes_or_shows_users_is_probed(settings):
    document = create_app(settings).openapi()
    components = document["components"]["schemas"]
    found = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            contents = [operation.get("requestBody", {})]
            contents += [r for code, r in operation["responses"].items() if code < "300"]
            fields = {parameter["name"] for parameter in operation.get("parameters", ())}
            for content in contents:
                for media in content.get("content", {}).values():
                    fields |= names(media.get("schema", {}), components)
            if fields & {"user", "users", "user_id", "user_ids"}:
                found.add((method.upper(), path))
                assert operation["x-tenants"] is True, path
    assert found == PROBES.keys()


@pytest.mark.parametrize("probe", READS)
async def test_a_tenant_reads_its_own_users(shops, recommender, probe):
    answers = {}
    for tenant, items in HISTORIES.items():
        response = await probe(shops[tenant], "ada")
        assert response.status_code == 200, response.text
        found, expected = seen(probe, response, recommender.expected(items, 5))
        assert found == expected
        body = response.json()
        body.pop("recommendation_id", None)
        for result in body.get("results", ()):
            result["answer"].pop("recommendation_id")
        answers[tenant] = body
    if probe is ask_history:
        for tenant, items in HISTORIES.items():
            assert [event["item"] for event in answers[tenant]["events"]] == items[::-1]
            assert answers[tenant]["user"] == "ada"
        assert [event["event_id"] for event in answers["shop2"]["events"]] == ["ada-1", "ada-0"]
    if probe is ask_rank:
        assert [answers[tenant]["history_items"] for tenant in HISTORIES] == [2, 1, 2]
    if probe is ask_users:
        assert answers["shop1"] == answers["shop2"] == {"users": ["ada"]}
        everyone = (await shops[None]("GET", "/v1/users")).json()["users"]
        assert everyone == ["ada", "bob", "shop1:ada", "shop2:ada"]


@pytest.mark.parametrize("probe", READS)
async def test_no_id_reaches_a_user_of_another_tenant(shops, probe):
    await post(shops["shop2"], "eve", ["item-3"])
    for user in ("bob", "eve", "shop2:ada", "shop1:ada", ":ada", "shop2:eve", "shop1"):
        response = await probe(shops["shop1"], user)
        assert response.status_code == 404, (user, response.text)
    assert (await probe(shops[None], "shop2:eve")).status_code == 200  # as it is stored


async def test_a_tenant_erases_its_own_user(shops):
    assert (await shops["shop1"]("DELETE", "/v1/users/ada")).status_code == 204
    assert (await shops["shop1"]("DELETE", "/v1/users/shop2:ada")).status_code == 204
    found = [(await ask_history(shops[tenant], "ada")).status_code for tenant in HISTORIES]
    assert found == [200, 404, 200]
    # What arrives late is of the erased user of this tenant only.
    assert (await post(shops["shop1"], "ada", ["item-5"]))["ignored"] == 1
    assert (await post(shops["shop2"], "ada", ["item-7"]))["duplicates"] == 1


async def test_ids_of_events_are_the_tenant_s_own(shops):
    assert (await post(shops["shop1"], "ada", ["item-5"]))["duplicates"] == 1
    assert (await post(shops[None], "ada", ["item-6"]))["accepted"] == 1
    conflict = await post(shops["shop2"], "ada", ["item-6"])
    assert conflict["code"] == "event_conflict"
    assert conflict["errors"][0]["pointer"] == "/events/0/event_id"


async def test_feedback_is_linked_within_a_tenant(shops, until):
    answer = (await ask(shops["shop1"], "ada")).json()
    event = {
        "user": "ada", "item": "item-9", "recommendation_id": answer["recommendation_id"]
    }  # fmt: skip
    done = await shops["shop1"]("POST", "/v1/events", json={"events": [event]})
    assert done.json()["unlinked"] == 0
    seen = (await ask_history(shops["shop1"], "ada")).json()["events"][0]
    assert (seen["recommendation_id"], seen["linked"]) == (event["recommendation_id"], True)
    for other in ("shop2", None):  # who knows the id of another's answer gives no feedback on it
        done = await shops[other]("POST", "/v1/events", json={"events": [event]})
        assert (done.json()["accepted"], done.json()["unlinked"]) == (1, 1)
    rows = shops["service"].store._query("SELECT user_id FROM recommendations", ())
    assert rows == [("shop1:ada",)]


async def test_an_id_that_is_too_long_with_its_tenant_is_invalid(shops):
    longest = "x" * (MAX_ID - len("shop1:"))
    assert (await post(shops["shop1"], longest, ["item-1"]))["accepted"] == 1
    for probe in (ask, ask_batch, ask_by_path, ask_by_get, ask_rank, ask_history):
        assert (await probe(shops["shop1"], longest)).status_code == 200, probe
        assert (await probe(shops["shop1"], longest + "x")).status_code == 422, probe
    assert (await post(shops["shop1"], longest + "x", ["item-1"]))["code"] == "invalid_request"
    response = await shops["shop1"]("DELETE", f"/v1/users/{longest}x")
    assert response.json()["code"] == "invalid_request"
    assert "ids of up to 250" in response.json()["detail"]


async def test_a_tenant_has_no_way_to_what_all_share(shops):
    for route in ROUTES:
        for method in route.methods:
            path = route.path_format.replace("{", "").replace("}", "")
            if not route.include_in_schema or path.startswith("/health/"):
                continue
            response = await shops["shop1"](method, path)
            allowed = getattr(route.endpoint, "tenants", False)
            assert (response.status_code == 403) == (not allowed), (method, path)
            if not allowed and method == "GET":
                assert "is not for keys of a tenant" in response.json()["detail"]
    assert (await shops["shop1"]("PUT", "/v1/items/item-9", json={"title": "x"})).status_code == 403
    assert (await shops["shop1"]("GET", "/v1/items/item-9")).status_code == 200


async def test_the_audit_log_has_the_hash_of_the_stored_id(shops, caplog):
    caplog.set_level("INFO", "recsys.serving.audit")
    await shops["shop1"]("DELETE", "/v1/users/ada")
    (line,) = [r.fields for r in caplog.records if r.name == "recsys.serving.audit"]
    assert line["user_id"] == user_hash("shop1:ada", shops["service"].store.salt)[:32]


def test_no_tenant_s_ids_begin_like_another_s(tmp_path):
    for name in ("", "a:b", "a b", ":", "a" * 65, "shop/1"):
        with pytest.raises(ConfigError, match="not a plain word"):
            auth.create(tmp_path / "keys.json", "key", "read", tenant=name)
    with pytest.raises(ConfigError, match="scope read or write"):
        auth.create(tmp_path / "keys.json", "key", "admin", tenant="shop1")
    assert inside("x", "a") != inside("x", "b")


@pytest.mark.parametrize("wrong", ['"a:b"', "7", '""'])
def test_a_key_of_a_malformed_tenant_is_not_a_key_of_all(tmp_path, wrong):
    file = tmp_path / "keys.json"
    auth.create(file, "key", "read", tenant="shop1")
    document = json.loads(file.read_text())
    document["keys"][0]["tenant"] = json.loads(wrong)
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match="not a file of"):
        auth.read(file)
