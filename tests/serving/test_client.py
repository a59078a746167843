import httpx
import pytest

from recsys.serving import client as client_module
from recsys.serving.client import Client, ServiceError
from recsys.serving.errors import ProblemError, problem_body
from recsys.serving.schemas.rules import RuleList

PROBLEM = problem_body(ProblemError("queue_full", "The queue is full."), None)


def test_every_method_calls_the_service(settings, recommender, serving):
    with serving(settings, recommender=recommender) as url, Client(url) as client:
        answer = client.recommend(history=["item-1"], k=3, include=["timing", "trace"])
        assert [i.item_id for i in answer.items] == recommender.expected(["item-1"], 3)
        assert answer.timing is not None
        assert answer.trace.nodes[0].target_pass == 1
        assert client.recommend(user="ada").history_items == 2
        events = [{"user": "zoe", "item": "item-1"}, {"user": "zoe", "item": "item-2"}]
        assert client.send_events(events).accepted == 2
        client.forget("zoe")
        assert client.recommend(user="zoe").note.code == "unknown_user"
        assert client.models().models[0].name == "demo"
        assert [alias.name for alias in client.models().aliases] == ["champion"]
        assert client.alias("champion").bundle == "demo"
        with pytest.raises(ServiceError) as refused:
            client.set_alias("champion", "nothing")
        assert (refused.value.status, refused.value.code) == (404, "unknown_bundle")
        with pytest.raises(ServiceError, match="alias_conflict"):
            client.rollback("champion")
        assert client.ask(RuleList, "GET", "/v1/rules").rules == []


def scripted(answers, asked):
    def answer(request):
        asked.append(request)
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    return Client(transport=httpx.MockTransport(answer), key="rk_test", retries=4)


@pytest.fixture
def slept(monkeypatch):
    waits = []
    monkeypatch.setattr(client_module.time, "sleep", waits.append)
    return waits


def full(after):
    headers = {} if after is None else {"retry-after": after}
    return httpx.Response(429, json=PROBLEM, headers=headers)


def test_refused_calls_are_repeated_after_retry_after(slept):
    asked = []
    models = httpx.Response(200, json={"models": [], "aliases": [], "experiments": []})
    more = httpx.ConnectError("no"), httpx.Response(502), httpx.Response(503), models
    with scripted([full("2"), *more], asked) as client:
        assert client.models().models == []
    assert len(asked) == 5
    assert asked[0].headers["authorization"] == "Bearer rk_test"
    assert 2 <= slept[0] <= 2.5
    assert 0.1 <= slept[1] <= 0.3  # nobody said; 0.1 s, doubled


def test_invalid_requests_are_not_repeated(slept):
    for status in (400, 404, 422, 500, 504):
        answer = httpx.Response(status, text="<html>a proxy's page</html>")
        with scripted([answer], []) as client, pytest.raises(ServiceError) as error:
            client.recommend(history=[])
        assert (error.value.status, error.value.problem) == (status, None)
    assert slept == []


def test_events_get_ids_so_that_a_repetition_counts_once(slept):
    asked = []
    done = httpx.Response(200, json={"accepted": 1, "duplicates": 0, "ignored": 0, "unlinked": 0})
    with scripted([full("1"), done], asked) as client:
        client.send_events([{"user": "ada", "item": "item-1"}])
    assert asked[0].content == asked[1].content
    assert b"event_id" in asked[0].content


def test_a_rollback_with_unknown_outcome_is_not_repeated(slept):
    with scripted([httpx.ReadTimeout("slow")], []) as client, pytest.raises(httpx.ReadTimeout):
        client.rollback("champion")
    with scripted([httpx.Response(502)], []) as client, pytest.raises(ServiceError):
        client.rollback("champion")
    assert slept == []
    done = httpx.Response(409, json=PROBLEM)
    with scripted([full("1"), done], []) as client, pytest.raises(ServiceError) as error:
        client.rollback("champion")
    assert (error.value.status, len(slept)) == (409, 1)
