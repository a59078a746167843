"""Grammars from untrusted clients: refused, or compiled in bounded time and memory.

llguidance counts the work of compiling and of each step (`LIMITS`), and fetches no reference. One
keyword escapes its count: the automaton of `multipleOf: n` has n states, and several of them
together have their least common multiple. {"multipleOf": 999983} took 21 seconds and 360 MB, so
that number is bounded here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from llguidance import LLParserLimits

from recsys.text.grammar import Grammar, json_schema
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.token_trie import TextTokenizer

LONGEST_SCHEMA = 4096
"""Most characters of a schema, written without white space."""
LARGEST_MULTIPLE = 10_000
"""Largest least common multiple of a schema's `multipleOf`, in units of their last digit."""
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
    return json_schema(schema)


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
