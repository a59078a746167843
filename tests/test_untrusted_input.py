"""What comes from outside costs processor time and memory in proportion to its size."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from fastapi.exceptions import RequestValidationError
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer
from pydantic import BaseModel

from recsys.constraint.attributes import Attributes
from recsys.constraint.filters import ItemBoosts, ItemFilter
from recsys.errors import FilterError
from recsys.serving.api.routing import document
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.events import EventsBody
from recsys.serving.schemas.items import ItemBody, ItemPatch, RankBody, UpsertBody
from recsys.serving.schemas.models import AliasBody
from recsys.serving.schemas.recommendations import BatchRequest, RecommendationsRequest
from recsys.serving.schemas.rules import RuleBody
from recsys.serving.schemas.texts import TextsRequest
from recsys.text.grammar import lark
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.tokenizer import TextTokenizer

STALL_S = 0.1  # for each KB
MEMORY, MEMORY_PER_BYTE = 64 << 20, 2000
MOST = 64 << 10
BODIES: tuple[type[BaseModel], ...] = (
    RecommendationsRequest, BatchRequest, RankBody, EventsBody, UpsertBody, ItemBody, ItemPatch,
    AliasBody, RuleBody, TextsRequest,
)  # fmt: skip


# What reads bytes from outside


def read_bodies(data: bytes) -> None:
    """As every kind of body."""
    for model in BODIES:
        with suppress(ProblemError, RequestValidationError):
            document(data, model)


def read_filters(data: bytes) -> None:
    """As a filter and as boosts, which are evaluated."""
    with suppress(MalformedError):
        value = parse(data)
        for kind in (ItemFilter, ItemBoosts):
            with suppress(FilterError):
                found: Any = kind.parse(value)
                assert len(found.key) <= 10 * len(data) + 1000
                found.evaluate(some_items())


def read_texts(data: bytes) -> None:
    """As a text whose parts are written, of which the first tokens are computed."""
    text = data.decode(errors="replace")[:8_000]
    for unit in ("substring_chars", "substring_words"):
        constraint = compiler().constraint(lark(f"start: %regex {json.dumps({unit: text})}"))
        states = np.asarray([constraint.initial()])
        for _ in range(3):
            constraint.forced(states)
            states = constraint.advance(states, constraint.allowed(states).argmax(1))


TARGETS: dict[str, Callable[[bytes], None]] = {
    "bodies": read_bodies,
    "filters": read_filters,
    "texts": read_texts,
}


@cache
def some_items() -> Attributes:
    table = pa.table(
        {
            "brand": [None if i % 7 == 0 else f"b{i % 5}" for i in range(100)],
            "price": [i / 4 for i in range(100)],
            "tags": [[f"t{j}" for j in range(i % 4)] for i in range(100)],
        }
    )
    return Attributes(table, np.arange(100, dtype=np.int32))


@cache
def compiler() -> GrammarCompiler:
    words = ["the quick brown fox", '{"a":[1,2]}'] * 3
    return GrammarCompiler(TextTokenizer(byte_level_tokenizer(words, 290)))


# What it costs


def resident(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 0


def cost(target: str, data: bytes) -> tuple[float, int]:
    """Processor seconds of all threads, and bytes by which the process grew meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before, start = resident("VmRSS"), time.process_time()
    TARGETS[target](data)
    return time.process_time() - start, resident("VmHWM") - before


def check(target: str, data: bytes) -> None:
    """Fail if the cost is beyond its bounds, again and again."""
    most_s = STALL_S * (1 + len(data) // 1024)
    most = MEMORY + MEMORY_PER_BYTE * len(data)
    for _ in range(3):  # what happens once only, such as an import or a collection, does not count
        seconds, grown = cost(target, data)
        if seconds <= most_s and grown <= most:
            return
    raise AssertionError(
        f"{target}: {len(data)} bytes took {seconds:.2f} s of {most_s:.2f} and "
        f"{grown >> 20} MB of {most >> 20}: {data[:300]!r}"
    )


# What is read: pieces that are repeated and nested


def repeated(drawn: tuple[bytes, int, bytes]) -> bytes:
    """A piece many times; `#` in it becomes a number."""
    piece, times, separator = drawn
    times = min(times, 1 + MOST // (len(piece) + 6))
    return separator.join(piece.replace(b"#", b"%d" % i) for i in range(times))


def nested(drawn: tuple[tuple[bytes, bytes], bytes, int]) -> bytes:
    """A piece between many brackets."""
    (begin, end), inner, times = drawn
    return begin * times + inner + end * times


def pieces(leaves: list[bytes], brackets: list[tuple[bytes, bytes]]) -> st.SearchStrategy[bytes]:
    times = st.sampled_from([1, 2, 10, 300, 5000])
    return st.recursive(
        st.sampled_from(leaves) | st.binary(max_size=3),
        lambda inner: st.one_of(
            st.lists(inner, max_size=5).map(b"".join),
            st.tuples(inner, times, st.sampled_from([b"", b",", b"\n", b"|"])).map(repeated),
            st.tuples(st.sampled_from(brackets), inner, times.filter(lambda n: n <= 300)).map(
                nested
            ),
        ),
        max_leaves=8,
    ).map(lambda data: data[:MOST])


def words(text: str) -> list[bytes]:
    return [word.encode() for word in text.split()]


WORDS = words(
    "a é \\u0000 #"  # also as names
    " history user k filter boosts requests events items item_id attributes like title text"
    " semantic_id exclude_items include bundle rules pin key match any range exists must should"
    " must_not gt lte weight type prompt format"
)
SCALARS = st.one_of(
    st.sampled_from(
        [None, True, 0, -1, 2.5, 1e300, 2**70, "", "brand", "price", "x" * 2000, '"\\' * 300, "\0"]
    ),
    st.sampled_from([word.decode() for word in WORDS]),
)
NAMES = st.sampled_from([word.decode() for word in WORDS])


def grown(drawn: tuple[Any, int, str]) -> Any:
    """A value in a list many times, or by many names, or within many others."""
    value, times, how = drawn
    small = len(json.dumps(value)) + 12
    times = min(times, 1 + MOST // small)
    if how == "list":
        return [value] * times
    if how == "names":
        return {f"a{i}": value for i in range(times)}
    for _ in range(min(times, 60)):
        value = [value] if how == "lists" else {how: [value]}
    return value


VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(NAMES, inner, max_size=4),
        st.tuples(
            inner,
            st.sampled_from([2, 15, 300, 10_000]),
            st.sampled_from(["list", "names", "lists", "must", "should", "filter"]),
        ).map(grown),
    ),
    max_leaves=10,
).map(lambda value: json.dumps(value).encode()[:MOST])

CLAUSES = st.recursive(
    st.fixed_dictionaries({"key": st.sampled_from(["brand", "price", "tags", '"\\' * 99])})
    .flatmap(
        lambda clause: st.one_of(
            SCALARS.map(lambda value: {**clause, "match": value}),
            st.tuples(SCALARS, st.sampled_from([1, 900])).map(
                lambda drawn: {**clause, "any": [f"{drawn[0]}{i}" for i in range(drawn[1])]}
            ),
            st.dictionaries(st.sampled_from(["gt", "lte", "lt"]), SCALARS, min_size=1).map(
                lambda bounds: {**clause, "range": bounds}
            ),
        )
    ),
    lambda inner: st.one_of(
        st.dictionaries(
            st.sampled_from(["must", "should", "must_not"]), st.lists(inner, max_size=3), max_size=3
        ),
        st.tuples(
            inner, st.sampled_from([2, 14, 1000]), st.sampled_from(["must", "should", "list"])
        ).map(
            lambda drawn: {"must": grown(drawn)} if drawn[2] == "list" else deep(*drawn)
        ),
    ),
    max_leaves=6,
)  # fmt: skip


def deep(value: Any, times: int, name: str) -> Any:
    for _ in range(min(times, 16)):
        value = {name: [value]}
    return value


JSON_PIECES = pieces(
    [*words('{} [] 0 1e9 9999999999999999999999 null true "a" "#":0 "\\ud800" NaN , :'), *WORDS],
    [(b"[", b"]"), (b'{"a":', b"}"), (b'{"must":[', b"]}"), (b'"', b'"')],
)


INPUTS = {
    "bodies": VALUES | JSON_PIECES | st.binary(max_size=100),
    "filters": VALUES | CLAUSES.map(lambda clause: json.dumps(clause).encode()[:MOST]),
    "texts": JSON_PIECES | VALUES,
}


@pytest.mark.parametrize("target", TARGETS)
@given(data=st.data())
@settings(max_examples=40)
def test_the_cost_of_an_input_is_bounded_by_its_size(target: str, data: st.DataObject) -> None:
    check(target, data.draw(INPUTS[target]))


EXPENSIVE = {
    "the same name twice among many": ("bodies", b"{%s}" % (b'"a":0,' * 40_000)),
    "quotes to escape in many groups": (
        "filters",
        json.dumps(deep({"key": '"\\' * 200, "any": ['"' * 99] * 9}, 15, "must")).encode(),
    ),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_what_was_expensive_or_failed_once_is_cheap(name: str) -> None:
    check(*EXPENSIVE[name])
