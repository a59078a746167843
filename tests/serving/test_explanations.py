"""Explanations over HTTP, by a small random text model, within the bounds of other requests."""

import asyncio
import logging
import socket
import threading

import pytest

from recsys.errors import RequestError
from recsys.recommender import RecommendRequest
from recsys.serving.explanations import EVENTS, WORK
from recsys.serving.schemas.explanations import MAX_EXPLAINED
from recsys.serving.service import Phase
from recsys.serving.text_model import TITLE
from recsys.testing import PATIENCE_S, byte_level_tokenizer, tiny_model
from recsys.text.explain import Explained, Explainer, Explanation
from recsys.text.stopping import StoppedError

PATH = "/v1/explanations"
FAST = byte_level_tokenizer(["Thing no. 1", "because it is much like the others"], 330)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "tiny-llama"
    tiny_model("llama-gqa", 352).save_pretrained(folder)
    FAST.save_pretrained(folder)
    return folder


class Scripted:
    """Writes when its gate is open, and notes what it was asked and whether it was stopped."""

    def __init__(self):
        self.gate, self.asked = threading.Event(), []
        self.begun, self.stopped = threading.Event(), threading.Event()

    def explain(self, history, items, *, stopped):
        self.asked.append((history, items))
        self.begun.set()
        while not self.gate.wait(0.01):
            if stopped():
                self.stopped.set()
                raise StoppedError
        return [
            Explained(Explanation(item, history[-1:], f"like {item}"), "", None) for item in items
        ]


@pytest.fixture
def scripted(monkeypatch):
    made = Scripted()
    monkeypatch.setattr(Explainer, "load", lambda folder: made)
    return made


@pytest.fixture
def on(settings, tmp_path):
    return settings.model_copy(update={"explainer": tmp_path / "tiny-llama", "keys": None})


async def test_items_are_explained_by_titles_of_the_history(
    settings, recommender, running, text_model
):
    there = settings.model_copy(update={"explainer": text_model})
    body = {"history": ["item-7", "gone", "item-12", "item-7"], "items": ["item-3", "item-9"]}
    async with running(there, recommender=recommender) as (client, _):
        response = await client.post(PATH, json=body)
        again = await client.post(PATH, json=body)
        nothing = await client.post(PATH, json={"history": [], "items": ["gone"]})
    assert (nothing.json()["explanations"], nothing.json()["unknown_items"]) == ([], ["gone"])
    assert response.status_code == 200
    found = response.json()
    assert found == again.json()
    assert found["text_model"] == "tiny-llama"
    assert found["model"]["alias"] == "champion"
    liked = {"item-7": "Thing no. 7", "item-12": "Thing no. 12"}
    alone = Explainer.load(text_model).explain(
        ["Thing no. 12", "Thing no. 7"], ["Thing no. 3", "Thing no. 9"]
    )
    for one, expected, name in zip(found["explanations"], alone, ("3", "9"), strict=True):
        assert (one["item_id"], one["title"]) == (f"item-{name}", f"Thing no. {name}")
        assert one["reason"] == expected.explanation.reason
        assert [quoted["title"] for quoted in one["because"]] == expected.explanation.because
        assert all(liked[quoted["item_id"]] == quoted["title"] for quoted in one["because"])


async def test_a_stored_user_is_explained_to(on, recommender, running, scripted, caplog):
    scripted.gate.set()
    caplog.set_level(logging.DEBUG)
    async with running(on, recommender=recommender) as (client, _):
        found = (await client.post(PATH, json={"user": "ada", "items": ["item-5"]})).json()
        missing = await client.post(PATH, json={"user": "nobody", "items": ["item-5"]})
    assert scripted.asked == [(["Thing no. 1", "Thing no. 2"], ["Thing no. 5"])]
    assert found["explanations"] == [
        {
            "item_id": "item-5",
            "title": "Thing no. 5",
            "because": [{"item_id": "item-2", "title": "Thing no. 2"}],
            "reason": "like Thing no. 5",
        }
    ]
    assert (missing.status_code, missing.json()["code"]) == (404, "unknown_user")
    access = [r.fields for r in caplog.records if r.name == "recsys.serving.access"]
    assert [line["route"] for line in access] == [PATH, PATH]
    assert not any("Thing" in f"{r.getMessage()} {vars(r)}" for r in caplog.records)


async def test_unknown_removed_untitled_and_repeated_items(on, recommender, running, scripted):
    scripted.gate.set()
    long = "x" * 5_000
    async with running(on, recommender=recommender) as (client, _):
        for name, title in (("untitled", ""), ("long", long)):
            put = {"title": title, "semantic_id": [0, 0, 1]}
            assert (await client.put_item(name, put)).status_code == 200
        assert (await client.delete("/v1/items/item-4")).status_code == 204
        items = ["item-4", "item-1", "gone", "untitled", "item-1", "long"]
        body = {"history": ["item-4", "item-2"], "items": items}
        found = (await client.post(PATH, json=body)).json()
    assert [one["item_id"] for one in found["explanations"]] == ["item-1", "long"]
    assert found["explanations"][1]["title"] == long
    assert found["unknown_items"] == ["item-4", "gone"]
    assert found["untitled_items"] == ["untitled"]
    # A removed item is not quoted, and a text model reads the beginning of a long title.
    assert scripted.asked == [(["Thing no. 2"], ["Thing no. 1", long[:TITLE]])]


async def test_a_quoted_title_is_complete_and_in_the_place_of_its_last_item(
    on, recommender, running, scripted
):
    scripted.gate.set()
    long = "x" * (TITLE + 1)
    async with running(on, recommender=recommender) as (client, _):
        for name in ("red", "blue"):
            put = {"title": long, "semantic_id": [0, 0, 1]}
            assert (await client.put_item(name, put)).status_code == 200
        body = {"history": ["red", "item-2", "blue"], "items": ["item-1"]}
        found = (await client.post(PATH, json=body)).json()
    assert scripted.asked[0][0] == ["Thing no. 2", long[:TITLE]]
    assert found["explanations"][0]["because"] == [{"item_id": "blue", "title": long}]


async def test_the_end_of_a_long_history_is_read(on, recommender, running, scripted):
    scripted.gate.set()
    history = ["item-0", *["item-1"] * (EVENTS - 1), "item-2"]
    async with running(on, recommender=recommender) as (client, _):
        await client.post(PATH, json={"history": history, "items": ["item-5"]})
    assert scripted.asked[0][0] == ["Thing no. 1", "Thing no. 2"]


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"items": []}, "/items"),
        ({"items": ["a"] * (MAX_EXPLAINED + 1)}, "/items"),
        ({"items": [3]}, "/items/0"),
        ({"reason": "short"}, "/reason"),
        ({"user": "ada"}, ""),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(
    on, recommender, running, scripted, change, pointer
):
    body = {"history": ["item-1"], "items": ["item-2"], **change}
    async with running(on, recommender=recommender) as (client, _):
        response = await client.post(PATH, json=body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert response.json()["errors"][0]["pointer"] == pointer
    assert not scripted.asked


async def test_a_folder_without_a_text_model_ends_the_start(
    settings, recommender, running, tmp_path
):
    wrong = settings.model_copy(update={"explainer": tmp_path})
    async with running(wrong, recommender=recommender) as (_, service):
        assert service.phase is Phase.FAILED
        assert "has no tokenizer, so it writes no text" in str(service.failure)
        assert "serve.explainer" in str(service.failure)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RequestError("history and items need 9000 positions"), (409, "unsupported_by_model")),
        (ValueError("history and items need 9000 positions"), (500, "internal_error")),
    ],
)
async def test_only_a_refusal_of_the_text_model_is_told(
    on, recommender, running, scripted, monkeypatch, error, told
):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr(scripted, "explain", fail)
    async with running(on, recommender=recommender) as (client, _):
        response = await client.post(PATH, json={"history": ["item-1"], "items": ["item-2"]})
    assert (response.status_code, response.json()["code"]) == told
    assert ("9000" in response.json()["detail"]) == (told[0] == 409)


async def test_others_are_answered_while_an_explanation_is_written(
    on, recommender, running, scripted
):
    async with running(on, recommender=recommender) as (client, _):
        body = {"history": ["item-1"], "items": ["item-2"]}
        waiting = asyncio.gather(client.post(PATH, json=body), client.post(PATH, json=body))
        await asyncio.to_thread(scripted.begun.wait, 60)
        answer = await client.post("/v1/recommendations", json={"history": ["item-1"], "k": 3})
        assert [one["item_id"] for one in answer.json()["items"]] == [
            one.item_id
            for one in recommender.answer(RecommendRequest(["item-1"], 3)).recommendations
        ]
        assert not waiting.done()
        assert len(scripted.asked) == 1  # one at a time
        scripted.gate.set()
        assert [one.status_code for one in await waiting] == [200, 200]


def test_what_nobody_waits_for_is_written_no_further(on, recommender, serving, scripted):
    patient = on.model_copy(update={"deadline_ms": 60_000.0})
    body = b'{"history": ["item-1"], "items": ["item-2"]}'
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(patient, recommender=recommender) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert scripted.begun.wait(PATIENCE_S)
        assert scripted.stopped.wait(PATIENCE_S)


async def test_stopping_answers_what_is_being_explained(on, recommender, running, scripted, until):
    async with running(on, recommender=recommender) as (client, service):
        body = {"history": ["item-1"], "items": ["item-2"]}
        asked = [asyncio.create_task(client.post(PATH, json=body)) for _ in range(2)]
        await until(scripted.begun.is_set)
        stopping = asyncio.create_task(service.stop())
        await until(lambda: service.phase is Phase.STOPPING)
        refused = await client.post(PATH, json=body)
        assert (refused.status_code, refused.json()["code"]) == (503, "not_ready")
        scripted.gate.set()
        assert [one.status_code for one in await asyncio.gather(*asked)] == [200, 200]
        await stopping


async def test_what_is_late_fails_and_is_written_no_further(on, recommender, running, scripted):
    hasty = on.model_copy(update={"deadline_ms": 200.0})
    async with running(hasty, recommender=recommender) as (client, _):
        response = await client.post(PATH, json={"history": ["item-1"], "items": ["item-2"]})
        assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
        assert response.headers["Retry-After"]
        assert await asyncio.to_thread(scripted.stopped.wait, 60)


async def test_an_explanation_costs_its_work(on, recommender, running, scripted):
    scripted.gate.set()
    dear = on.model_copy(update={"rate_limit": 1e-6, "rate_burst": int(WORK)})
    body = {"history": ["item-1"], "items": ["item-2", "item-3"]}
    async with running(dear, recommender=recommender) as (client, _):
        assert (await client.post(PATH, json=body)).status_code == 200
        response = await client.post("/v1/recommendations", json={"history": ["item-1"]})
    assert (response.status_code, response.json()["code"]) == (429, "rate_limited")
