"""Texts of named formats over HTTP, by a small random text model."""

import asyncio
import json
import re
import threading
from functools import partial

import jsonschema_rs
import pytest
from oracles import byte_level_tokenizer, tiny_model

from recsys.errors import ConfigError
from recsys.serving import texts
from recsys.serving.schemas.texts import MAX_PROMPT, MAX_TOKENS
from recsys.serving.service import Phase
from recsys.serving.settings import TextFormat
from recsys.serving.texts import PASS, PROMPT
from recsys.text import json_schema, regex, sample
from recsys.text.grammar_constraint import Parser
from recsys.text.sample import SampledText, StoppedError
from recsys.text.tokenizer import TextTokenizer

PATH = "/v1/texts"
FAST = byte_level_tokenizer([f"Thing no. {i}" for i in range(300)] + ["it is much like it"], 330)
COLOURS = {"enum": ["red", "green", "blue"]}


@pytest.fixture(scope="module")
def text_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text") / "tiny-llama"
    tiny_model("llama-gqa", 352).save_pretrained(folder)
    FAST.save_pretrained(folder)
    return folder


@pytest.fixture
def on(settings, text_model):
    # Random models take a while on a busy core, and no test here waits for the deadline but one.
    more = {"explainer": text_model, "keys": None, "deadline_ms": 120_000.0}
    return named(settings.model_copy(update=more), colour={"json_schema": COLOURS})


def ask(form, prompt="A gift: ", **more):
    return {"prompt": prompt, "format": form, "max_tokens": 24} | more


async def found(client, form, **more):
    response = await client.post(PATH, json=ask(form, **more))
    assert response.status_code == 200, response.text
    return response.json()


SCHEMAS = {
    "colour": COLOURS,
    "nothing": {"type": "null"},
    "size": {"type": "integer", "minimum": 3, "maximum": 40, "multipleOf": 5},
    "code": {"type": "string", "pattern": "^[a-c]{2,4}$"},
    "gift": {
        "type": "object",
        "properties": {"kind": {"const": "gift"}, "sizes": {"$ref": "#/$defs/sizes"}},
        "required": ["kind", "sizes"],
        "additionalProperties": False,
        "$defs": {
            "sizes": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
        },
    },
}
LARK = 'start: "a" more\nmore: "b" more "b" | "c"'


def named(settings, **formats):
    made = {name: TextFormat(**definition) for name, definition in formats.items()}
    return settings.model_copy(update={"text_formats": made})


async def test_named_formats_are_offered_and_obeyed(on, recommender, running):
    schemas = {name: {"json_schema": schema} for name, schema in SCHEMAS.items()}
    on = named(on, **schemas, date={"regex": r"20\d\d-[01]\d"}, pairs={"lark": LARK})
    async with running(on, recommender=recommender) as (client, _):
        offered = (await client.get("/v1/models")).json()["text_formats"]
        assert offered == [*SCHEMAS, "date", "pairs"]
        for name, schema in SCHEMAS.items():
            answer = await found(client, name, max_tokens=128)
            assert answer["finished"]
            assert json.loads(answer["text"]) == answer["value"]
            jsonschema_rs.validate(schema, answer["value"])
        date = await found(client, "date")
        assert re.fullmatch(r"20\d\d-[01]\d", date["text"])
        assert "value" not in date
        pairs = await found(client, "pairs", max_tokens=MAX_TOKENS)
        assert re.fullmatch("a(b*)c?(b*)", pairs["text"])
        if pairs["finished"]:
            assert pairs["text"].strip("a").partition("c")[::2] in [
                (n * "b",) * 2 for n in range(300)
            ]


async def test_a_name_that_is_not_offered_is_refused_with_those_that_are(on, recommender, running):
    for formats, offered in (
        ({"colour": {"regex": "red"}, "size": {"regex": "1"}}, "offers 'colour', 'size'"),
        ({}, "offers none; serve.text_formats defines them"),
    ):
        async with running(named(on, **formats), recommender=recommender) as (client, _):
            response = await client.post(PATH, json=ask("poem" * 50))
        assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
        (error,) = response.json()["errors"]
        assert error["pointer"] == "/format"
        assert offered in error["detail"]
        assert len(error["detail"]) < 200


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ({"json_schema": {"type": "elephant"}}, "json_schema: "),
        ({"json_schema": {"enum": []}}, "json_schema: "),
        ({"json_schema": {"$ref": "http://127.0.0.1:9/schema.json"}}, "json_schema: "),
        ({"regex": "(?=a)b"}, "regex: "),
        ({"regex": "("}, "regex: "),
        ({"lark": "start: nobody"}, "lark: "),
    ],
)
async def test_a_bad_format_ends_the_start(on, recommender, running, definition, reason):
    bad = named(on, good={"regex": "a"}, bad=definition)
    async with running(bad, recommender=recommender) as (_, service):
        assert service.phase is Phase.FAILED
        assert isinstance(service.failure, ConfigError)
        assert str(service.failure).startswith(f"serve.text_formats.bad.{reason}")


async def test_a_format_is_compiled_once_and_keeps_its_masks(on, recommender, running, monkeypatch):
    compiled, masks, compile_, bits = [], [], Parser.compile, Parser.bits
    monkeypatch.setattr(
        Parser,
        "compile",
        lambda grammar, *more: compiled.append(grammar) or compile_(grammar, *more),
    )
    monkeypatch.setattr(Parser, "bits", lambda self: masks.append(self) or bits(self))
    on = named(on, size={"regex": "[0-9]{3}"}, colour={"json_schema": SCHEMAS["colour"]})
    formats = {regex("[0-9]{3}"), json_schema(SCHEMAS["colour"])}
    async with running(on, recommender=recommender) as (client, _):
        assert len(set(compiled) & formats) == 2
        at_start = len(compiled)
        answers = [await found(client, "size") for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        asked = len(masks)
        await found(client, "size")
        assert len(masks) == asked  # the masks of an equal text are not computed again
        await found(client, "colour")
        assert len(compiled) == at_start


async def test_masks_beyond_their_bound_are_not_kept(on, recommender, running, monkeypatch):
    monkeypatch.setattr(texts, "MOST_MASKS", 0)
    async with running(named(on, size={"regex": "[0-9]{3}"}), recommender=recommender) as (
        client,
        service,
    ):
        answers = [await found(client, "size") for _ in range(2)]
        assert answers[0] == answers[1]
        assert service.texts._formats["size"]._constraint is None


async def test_a_format_works_after_an_error(on, recommender, running, monkeypatch):
    def fail(self, tokens):
        raise ValueError("regex: too many states")

    async with running(named(on, size={"regex": "[0-9]{3}"}), recommender=recommender) as (
        client,
        _,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Parser, "forth", fail)
            response = await client.post(PATH, json=ask("size"))
        assert (response.status_code, response.json()["code"]) == (409, "unsupported_by_model")
        assert "'size' cannot be followed: too many states" in response.json()["detail"]
        assert re.fullmatch("[0-9]{3}", (await found(client, "size"))["text"])


async def test_a_prompt_of_very_many_tokens_is_refused(on, recommender, running):
    async with running(on, recommender=recommender) as (client, _):
        refused = await client.post(PATH, json=ask("colour", prompt="\U0001f642" * 600))
        assert (refused.status_code, refused.json()["code"]) == (409, "unsupported_by_model")
        assert "the limit is 2,000" in refused.json()["detail"]
        await found(client, "colour", prompt="\U0001f642" * 400)


async def test_a_cut_text_ends_with_a_whole_character(on, recommender, running):
    flowers = "\U0001f339\u00e9\u20ac" * 9
    async with running(named(on, flowers={"regex": flowers}), recommender=recommender) as (
        client,
        _,
    ):
        for most in range(1, 9):
            answer = await found(client, "flowers", max_tokens=most)
            assert flowers.startswith(answer["text"])


@pytest.mark.parametrize("written", ["9" * 5000, "1e999", '"\\ud800"'])
async def test_a_value_that_no_body_may_have_is_left_out(
    on, recommender, running, monkeypatch, written
):
    made = SampledText([], True, 0.0, 0, None)
    monkeypatch.setattr(sample, "sample_text", lambda *a, **more: [made])
    monkeypatch.setattr(TextTokenizer, "decode", lambda self, tokens: written)
    on = named(on, number={"json_schema": {"type": "number"}})
    async with running(on, recommender=recommender) as (client, _):
        answer = await found(client, "number", max_tokens=MAX_TOKENS)
    assert "value" not in answer


async def test_a_text_that_is_cut_has_no_value(on, recommender, running):
    on = named(on, long={"json_schema": {"type": "string", "minLength": 500}})
    async with running(on, recommender=recommender) as (client, _):
        answer = await found(client, "long", max_tokens=6)
    assert (answer["finished"], answer["tokens"]) == (False, 6)
    assert "value" not in answer


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"prompt": ""}, "/prompt"),
        ({"prompt": "x" * (MAX_PROMPT + 1)}, "/prompt"),
        ({"max_tokens": 0}, "/max_tokens"),
        ({"max_tokens": MAX_TOKENS + 1}, "/max_tokens"),
        ({"max_tokens": "5"}, "/max_tokens"),
        ({"seed": 3}, "/seed"),
        ({"format": None}, "/format"),
        ({"format": {"type": "json", "schema": {"type": "null"}}}, "/format"),
        ({"format": 3}, "/format"),
    ],
)
async def test_what_is_wrong_with_a_request_is_named(on, recommender, running, change, pointer):
    async with running(on, recommender=recommender) as (client, _):
        response = await client.post(PATH, json=ask("colour") | change)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")
    assert response.json()["errors"][0]["pointer"] == pointer


class Slow:
    """Holds the text model's thread, as a slow model does, until it is free or stopped."""

    def __init__(self, monkeypatch):
        self.begun, self.stopped = threading.Event(), threading.Event()
        self.free = threading.Event()
        monkeypatch.setattr(sample, "sample_text", partial(self.wait, sample.sample_text))

    def wait(self, function, *arguments, stopped, **options):
        self.begun.set()
        while not self.free.wait(0.01):
            if stopped():
                self.stopped.set()
                raise StoppedError
        return function(*arguments, stopped=stopped, **options)


async def test_what_is_late_fails_and_is_written_no_further(on, recommender, running, monkeypatch):
    slow = Slow(monkeypatch)
    hasty = on.model_copy(update={"deadline_ms": 500.0})
    async with running(hasty, recommender=recommender) as (client, _):
        response = await client.post(PATH, json=ask("colour"))
        assert (response.status_code, response.json()["code"]) == (504, "deadline_exceeded")
        assert response.headers["Retry-After"]
        assert await asyncio.to_thread(slow.stopped.wait, 60)


async def test_texts_have_a_thread_and_a_queue_of_their_own(on, recommender, running, monkeypatch):
    slow = Slow(monkeypatch)
    narrow = on.model_copy(update={"queue_limit": 1, "deadline_ms": 60_000.0})
    async with running(narrow, recommender=recommender) as (client, _):
        first = asyncio.create_task(client.post(PATH, json=ask("colour")))
        assert await asyncio.to_thread(slow.begun.wait, 60)
        second = await client.post(PATH, json=ask("colour"))
        assert (second.status_code, second.json()["code"]) == (429, "queue_full")
        usual = await client.post("/v1/recommendations", json={"history": ["item-1"], "k": 3})
        assert usual.status_code == 200  # the event loop and the worker are free
        slow.free.set()
        assert (await first).status_code == 200


async def test_a_text_costs_its_work(on, recommender, running):
    work = PROMPT + PASS * MAX_TOKENS
    for burst, status in ((int(work) - 2, 429), (int(work) + 2, 200)):
        dear = on.model_copy(update={"rate_limit": 1e-6, "rate_burst": burst})
        async with running(dear, recommender=recommender) as (client, _):
            body = ask("colour", max_tokens=MAX_TOKENS)
            assert (await client.post(PATH, json=body)).status_code == 200
            usual = await client.post("/v1/recommendations", json={"history": ["item-1"]})
        assert usual.status_code == status
