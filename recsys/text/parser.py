"""Parser: the position in a text of a grammar, by llguidance."""

from __future__ import annotations

import json
import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from numpy.typing import NDArray

from recsys.text.grammar import ASCII, Grammar
from recsys.text.token_trie import TextTokenizer

MOST_FORCED = 4096
"""Most forced bytes that are searched for by masks. A grammar that forces so many is refused."""


class Parser:
    """A position in a text of one grammar.

    Every method raises `ValueError`, with a message that begins with the grammar's field, where the
    library refuses the grammar or exceeds its limits.
    """

    @classmethod
    def compile(cls, grammar: Grammar, tokenizer: TextTokenizer) -> Parser:
        """A parser at the beginning of a text; safe to call from several threads.

        Raises:
            ValueError: the grammar is malformed, too large, or uses what the library lacks; the
                message begins with its field.
        """
        limits = LLParserLimits(verbose_errors=False)
        plain = _source(grammar)
        # without its own forcing, which leaves one way to cut forced bytes into tokens
        source = f'%llguidance {{"no_forcing": true}}\n{plain}'
        matcher = LLMatcher(tokenizer.parser, source, log_level=0, limits=limits)
        parser = cls(matcher, tokenizer, grammar.field)
        parser.check()
        return parser

    def __init__(self, matcher: LLMatcher, tokenizer: TextTokenizer, field: str) -> None:
        """Take over `matcher`."""
        self._matcher, self._tokenizer, self._field = matcher, tokenizer, field
        self._width = -(-tokenizer.vocabulary_size // 8)

    def fork(self) -> Parser:
        """Another one at the same place."""
        return Parser(self._matcher.deep_copy(), self._tokenizer, self._field)

    def bits(self) -> NDArray[np.uint8]:
        """(V / 8, rounded up) a bit per token that may follow, lowest first.

        The end tokens are set only where nothing else may follow.
        """
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
