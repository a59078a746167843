"""Grammars: regular expressions, context-free grammars and JSON schemas.

`recsys.text.grammar_constraint` compiles a `Grammar` for a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

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


def choice(options: Sequence[str]) -> Grammar:
    """One of some texts."""
    if not options:
        raise ValueError("choice: there are no options")
    # One terminal rather than a rule with many alternatives: the lexer is faster than the parser.
    texts = " | ".join(map(literal, options))
    return Grammar("choice", "lark", f"start: OPTION\nOPTION: {texts}")


def literal(text: str) -> str:
    """A text as a Lark string, which cannot hold U+007F itself."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
