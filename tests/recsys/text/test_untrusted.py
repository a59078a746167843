"""Schemas that must hold together are multiplied out by the library, so their number is bounded."""

import pytest

from recsys.testing import byte_level_tokenizer
from recsys.text.token_trie import TextTokenizer
from recsys.text.untrusted import untrusted_compiler, untrusted_schema


def choice(number, name):
    return {"anyOf": [{"properties": {f"{name}{i}": {"type": "integer"}}} for i in range(number)]}


def together(*schemas):
    return {"type": "object", "allOf": list(schemas)}


ALLOWED = [
    together(choice(10, "a"), choice(10, "b")),
    together(*(choice(2, name) for name in "abcdef")),
    choice(60, "a"),
    # Optional fields, as pydantic writes them, are not multiplied out.
    {
        "type": "object",
        "properties": {
            f"field{i}": {"anyOf": [{"type": "integer"}, {"type": "null"}]} for i in range(40)
        },
    },
    {"anyOf": [choice(10, name) for name in "abcdef"]},
    {
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
        "$ref": "#/$defs/node",
    },
    {"type": "object", "properties": {"$id": {"type": "string"}}},
]
REFUSED = [
    together(choice(10, "a"), choice(11, "b")),
    together(*(choice(2, name) for name in "abcdefg")),
    together(*[{"$ref": "#/$defs/a"}] * 7) | {"$defs": {"a": choice(2, "a")}},
    together(*[{"$ref": "#/%24defs/x~1y"}] * 7) | {"$defs": {"x/y": choice(2, "a")}},
    together(*({"properties": {"a": choice(4, "a")}} for _ in range(4))),
    together({"allOf": [choice(5, "a"), choice(5, "b")]}, choice(5, "c")),
    together({"anyOf": [choice(6, "a"), choice(5, "b")]}, choice(10, "c")),
    {"anyOf": choice(11, "a")["anyOf"], "properties": {"x": choice(10, "b")}},
    {"type": "object", "properties": {"x": {"items": together(choice(11, "a"), choice(11, "b"))}}},
]


@pytest.mark.parametrize("schema", ALLOWED)
def test_schemas_within_the_bound_compile(schema):
    compiler = untrusted_compiler(TextTokenizer(byte_level_tokenizer(["one", "two"], 290)))
    compiler.constraint(untrusted_schema(schema))


@pytest.mark.parametrize("schema", REFUSED)
def test_more_than_a_hundred_combinations_are_refused(schema):
    with pytest.raises(ValueError, match="more than 100 combinations of anyOf"):
        untrusted_schema(schema)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"$ref": "#name"}, r"'#name' names no part of the schema"),
        ({"$ref": "#/$defs/none"}, "names no part"),
        ({"$ref": "https://example.org/schema.json"}, "names no part"),
        ({"allOf": [{"$anchor": "a"}, {"$ref": "#a"}]}, "is supported at the top only|names no"),
        ({"items": {"$id": "https://example.org/"}}, r"\$id is supported at the top only"),
    ],
)
def test_references_that_are_not_followed_here_are_refused(schema, said):
    with pytest.raises(ValueError, match=said):
        untrusted_schema(schema)


def test_a_schema_with_many_levels_is_refused():
    schema = {"type": "integer"}
    for _ in range(70):
        schema = {"items": schema}
    with pytest.raises(ValueError, match="more than 64 levels"):
        untrusted_schema(schema)


def test_an_assertion_of_the_library_is_no_part_of_the_message():
    from recsys.text.grammar_constraint import _said

    message = "panic: assertion failed: grammar.symbols.len() < MAX <backtrace> /tmp/python/x.c:9"
    assert _said(message) == "is too large for the library that compiles it"
