import json
import random
import threading
from itertools import pairwise
from unicodedata import combining, normalize

import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given
from hypothesis import strategies as st

from recsys.arguments import spelled
from recsys.serving.api.routing import document
from recsys.serving.bodies import LARGE, MAX_DEPTH, MAX_NAMES, MalformedError, parse, read
from recsys.serving.schemas.events import EventsBody
from recsys.serving.schemas.items import ItemBody, UpsertBody
from recsys.serving.schemas.recommendations import BatchRequest, RecommendationsRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(VALUES, st.booleans())
def test_every_json_value_is_parsed(value, ascii_only):
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"[1e999]", "1e999 is too large"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the name 'b' twice"),
        (b"\xff", "not UTF-8"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 64"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested deeper than 64"),
        (b"[" * 50_000, "nested deeper than 64"),
        (b"[" + b"[]," * 25_000 + b"[]]", "more than 50,000 values"),
        (b"[" + b'"a,[",' * 50_000 + b"1]", "more than 50,000 values"),
        (b"[" + b"9" * 5_000 + b"]", "too many digits"),
        (b"{'a': 1}", "at character 1"),
        (b"", "at character 0"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(body, why):
    with pytest.raises(MalformedError, match=why):
        parse(body)


def test_the_deepest_that_is_allowed_is_read():
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    assert parse(b'["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]
    assert parse(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]


def test_commas_and_brackets_in_texts_are_no_values():
    texts = ['a,"[{\\,', "\\", ",[" * 40_000, '\\"']
    body = dict.fromkeys(texts, texts)
    assert parse(json.dumps(body).encode()) == body


def test_an_object_with_very_many_names_is_refused():
    names = [f'"{i}":0' for i in range(MAX_NAMES + 1)]
    assert len(parse(("{" + ",".join(names[1:]) + "}").encode())) == MAX_NAMES
    with pytest.raises(MalformedError, match="an object has more than 256 names"):
        parse(("{" + ",".join(names) + "}").encode())


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (RecommendationsRequest, {"history": [1] * 2000, "exclude_items": [None] * 2000}),
        (RecommendationsRequest, {"history": [], **{f"n{i}": 0 for i in range(200)}}),
        (BatchRequest, {"requests": [{"history": [1] * 400}] * 100}),
        (BatchRequest, {"requests": [{}] * 20_000}),
        (ItemBody, {"attributes": {f"a{i}": [{}] * 100 for i in range(200)}}),
        (UpsertBody, {"items": [{f"n{i}": 0 for i in range(200)}] * 200}),
        (EventsBody, {"events": [{"user": 1}] * 20_000}),
    ],
)
def test_the_number_of_errors_that_are_built_is_bounded(model, body):
    with pytest.raises(RequestValidationError) as refused:
        document(json.dumps(body).encode(), model)
    assert 1 <= len(refused.value.errors()) <= 8 * MAX_NAMES  # an attribute may be of eight types


async def test_only_a_large_body_leaves_the_event_loop():
    here = threading.get_ident()
    assert await read(lambda body: threading.get_ident(), b"x" * LARGE) == here
    first, second = [
        await read(lambda body: threading.get_ident(), b"x" * (LARGE + 1)) for _ in range(2)
    ]
    assert first == second != here


def test_marks_are_in_order_before_a_long_text_is_normalised(monkeypatch):
    """`normalize` takes a time that is quadratic in marks that are not in order."""
    passed, draw = [], random.Random(0)

    def noted(form, text):
        passed.append(text)
        return normalize(form, text)

    monkeypatch.setattr("recsys.arguments.normalize", noted)
    letters = "ae\ufb2c\uac01\u1100\u1161" + 9 * "\u0300\u0316\u0301\u0345\u0f71\u0f72\u0344\u3099"
    for length in (5, 256, 257, 3_000, 3_000):
        text = "".join(draw.choices(letters, k=length))
        assert spelled(text) == normalize("NFC", text)
    for text in passed:
        classes = [*map(combining, text)] if len(text) > 256 else []
        assert all(after == 0 or before <= after for before, after in pairwise(classes))
