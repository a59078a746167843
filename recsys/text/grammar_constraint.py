r"""GrammarConstraint: the tokens that may follow in a text of a grammar, for one tokenizer.

`GrammarCompiler` compiles a `Grammar` and keeps what it compiled. The parser, llguidance's,
accepts every tokenisation of every text, and reports the bytes that are forced next.

The parser holds one position and can only step forwards and back. A state is therefore the number
of a node in a tree with one token per node. To answer for a node, the parser rolls back to the
common ancestor and then consumes tokens down to that node. This costs a microsecond per token; a
copy of the parser would take a megabyte per few thousand tokens. A mask is computed once and kept
with its node.

        0 ── { ── " ── a        from x to a: roll back 1 token, consume 2
                   └── b ── x
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise

import numpy as np
from llguidance import LLMatcher, LLParserLimits, regex_to_lark
from numpy.typing import ArrayLike, NDArray

from recsys.text.constraint import DEAD
from recsys.text.grammar import ASCII, TERMINALS, TOKENS, Grammar
from recsys.text.tokenizer import TextTokenizer

LINE_BREAKS = frozenset(b"\r\n")
LIMITS = LLParserLimits(verbose_errors=False)
NODE = 300  # bytes of a state in three lists and a dictionary
LONGEST_REASON = 300  # characters of an error; some show a whole automaton
MOST_FORCED = 4096
"""Most forced bytes that are found by masks; a grammar that forces more is refused."""


class GrammarConstraint:
    """A `Constraint` from a compiled grammar, for one search; `GrammarCompiler` makes them.

    Two states are equal if their tokens are. Not safe to share between threads.
    """

    def __init__(self, parser: Parser, tokenizer: TextTokenizer, field: str) -> None:
        """Use `parser`, which is at the beginning of a text."""
        self._parser, self._tokenizer, self._field = parser, tokenizer, field
        self.vocabulary_size = tokenizer.vocabulary_size
        self.end_tokens = tokenizer.end_tokens
        self._parent, self._token, self._depth = [DEAD], [DEAD], [0]
        self._child: dict[tuple[int, int], int] = {}
        self._mask: dict[int, NDArray[np.uint8]] = {}  # bits
        self._here, self._width = 0, -(-self.vocabulary_size // 8)

    @property
    def nbytes(self) -> int:
        """About the memory of its states and masks, which grows with each new text."""
        return NODE * len(self._parent) + self._width * len(self._mask)

    def initial(self) -> int:
        """The state at the beginning of a text."""
        return 0

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that continue a text; end tokens where a text is complete."""
        states = np.asarray(states, np.int64)
        bits = np.zeros((len(states), self._width), np.uint8)
        for line, state in zip(bits, states.tolist(), strict=True):
            if state != DEAD:
                line[:] = self._bits(state)
        mask = np.unpackbits(bits, axis=1, bitorder="little", count=self.vocabulary_size)
        return mask.view(np.bool_)

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states after (n,) tokens."""
        states, tokens = np.asarray(states, np.int64), np.asarray(tokens, np.int64)
        return np.asarray(
            [self._step(s, t) for s, t in zip(states.tolist(), tokens.tolist(), strict=True)],
            np.int64,
        )

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the states themselves."""
        return np.asarray(states, np.int64)

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Tokens of the bytes with which every text continues, as the tokenizer would split them.

        Other tokens for the same bytes are also allowed; the texts are the same. The end token is
        included if nothing else may follow.
        """
        return [self._run(state) for state in np.asarray(states, np.int64).tolist()]

    def _run(self, state: int) -> list[int]:
        """Forced tokens of a state."""
        if state == DEAD or self._has_ended(state):
            return []
        self._go(state)
        text = self._parser.forced()
        parser = self._tokenizer.parser
        run = parser.tokenize_bytes(text)
        special = [position for position, token in enumerate(run) if parser.is_special_token(token)]
        if special:  # its name is a part of the text, which no special token may write
            return run[: special[0]]
        for token in run:
            state = self._add(state, token)
        ends = np.flatnonzero(self.allowed([state])[0]).tolist() == sorted(self.end_tokens)
        if ends:
            return [*run, self.end_tokens[0]]
        # The end of the run may be part of a longer token.
        return parser.tokenize_partial(text)[0]

    def _has_ended(self, state: int) -> bool:
        return self._token[state] in self.end_tokens

    def _bits(self, state: int) -> NDArray[np.uint8]:
        """Mask of a state, one bit per token."""
        if state not in self._mask:
            if self._has_ended(state):
                mask = np.zeros(self._width, np.uint8)
            else:
                self._go(state)
                mask = self._parser.bits()
                if not mask.any():
                    raise ValueError(f"{self._field}: the text so far has no end")
            self._mask[state] = mask
        return self._mask[state]

    def _step(self, state: int, token: int) -> int:
        """The state after a token."""
        if state == DEAD or not 0 <= token < self.vocabulary_size:
            return DEAD
        if not self._bits(state)[token >> 3] >> (token & 7) & 1:
            return DEAD
        return self._add(state, token)

    def _add(self, state: int, token: int) -> int:
        """The node of an allowed token."""
        node = self._child.setdefault((state, token), len(self._parent))
        if node == len(self._parent):
            self._parent.append(state)
            self._token.append(token)
            self._depth.append(self._depth[state] + 1)
        return node

    def _go(self, state: int) -> None:
        """Move the parser to a state."""
        back, there, forth = 0, state, []
        here = self._here
        while here != there:
            if self._depth[here] >= self._depth[there]:
                here, back = self._parent[here], back + 1
            else:
                forth.append(self._token[there])
                there = self._parent[there]
        self._here = state
        if back:
            self._parser.back(back)
        if forth:
            self._parser.forth(forth[::-1])


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last ones; threads may share it."""

    def __init__(self, tokenizer: TextTokenizer, capacity: int = 256) -> None:
        """Keep at most `capacity` grammars; the least recently used one is dropped first."""
        self.tokenizer = tokenizer
        self._compiled = lru_cache(capacity)(self._compile)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """Make a constraint for one search.

        Raises:
            ValueError: the grammar is malformed, too large, or matches no text; the message begins
                with the constructor's name.
        """
        return GrammarConstraint(self._compiled(grammar).fork(), self.tokenizer, grammar.field)

    def _compile(self, grammar: Grammar) -> Parser:
        parser = Parser.compile(grammar, self.tokenizer)
        trial = parser.fork()  # an error stays in this copy; what they share is warmed up
        try:
            is_possible = bool(trial.bits().any())
        except ValueError:
            is_possible = False
        if not is_possible:
            raise ValueError(f"{grammar.field}: matches no text")
        if len(trial.forced()) >= MOST_FORCED:
            raise ValueError(
                f"{grammar.field}: begins with a text of {MOST_FORCED} bytes or more, or never ends"
            )
        return parser


class Parser:
    """A position in a text of one grammar.

    Every method raises `ValueError`, with a message that begins with the grammar's field, if the
    library refuses the grammar or exceeds its limits.
    """

    @classmethod
    def compile(
        cls, grammar: Grammar, tokenizer: TextTokenizer, limits: LLParserLimits = LIMITS
    ) -> Parser:
        """Make a parser at the beginning of a text; threads may call this at the same time.

        Raises:
            ValueError: the grammar is malformed, too large, or not supported by the library.
        """
        matcher = LLMatcher(
            tokenizer.parser, _source(grammar, tokenizer), log_level=0, limits=limits
        )
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
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)[: self._width]
        self.check()
        return mask

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
            raise ValueError(f"{self._field}: {explained(self._matcher.get_error())}")


def forced_by_masks(parser: Parser, tokenizer: TextTokenizer) -> bytes:
    """Bytes with which every text continues, at most `MOST_FORCED`; one mask per byte."""
    run = bytearray()
    while len(run) < MOST_FORCED:
        mask = np.unpackbits(parser.bits(), bitorder="little", count=tokenizer.vocabulary_size)
        byte = tokenizer.first_byte[np.flatnonzero(mask)]
        if not len(byte) or byte[0] < 0 or (byte != byte[0]).any():
            break
        token = int(tokenizer.of_byte[byte[0]])
        if token < 0 or not mask[token]:
            break
        parser.forth([token])
        run.append(int(byte[0]))
    parser.back(len(run))
    return bytes(run)


def _source(grammar: Grammar, tokenizer: TextTokenizer) -> str:
    """The grammar in Lark's syntax, which llguidance reads."""
    source = grammar.text
    if grammar.field == "lark":
        source = "\n".join([source, *_missing(source, tokenizer)])
    elif grammar.kind == "regex":
        source = f"start: /{regex_to_lark(source, ASCII)}/"
    elif grammar.kind == "json_schema":
        schema = json.loads(source) | {"x-guidance": {"whitespace_flexible": False}}
        source = f"start: %json {json.dumps(schema, ensure_ascii=False)}"
    # Without the library's own forcing, which allows a single way to split forced bytes.
    return f'%llguidance {{"no_forcing": true}}\n{source}'


def _missing(text: str, tokenizer: TextTokenizer) -> Iterator[str]:
    """Definitions of the names of `TERMINALS` and `TOKENS` that a grammar uses, but not defines."""
    for name in (*TERMINALS, *TOKENS):
        if not re.search(rf"\b{name}\b", text) or re.search(rf"(?m)^\s*{name}\b[^:\n]*:", text):
            continue
        if name in TERMINALS:
            yield f"{name}: {TERMINALS[name]}"
            continue
        absent = [
            token
            for token, data in enumerate(tokenizer.spelling)
            if data and (name == "text_token" or not LINE_BREAKS.intersection(data))
        ]
        yield f"{name}: <[{','.join(_ranges(absent))}]>"


def _ranges(numbers: list[int]) -> Iterator[str]:
    """Ascending numbers as ranges, such as 3-7."""
    cuts = [i for i, (a, b) in enumerate(pairwise(numbers), 1) if b != a + 1]
    for first, stop in pairwise([0, *cuts, len(numbers)]):
        yield f"{numbers[first]}-{numbers[stop - 1]}"


def explained(message: str) -> str:
    """An error of llguidance as one line, without its dumps of parser and source."""
    message = re.split("<state>|<backtrace>", message)[0].replace("<non-verbose/>", "")
    if message.startswith("panic"):  # a failed assertion, with lines of its program
        return "is too large for the library that compiles it"
    lines = [line for line in message.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    said = " ".join(" ".join(lines).split())
    said = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", said)
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."
