"""Grammars from untrusted clients: refused, or compiled in bounded time and memory.

llguidance counts the work of compiling and of each step (`LIMITS`), and fetches no reference. Two
things escape its count, and are bounded here:

- The automaton of `multipleOf: n` has n states, and several of them together have their least
  common multiple. {"multipleOf": 999983} took 21 seconds and 360 MB.
- Schemas that must hold together (`allOf`, or `anyOf` beside others) are multiplied out: an `allOf`
  of eleven `anyOf` of two objects has 2,048 alternatives, and took 2 seconds and 250 MB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from llguidance import LLParserLimits

from recsys.text.grammar import Grammar, json_schema
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.token_trie import TextTokenizer

LONGEST_SCHEMA = 4096
"""Most characters of a schema, written without white space."""
LARGEST_MULTIPLE = 10_000
"""Largest least common multiple of a schema's `multipleOf`, in units of their last digit."""
MOST_ALTERNATIVES = 100
"""Most combinations of `anyOf` in schemas that must hold together."""
CONJUNCTIVE = frozenset({"anyOf", "oneOf", "allOf", "$ref"})
BASES = frozenset({"$id", "id", "$anchor", "$dynamicAnchor"})  # what references are relative to
DEEPEST = 64
"""Most levels of a schema, references included."""
LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


def untrusted_compiler(tokenizer: TextTokenizer) -> GrammarCompiler:
    """A compiler with `LIMITS`, which keeps one grammar: many could fill the memory."""
    return GrammarCompiler(tokenizer, 1, limits=LIMITS)


def untrusted_schema(schema: dict[str, Any]) -> Grammar:
    """JSON of a schema, as `json_schema`.

    Raises:
        ValueError: as of `json_schema`, or one of the bounds is exceeded.
    """
    size = len(json.dumps(schema, ensure_ascii=False, separators=(",", ":")))
    if size > LONGEST_SCHEMA:
        raise ValueError(
            f"json_schema: must have at most {LONGEST_SCHEMA} characters without white space, "
            f"got {size}"
        )
    found = list(_multiples(schema))
    last = min((exponent for _, exponent in found), default=0)  # one unit for all of them
    common = math.lcm(*(number * 10 ** (exponent - last) for number, exponent in found))
    if common > LARGEST_MULTIPLE:
        got = common if common < 10**18 else "more than 10**18"
        raise ValueError(
            "json_schema: the least common multiple of all multipleOf must be at most "
            f"{LARGEST_MULTIPLE} in units of their last digit, got {got}"
        )
    if _Alternatives(schema).together() > MOST_ALTERNATIVES:
        raise ValueError(
            f"json_schema: has more than {MOST_ALTERNATIVES} combinations of anyOf in schemas that "
            "must hold together (allOf, or anyOf beside other keywords); write fewer, or the ones "
            "that you want as one anyOf"
        )
    return json_schema(schema)


class _Alternatives:
    """Counts the alternatives of the parts of a schema, up to one more than `MOST_ALTERNATIVES`."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self._known: dict[int, int] = {}  # by the part's identity
        self._most = 1

    def together(self) -> int:
        """The most alternatives of any part whose schemas must hold together.

        Raises:
            ValueError: the schema has too many levels.
        """
        self._count(self._schema, DEEPEST)
        return self._most

    def _count(self, part: Any, levels: int) -> int:
        """The alternatives of a part if it is multiplied out."""
        if not isinstance(part, (dict, list)):
            return 1
        if levels == 0:
            raise ValueError(f"json_schema: has more than {DEEPEST} levels")
        if id(part) not in self._known:
            self._known[id(part)] = 1  # of a reference to what contains it
            self._known[id(part)] = self._counted(part, levels - 1)
        return self._known[id(part)]

    def _counted(self, part: dict[str, Any] | list[Any], levels: int) -> int:
        if isinstance(part, list):
            return _product(self._count(value, levels) for value in part)
        counts = []
        for key, value in part.items():
            if key in BASES and isinstance(value, str) and part is not self._schema:
                raise ValueError(f"json_schema: {key} is supported at the top only")
            if key in ("anyOf", "oneOf") and isinstance(value, list):
                counts.append(sum(self._count(one, levels) for one in value) or 1)
            elif key == "$ref" and isinstance(value, str):
                counts.append(self._count(self._referred(value), levels))
            elif key not in ("$defs", "definitions"):
                counts.append(self._count(value, levels))
        several = [count for count in counts if count > 1]
        both = part.get("allOf")
        if (len(several) > 1 and CONJUNCTIVE & part.keys()) or (
            isinstance(both, list) and len(both) > 1
        ):
            self._most = max(self._most, _product(several))
        return _product(several)

    def _referred(self, reference: str) -> Any:
        """The part that a local reference names.

        Raises:
            ValueError: it names nothing in the schema.
        """
        part: Any = self._schema
        first, *names = unquote(reference).split("/")
        for name in (name.replace("~1", "/").replace("~0", "~") for name in names):
            if isinstance(part, list):
                part = part[int(name)] if name.isdecimal() and int(name) < len(part) else None
            else:
                part = part.get(name) if isinstance(part, dict) else None
        if first != "#" or part is None:
            raise ValueError(
                f"json_schema: $ref {reference[:100]!r} names no part of the schema; write "
                "#/$defs/NAME"
            )
        return part


def _product(counts: Iterable[int]) -> int:
    """The product, or `MOST_ALTERNATIVES` + 1 if it is more."""
    product = 1
    for count in counts:
        product = min(product * count, MOST_ALTERNATIVES + 1)
    return product


def _multiples(schema: Any) -> Iterator[tuple[int, int]]:
    """Each `multipleOf` but 0 as (n, exponent), for n * 10 ** exponent with exponents up to 0."""
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, list):
            stack += value
        elif isinstance(value, dict):
            stack += value.values()
            given = value.get("multipleOf")
            if type(given) in (int, float) and given:
                _, digits, exponent = Decimal(repr(given)).normalize().as_tuple()
                number = int("".join(map(str, digits)))
                assert isinstance(exponent, int)  # noqa: S101 - it is a finite number
                yield number * 10 ** max(exponent, 0), min(exponent, 0)
