"""Grammars: regular expressions, context-free grammars, JSON schemas, and shorthands for them.

`recsys.text.grammar_constraint` compiles a `Grammar` for a tokenizer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import regex_to_lark

ASCII = "dws"
"""Character classes of a regular expression that match ASCII only: digits, words and spaces."""
MAX_DEPTH = 64
"""Most levels that a JSON schema may be nested."""


TERMINALS = {
    "QUOTED_TEXT": r"""/"([^"\\\r\n]|\\[^\r\n])*"|'([^'\\\r\n]|\\[^\r\n])*'/""",
    "UNQUOTED_TEXT": r"""/[^"'\r\n]+/""",
}
"""Terminals of `lark` grammars: a line's text in quotes, with `\\` escapes, and without any."""
TOKENS = ("text_token", "paragraph_token")
"""Rules of `lark` grammars: one token of text, and one without a line break.

They bound a text by its tokens, as in `start: "Why: " paragraph_token{1,40} "\\n"`. What follows
must not begin with a token that they match themselves.
"""


@dataclass(frozen=True)
class Grammar:
    """A set of texts; hashable, so that equal grammars are compiled once.

    Attributes:
        field: name of the constructor, with which error messages begin.
        kind: kind of `text`.
        text: an expression, a grammar in Lark's syntax, or a JSON schema.
    """

    field: str
    kind: Literal["regex", "lark", "json_schema"]
    text: str


def regex(pattern: str) -> Grammar:
    r"""Texts that match a regular expression as a whole.

    Rust's syntax, without look-around; `\d`, `\w` and `\s` are ASCII's.
    """
    return Grammar("regex", "regex", pattern)


def lark(grammar: str) -> Grammar:
    """Texts of a context-free grammar in Lark's syntax; its first symbol is `start`.

    A grammar may use the names of `TERMINALS` and `TOKENS` without defining them, and a special
    token of the tokenizer by its name, as in `<|image|>`.
    """
    return Grammar("lark", "lark", grammar)


def json_schema(schema: dict[str, Any] | str) -> Grammar:
    """JSON of a schema, without white space between its parts.

    The schema bounds the length of a text: give strings a `maxLength` and arrays a `maxItems`.

    Raises:
        ValueError: not JSON, or nested deeper than `MAX_DEPTH` levels.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"json_schema: not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"json_schema: nested deeper than {MAX_DEPTH} levels") from None
    if not isinstance(schema, dict):
        raise ValueError(f"json_schema: must be an object, got {type(schema).__name__}")
    _check_depth(schema)
    return Grammar("json_schema", "json_schema", json.dumps(schema, ensure_ascii=False))


def structured(kind: type) -> Grammar:
    """JSON of a pydantic model or a dataclass; `parse` reads it back.

    Objects have the fields of the type and no others.
    """
    from pydantic import PydanticSchemaGenerationError, TypeAdapter

    name = getattr(kind, "__name__", repr(kind))
    try:
        schema = TypeAdapter(kind).json_schema()
    except PydanticSchemaGenerationError as error:
        first = str(error).splitlines()[0]
        raise ValueError(f"structured: {name} has no JSON schema: {first}") from None
    return dataclasses.replace(json_schema(_closed(schema)), field=f"structured: {name}")


def free_json(depth: int = 3, items: int = 8, length: int = 64) -> Grammar:
    """Any JSON of bounded size.

    It has at most `depth` levels of nested arrays and objects, `items` members of each, and
    `length` characters of a string or key.
    """
    if not 0 <= depth <= MAX_DEPTH // 4:
        raise ValueError(f"free_json: depth must be in 0 .. {MAX_DEPTH // 4}, got {depth}")
    text = {"type": "string", "maxLength": length}
    number = {"type": "number", "minimum": -1e9, "maximum": 1e9, "multipleOf": 0.01}
    plain = [text, number, {"type": "boolean"}, {"type": "null"}]
    key = f"^.{{1,{length}}}$"
    definitions: dict[str, Any] = {"value0": {"anyOf": plain}}
    for level in range(1, depth + 1):
        below = {"$ref": f"#/$defs/value{level - 1}"}
        array = {"type": "array", "items": below, "maxItems": items}
        entries = {
            "type": "object",
            "patternProperties": {key: below},
            "additionalProperties": False,
            "maxProperties": items,
        }
        definitions[f"value{level}"] = {"anyOf": [*plain, array, entries]}
    schema = {"$defs": definitions, "$ref": f"#/$defs/value{depth}"}
    return dataclasses.replace(json_schema(schema), field="free_json")


def choice(options: Sequence[str]) -> Grammar:
    """One of some texts."""
    if not options:
        raise ValueError("choice: there are no options")
    # One terminal rather than a rule with many alternatives: the lexer is faster than the parser.
    texts = " | ".join(map(literal, options))
    return Grammar("choice", "lark", f"start: OPTION\nOPTION: {texts}")


def substring_of(text: str, unit: str = "characters") -> Grammar:
    """A part of a text, possibly empty: verbatim quotations.

    It may begin and end between any `unit`, "characters" or "words".
    """
    keys = {"characters": "substring_chars", "words": "substring_words"}
    if unit not in keys:
        raise ValueError(f"substring_of: unit must be one of {sorted(keys)}, got {unit!r}")
    part = json.dumps({keys[unit]: text}, ensure_ascii=False)
    return Grammar("substring_of", "lark", f"start: %regex {part}")


def text_until(stop: str) -> Grammar:
    """Any text that ends with the first occurrence of `stop`."""
    if not stop:
        raise ValueError("text_until: stop is empty")
    end = literal(stop)
    rules = f"UNTIL: (/(?s:.*)/ {end}) & ~(/(?s:.*)/ {end} /(?s:.+)/)"
    return Grammar("text_until", "lark", f"start: UNTIL\n{rules}")


def delimited_list(
    pattern: str, delimiter: str = ", ", *, least: int = 1, most: int = 10
) -> Grammar:
    """`least` to `most` texts that match a regular expression, with a delimiter between them."""
    _check_counts("delimited_list", least, most)
    more = f"({literal(delimiter)} ITEM){{{max(least - 1, 0)},{most - 1}}}" if most > 1 else ""
    whole = f"ITEM {more}" if least else f"(ITEM {more})?"
    item = f"ITEM: /{regex_to_lark(pattern, ASCII)}/"
    # One terminal again: with a rule, adjacent items would be ambiguous.
    return Grammar("delimited_list", "lark", f"start: LIST\nLIST: {whole}\n{item}")


def delimited_subsequence(
    candidates: Sequence[str], delimiter: str = ", ", *, least: int = 1, most: int | None = None
) -> Grammar:
    """`least` to `most` (or all) of some candidates, in their order, each at most once."""
    most = len(candidates) if most is None else most
    if not candidates:
        raise ValueError("delimited_subsequence: there are no candidates")
    _check_counts("delimited_subsequence", least, most)
    if least > len(candidates):
        raise ValueError(f"delimited_subsequence: least is {least} of {len(candidates)} candidates")
    most = min(most, len(candidates))
    rules = subsequence_rules("start", candidates, delimiter, least, most)
    return Grammar("delimited_subsequence", "lark", rules)


def subsequence_rules(
    name: str, candidates: Sequence[str], delimiter: str, least: int, most: int
) -> str:
    """Lark rules of `delimited_subsequence` for use in a larger grammar, beginning with `name`."""
    # NAME_i_k: k candidates are written, and candidates i and later may follow. There is no rule
    # where `least` cannot be reached any more.
    rules = [f"{name}: {name}_0_0"]
    for i in range(len(candidates) + 1):
        for k in range(min(i, most) + 1):
            if i == len(candidates) or k == most:
                ways = ['""'] if k >= least else []
            else:
                between = f"{literal(delimiter)} " if k else ""
                ways = [f"{between}{literal(candidates[i])} {name}_{i + 1}_{k + 1}"]
                if len(candidates) - i - 1 + k >= least:
                    ways.append(f"{name}_{i + 1}_{k}")
            if ways:
                rules.append(f"{name}_{i}_{k}: " + " | ".join(ways))
    return "\n".join(rules)


def parse(kind: type, text: str) -> Any:
    """The value that a text of `structured(kind)` encodes.

    ValueError if the text was cut, or violates a rule that a schema cannot express.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(text)


def literal(text: str) -> str:
    """A text as a Lark string, which cannot hold U+007F itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _check_counts(field: str, least: int, most: int) -> None:
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"{field}: needs 0 <= least <= most and most >= 1, got {least} and {most}")


def _check_depth(schema: dict[str, Any]) -> None:
    """Raise `ValueError` with the path if a schema is nested too deeply."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while stack:
        value, path = stack.pop()
        if len(path) > MAX_DEPTH:
            where = "/".join(path[:6])
            raise ValueError(f"json_schema: nested deeper than {MAX_DEPTH} levels at {where}/...")
        if isinstance(value, dict):
            stack += [(inner, (*path, str(key))) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(inner, (*path, str(number))) for number, inner in enumerate(value)]


def _closed(schema: Any) -> Any:
    """The schema without additional properties in any object."""
    if isinstance(schema, list):
        return [_closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
