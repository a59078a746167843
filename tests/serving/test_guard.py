import asyncio
from functools import partial
from urllib.parse import quote

import pytest
from starlette.datastructures import Headers

from recsys.errors import ConfigError
from recsys.serving import auth, middleware
from recsys.serving.errors import ProblemError
from recsys.serving.limits import RateLimit
from recsys.serving.middleware import BODIES, BodyLimit
from recsys.serving.settings import ServingSettings

MAX = 1 << 20

# The bucket


def test_a_bucket_gives_its_burst_and_then_its_rate(clock):
    limit = RateLimit(2.0, 3, clock=clock)
    assert [limit.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    clock.now = 0.5
    assert limit.take("a") == 0
    assert limit.take("a") == 0.5
    clock.now = 100.0  # no more than the burst has gathered
    assert [limit.take("a") > 0 for _ in range(4)] == [False, False, False, True]


def test_clients_have_buckets_of_their_own_in_bounded_number(clock):
    limit = RateLimit(1.0, 1, clients=3, clock=clock)
    for client in "abc":
        assert limit.take(client) == 0
    assert limit.take("a") == 1.0  # and is now the one used last
    assert limit.take("d") == 0
    assert len(limit._buckets) == 3
    assert limit.take("a") == 1.0
    assert limit.take("b") == 0  # was forgotten


async def test_too_many_requests_are_refused_with_retry_after(settings, recommender, running):
    slow = settings.model_copy(update={"rate_limit": 0.1, "rate_burst": 2})
    async with running(slow, recommender=recommender) as (client, service):
        assert [(await client.get("/v1/models")).status_code for _ in range(3)] == [200, 200, 429]
        response = await client.get("/v1/models")
        assert response.json()["code"] == "rate_limited"
        assert 1 <= int(response.headers["retry-after"]) <= 10
        for _ in range(5):  # an orchestrator may always ask
            assert (await client.get("/health/live")).status_code == 200
        assert b"recsys_rate_limited_total 2.0" in service.metrics.exposition()


async def test_each_key_has_a_bucket_of_its_own(settings, recommender, running, tmp_path):
    file = tmp_path / "keys.json"
    made = {
        name: {"Authorization": f"Bearer {auth.create(file, name, 'read')}"}
        for name in ("one", "other")
    }
    guarded = settings.model_copy(update={"keys": file, "rate_limit": 1e-3, "rate_burst": 20})
    async with running(guarded, recommender=recommender) as (client, _):

        async def allowed(name, path="/v1/models"):
            count = 0
            while (response := await client.get(path, headers=made[name])).status_code == 200:
                count += 1
            assert (response.status_code, response.json()["code"]) == (429, "rate_limited")
            return count

        assert await allowed("one") == 20
        page = "/v1/users/ada/history?limit=1000"
        assert await allowed("other", page) == 2  # units, and not requests
        assert await allowed("one") == 0
        without = [(await client.get("/v1/models")).status_code for _ in range(21)]
        assert without == [401] * 20 + [429]  # by its address
        response = await client.get("/health/live", headers=made["one"])
        assert response.status_code == 200


async def test_no_number_of_addresses_gives_a_key_a_new_bucket(
    settings, recommender, running, tmp_path, monkeypatch
):
    monkeypatch.setattr(middleware, "RateLimit", partial(RateLimit, clients=1))
    header = {"Authorization": f"Bearer {auth.create(tmp_path / 'keys.json', 'one', 'read')}"}
    update = {"keys": tmp_path / "keys.json", "rate_limit": 1e-3, "rate_burst": 1}
    async with running(settings.model_copy(update=update), recommender=recommender) as (client, _):
        asked = [
            (await client.get("/v1/models", headers=h)).status_code for h in (header, {}, header)
        ]
    assert asked == [200, 401, 429]


@pytest.mark.parametrize("client", [("key one", 0), ("x" * 9999, 0), None])
def test_what_is_no_address_is_unknown(client):
    assert middleware._address({"client": client}) == "unknown"
    assert middleware._address({"client": ("::1", 5)}) == "::1"


async def test_targets_and_headers_are_limited(client):
    response = await client.get("/v1/items/" + "x" * 9000)
    assert (response.status_code, response.json()["code"]) == (414, "target_too_long")
    response = await client.get("/v1/models?" + "x" * 9000)
    assert response.status_code == 414
    response = await client.get("/v1/models", headers={"x-large": "x" * 17_000})
    assert (response.status_code, response.json()["code"]) == (431, "headers_too_large")
    response = await client.get("/v1/models", headers={f"x-{i}": "x" for i in range(70)})
    assert response.status_code == 431


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("DELETE", "/v1/users/M%FCller"),
        ("GET", "/v1/users/caf%E9/history"),
        ("GET", "/v1/items?q=caf%E9"),
        ("PATCH", "/v1/items/caf%E9"),
        ("GET", "/v1/users/%ED%A0%80/history"),  # half a surrogate pair
    ],
)
async def test_ids_that_are_not_utf_8_are_refused(client, method, target):
    """They became one id, so another user was erased."""
    response = await client.request(
        method, target, json={"title": "x"} if method == "PATCH" else None
    )
    assert (response.status_code, response.json()["code"]) == (400, "malformed_target")
    assert target.partition("%")[2][:2] in response.json()["detail"]


async def test_without_keys_other_host_names_are_refused(client):
    for host, status in (("evil.example", 400), ("localhost:8000", 200), ("127.0.0.1", 200)):
        assert (await client.get("/v1/models", headers={"host": host})).status_code == status


async def test_two_keys_or_host_names_are_refused(client):
    for header, value, refusal in (
        ("authorization", "Bearer a", (401, "unauthenticated")),
        ("host", "localhost", (400, "unknown_host")),
    ):
        response = await client.get("/v1/models", headers=[(header, value)] * 2)
        assert (response.status_code, response.json()["code"]) == refusal


async def test_the_rate_is_one_of_work(settings, recommender, running):
    slow = settings.model_copy(update={"rate_limit": 0.001, "rate_burst": 10})
    url, large = "/v1/recommendations", {"history": ["item-1"], "k": 200}
    async with running(slow, recommender=recommender) as (client, _):
        answer = await client.post(f"{url}/batch", json={"requests": [large] * 5})
        codes = [one["status"] for one in answer.json()["results"]]
        assert codes == [200, 200, 429, 429, 429]  # 5.2 units each


async def test_large_bodies_are_limited_together(settings):
    async def body():
        return {"type": "http.request", "body": b" " * MAX, "more_body": False}

    gate, accepted, refused = asyncio.Event(), [], []
    limit = BodyLimit(MAX)

    async def serve(number):
        with limit.counted(Headers({}), body) as receive:
            try:
                await receive()
            except ProblemError as error:
                refused.append(error.code)
                return
            accepted.append(number)
            await gate.wait()

    tasks = [asyncio.create_task(serve(number)) for number in range(10)]
    await asyncio.sleep(0)
    assert accepted == [*range(BODIES)]
    assert refused == ["queue_full"] * 2
    gate.set()
    await asyncio.gather(*tasks)
    assert not limit.room.taken
    await serve(10)
    assert accepted[-1] == 10


async def test_listed_hosts_are_answered_and_health_and_metrics_by_address_too(
    settings, recommender, running
):
    listed = settings.model_copy(update={"allowed_hosts": "shop.example, *.inside.example"})
    async with running(listed, recommender=recommender) as (client, _):
        for path, host, status in (
            ("/health/live", "10.1.2.3:8000", 200),
            ("/health/ready", "pod.internal", 200),
            ("/metrics", "10.1.2.3:8000", 200),
            ("/metrics", "[fd00::1]:8000", 200),
            ("/metrics", "evil.example", 400),
            ("/v1/models", "10.1.2.3:8000", 400),
            ("/v1/models", "shop.example", 200),
            ("/v1/models", "a.b.inside.example", 200),
            ("/v1/models", "inside.example", 400),
            ("/v1/models", "localhost", 400),
        ):
            response = await client.get(path, headers={"host": host})
            assert response.status_code == status, (path, host)


async def test_pages_of_other_origins_cannot_change_anything(client):
    path = "/v1/aliases/champion/rollback"
    for headers in (
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site", "origin": "http://localhost:3000"},
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
    ):
        response = await client.post(path, headers=headers)
        assert (response.status_code, response.json()["code"]) == (403, "cross_origin")
        assert (await client.delete("/v1/users/ada", headers=headers)).status_code == 403
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    for headers in (
        {},
        {"sec-fetch-site": "same-origin", "origin": "http://localhost"},
        {"sec-fetch-site": "none"},
        {"origin": "http://LOCALHOST"},
    ):
        response = await client.post(path, headers=headers)
        assert (response.status_code, response.json()["code"]) == (409, "alias_conflict")


async def test_responses_have_security_headers_and_are_not_stored(client):
    for path in ("/", "/openapi.json", "/v1/models", "/v1/nothing", "/health/live", "/metrics"):
        headers = (await client.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        stored = headers.get("cache-control") != "no-store"
        assert stored == (not path.startswith(("/v1/", "/metrics")))


async def test_the_policy_allows_pictures_of_named_hosts_only(settings, recommender, running):
    def sources(response):
        parts = response.headers["content-security-policy"].split("; ")
        return next(part for part in parts if part.startswith("img-src"))

    async with running(settings, recommender=recommender) as (client, _):
        assert sources(await client.get("/")) == "img-src 'self' data:"
    listed = settings.model_copy(update={"image_hosts": "CDN.example, *.shop.example"})
    async with running(listed, recommender=recommender) as (client, _):
        page = await client.get("/")
        expected = "img-src 'self' data: https://cdn.example https://*.shop.example"
        assert sources(page) == expected
        assert 'content="cdn.example *.shop.example"' in page.text
    for wrong in ("a.example;script-src *", "https://a.example", "a b", "a,,b", "*", ""):
        with pytest.raises(ConfigError, match="image_hosts"):
            ServingSettings.load(image_hosts=wrong)


async def test_a_refused_request_is_logged_without_its_path(settings, recommender, running, caplog):
    caplog.set_level("INFO", "recsys.serving.access")
    listed = settings.model_copy(update={"allowed_hosts": "shop.example"})
    async with running(listed, recommender=recommender) as (client, service):
        assert (await client.get("/v1/users/ada/history")).status_code == 400
        assert (await client.get("/nothing/" + "x" * 5000)).status_code == 400
        text = service.metrics.exposition().decode()
    routes = [r.fields["route"] for r in caplog.records if r.name == "recsys.serving.access"]
    assert routes == ["/v1/users/{user_id}/history", "unmatched"]
    assert "ada" not in caplog.text
    assert 'route="/v1/users/{user_id}/history"' in text
    assert "nothing" not in text


async def test_a_user_id_with_slashes_is_read_erased_and_not_logged(client, caplog):
    caplog.set_level("INFO", "recsys.serving.access")
    user = "mail/ada@x.org"
    body = {"events": [{"user": user, "item": "item-1"}]}
    assert (await client.post("/v1/events", json=body)).status_code == 200
    for path in (user, "mail%2Fada@x.org"):
        assert (await client.get(f"/v1/users/{path}/history")).json()["user"] == user
    assert (await client.delete(f"/v1/users/{user}")).status_code == 204
    assert (await client.get(f"/v1/users/{user}/history")).status_code == 404
    await client.get(f"/v1/user/{user}")
    routes = {r.fields["route"] for r in caplog.records if r.name == "recsys.serving.access"}
    assert "unmatched" in routes
    assert not any("ada" in route for route in routes)


CONTROLS = ("a\0b", "a\nb", "\x1b[2J", "a\x7f", "a\n")


@pytest.mark.parametrize("bad", CONTROLS)
async def test_ids_with_control_characters_are_refused_everywhere(client, bad):
    path = quote(bad, safe="")
    for method, url, body in (
        ("POST", "/v1/recommendations", {"user": bad}),
        ("POST", "/v1/recommendations", {"history": [bad]}),
        ("POST", "/v1/recommendations", {"history": [], "exclude_items": [bad]}),
        ("POST", "/v1/rank", {"history": [], "items": [bad]}),
        ("POST", "/v1/events", {"events": [{"user": "ada", "item": bad}]}),
        ("POST", "/v1/items", {"items": [{"item_id": bad, "like": "item-1"}]}),
        ("PATCH", f"/v1/items/{path}", {"title": "new"}),
        ("GET", f"/v1/items/{path}", None),
        ("DELETE", f"/v1/items/{path}", None),
        ("GET", f"/v1/items/{path}/similar", None),
        ("GET", f"/v1/users/{path}/history", None),
        ("DELETE", f"/v1/users/{path}", None),
    ):
        response = await client.request(method, url, json=body)
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request"), url
        assert "control characters" in response.json()["detail"]
