import pytest

from recsys.serving import auth
from recsys.serving.api.routes import ROUTES
from recsys.serving.auth import Scope
from recsys.serving.stores.records import user_hash

UNAUDITED = {("POST", "/v1/events")}


@pytest.fixture
def keys(tmp_path):
    file = tmp_path / "keys" / "keys.json"
    made = {scope: auth.create(file, scope, scope) for scope in ("read", "write", "admin")}
    return file, made


@pytest.fixture
async def ask(settings, recommender, running, keys, caplog):
    """Send a request with the key of a scope; returns its status and its lines of the audit log."""
    file, made = keys
    with_keys = settings.model_copy(update={"keys": file})
    async with running(with_keys, recommender=recommender) as (client, service):
        caplog.set_level("INFO", "recsys.serving.audit")

        async def send(method, path, scope, **parts):
            caplog.clear()
            headers = {"authorization": f"Bearer {made[scope]}"} if scope else {}
            response = await client.request(method, path, headers=headers, **parts)
            records = [r for r in caplog.records if r.name == "recsys.serving.audit"]
            assert all(secret not in str(r.fields) for r in records for secret in made.values())
            return response, [r.fields for r in records]

        send.salt = service.store.salt
        yield send


def hashed(ask, name):
    return user_hash(name, ask.salt)[:32]


async def test_a_change_is_written_with_who_what_and_where(ask):
    response, (line,) = await ask("DELETE", "/v1/users/ada@x.org", "write")
    assert response.status_code == 204
    assert line == {
        "action": "DELETE /v1/users/{user_id}",
        "key": "write",
        "client": "127.0.0.1",
        "request_id": response.headers["x-request-id"],
        "status": 204,
        "user_id": hashed(ask, "ada@x.org"),
    }
    _, (line,) = await ask("PUT", "/v1/rules/sale", "write", json={"pin": []})
    assert (line["name"], line["key"]) == ("sale", "write")
    _, (line,) = await ask("PUT", "/v1/aliases/champion", "admin", json={"bundle": "none"})
    assert (line["name"], line["bundle"], line["rules"]) == ("champion", "none", None)


async def test_ids_of_items_are_hashed(ask):
    body = {"items": [{"item_id": "secret-1"}, {"item_id": "secret-2"}]}
    _, (line,) = await ask("POST", "/v1/items", "write", json=body)
    assert line["item_ids"] == [hashed(ask, "secret-1"), hashed(ask, "secret-2")]
    _, (line,) = await ask("DELETE", "/v1/items/secret-3/4", "write")
    assert line["item_id"] == hashed(ask, "secret-3/4")
    assert "secret" not in str(line)


async def test_refused_changes_are_written_too(ask):
    for scope, status in ((None, 401), ("read", 403)):
        _, (line,) = await ask("DELETE", "/v1/users/ada", scope)
        assert (line["status"], line["key"]) == (status, scope)
        assert line["user_id"] == hashed(ask, "ada")


async def test_every_change_but_events_is_audited(ask):
    for route in ROUTES:
        for method in route.methods:
            path = route.path_format.replace("{", "").replace("}", "")
            _, lines = await ask(method, path, None)
            is_change = method not in ("GET", "HEAD") and auth.scope_of(route.endpoint) > Scope.READ
            expected = is_change and (method, route.path_format) not in UNAUDITED
            assert len(lines) == expected, (method, path)
