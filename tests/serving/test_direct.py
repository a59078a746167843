"""Routes that are answered without FastAPI, against the same routes through FastAPI."""

import itertools
import json

import pytest
from starlette.routing import Match, Route

from recsys.serving import middleware
from recsys.serving.api.routes import ROUTES, find_route
from recsys.serving.errors import response_to
from recsys.serving.schemas.recommendations import RecommendationsResponse

URL = "/v1/recommendations"
JSON = {"content-type": "application/json"}
REQUESTS = [
    ("POST", URL, JSON, b'{"history": ["item-1"], "k": 3}'),
    ("POST", URL, JSON, b'{"user": "ada", "k": 2, "include": ["metadata", "explanation"]}'),
    ("POST", URL, JSON, b'{"user": "nobody", "fallback": false}'),
    ("POST", URL, JSON, b'{"history": ["item-1"], "model": "unknown"}'),
    ("POST", URL, JSON, b'{"history": ["item-1"], "filter": {"must": [{"key": "no"}]}}'),
    ("POST", URL, JSON, b'{"history": ["item-1"], "rules": ["none"]}'),
    ("POST", URL, JSON, b'{"history": ["poison"]}'),
    ("POST", URL, JSON, b'{"history": ["not-finite"]}'),
    ("POST", URL, JSON, b'{"history": ["item-1"], "k": 0, "more": 1}'),
    ("POST", URL, JSON, b'{"history": [], "history": []}'),
    ("POST", URL, JSON, b"{"),
    ("POST", URL, JSON, b""),
    ("POST", URL, {"content-type": "text/plain"}, b"{}"),
    ("POST", URL, {}, b"{}"),
    ("POST", URL, JSON, b" " * 2_000_000),
    ("GET", URL, {}, b""),
    ("PUT", URL, JSON, b"{}"),
    ("POST", URL + "/", JSON, b"{}"),
    ("POST", "/v1/recommendation%73", JSON, b'{"history": ["item-1"], "k": 1}'),
    ("POST", "/v1/recommendations/batch", JSON, b'{"requests": [{"history": ["item-1"]}]}'),
    ("POST", "/v1/events", JSON, b'{"events": [{"event_id": "a", "user": "u", "item": 3}]}'),
]


def without_ids(text):
    """A JSON document without what is random."""
    random = ("recommendation_id", "request_id")
    return json.loads(
        text, object_pairs_hook=lambda pairs: [pair for pair in pairs if pair[0] not in random]
    )


async def ask(client):
    found = []
    for method, path, headers, body in REQUESTS:
        answer = await client.request(method, path, headers=headers, content=body)
        assert answer.headers.pop("x-request-id")
        text = without_ids(answer.text)
        answer.headers.pop("content-length")
        found.append((answer.status_code, sorted(answer.headers.items()), text))
    return found


async def test_answers_and_problems_are_those_of_the_router(client, monkeypatch):
    directly = await ask(client)
    for route in ROUTES:
        if getattr(route, "direct", None) is not None:
            monkeypatch.setattr(route, "direct", None)
    assert directly == await ask(client)
    assert len({status for status, _, _ in directly}) > 6


def test_the_routes_with_a_body_are_direct():
    direct = {route.path for route in ROUTES if getattr(route, "direct", None) is not None}
    assert {URL, URL + "/batch"} <= direct
    assert not any("{" in path for path in direct)


PATHS = sorted(
    {route.path.replace(":id", "").replace("{", "").replace("}", "") for route in ROUTES}
    | {"/", "/v1", "/v1/recommendations/", "/v1/recommendations/batch/x", "/none", "/v1/items/a/b"}
)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "HEAD"])
def test_a_route_is_found_as_by_the_router(method):
    for path in PATHS:
        for written in (path.encode(), path.replace("s", "%73").encode(), None):
            scope = {"type": "http", "method": method, "path": path, "root_path": ""}
            if written is not None:
                scope["raw_path"] = written
            matches = [(route, route.matches(dict(scope))[0]) for route in ROUTES]
            full = [route for route, match in matches if match is Match.FULL]
            partial = [route for route, match in matches if match is Match.PARTIAL]
            route, methods = find_route(dict(scope))
            assert isinstance(route, Route) or not (full or partial)
            assert route is (full or partial or [None])[0]
            if full:
                assert methods == route.methods
            else:
                assert methods == {name for one in partial for name in one.methods}


@pytest.mark.parametrize("diversity", [0.0, 0.5])
async def test_an_answer_has_the_documented_fields(client, recommender, diversity):
    kinds = ("metadata", "timing", "trace", "explanation")
    for size in range(len(kinds) + 1):
        for include in itertools.combinations(kinds, size):
            body = {"history": ["item-1", "gone"], "k": 4, "include": include}
            response = await client.post(URL, json=body | {"diversity": diversity})
            assert response.status_code == 200, response.text
            answer = response.json()
            RecommendationsResponse.model_validate(answer)
            always = [
                *("recommendation_id", "model", "items", "certificate", "history_items"),
                *("unknown_items", "eligible_items", "note"),
            ]
            asked = [name for name in ("timing", "trace") if name in include]
            assert sorted(answer) == sorted([*always, *asked])
            for rank, item in enumerate(answer["items"], start=1):
                place = int(item["item_id"][5:])
                expected = {
                    "item_id": f"item-{place}",
                    "score": item["score"],
                    "title": f"Thing no. {place}",
                    "rank": rank,
                    "source": "model",
                    "semantic_id": [place // 81, place // 9 % 9, place % 9],
                }
                if "explanation" in include:
                    expected["because"] = "item-1"
                if "metadata" in include:
                    price = {} if place == 0 else {"price": place / 2}
                    odd = "odd" if place % 2 else "even"
                    assert item["metadata"] == price | {"categories": [odd]}
                    expected["metadata"] = item["metadata"]
                assert item == expected
            text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"))
            assert len(response.text) == len(text)


async def test_a_problem_keeps_no_frames(client, monkeypatch):
    """The frames would hold the body until the next garbage collection, in cycles."""
    seen = []

    def respond(request, error):
        seen.append(error)
        return response_to(request, error)

    monkeypatch.setattr(middleware, "response_to", respond)
    await client.post(URL, headers=JSON, content=b"{")
    assert [error.__traceback__ for error in seen] == [None]
