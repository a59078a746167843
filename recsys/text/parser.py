"""Parser: a position in a text of a grammar, with llguidance."""

from __future__ import annotations

import json
import re

import numpy as np
from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from numpy.typing import NDArray

from recsys.text.grammar import ASCII, Grammar
from recsys.text.token_trie import TextTokenizer

MOST_FORCED = 4096
"""Most forced bytes that are found by masks; a grammar that forces more is refused."""


class Parser:
    """A position in a text of one grammar.

    Every method raises `ValueError`, with a message that begins with the grammar's field, if the
    library refuses the grammar or exceeds its limits.
    """

    @classmethod
    def compile(cls, grammar: Grammar, tokenizer: TextTokenizer) -> Parser:
        """Make a parser at the beginning of a text; threads may call this at the same time.

        Raises:
            ValueError: the grammar is malformed, too large, or not supported by the library.
        """
        limits = LLParserLimits(verbose_errors=False)
        plain = _source(grammar)
        # Without the library's own forcing, which allows a single way to split forced bytes.
        source = f'%llguidance {{"no_forcing": true}}\n{plain}'
        matcher = LLMatcher(tokenizer.parser, source, log_level=0, limits=limits)
        parser = cls(matcher, tokenizer, grammar.field)
        parser.check()
        return parser

    def __init__(self, matcher: LLMatcher, tokenizer: TextTokenizer, field: str) -> None:
        """Use `matcher`."""
        self._matcher, self._tokenizer, self._field = matcher, tokenizer, field
        self._width = -(-tokenizer.vocabulary_size // 8)

    def fork(self) -> Parser:
        """Copy the parser at its position."""
        return Parser(self._matcher.deep_copy(), self._tokenizer, self._field)

    def bits(self) -> NDArray[np.uint8]:
        """(V / 8, rounded up) one bit per token that may follow, lowest first.

        The end tokens are set only if the text may end.
        """
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._width]
        self.check()
        return found

    def forced(self) -> bytes:
        """Bytes with which every text continues."""
        if self._field == "lark":  # llguidance's search may not terminate there
            return forced_by_masks(self, self._tokenizer)
        return self._matcher.compute_ff_bytes()

    def forth(self, tokens: list[int]) -> None:
        """Move forward by tokens."""
        self._matcher.consume_tokens(tokens)
        self.check()

    def back(self, count: int) -> None:
        """Move back by a number of tokens."""
        self._matcher.rollback(count)
        self.check()

    def check(self) -> None:
        """Raise the matcher's error, if any, as one line without a dump of the parser."""
        if self._matcher.is_error():
            raise ValueError(f"{self._field}: {_said(self._matcher.get_error())}")


def forced_by_masks(parser: Parser, tokenizer: TextTokenizer) -> bytes:
    """Bytes with which every text continues, at most `MOST_FORCED`; one mask per byte."""
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
    """The grammar in Lark's syntax, which llguidance reads."""
    if grammar.kind == "lark":
        return grammar.text
    if grammar.kind == "regex":
        return f"start: /{regex_to_lark(grammar.text, ASCII)}/"
    schema = json.loads(grammar.text) | {"x-guidance": {"whitespace_flexible": False}}
    return f"start: %json {json.dumps(schema, ensure_ascii=False)}"


def _said(message: str) -> str:
    """An error of llguidance as one line, without its dumps of parser and source."""
    message = message.split("<state>")[0].replace("<non-verbose/>", "")
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    said = " ".join(" ".join(lines).split())
    return re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", said)
