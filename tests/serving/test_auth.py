import json
import multiprocessing
import os
import stat
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from recsys import cli
from recsys.errors import ConfigError
from recsys.serving import auth
from recsys.serving.api.routes import ROUTES, find_route
from recsys.serving.app import create_app
from recsys.serving.auth import Keyring, Scope
from recsys.serving.settings import ServingSettings


@pytest.fixture
def file(tmp_path):
    return tmp_path / "keys" / "keys.json"


@pytest.fixture
def check_at_once(monkeypatch):
    monkeypatch.setattr(auth, "CHECK_INTERVAL_S", 0.0)


def test_a_key_is_256_random_bits_and_the_file_has_its_hash_only(file):
    first, second = auth.create(file, "shop", "read"), auth.create(file, "ops", "admin")
    assert first.startswith("rk_")
    assert len(first) == 3 + 43  # 32 bytes in base64 without padding
    assert first != second
    text = file.read_text()
    assert first not in text
    assert first[3:] not in text
    assert [(key.name, key.scope) for key in auth.read(file)] == [
        ("shop", "read"),
        ("ops", "admin"),
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    left = sorted(os.listdir(file.parent))  # noqa: PTH208 - nothing temporary is left
    assert left == [".keys.json.in-use", "keys.json"]


def test_a_key_is_found_and_no_other_text_is(file):
    secret = auth.create(file, "shop", "write")
    ring = Keyring(file)
    found = ring.find(secret)
    assert found is not None
    assert (found.name, found.may) == ("shop", Scope.WRITE)
    for other in ("", "rk_", secret[:-1], secret + "x", secret.upper(), auth.read(file)[0].sha256):
        assert ring.find(other) is None


@pytest.mark.usefixtures("check_at_once")
def test_new_keys_are_accepted_and_revoked_keys_refused_at_once(file):
    first = auth.create(file, "first", "read")
    ring = Keyring(file)
    second = auth.create(file, "second", "read")
    assert ring.find(second) is not None
    auth.revoke(file, "first")
    assert ring.find(first) is None
    auth.revoke(file, "second")
    assert ring.find(second) is None  # the last one: nobody has a way in


def test_a_revoked_key_is_refused_within_a_second(file, monkeypatch):
    key, now = auth.create(file, "first", "read"), [100.0]
    monkeypatch.setattr(auth, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ring = Keyring(file)
    auth.revoke(file, "first")
    now[0] += 1
    assert ring.find(key) is None


def test_an_expired_key_is_not_found(file, monkeypatch):
    short, long = auth.create(file, "a", "read", "12h"), auth.create(file, "b", "read", "90d")
    forever = auth.create(file, "c", "read")
    ring = Keyring(file)
    start = datetime.now(UTC)

    def found_after(**time):
        class Clock(datetime):
            @classmethod
            def now(cls, zone):
                return start + timedelta(**time)

        monkeypatch.setattr(auth, "datetime", Clock)
        return [ring.find(secret) is not None for secret in (short, long, forever)]

    assert found_after(hours=11.9) == [True, True, True]
    assert found_after(hours=12) == [False, True, True]
    assert found_after(days=89) == [False, True, True]
    assert found_after(days=90) == [False, False, True]
    assert "expires" not in json.loads(file.read_text())["keys"][2]
    for wrong in ("90", "0d", "d", "-1d", "1w", "99999d", "1.5h"):
        with pytest.raises(ConfigError, match="not a number of days or hours, such as 90d"):
            auth.create(file, "d", "read", wrong)


def test_a_key_with_a_limit_that_is_not_known_is_refused(file):
    auth.create(file, "partner", "read")
    document = json.loads(file.read_text())
    document["keys"][0]["tenant"] = "shop1"
    file.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=r"keys\.0\.tenant: Extra .*`recsys keys create`"):
        Keyring(file)


@pytest.mark.usefixtures("check_at_once")
def test_keys_stay_valid_if_their_file_becomes_unreadable(file, caplog):
    secret = auth.create(file, "shop", "read")
    ring = Keyring(file)
    file.write_text("{")
    assert ring.find(secret) is not None
    assert "not a file of `recsys keys`" in caplog.text
    file.unlink()
    assert ring.find(secret) is not None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not a file of `recsys keys`: Invalid JSON"),
        ("[]", "not a file of"),
        ('{"version": 2, "keys": []}', "version: Input should be 1"),
        ('{"version": 1, "keys": [{"name": "a"}]}', "not a file of"),
        (
            '{"version": 1, "keys": [{"name": "a", "scope": "root", "sha256": "", "created": ""}]}',
            "not a file of",
        ),
        ('{"version": 1, "keys": []}', "there is no key in it"),
    ],
)
def test_a_file_that_is_not_one_is_refused_at_the_start(file, text, told):
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        Keyring(file)


def test_wrong_names_scopes_and_files_are_reported(file):
    with pytest.raises(ConfigError, match="No such file or directory; make one with `recsys keys"):
        Keyring(file)
    with pytest.raises(ConfigError, match="scope 'root': Input should be 'read', 'write' or 'ad"):
        auth.create(file, "a", "root")
    with pytest.raises(ConfigError, match="name 'a b': String should match"):
        auth.create(file, "a b", "read")
    auth.create(file, "a", "read")
    with pytest.raises(ConfigError, match="there is a key 'a' already"):
        auth.create(file, "a", "read")
    with pytest.raises(ConfigError, match="there is no key 'b'; known: a"):
        auth.revoke(file, "b")


def create_some(file, first):
    for number in range(first, first + 5):
        auth.create(file, f"key-{number}", "read")


def test_keys_that_are_made_in_parallel_are_all_kept(file):
    context = multiprocessing.get_context("fork")
    makers = [context.Process(target=create_some, args=(file, 5 * n)) for n in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert sorted(int(key.name[4:]) for key in auth.read(file)) == list(range(40))


def test_a_revoked_key_stays_revoked_beside_other_changes(file, monkeypatch):
    auth.create(file, "leaked", "admin")
    read = auth.read
    others = []

    def revoke_meanwhile(place):
        keys = read(place)
        if not others:  # the first change has read the keys, and has not written them yet
            others.append(
                multiprocessing.get_context("fork").Process(
                    target=auth.revoke, args=(file, "leaked")
                )
            )
            others[0].start()
            others[0].join(0.2)
        return keys

    monkeypatch.setattr(auth, "read", revoke_meanwhile)
    auth.create(file, "shop", "read")
    others[0].join()
    assert [key.name for key in read(file)] == ["shop"]


def test_what_a_killed_change_left_is_removed(file):
    auth.create(file, "a", "read")
    (file.parent / ".keys.json.writing").write_text("{")
    auth.revoke(file, "a")
    assert {path.name for path in file.parent.iterdir()} == {"keys.json", ".keys.json.in-use"}


def test_a_link_to_the_keys_stays_a_link(file, tmp_path):
    auth.create(file, "a", "read")
    link = tmp_path / "keys.json"
    link.symlink_to(file)
    auth.create(link, "b", "read")
    assert link.is_symlink()
    assert [key.name for key in auth.read(file)] == ["a", "b"]


@pytest.mark.parametrize("served", [True, False], ids=["read by a service", "made by the command"])
def test_deleting_the_keys_does_not_open_the_service(tmp_path, monkeypatch, served):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    assert ServingSettings.load().keys is None, "a first start on loopback needs no keys"
    file = tmp_path / "serving" / "keys.json"
    auth.create(file, "shop", "read")
    if served:
        auth.marker(file).unlink()  # made by an earlier version
        Keyring(file)
    file.unlink()
    settings = ServingSettings.load()
    assert settings.keys == file
    with pytest.raises(ConfigError, match=r"were in use here: restore .*--set serve\.keys=null"):
        create_app(settings)
    assert ServingSettings.load(overrides=["serve.keys=null"]).keys is None
    auth.create(file, "shop", "read")
    assert [key.name for key in auth.read(file)] == ["shop"]


def test_the_commands_make_list_and_revoke(monkeypatch, tmp_path):
    # as in the image: it could not listen there without the key that is made here
    monkeypatch.setenv("RECSYS_SERVE_HOST", "0.0.0.0")
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))

    def run(*words):
        done = CliRunner().invoke(cli.app, ["keys", *words])
        assert done.exit_code == 0, done.stderr
        return done

    made = run("create", "--name", "shop", "--scope", "write")
    secret = made.stdout.strip()
    assert secret.startswith("rk_")
    assert secret not in made.stderr
    file = tmp_path / "serving" / "keys.json"
    assert [key.name for key in auth.read(file)] == ["shop"]
    assert json.loads(run("list", "--json").stdout)[0]["scope"] == "write"
    run("create", "--name", "guest", "--expires", "12h")
    name, _, created, until = run("list").stdout.splitlines()[1].split("\t")
    assert (name, until[:6]) == ("guest", "until ")
    lasts = datetime.fromisoformat(until[6:]) - datetime.fromisoformat(created)
    assert lasts == timedelta(hours=12)
    for name in ("guest", "shop"):
        run("revoke", name)
    assert auth.read(file) == []


SCOPES = {
    (method, route.path_format): auth.scope_of(route.endpoint)
    for route in ROUTES
    for method in route.methods
}


def test_every_route_declares_a_scope(settings):
    assert create_app(settings).routes == ROUTES
    for route in ROUTES:
        assert hasattr(route.endpoint, "scope"), route.path


@pytest.mark.parametrize(
    ("path", "template"),
    [
        ("/v1/items/a", "/v1/items/{item_id}"),
        ("/v1/items/a/similar", "/v1/items/{item_id}/similar"),
        ("/v1/items/a/b", "/v1/items/{item_id}"),
        ("/v1/items/a/b/similar", "/v1/items/{item_id}/similar"),
        ("/v1/users/a/b/history", "/v1/users/{user_id}/history"),
        ("/v1/users/mail/ada@x.org", "/v1/users/{user_id}"),
        ("/v1/users/", "/v1/users/{user_id}"),  # an empty id, which the route refuses
        ("/v1/items", "/v1/items"),
        ("/v1/items/a\nb", "/v1/items/{item_id}"),
        ("/v1/items/", "/v1/items/{item_id}"),
        ("/static/css/app.css", "/static/{path}"),
        ("/", "/"),
        ("", None),
        ("//v1/items", None),
    ],
)
def test_a_path_finds_its_route(path, template):
    route, _ = find_route({"type": "http", "method": "GET", "path": path})
    assert (None if route is None else route.path_format) == template


def test_every_change_needs_more_than_the_scope_read():
    asking = {
        "/v1/recommendations",
        "/v1/recommendations/batch",
        "/v1/rank",
        "/v1/texts",
    }
    for (method, path), scope in SCOPES.items():
        if method in ("PUT", "DELETE") or (method == "POST" and path not in asking):
            assert scope >= Scope.WRITE, (method, path)
        if path.startswith("/v1/") or path == "/metrics":
            assert scope >= Scope.READ, (method, path)


@pytest.fixture
def keys(file):
    return {scope: auth.create(file, scope, scope) for scope in ("read", "write", "admin")}


@pytest.fixture
async def guarded(settings, recommender, running, file, keys):
    with_keys = settings.model_copy(update={"keys": file})
    async with running(with_keys, recommender=recommender) as (client, _):
        yield client


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


async def test_without_a_key_only_public_routes_answer_and_say_nothing_of_models(guarded):
    model = guarded._transport.app.state.service.state.models.get()
    words = model.version, *model.recommender.catalog.item_ids
    for (method, template), scope in SCOPES.items():
        path = template.replace("{path}", "none").replace("{", "").replace("}", "")
        response = await guarded.request(method, path)
        assert (response.status_code == 401) == (scope is not Scope.PUBLIC), (method, path)
        assert not any(word in response.text for word in words), path
        if response.status_code == 401:
            assert response.json()["code"] == "unauthenticated"
            assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/nothing", "/v1/nothing", "/v1/items/"):
        assert (await guarded.get(path)).status_code == 401


async def test_a_wrong_key_is_no_key(guarded, keys):
    for header in (
        *("Bearer rk_wrong", "Bearer", "Bearer ", f"Basic {keys['admin']}", keys["admin"]),
        f"Bearer {keys['admin']}, Bearer {keys['read']}",
    ):
        response = await guarded.get("/v1/models", headers={"authorization": header})
        assert response.status_code == 401
        assert keys["admin"] not in response.text


async def test_each_scope_allows_exactly_what_it_includes(guarded, keys):
    for (method, template), needed in SCOPES.items():
        path = template.replace("{path}", "none").replace("{", "").replace("}", "")
        for scope in (Scope.READ, Scope.WRITE):
            response = await guarded.request(method, path, headers=bearer(keys[scope.word]))
            assert (response.status_code == 403) == (scope < needed), (method, path, scope)
            if response.status_code == 403:
                body = response.json()
                assert body["code"] == "forbidden"
                assert f"needs a key of scope {needed.word}" in body["detail"]
        response = await guarded.request(method, path, headers=bearer(keys["admin"]))
        assert response.status_code not in (401, 403)


async def test_the_scope_is_that_of_the_route_for_any_id(guarded, keys):
    for path in ("/v1/items/a%2Fsimilar", "/v1/users/u%2Fhistory"):
        response = await guarded.delete(path, headers=bearer(keys["read"]))
        assert response.status_code == 403
        response = await guarded.delete(path, headers=bearer(keys["write"]))
        assert response.status_code in (204, 404)


async def test_a_route_without_a_declared_scope_needs_admin(guarded, keys, monkeypatch):
    route, _ = find_route({"type": "http", "method": "GET", "path": "/v1/models"})
    assert route is not None
    monkeypatch.delattr(route.endpoint, "scope")
    response = await guarded.get("/v1/models", headers=bearer(keys["write"]))
    assert (response.status_code, response.json()["code"]) == (403, "forbidden")
    assert (await guarded.get("/v1/models", headers=bearer(keys["admin"]))).status_code == 200


async def test_an_unsupported_method_is_405_with_all_methods(guarded, keys):
    for scope in ("read", "admin"):
        response = await guarded.get("/v1/rank", headers=bearer(keys[scope]))
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        response = await guarded.post("/v1/items/a", headers=bearer(keys[scope]))
        allowed = "DELETE, GET, HEAD, PATCH"
        assert (response.status_code, response.headers["allow"]) == (405, allowed)


async def test_the_access_line_names_the_key_and_never_shows_it(guarded, keys, caplog):
    caplog.set_level("INFO")
    await guarded.get("/v1/models", headers=bearer(keys["write"]))
    (record,) = [r for r in caplog.records if r.name == "recsys.serving.access"]
    assert record.fields["key"] == "write"
    assert keys["write"] not in caplog.text


async def test_openapi_has_the_scope_of_each_operation(guarded):
    document = (await guarded.get("/openapi.json")).json()
    assert document["components"]["securitySchemes"]["key"]["scheme"] == "bearer"
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scope = SCOPES[method.upper(), path]
            if scope is Scope.PUBLIC:
                assert "security" not in operation
            else:
                assert operation["security"] == [{"key": []}]
                assert operation["x-scope"] == scope.word


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for other users")
def test_a_key_that_root_makes_leaves_the_file_to_its_owner(file):
    auth.create(file, "shop", "read")
    os.chown(file, 12345, 12346)
    auth.create(file, "ops", "admin")
    assert (file.stat().st_uid, file.stat().st_gid) == (12345, 12346)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
