"""The door, before replicas that are lost, busy or slow; no Ray."""

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path
from unittest.mock import AsyncMock, MagicMock

import httpx
import pytest
import yaml
from starlette.requests import Request

from recsys.errors import ConfigError, RecsysError
from recsys.serving.batcher import DeadlineExceededError, QueueFullError
from recsys.serving.cluster import deployment
from recsys.serving.cluster.door import Door, ReplicaLostError
from recsys.serving.cluster.ray import start_ray
from recsys.serving.cluster.replica import Call, Replica, Reply, answer
from recsys.serving.middleware import CLIENT_CLOSED
from recsys.serving.settings import ServingSettings

JSON = (b"content-type", b"application/json")
SEEDED = {"history": ["item-1"]}


class FakeReplicas:
    """Answers what it is told to, one after the other; the last for ever."""

    def __init__(self):
        self.outcomes: list[Reply | Exception] = [Reply(200, [JSON], b"{}", "a:1")]
        self.replies: list[Reply] = []
        self.asked: list[tuple[Call, str]] = []
        self.all: list[Call] = []

    async def ask(self, call, session):
        self.asked.append((call, session))
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def ask_all(self, call):
        self.all.append(call)
        return self.replies


def problem(code, status=503):
    return Reply(status, [JSON], json.dumps({"code": code}).encode(), "a:1")


ASK, EVENTS = "/v1/recommendations", "/v1/events"
GOOD, LOST = Reply(200, [JSON], b"{}", "a:1"), ReplicaLostError()


@pytest.fixture
def replicas():
    return FakeReplicas()


@pytest.fixture
async def client(request, replicas):
    """A client of a door with a deadline in milliseconds, which most tests do not wait for."""
    door = Door(replicas, deadline_ms=getattr(request, "param", 60_000), max_body_bytes=2000)

    async def ask(scope, receive, send):
        response = await door(Request(scope, receive))
        await response(scope, receive, send)

    transport = httpx.ASGITransport(ask)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    ("path", "outcomes", "told", "asked"),
    [
        pytest.param(ASK, [LOST, LOST, GOOD], (200, None), 3, id="lost: sent again"),
        pytest.param(EVENTS, [LOST], (503, "not_ready"), 1, id="lost events: not sent twice"),
        pytest.param(EVENTS, [problem("not_ready"), GOOD], (200, None), 2, id="not ready: next"),
        pytest.param(ASK, [problem("shutting_down"), GOOD], (200, None), 2, id="stopping: next"),
        pytest.param(
            ASK, [problem("store_unavailable")], (503, "store_unavailable"), 1, id="store"
        ),
        pytest.param(ASK, [QueueFullError()], (429, "queue_full"), 1, id="queue full: no retry"),
    ],
)
async def test_a_request_is_sent_again_only_where_that_is_right(
    client, replicas, path, outcomes, told, asked
):
    replicas.outcomes = [*outcomes]
    response = await client.post(path, json=SEEDED)
    assert (response.status_code, response.json().get("code")) == told
    assert ("retry-after" in response.headers) == (told[1] in ("not_ready", "queue_full"))
    assert len(replicas.asked) == asked
    assert len({dict(call.scope["headers"])[b"x-request-id"] for call, _ in replicas.asked}) == 1


@pytest.mark.parametrize("client", [200], indirect=True)
async def test_a_door_without_replicas_gives_up_at_the_deadline(client, replicas):
    replicas.outcomes = [ReplicaLostError()]
    response = await client.post(
        "/v1/recommendations", json=SEEDED, headers={"x-request-id": "mine"}
    )
    assert response.status_code == 503
    assert response.json()["request_id"] == "mine"
    assert len(replicas.asked) > 1


async def test_a_client_that_goes_before_its_body_is_read_has_the_status_for_that(replicas):
    async def receive():
        return {"type": "http.disconnect"}

    door = Door(replicas, deadline_ms=1, max_body_bytes=9)
    scope = {"type": "http", "method": "POST", "path": ASK, "headers": []}
    assert (await door(Request(scope, receive))).status_code == CLIENT_CLOSED


async def test_the_door_ends_a_connection_whose_requests_are_ambiguous(client, replicas):
    headers = {"Content-Length": "2001", "Transfer-Encoding": "chunked"}
    response = await client.post("/v1/rank", content=b"x" * 2001, headers=headers)
    assert (response.status_code, response.json()["code"]) == (400, "ambiguous_length")
    assert response.headers["connection"] == "close"
    assert replicas.asked == []


async def test_the_door_refuses_a_large_body(client, replicas):
    response = await client.post("/v1/recommendations", content=b"x" * 2001)
    assert (response.status_code, response.json()["code"]) == (413, "body_too_large")
    assert replicas.asked == []


async def test_large_bodies_at_the_door_are_limited_together(replicas):
    gate, size = asyncio.Event(), 1 << 20

    async def ask(call, session):
        await gate.wait()
        return GOOD

    replicas.ask = ask
    receive = AsyncMock(return_value={"type": "http.request", "body": bytes(size)})
    door = Door(replicas, deadline_ms=60_000, max_body_bytes=size)
    scope = {"type": "http", "method": "POST", "path": ASK, "headers": []}
    asked = [asyncio.create_task(door(Request({**scope}, receive))) for _ in range(10)]
    for _ in range(100):
        await asyncio.sleep(0)
    gate.set()
    assert [(await task).status_code for task in asked] == [200] * 8 + [429] * 2


@pytest.mark.parametrize(("given", "used"), [(None, 3), (5, 5)])
def test_a_replica_computes_on_the_cores_that_ray_gives_it(tmp_path, monkeypatch, given, used):
    ray = MagicMock()
    ray.get_runtime_context().get_assigned_resources.return_value = {"CPU": 3.0}
    monkeypatch.setattr(deployment, "import_ray", lambda: ray)
    monkeypatch.delattr(deployment.ServedReplica, "__del__")
    settings = ServingSettings(bundle=tmp_path, histories=None, keys=None, threads=given)
    assert deployment.ServedReplica(settings.model_dump()).settings.threads == used


@pytest.mark.parametrize(
    ("method", "path"),
    [("PATCH", "/v1/items/a/b"), ("POST", "/v1/items"), ("PUT", "/v1/aliases/champion")],
)
async def test_a_change_goes_to_all_replicas_and_fails_if_one_refuses(
    client, replicas, method, path
):
    replicas.replies = [Reply(200, [JSON], b"{}", "a:1"), problem("bundle_refused", 409)]
    response = await client.request(method, path, json={})
    assert response.json() == {"code": "bundle_refused"}
    assert len(replicas.all) == 1
    assert replicas.asked == []


@pytest.mark.parametrize("path", ["/v1/items/a", "/v1/aliases/next"])
@pytest.mark.parametrize(
    ("statuses", "told"),
    [((204, 404), 204), ((404, 204), 204), ((404, 404), 404), ((404, 503), 503), ((204, 409), 409)],
)
async def test_a_deletion_is_404_only_if_every_replica_says_so(
    client, replicas, path, statuses, told
):
    replicas.replies = [Reply(status, [JSON], b"", "a:1") for status in statuses]
    assert (await client.delete(path)).status_code == told


async def test_metrics_of_all_replicas_have_a_label(client, replicas):
    text = b'# HELP a_total One.\n# TYPE a_total counter\na_total{b="c"} 1.0\n'
    text += b"# HELP g g\n# TYPE g gauge\ng 2.0\n"
    replicas.replies = [Reply(200, [], text, name) for name in ("h:2", "h:1")]
    response = await client.get("/metrics")
    assert response.text.splitlines() == [
        "# HELP a_total One.",
        "# TYPE a_total counter",
        'a_total{b="c",replica="h:1"} 1.0',
        'a_total{b="c",replica="h:2"} 1.0',
        "# HELP g g",
        "# TYPE g gauge",
        'g{replica="h:1"} 2.0',
        'g{replica="h:2"} 2.0',
    ]


def call(method, path, body=None, **headers):
    sent = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    content = b"" if body is None else json.dumps(body).encode()
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": sent}
    return Call.of(scope, content)


async def test_a_session_is_the_header_the_user_or_the_first_item(client, replicas):
    for body, headers, session in (
        ({"user": "ada"}, {"x-session-id": "s"}, "s"),
        ({"user": "ada"}, {}, "ada"),
        ({"history": ["x", "y"]}, {}, "x"),
    ):
        await client.post(ASK, json=body, headers=headers)
        assert replicas.asked[-1][1] == session


async def test_an_application_answers_a_call_as_it_answers_a_client():
    async def app(scope, receive, send):
        message = await receive()
        assert not message["more_body"]
        body = scope["method"].encode() + b" " + scope["raw_path"] + b" " + message["body"]
        await send({"type": "http.response.start", "status": 201, "headers": [JSON]})
        await send({"type": "http.response.body", "body": body[:3], "more_body": True})
        if scope["method"] == "PUT":  # else the answer is cut off at its deadline
            await send({"type": "http.response.body", "body": body[3:]})

    reply = await answer(app, call("PUT", "/x", {"a": 1}))
    assert (reply.status, reply.headers, reply.body) == (201, [JSON], b'PUT /x {"a": 1}')
    with pytest.raises(DeadlineExceededError):
        await answer(app, call("GET", "/x"))


async def test_a_replica_starts_answers_and_swaps(bundles, tmp_path):
    replica = Replica(
        {"bundle": bundles / "one", "histories": None, "store": tmp_path / "h.db", "keys": None}
        | {"threads": 1, "gc_freeze": False}
    )
    await replica.reconfigure()
    life = replica._life
    await replica.reconfigure()  # as after another deployment
    with pytest.raises(RecsysError, match="PUT /v1/aliases"):
        await replica.reconfigure({"aliases": {"champion": "two"}})
    assert replica._life is life
    ask = call("POST", "/v1/recommendations", {"history": ["B0001"]}, host="localhost")
    ask.scope["headers"].append(JSON)
    first = json.loads((await replica.answer(ask)).body)
    assert first["model"]["name"] == "one"
    swap = call("PUT", "/v1/aliases/champion", {"bundle": "two"}, host="localhost")
    swap.scope["headers"].append(JSON)
    assert (await replica.answer(swap)).status == 200
    second = json.loads((await replica.answer(ask)).body)
    assert second["model"]["name"] == "two"
    replica.check_health()
    await replica.stop()


async def test_a_request_of_rays_proxies_is_answered_though_its_version_is_not_known(replicas):
    scope = call("GET", "/health/live", transfer_encoding="chunked").scope
    del scope["http_version"]

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    door = Door(replicas, deadline_ms=60_000, max_body_bytes=2000)
    response = await door(Request(scope, receive))
    assert (response.status_code, response.body) == (200, b"{}")
    assert response.raw_headers == [JSON]


def test_the_files_to_deploy_are_valid_and_say_the_same():
    schema = pytest.importorskip("ray.serve.schema")
    files = Path(__file__).parents[3] / "deploy" / "ray"
    alone = yaml.safe_load((files / "serve.yaml").read_text())
    service = yaml.safe_load((files / "rayservice.yaml").read_text())
    (application,) = alone["applications"]
    within = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"][0]
    for one in (application, within):
        given = {"host": "0.0.0.0", "store": "postgresql://db/r", **one["args"]["serve"]}
        assert ServingSettings.load(None, (), **given).hosts == ("*",)
        (replicas,) = schema.ServeApplicationSchema(**one).deployments
        assert replicas.name == deployment.REPLICAS
        assert replicas.autoscaling_config["target_ongoing_requests"] == 32
        module, name = one["import_path"].split(":")
        assert callable(getattr(import_module(module), name))


@pytest.mark.parametrize("address", [None, "10.0.0.7:6379"])
def test_a_cluster_is_joined_or_started(monkeypatch, address):
    """Ray reads the variable itself; a cluster that is joined has its own options."""
    ray = MagicMock()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    start_ray(ray)
    options = ray.init.call_args.kwargs
    assert ("object_store_memory" in options) == (address is None)
    assert "address" not in options


def test_rays_proxies_need_keys_or_insecure_listen(monkeypatch):
    monkeypatch.setattr(deployment, "import_ray", lambda: None)
    monkeypatch.setitem(sys.modules, "ray", MagicMock())
    with pytest.raises(ConfigError, match=r"has\s+no\s+keys"):
        deployment.app({"serve": {}})
    with pytest.raises(ConfigError, match=r"unknown key 'cluster'.*options of `deployments`"):
        deployment.app({"cluster": {}})


@pytest.mark.parametrize("scheme", ["postgresql", "postgres"])
def test_replicas_on_several_machines_need_a_database(monkeypatch, tmp_path, scheme):
    ray = MagicMock()
    ray.nodes.return_value = [{"Alive": True}, {"Alive": True}, {"Alive": False}]
    monkeypatch.setattr(deployment, "import_ray", lambda: ray)
    for store in (tmp_path / "h.db", f"sqlite:///{scheme}.db"):
        with pytest.raises(ConfigError, match=r"serves one machine .* has 2"):
            deployment.replicas(ServingSettings(bundle=tmp_path, store=store))
    settings = ServingSettings(bundle=tmp_path, store=f"{scheme}://db/r")
    assert deployment.replicas(settings) is not None
