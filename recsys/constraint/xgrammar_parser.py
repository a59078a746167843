r"""The second backend: grammars by xgrammar (extra `xgrammar`), behind the same protocol.

xgrammar precomputes masks when it compiles, where llguidance finds them as it goes. It knows less:

- Of JSON schemas, what it would pass over in silence (`multipleOf`, an `enum` beside a bound) or
  write wrongly (control characters in strings of bounded length, white space in values of any kind)
  is refused here, by its name and place.
- It does not notice texts that cannot come to an end. A search that gets into one is told so.
- Its own search for forced text may not come back, and breaks at half a character. Forced bytes are
  found from masks.
- Negated classes, like `[^a]`, match surrogates, whose bytes are no UTF-8; strings in JSON may hold
  a DEL.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.constraint.parser import forced_by_masks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from recsys.constraint.grammar import Grammar
    from recsys.constraint.token_trie import TextTokenizer

_NOTES = {"title", "description", "default", "examples", "$schema", "$id", "$comment"}
_DEFINITIONS = {"$defs", "definitions"}
_BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
_BESIDE: dict[str, set[str]] = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "integer": _BOUNDS,
    "number": _BOUNDS,
    "string": set(),
    "boolean": set(),
    "null": set(),
}
"""What may stand beside a type."""
_OF_TYPE: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,),
    "null": (type(None),), "array": (list,), "object": (dict,),
}  # fmt: skip


class XgrammarBackend:
    """A `Backend`: xgrammar's compiler for one tokenizer."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Read the vocabulary; its bytes are those that llguidance sees.

        Raises:
            ValueError: xgrammar is not installed.
        """
        try:
            import xgrammar
        except ImportError as error:
            raise ValueError(
                "backend: xgrammar is not installed; pip install 'recsys[xgrammar]', or take "
                "backend llguidance"
            ) from error
        self._tokenizer, self._library = tokenizer, xgrammar
        spelling = list(tokenizer.tokens.spelling)
        info = xgrammar.TokenizerInfo(
            spelling,
            xgrammar.VocabType.RAW,
            vocab_size=len(spelling),
            stop_token_ids=list(tokenizer.end_tokens),
        )
        # one thread, so that figures compare; its cache is off, as ours is in front
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, grammar: Grammar) -> XgrammarParser:
        """As `Backend.compile`."""
        if grammar.kind == "json_schema":
            for said in _unsupported(json.loads(grammar.text), "#"):
                raise ValueError(
                    f"{grammar.field}: xgrammar cannot hold a text to {said}; take backend "
                    "llguidance"
                )
        try:
            if grammar.kind == "regex":
                compiled = self._compiler.compile_regex(_dots_within_lines(grammar.text))
            elif grammar.kind == "lark":
                compiled = self._compiler.compile_lark(grammar.text)
            else:
                compiled = self._compiler.compile_json_schema(
                    grammar.text, any_whitespace=False, separators=(",", ":"), strict_mode=False
                )
        except RuntimeError as error:
            raise ValueError(f"{grammar.field}: xgrammar: {_said(str(error))}") from None
        matcher = self._library.GrammarMatcher(compiled)
        return XgrammarParser(matcher, self._tokenizer, grammar.field)


class XgrammarParser:
    """A `Parser`."""

    def __init__(self, matcher: Any, tokenizer: TextTokenizer, field: str) -> None:
        """Take over `matcher`."""
        self._matcher, self._tokenizer, self._field = matcher, tokenizer, field

    def fork(self) -> XgrammarParser:
        """Another one at the same place."""
        return XgrammarParser(self._matcher.fork(), self._tokenizer, self._field)

    def bits(self) -> NDArray[np.uint8]:
        """Tokens that may follow; none where the text cannot come to an end."""
        size = self._tokenizer.vocabulary_size
        mask = np.full((1, -(-size // 32)), -1, np.int32)
        self._matcher.fill_next_token_bitmask(mask)
        found: NDArray[np.uint8] = mask.view(np.uint8)[0, : -(-size // 8)]
        return found

    def forced(self) -> bytes:
        """What every text goes on with, or the beginning of it."""
        return forced_by_masks(self, self._tokenizer)

    def forth(self, tokens: list[int]) -> None:
        """Go on by tokens."""
        for token in tokens:
            if not self._matcher.accept_token(token):
                raise ValueError(f"{self._field}: xgrammar does not take token {token} here")

    def back(self, count: int) -> None:
        """Go back by so many tokens."""
        self._matcher.rollback(count)


def _unsupported(schema: Any, path: str) -> Iterator[str]:
    """What xgrammar would not hold texts to as llguidance does, with its place."""
    if isinstance(schema, bool):
        if schema:
            yield f"values of any kind, at {path}"
        return
    keys = set(schema) - _NOTES - _DEFINITIONS
    for group in _DEFINITIONS & set(schema):
        for name, part in schema[group].items():
            yield from _unsupported(part, f"{path}/{group}/{name}")
    for alone in ("$ref", "anyOf", "enum", "const"):
        if alone in keys:
            kind = schema.get("type") if alone in ("enum", "const") else None
            values = schema.get("enum", [schema.get("const")])
            fits = kind in _OF_TYPE and all(type(v) in _OF_TYPE[kind] for v in values)
            for key in sorted(keys - {alone} - ({"type"} if fits else set())):
                yield f"{key!r} beside {alone!r}, at {path}"
            for place, part in enumerate(schema[alone] if alone == "anyOf" else ()):
                yield from _unsupported(part, f"{path}/anyOf/{place}")
            return
    types = schema.get("type", [])
    types = types if isinstance(types, list) else [types]
    if not types:
        yield f"values of any kind, at {path}"
    allowed = {"type"}.union(*(_BESIDE.get(name, ()) for name in types))
    for key in sorted(keys - allowed):
        yield f"{key!r}, at {path}"
    if "array" in types:
        yield from _unsupported(schema.get("items", True), f"{path}/items")
    if "object" in types:
        properties = schema.get("properties", {})
        for name in sorted(set(schema.get("required", ())) - set(properties)):
            yield f"'required' property {name!r} that is no property, at {path}"
        yield from _unsupported(
            schema.get("additionalProperties", True), f"{path}/additionalProperties"
        )
        for name, part in properties.items():
            yield from _unsupported(part, f"{path}/properties/{name}")


def _dots_within_lines(pattern: str) -> str:
    r"""The expression with `[^\n]` for each `.`, which is any character to xgrammar."""
    parts = re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, flags=re.DOTALL)
    return "".join(r"[^\n]" if part == "." else part for part in parts)


def _said(message: str) -> str:
    """An error of xgrammar in one line, without where in its source it arose."""
    return " ".join(re.sub(r"^\[[^]]*\] \S+:\d+: ", "", message).split())
