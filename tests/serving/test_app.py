import asyncio
import json
import logging
import re
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from recsys.errors import ArtifactError
from recsys.recommender import RecommendRequest
from recsys.serving.api import openapi as openapi_module
from recsys.serving.api.routes import ROUTES
from recsys.serving.errors import KINDS
from recsys.serving.service import Phase
from recsys.serving.stores.records import StoreError

URL = "/v1/recommendations"
EVEN = {"must": [{"key": "categories", "match": "even"}]}
JSON = {"content-type": "application/json"}


def is_problem(response, code):
    body = response.json()
    kind = KINDS[code]
    assert (body["code"], body["status"], response.status_code) == (code, kind.status, kind.status)
    assert response.headers["content-type"] == "application/problem+json"
    assert body["type"] == f"urn:recsys:problem:{code}"
    assert body["title"] == kind.title
    assert body["detail"]
    assert body["request_id"] == response.headers["x-request-id"]
    assert ("retry-after" in response.headers) == (kind.retry_after_s is not None)
    return body


def ids(response):
    assert response.status_code == 200, response.text
    return [item["item_id"] for item in response.json()["items"]]


def shortened(fallback, request):
    result = fallback(request)
    return replace(result, recommendations=result.recommendations[:2])


async def test_an_inline_history_is_answered_by_the_model(client, recommender):
    history = ["item-1", "gone", "item-2", "lost"]
    response = await client.post(URL, json={"history": history, "k": 3})
    assert ids(response) == recommender.expected(history, 3)
    body = response.json()
    assert re.fullmatch("[0-9a-f]{32}", body.pop("recommendation_id"))
    first = body.pop("items")[0]
    assert first == {
        "item_id": first["item_id"],
        "score": 0.0,
        "title": f"Thing no. {first['item_id'][5:]}",
        "rank": 1,
        "source": "model",
        "semantic_id": list(recommender.named(first["item_id"], 0.0).semantic_id),
    }
    assert body == {
        "model": {
            "name": "demo",
            "version": recommender.manifest.digest,
            "alias": "champion",
            "epoch": 0,
        },
        "certificate": "beam-exact",
        "history_items": 2,
        "unknown_items": ["gone", "lost"],
        "eligible_items": 298,
        "note": None,
    }


async def test_an_unknown_user_without_fallback_is_a_problem(client):
    strict = {"user": "eve", "fallback": False}
    body = is_problem(await client.post(URL, json=strict), "unknown_user")
    assert body["detail"] == "There is no history of user 'eve'; send one inline as 'history'."


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        ({"history": []}, "empty_history"),
        ({"history": ["gone"]}, "unknown_history"),
        ({"user": "bob"}, "unknown_history"),
    ],
)
async def test_unknown_histories_get_a_fallback_or_the_bare_prompt(
    client, recommender, request_, code
):
    unknown = [] if code == "empty_history" else ["gone"]
    answer = await client.post(URL, json={**request_, "filter": EVEN, "exclude_items": ["item-2"]})
    assert ids(answer)[:2] == ["item-0", "item-4"]  # the filter and exclusions hold
    body = answer.json()
    assert (body["note"]["code"], body["unknown_items"]) == (code, unknown)
    assert (body["history_items"], body["eligible_items"]) == (0, 149)
    # who asks for what only the model can do gets the model
    boosted = {"boosts": [{"filter": EVEN, "weight": 1}]}
    for special in ({"fallback": False}, {"seed": 7}, {"blend": False}, {"guarantee": "global"},
                    {"include": ["trace"]}, boosted):  # fmt: skip
        answer = await client.post(URL, json={**request_, **special})
        assert ids(answer) == recommender.expected(unknown)
        assert answer.json()["note"]["code"] == code
        assert "bare prompt" in answer.json()["note"]["detail"]
    # how a list is computed is not such a wish
    for mode in ("beam", "strict"):
        answer = await client.post(URL, json={**request_, "filter": EVEN, "mode": mode})
        assert ids(answer)[:2] == ["item-0", "item-2"]


async def test_new_users_get_the_bare_prompt_without_retrieval(client, recommender):
    recommender.retrieval = None
    answer = await client.post(URL, json={"user": "eve"})
    assert ids(answer) == recommender.expected([])
    assert answer.json()["note"]["code"] == "unknown_user"


async def test_the_model_fills_up_a_short_fallback(client, recommender):
    recommender.fallback = partial(shortened, recommender.fallback)
    request = {"user": "eve", "k": 5, "filter": EVEN, "exclude_items": ["item-2"]}
    body = (await client.post(URL, json=request | {"include": ["metadata", "timing"]})).json()
    hidden = ["item-2", "item-0", "item-4"]
    named = recommender.expected([], 3, filter=EVEN, exclude_items=hidden)
    assert [item["item_id"] for item in body["items"]] == ["item-0", "item-4", *named]
    assert [item["source"] for item in body["items"]] == ["popular"] * 2 + ["model"] * 3
    assert [item["rank"] for item in body["items"]] == [1, 2, 3, 4, 5]
    assert all(item["metadata"]["categories"] == ["even"] for item in body["items"])
    assert (body["certificate"], body["eligible_items"]) == ("approximate", 149)
    assert (body["note"]["code"], body["timing"]["batch_size"]) == ("unknown_user", 1)
    assert "the model" in body["note"]["detail"]


async def test_a_fallback_stays_short_if_the_queue_is_full(settings, recommender, running, until):
    recommender.fallback = partial(shortened, recommender.fallback)
    tight = settings.model_copy(update={"queue_limit": 1, "max_batch": 1})
    async with running(tight, recommender=recommender) as (client, service):
        recommender.gate.clear()
        first = asyncio.create_task(client.post(URL, json={"history": ["item-1"]}))
        await until(lambda: recommender.busy)
        second = asyncio.create_task(client.post(URL, json={"history": ["item-2"]}))
        await until(lambda: service.state.models.queue_depth() == 1)
        answer = await client.post(URL, json={"user": "eve", "k": 5})
        assert ids(answer) == ["item-0", "item-1"]
        recommender.gate.set()
        assert [r.status_code for r in await asyncio.gather(first, second)] == [200, 200]


async def test_metadata_and_timing_are_included_on_request(client):
    request = {"history": ["item-1"], "k": 200, "include": ["metadata", "timing"]}
    body = (await client.post(URL, json=request)).json()
    for item in body["items"]:
        number = int(item["item_id"][5:])
        price = number / 2 if number else None  # not a number becomes null
        categories = ["odd" if number % 2 else "even"]
        assert item["metadata"] == {"price": price, "categories": categories}
    timing = body["timing"]
    assert (timing["batch_size"], timing["decode"]["target_passes"]) == (1, 3)
    assert timing["total_ms"] >= timing["compute_ms"] >= 0


@pytest.mark.parametrize(
    ("body", "pointer", "text"),
    [
        ({}, "", "exactly one of 'user' and 'history'"),
        ({"user": "ada", "history": []}, "", "exactly one of 'user' and 'history'"),
        ({"user": "u" * 257}, "/user", "at most 256 characters"),
        ({"history": ["item-1", ""]}, "/history/1", "at least 1 character"),
        ({"history": [1]}, "/history/0", "valid string"),
        ({"history": ["x"] * 2001}, "/history", "at most 2000 items"),
        ({"history": [], "exclude_items": ["x"] * 2001}, "/exclude_items", "at most 2000 items"),
        ({"history": [], "k": 0}, "/k", "greater than or equal to 1, got 0"),
        ({"history": [], "k": True}, "/k", "valid integer"),
        ({"history": [], "include": ["all"]}, "/include/0", "'trace' or 'explanation'"),
        ({"history": [], "k": 10**400}, "/k", "less than or equal to 200"),
        ({"history": [], "seed": -1}, "/seed", "greater than or equal to 0"),
        ({"history": [], "model": "../x"}, "/model", "want a name: up to 64 of a to z"),
        ({"history": [], "boosts": [{"filter": {}}]}, "/boosts/0/weight", "required"),
        ({"history": [], "top": 5}, "/top", "unknown field"),
        ({"history": [], "a/b~c": 5}, "/a~1b~0c", "unknown field"),
        ([], "", "a JSON object"),
        (None, "", "a JSON object"),
        ("", "", "a JSON object"),
    ],
)
async def test_an_invalid_request_is_reported_with_its_pointer(client, body, pointer, text):
    content = b"" if body == "" else json.dumps(body)
    response = await client.post(URL, content=content, headers=JSON)
    (error,) = is_problem(response, "invalid_request")["errors"]
    assert (error["location"], error["pointer"]) == ("body", pointer)
    assert text in error["detail"]


async def test_refused_fields_are_listed_up_to_a_limit_and_counted(client):
    unknown = {f"field-{i}": 1 for i in range(100)}
    body = is_problem(await client.post(URL, json={"history": [], **unknown}), "invalid_request")
    assert len(body["errors"]) == 20
    assert body["detail"].endswith("(and 99 more)")


@pytest.mark.parametrize(
    ("path", "pointer"),
    [
        ("/v1/items/item-1/similar?k=0", "/k"),
        ("/v1/items/item-1/similar?k=many", "/k"),
        ("/v1/items/item-1/similar?size=3", "/size"),
        ("/v1/lists/latest?include=all", "/include/0"),
        ("/v1/items/item-1/similar?k=1&k=2", "/k"),
        ("/v1/lists/trending?k=3&%6b=3", "/k"),
        ("/v1/today?days=1&days=7", "/days"),
        (f"/v1/users/{'u' * 257}/history", "/user_id"),
        (f"/v1/items/{'i' * 257}", "/item_id"),
    ],
)
async def test_an_invalid_path_or_query_is_reported_with_its_pointer(client, path, pointer):
    (error,) = is_problem(await client.get(path), "invalid_request")["errors"]
    assert error["pointer"] == pointer


@pytest.mark.parametrize(
    "content",
    [
        b'{"history": [}',
        b'{"history": [], "k": 1, "k": 2}',
        b'\xef\xbb\xbf{"history": []}',
    ],
)
async def test_a_body_that_is_not_json_is_a_problem(client, content):
    is_problem(await client.post(URL, content=content, headers=JSON), "malformed_body")


@pytest.mark.parametrize("given", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_a_body_must_say_that_it_is_json(client, given):
    headers = {} if given is None else {"content-type": given}
    response = await client.post(URL, content=b'{"history": []}', headers=headers)
    is_problem(response, "unsupported_media_type")
    response = await client.post(
        URL, content=b'{"history": []}', headers={"content-type": "Application/JSON; charset=utf-8"}
    )
    assert response.status_code == 200


async def test_a_large_body_is_refused_by_its_header(client):
    body = is_problem(
        await client.post(URL, content=b" " * (1024 * 1024 + 1), headers=JSON), "body_too_large"
    )
    assert body["detail"] == "The limit is 1048576 bytes."
    valid = b'{"history": []}'.ljust(1024 * 1024)  # exactly the limit
    assert (await client.post(URL, content=valid, headers=JSON)).status_code == 200


async def test_a_body_too_large_is_refused_while_it_streams(client):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b" " * 64 * 1024

    response = await client.post(URL, content=endless(), headers=JSON)
    is_problem(response, "body_too_large")
    assert sent == 17  # the first chunk beyond 1 MiB


async def test_every_option_arrives_at_the_model(client, recommender, monkeypatch):
    asked = []
    answer = recommender.answer
    monkeypatch.setattr(recommender, "answer", lambda r: (asked.append(r), answer(r))[1])
    boosts = [{"filter": EVEN, "weight": 0.5}]
    asked.clear()
    for options in (
        {"filter": EVEN, "boosts": boosts, "guarantee": "global"},
        {"seed": 2**63 - 1, "temperature": 1.5, "mode": "relaxed"},
        {"mode": "strict", "include": ["trace"], "blend": False},
        {},
    ):
        response = await client.post(URL, json={"history": ["item-1"], **options})
        assert response.status_code == 200, response.text
    first, second, third, last = asked
    assert (first.filter, first.boosts, first.guarantee) == (EVEN, boosts, "global")
    assert (second.seed, second.temperature, second.mode) == (2**63 - 1, 1.5, "relaxed")
    assert (third.mode, third.trace, third.blend) == ("strict", True, False)
    assert last == RecommendRequest(["item-1"], 10, None, [], boosts=[], history_types=[])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"seed": 1, "guarantee": "global"}, "a seed asks for a sample"),
        ({"seed": 1, "boosts": [{"filter": {}, "weight": 1}]}, "a seed asks for a sample"),
        ({"mode": "relaxed"}, "give it a seed"),
    ],
)
async def test_conflicting_options_are_reported(client, options, text):
    response = await client.post(URL, json={"history": ["item-1"], **options})
    assert text in is_problem(response, "invalid_request")["detail"]


async def test_traces_and_explanations_are_included_on_request(client):
    request = {"history": ["item-1"], "k": 1, "include": ["trace", "explanation"]}
    body = (await client.post(URL, json=request)).json()
    assert body["trace"] == {
        "nodes": [
            {
                "parent": -1, "depth": 1, "token": 2, "state": 1, "target_pass": 1,
                "draft_log_prob": -0.5, "target_log_prob": -0.25, "fate": "accepted",
                "code": 0, "items": 81,
            },
            {
                "parent": 0, "depth": 2, "token": 9, "state": 5, "target_pass": 2,
                "draft_log_prob": None, "target_log_prob": -1.0, "fate": "patched",
                "code": 3, "items": 9,
            },
        ],
        "blocked": {"1": 3, "2": 4, "3": 0},
    }  # fmt: skip
    assert body["items"][0]["because"] == "item-1"


async def test_a_batch_is_answered_in_order_despite_failures(client, recommender, caplog):
    requests = [
        {"history": ["item-1"], "k": 2},
        {"user": "eve", "fallback": False},
        {"history": ["item-3", "poison"]},
        {"history": ["item-1"], "filter": {"must": [{"key": "size", "match": 1}]}},
        {"user": "ada", "k": 3},
        {"history": ["item-1"], "model": "nobody"},
        {"history": ["item-5", "not-finite"]},
    ]
    response = await client.post(f"{URL}/batch", json={"requests": requests})
    results = response.json()["results"]
    assert [result["status"] for result in results] == [200, 404, 500, 422, 200, 404, 500]
    assert [i["item_id"] for i in results[0]["answer"]["items"]] == recommender.expected(
        ["item-1"], 2
    )
    codes = [result["problem"]["code"] for result in results if "problem" in result]
    assert codes == [
        *("unknown_user", "internal_error", "invalid_filter", "unknown_model", "non_finite_scores")
    ]
    request_id = response.headers["x-request-id"]
    assert results[1]["problem"]["request_id"] == request_id
    assert "secret" not in response.text
    (record,) = [r for r in caplog.records if r.name == "recsys.serving.failures"]
    assert record.fields == {"request_id": request_id}
    assert "secret" in caplog.text
    body = is_problem(
        await client.post(f"{URL}/batch", json={"requests": [{"history": []}, {"k": 1}]}),
        "invalid_request",
    )
    assert body["errors"][0]["pointer"] == "/requests/1"
    for wrong in ([], [{"history": []}] * 101):
        is_problem(await client.post(f"{URL}/batch", json={"requests": wrong}), "invalid_request")


async def test_the_longest_requests_that_are_allowed_are_answered(client):
    long = {"history": ["i" * 256] * 1999 + ["item-1"], "k": 200, "exclude_items": ["x"] * 2000}
    assert len(ids(await client.post(URL, json=long))) == 200


async def test_an_item_is_shown_with_its_codes_and_attributes(client):
    assert (await client.get("/v1/items/item-100")).json() == {
        "item_id": "item-100",
        "title": "Thing no. 100",
        "text": "",
        "semantic_id": [1, 2, 1],  # 100 = (1 * 9 + 2) * 9 + 1
        "metadata": {"price": 50.0, "categories": ["even"]},
    }
    assert (await client.get("/v1/items/item-0")).json()["metadata"]["price"] is None  # was NaN
    is_problem(await client.get("/v1/items/item-300"), "unknown_item")
    is_problem(await client.get("/v1/items/%ed%a0%80"), "malformed_target")


async def test_models_are_listed(client, recommender):
    body = (await client.get("/v1/models")).json()
    version = recommender.manifest.digest
    model = {"name": "demo", "version": version, "epoch": 0, "items": 300, "levels": 3}
    model["exclude_seen"] = True
    assert body == {
        "models": [{**model, "aliases": ["champion"]}],
        "aliases": [
            {
                "name": "champion",
                "bundle": "demo",
                "version": version,
                "previous": None,
                "previous_version": None,
                "rules": [],
            }
        ],
        "experiments": [],
        "available": [],
        "text_formats": [],
    }


async def test_other_paths_and_methods_are_problems(client):
    is_problem(await client.get("/v1/nothing"), "not_found")
    is_problem(await client.get("/v1/models/"), "not_found")
    response = await client.delete(URL)
    is_problem(response, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("page", ["/"])
async def test_pages_are_self_contained_and_have_no_dead_link(client, page):
    response = await client.get(page)
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    links = re.findall(r"""\b(?:href|src)\s*=\s*["']?([^"'\s>]*)""", response.text)
    assert links
    for link in links:
        assert link.startswith("/")
        assert (await client.get(link)).status_code == 200


async def test_the_page_says_nothing_of_models_and_items(client, service):
    page = (await client.get("/")).text
    model = service.state.models.info()[0]
    told = [model.name, model.version, f"{model.items:,}", "item-0"]
    assert not [text for text in told if text in page]


async def test_not_ready_until_loaded_and_warm_but_alive(settings, recommender, running, until):
    recommender.gate.clear()
    async with running(settings, recommender=recommender, wait=False) as (client, service):
        assert (await client.get("/health/live")).json() == {"status": "live"}
        for response in (
            await client.get("/health/ready"),
            await client.get("/v1/models"),
            await client.get("/v1/items/item-1"),
            await client.post(URL, json={"history": []}),
        ):
            is_problem(response, "not_ready")
        recommender.gate.set()
        await until(lambda: service.phase is Phase.READY)
        assert recommender.warm
        assert (await client.get("/health/ready")).json() == {"status": "ready"}


async def test_a_damaged_bundle_leaves_the_service_not_ready(settings, running, caplog):
    caplog.set_level(logging.ERROR)
    async with running(settings) as (client, service):  # settings.bundle does not exist
        assert service.phase is Phase.FAILED
        assert isinstance(service.failure, ArtifactError)
        response = await client.get("/health/ready")
        is_problem(response, "not_ready")
        assert str(settings.bundle) not in response.text
    assert str(settings.bundle) in caplog.text


async def test_a_full_queue_is_429_and_a_late_answer_504(settings, recommender, running, until):
    tight = settings.model_copy(update={"queue_limit": 2, "max_batch": 1, "deadline_ms": 200.0})
    async with running(tight, recommender=recommender) as (client, _):
        recommender.gate.clear()
        asked = [asyncio.create_task(client.post(URL, json={"history": ["item-0"]}))]
        await until(lambda: recommender.busy)
        asked += [
            asyncio.create_task(client.post(URL, json={"history": ["item-0"]})) for _ in range(5)
        ]
        responses = await asyncio.gather(*asked)
        codes = sorted(response.json()["code"] for response in responses)
        # one computes and two wait until their deadline; three found no place
        assert codes == ["deadline_exceeded"] * 3 + ["queue_full"] * 3
        for response in responses:
            is_problem(response, response.json()["code"])
        recommender.gate.set()
        assert ids(await client.post(URL, json={"history": ["item-0"]})) == recommender.expected(
            ["item-0"]
        )


async def test_stopping_answers_the_requests_under_way(client, service, recommender, until):
    recommender.gate.clear()
    asked = [asyncio.create_task(client.post(URL, json={"history": ["item-0"]}))]
    await until(lambda: recommender.busy)
    for i in range(1, 9):
        asked.append(asyncio.create_task(client.post(URL, json={"history": [f"item-{i}"]})))
    await until(lambda: service.state.models.queue_depth() == 8)
    stopping = asyncio.create_task(service.stop())
    await until(lambda: service.phase is Phase.STOPPING)
    is_problem(await client.post(URL, json={"history": ["item-0"]}), "not_ready")
    recommender.gate.set()
    for i, response in enumerate(await asyncio.gather(*asked)):
        assert ids(response) == recommender.expected([f"item-{i}"])
    await stopping


async def test_a_request_that_finds_its_queue_closing_is_503(client, service):
    service.state.models.get().batcher._closing = True
    is_problem(await client.post(URL, json={"history": ["item-1"]}), "shutting_down")


async def post_and_leave(client, body, left):
    """Send the beginning of a request, or all of it, and hang up when `left` is set."""
    messages = [{"type": "http.request", "body": body, "more_body": not body.endswith(b"}")}]

    async def receive():
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        raise AssertionError(f"nobody listens: {message}")

    scope = {
        "type": "http",
        "method": "POST",
        "path": URL,
        "raw_path": URL.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    await client._transport.app(scope, receive, send)


async def test_a_client_that_leaves_during_its_body_gets_no_answer(client, recommender, caplog):
    caplog.set_level(logging.INFO, "recsys.serving.access")
    left = asyncio.Event()
    left.set()
    await post_and_leave(client, b'{"history": [', left)
    assert recommender.batches == []
    (record,) = [r for r in caplog.records if r.name == "recsys.serving.access"]
    assert record.fields["status"] == 499


async def test_many_clients_that_leave_do_not_affect_the_others(
    client, service, recommender, until, caplog
):
    caplog.set_level(logging.INFO, "recsys.serving.access")
    recommender.gate.clear()
    first = asyncio.create_task(client.post(URL, json={"history": ["item-0"]}))
    await until(lambda: recommender.busy)
    left = asyncio.Event()
    bodies = [json.dumps({"history": [f"item-{i}"]}).encode() for i in range(100)]
    gone = [asyncio.create_task(post_and_leave(client, body, left)) for body in bodies]
    stay = [
        asyncio.create_task(client.post(URL, json={"history": [f"item-{i}"]})) for i in range(1, 21)
    ]
    await until(lambda: service.state.models.queue_depth() == 120)
    left.set()
    await asyncio.gather(*gone)
    assert service.state.models.queue_depth() == 20
    recommender.gate.set()
    for i, response in enumerate(await asyncio.gather(first, *stay)):
        assert ids(response) == recommender.expected([f"item-{i}"])
    assert sum(recommender.batches) == 21
    assert service.state.models.get().leases == 0
    lines = [r for r in caplog.records if r.name == "recsys.serving.access"]
    assert [r.fields["status"] for r in lines] == [499] * 100 + [200] * 21
    assert "recsys_http_in_flight 1.0" in (await client.get("/metrics")).text  # this one


async def test_a_jump_of_the_wall_clock_ends_no_request(
    client, service, recommender, until, monkeypatch
):
    real_ns, real_s = time.time_ns, time.time
    for day in (1, -2):
        recommender.gate.clear()
        asked = [
            asyncio.create_task(client.post(URL, json={"history": [f"item-{i}"]})) for i in range(5)
        ]
        await until(lambda: service.state.models.queue_depth() + recommender.busy >= 1)
        with monkeypatch.context() as jumped:
            jumped.setattr(time, "time_ns", lambda day=day: real_ns() + day * 86_400 * 10**9)
            jumped.setattr(time, "time", lambda day=day: real_s() + day * 86_400)
            recommender.gate.set()
            for i, response in enumerate(await asyncio.gather(*asked)):
                assert ids(response) == recommender.expected([f"item-{i}"])


async def test_a_failing_store_is_503_except_for_inline_histories(
    settings, recommender, running, monkeypatch
):
    async def broken(user_id, limit):
        if user_id == "slow":
            await asyncio.sleep(60)
        raise StoreError("/var/secret.db: disk I/O error")

    hasty = settings.model_copy(update={"deadline_ms": 500.0})
    async with running(hasty, recommender=recommender) as (client, service):
        monkeypatch.setattr(service.store.history, "read", broken)
        response = await client.post(URL, json={"user": "ada"})
        is_problem(response, "store_unavailable")
        assert "secret" not in response.text
        is_problem(await client.post(URL, json={"user": "slow"}), "deadline_exceeded")
        assert (await client.post(URL, json={"history": []})).status_code == 200


async def test_a_request_id_is_accepted_or_generated(client):
    response = await client.get("/health/live", headers={"X-Request-ID": "trace-1.a_B"})
    assert response.headers["x-request-id"] == "trace-1.a_B"
    for bad in ("", "a b", "x" * 129, 'a"}\\n{'):
        response = await client.get("/health/live", headers={"X-Request-ID": bad})
        assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


async def test_every_request_is_one_line_in_the_log_without_user_ids(client, caplog):
    caplog.set_level(logging.INFO, "recsys.serving.access")
    await client.get("/v1/users/ada/history", headers={"X-Request-ID": "one"})
    url = "/v1/users/eve/history"
    await client.get(url, headers={"X-Request-ID": "two"})
    lines = [r.fields for r in caplog.records if r.name == "recsys.serving.access"]
    assert all(line.pop("ms") > 0 for line in lines)
    route = "/v1/users/{user_id}/history"
    assert lines == [
        {"request_id": "one", "method": "GET", "route": route, "status": 200},
        {
            "request_id": "two",
            "method": "GET",
            "route": route,
            "status": 404,
            "problem": "unknown_user",
        },
    ]


async def test_the_document_is_made_once_and_off_the_event_loop(client, monkeypatch):
    loop, threads = threading.get_ident(), []
    make = openapi_module._document
    monkeypatch.setattr(
        openapi_module, "_document", lambda app: threads.append(threading.get_ident()) or make(app)
    )
    first, again = await asyncio.gather(*map(client.get, ("/openapi.json",) * 2))
    assert first.json() == again.json()
    assert len(threads) == 1
    assert loop not in threads


async def openapi(client):
    return (await client.get("/openapi.json")).json()


async def test_openapi_lists_all_routes_and_its_references_resolve(client):
    document = await openapi(client)
    assert sorted(document["paths"]) == sorted(
        {route.path_format for route in ROUTES if route.include_in_schema}
    )
    for reference in re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(document)):
        assert reference in document["components"]["schemas"]


async def test_every_operation_may_answer_with_a_problem_of_every_code(client):
    document = await openapi(client)
    assert document["components"]["schemas"]["Problem"]["properties"]["code"]["enum"] == [
        *sorted(KINDS)
    ]
    for operations in document["paths"].values():
        for operation in operations.values():
            content = operation["responses"]["default"]["content"]
            assert content.keys() == {"application/problem+json"}


@pytest.mark.parametrize("asked", [True, False])
async def test_loaded_objects_are_frozen_for_the_garbage_collector(
    settings, recommender, running, left_frozen, asked
):
    chosen = settings.model_copy(update={"gc_freeze": asked})
    async with running(chosen, recommender=recommender):
        assert left_frozen.calls == ["collect", "freeze"] * asked
        assert left_frozen.thresholds == [(10_000, 10, 10)] * asked
    assert left_frozen.calls == ["collect", "freeze", "unfreeze"] * asked
    assert left_frozen.thresholds == [(10_000, 10, 10), (700, 10, 10)] * asked


@pytest.mark.parametrize(
    "path",
    ["/health/live", "/health/ready", "/", "/static/app.css", "/v1/models", "/v1/items/item-1"],
)
async def test_head_is_get_without_the_body(client, path):
    got, head = await client.get(path), await client.head(path)
    assert got.status_code == head.status_code == 200
    assert head.content == b""
    own = {"x-request-id", "date"}
    assert {k: v for k, v in head.headers.items() if k not in own} == {
        k: v for k, v in got.headers.items() if k not in own
    }
