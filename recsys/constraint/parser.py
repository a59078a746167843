"""Parsers: what stands behind a grammar, from one of two libraries.

A parser stands at one place in a text, goes forth by tokens and back by their number, and says what
may follow. `LlguidanceBackend` compiles grammars with llguidance, which comes with this package;
`recsys.constraint.xgrammar_parser` does with xgrammar, where that is installed. Which states there
are, and what is kept, is `recsys.constraint.grammar`'s affair.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, Protocol, get_args

import numpy as np
from llguidance import LLMatcher, LLParserLimits, regex_to_lark

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from recsys.constraint.grammar import Grammar
    from recsys.constraint.token_trie import TextTokenizer

BackendName = Literal["llguidance", "xgrammar"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)
ASCII = "dws"
"""Classes of expressions that are ASCII's alone: digits, words and spaces."""
MOST_FORCED = 4096
"""Most bytes that are looked for by masks; also, a grammar that forces so many is refused."""


class Parser(Protocol):
    """A place in a text of one grammar. Errors are `ValueError`s that begin with its field."""

    def fork(self) -> Self:
        """Another one at the same place."""

    def bits(self) -> NDArray[np.uint8]:
        """(V / 8, rounded up) tokens that may follow, a bit each, the lowest first."""

    def forced(self) -> bytes:
        """What every text goes on with, or the beginning of it."""

    def forth(self, tokens: list[int]) -> None:
        """Go on by tokens that are allowed and do not end."""

    def back(self, count: int) -> None:
        """Go back by so many tokens."""


class Backend(Protocol):
    """Compiles grammars for one tokenizer; safe to share between threads."""

    def compile(self, grammar: Grammar) -> Parser:
        """A parser at the beginning of a text.

        Raises:
            ValueError: the grammar is malformed, too large, or more than the library knows; the
                message begins with its field.
        """


def backend_of(name: str, tokenizer: TextTokenizer) -> Backend:
    """The backend of a name.

    Raises:
        ValueError: no such backend, or one that is not installed.
    """
    if name == "llguidance":
        return LlguidanceBackend(tokenizer)
    if name == "xgrammar":
        from recsys.constraint.xgrammar_parser import XgrammarBackend

        return XgrammarBackend(tokenizer)
    raise ValueError(f"backend: {name!r} is not one of {', '.join(BACKENDS)}")


def installed_backends() -> list[BackendName]:
    """Backends whose libraries are there."""
    return [name for name in BACKENDS if find_spec(name) is not None]


class LlguidanceBackend:
    """Grammars by llguidance: exact about what can still become a text."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Compile for `tokenizer`."""
        self._tokenizer = tokenizer

    def compile(self, grammar: Grammar) -> LlguidanceParser:
        """As `Backend.compile`."""
        limits = LLParserLimits(verbose_errors=False)
        plain = _source(grammar)
        # without its own forcing, which leaves one way to cut forced bytes into tokens
        source = f'%llguidance {{"no_forcing": true}}\n{plain}'
        matcher = LLMatcher(self._tokenizer.parser, source, log_level=0, limits=limits)
        parser = LlguidanceParser(matcher, self._tokenizer, grammar.field)
        parser.check()
        return parser


class LlguidanceParser:
    """A `Parser`."""

    def __init__(self, matcher: LLMatcher, tokenizer: TextTokenizer, field: str) -> None:
        """Take over `matcher`."""
        self._matcher, self._tokenizer, self._field = matcher, tokenizer, field
        self._width = -(-tokenizer.vocabulary_size // 8)

    def fork(self) -> LlguidanceParser:
        """Another one at the same place."""
        return LlguidanceParser(self._matcher.deep_copy(), self._tokenizer, self._field)

    def bits(self) -> NDArray[np.uint8]:
        """Tokens that may follow; the end tokens where nothing else may."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._width]
        self.check()
        return found

    def forced(self) -> bytes:
        """What every text goes on with."""
        if self._field == "lark":  # llguidance's own search may not come back from terminals there
            return forced_by_masks(self, self._tokenizer)
        return self._matcher.compute_ff_bytes()

    def forth(self, tokens: list[int]) -> None:
        """Go on by tokens."""
        self._matcher.consume_tokens(tokens)
        self.check()

    def back(self, count: int) -> None:
        """Go back by so many tokens."""
        self._matcher.rollback(count)
        self.check()

    def check(self) -> None:
        """Raise what the matcher has stumbled over, in one line without its dump of the parser."""
        if self._matcher.is_error():
            raise ValueError(f"{self._field}: {_said(self._matcher.get_error())}")


def forced_by_masks(parser: Parser, tokenizer: TextTokenizer) -> bytes:
    """What every text goes on with, `MOST_FORCED` bytes at most, a mask a byte."""
    run = bytearray()
    while len(run) < MOST_FORCED:
        mask = np.unpackbits(parser.bits(), bitorder="little", count=tokenizer.vocabulary_size)
        byte = tokenizer.tokens.first_byte[np.flatnonzero(mask)]
        if not len(byte) or byte[0] < 0 or (byte != byte[0]).any():
            break
        token = int(tokenizer.tokens.of_byte[byte[0]])
        if token < 0:
            break
        parser.forth([token])
        run.append(int(byte[0]))
    parser.back(len(run))
    return bytes(run)


def _source(grammar: Grammar) -> str:
    """A grammar as llguidance reads it, in Lark's syntax."""
    if grammar.kind == "lark":
        return grammar.text
    if grammar.kind == "regex":
        return f"start: /{regex_to_lark(grammar.text, ASCII)}/"
    schema = json.loads(grammar.text) | {"x-guidance": {"whitespace_flexible": False}}
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}"


def _said(message: str) -> str:
    """An error of llguidance in one line, without its dumps of parser and source."""
    message = message.split("<state>")[0].replace("<non-verbose/>", "")
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    said = " ".join(" ".join(lines).split())
    return re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", said)
