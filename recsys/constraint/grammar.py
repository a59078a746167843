r"""Texts of a grammar: regular expressions, context-free grammars, JSON of a schema, shorthands.

A `Grammar` says which texts; `GrammarCompiler` turns it into a `GrammarConstraint` for one
tokenizer and keeps what it compiled. Parsers (`recsys.constraint.parser`) accept every tokenisation
of every text, and know when the next bytes are forced.

A parser can only stand in one place and step back. States are therefore numbers of the nodes of
a tree, a token each, and the parser walks to the node that is asked about: back to the common
ancestor, then forth. That costs a microsecond a token, where a copy of the parser would take a
megabyte for a few thousand tokens. A mask, once found, is kept with its node.

        0 ── { ── " ── a        asked about x after a: back 1, forth 2
                   └── b ── x
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from llguidance import regex_to_lark

from recsys.constraint.parser import ASCII, MOST_FORCED, backend_of
from recsys.constraint.protocol import DEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from recsys.constraint.parser import BackendName, Parser
    from recsys.constraint.token_trie import TextTokenizer

MAX_DEPTH = 64
"""Most levels that a JSON schema may be nested."""


@dataclass(frozen=True)
class Grammar:
    """Which texts are meant; hashable, so that equal grammars are compiled once.

    Attributes:
        field: the constructor's name, with which errors begin.
        kind: what `text` is.
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
    """Texts of a context-free grammar in Lark's syntax; its first symbol is `start`."""
    return Grammar("lark", "lark", grammar)


def json_schema(schema: dict[str, Any] | str) -> Grammar:
    """JSON of a schema, without white space between its parts.

    A text may be as long as the schema lets it: give strings a `maxLength`, arrays a `maxItems`.

    Raises:
        ValueError: no JSON, or nested deeper than `MAX_DEPTH` levels.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise ValueError(f"json_schema: no JSON: {error}") from None
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
    """Any JSON, bounded so that it ends.

    Args:
        depth: levels of arrays and objects inside each other; 0 for none.
        items: most members of an array or object.
        length: most characters of a string or key.
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
        raise ValueError("choice: no option")
    # one terminal, not a rule of many: the parser then has one item to follow, the lexer the rest
    texts = " | ".join(map(_literal, options))
    return Grammar("choice", "lark", f"start: OPTION\nOPTION: {texts}")


def substring_of(text: str, unit: str = "characters") -> Grammar:
    """A part of a text, the empty one included: quotes that cannot be made up.

    Args:
        text: the text.
        unit: a part begins and ends between any "characters", or only at "words".
    """
    keys = {"characters": "substring_chars", "words": "substring_words"}
    if unit not in keys:
        raise ValueError(f"substring_of: unit must be one of {sorted(keys)}, got {unit!r}")
    part = json.dumps({keys[unit]: text}, ensure_ascii=False)
    return Grammar("substring_of", "lark", f"start: %regex {part}")


def delimited_list(
    pattern: str, delimiter: str = ", ", *, least: int = 1, most: int = 10
) -> Grammar:
    """`least` to `most` texts that match a regular expression, with a delimiter between them."""
    _check_counts("delimited_list", least, most)
    more = f"({_literal(delimiter)} ITEM){{{max(least - 1, 0)},{most - 1}}}" if most > 1 else ""
    whole = f"ITEM {more}" if least else f"(ITEM {more})?"
    item = f"ITEM: /{regex_to_lark(pattern, ASCII)}/"
    # one terminal again: where items may touch, a rule would leave open which of them goes on
    return Grammar("delimited_list", "lark", f"start: LIST\nLIST: {whole}\n{item}")


def delimited_subsequence(
    candidates: Sequence[str], delimiter: str = ", ", *, least: int = 1, most: int | None = None
) -> Grammar:
    """`least` to `most` of some candidates, in their order, each at most once: a slate.

    Args:
        candidates: the shortlist.
        delimiter: between two of them.
        least: fewest.
        most: most; all if None.
    """
    most = len(candidates) if most is None else most
    if not candidates:
        raise ValueError("delimited_subsequence: no candidate")
    _check_counts("delimited_subsequence", least, most)
    if least > len(candidates):
        raise ValueError(f"delimited_subsequence: least is {least} of {len(candidates)} candidates")
    most = min(most, len(candidates))
    rules = subsequence_rules("start", candidates, delimiter, least, most)
    return Grammar("delimited_subsequence", "lark", rules)


def subsequence_rules(
    name: str, candidates: Sequence[str], delimiter: str, least: int, most: int
) -> str:
    """Lark rules of `delimited_subsequence`, to be part of a larger grammar.

    Args:
        name: of the rule that others refer to.
        candidates: as there, like the others; `most` and `least` may be reached.
        delimiter: between two candidates.
        least: fewest.
        most: most.
    """
    # NAME_i_k: candidates i and later may follow, k are written. Those that cannot come to `least`
    # any more have no rule.
    rules = [f"{name}: {name}_0_0"]
    for i in range(len(candidates) + 1):
        for k in range(min(i, most) + 1):
            if i == len(candidates) or k == most:
                ways = ['""'] if k >= least else []
            else:
                between = f"{_literal(delimiter)} " if k else ""
                ways = [f"{between}{_literal(candidates[i])} {name}_{i + 1}_{k + 1}"]
                if len(candidates) - i - 1 + k >= least:
                    ways.append(f"{name}_{i + 1}_{k}")
            if ways:
                rules.append(f"{name}_{i}_{k}: " + " | ".join(ways))
    return "\n".join(rules)


def parse(kind: type, text: str) -> Any:
    """The value that a text of `structured(kind)` means.

    Raises:
        ValueError: the text was cut short, or breaks a rule that a schema cannot express.
    """
    from pydantic import TypeAdapter

    return TypeAdapter(kind).validate_json(text)


class GrammarConstraint:
    """A `Constraint` from a compiled grammar, for one search; `GrammarCompiler` makes them.

    Two states are equal if their tokens are. Not safe to share between threads.
    """

    def __init__(self, parser: Parser, tokenizer: TextTokenizer, field: str) -> None:
        """Take over `parser`, which stands at the beginning of a text."""
        self._parser, self._tokenizer, self._field = parser, tokenizer, field
        self.vocabulary_size = tokenizer.vocabulary_size
        self.end_tokens = tokenizer.end_tokens
        self._parent, self._token, self._depth = [DEAD], [DEAD], [0]
        self._child: dict[tuple[int, int], int] = {}
        self._mask: dict[int, NDArray[np.uint8]] = {}  # bits
        self._here, self._width = 0, -(-self.vocabulary_size // 8)

    def initial(self) -> int:
        """The beginning of the text."""
        return 0

    def allowed(self, states: ArrayLike) -> NDArray[np.bool_]:
        """(n, V) tokens that go on with some text; end tokens where one is complete."""
        states = np.asarray(states, np.int64)
        bits = np.zeros((len(states), self._width), np.uint8)
        for line, state in zip(bits, states.tolist(), strict=True):
            if state != DEAD:
                line[:] = self._bits(state)
        mask = np.unpackbits(bits, axis=1, bitorder="little", count=self.vocabulary_size)
        return mask.view(np.bool_)

    def advance(self, states: ArrayLike, tokens: ArrayLike) -> NDArray[np.int64]:
        """(n,) states behind (n,) tokens."""
        states, tokens = np.asarray(states, np.int64), np.asarray(tokens, np.int64)
        return np.asarray(
            [self._step(s, t) for s, t in zip(states.tolist(), tokens.tolist(), strict=True)],
            np.int64,
        )

    def merge_keys(self, states: ArrayLike) -> NDArray[np.int64]:
        """(n,) the states themselves."""
        return np.asarray(states, np.int64)

    def forced(self, states: ArrayLike) -> list[list[int]]:
        """Tokens of the bytes that every text goes on with, as the tokenizer would cut them.

        Other tokens for the same bytes are allowed too; taking these leaves the texts as they are.
        The end token is among them where nothing else may follow.
        """
        return [self._run(state) for state in np.asarray(states, np.int64).tolist()]

    def _run(self, state: int) -> list[int]:
        """Forced tokens of a state."""
        if state == DEAD or self._has_ended(state):
            return []
        self._go(state)
        text = self._parser.forced()
        run = self._tokenizer.parser.tokenize_bytes(text)
        for token in run:
            state = self._add(state, token)
        ends = np.flatnonzero(self.allowed([state])[0]).tolist() == sorted(self.end_tokens)
        if ends:
            return [*run, self.end_tokens[0]]
        # what follows may be one token with the end of the run
        return self._tokenizer.parser.tokenize_partial(text)[0]

    def _has_ended(self, state: int) -> bool:
        return self._token[state] in self.end_tokens

    def _bits(self, state: int) -> NDArray[np.uint8]:
        """Mask of a state, a bit a token."""
        if state not in self._mask:
            if self._has_ended(state):
                mask = np.zeros(self._width, np.uint8)
            else:
                self._go(state)
                mask = self._parser.bits()
                if not mask.any():
                    raise ValueError(f"{self._field}: a text has begun that cannot end")
            self._mask[state] = mask
        return self._mask[state]

    def _step(self, state: int, token: int) -> int:
        """The state behind one token."""
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
        """Walk the parser to a state."""
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


@dataclass
class CompilerStatistics:
    """What a `GrammarCompiler` has done.

    Attributes:
        hits: grammars found compiled.
        misses: grammars compiled.
        seconds: spent compiling.
    """

    hits: int = 0
    misses: int = 0
    seconds: float = 0.0


class GrammarCompiler:
    """Compiles grammars for one tokenizer and keeps the last ones; safe to share between threads.

    Attributes:
        tokenizer: the tokenizer.
        statistics: hits, misses and time.
    """

    def __init__(
        self, tokenizer: TextTokenizer, capacity: int = 256, backend: BackendName = "llguidance"
    ) -> None:
        """Start empty.

        Args:
            tokenizer: whose tokens the constraints speak of.
            capacity: grammars to keep; the one unused for longest goes first.
            backend: library that compiles; one of `recsys.constraint.parser.BACKENDS`.

        Raises:
            ValueError: a capacity below 1, or a backend that is unknown or not installed.
        """
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self.tokenizer, self.statistics = tokenizer, CompilerStatistics()
        self._capacity, self._lock = capacity, threading.Lock()
        self._backend = backend_of(backend, tokenizer)
        self._kept: OrderedDict[Grammar, Parser] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def constraint(self, grammar: Grammar) -> GrammarConstraint:
        """A constraint of its own for one search.

        Raises:
            ValueError: the grammar is malformed, too large, or matches no text; the message begins
                with the constructor's name.
        """
        with self._lock:
            base = self._kept.get(grammar)
            if base is not None:
                self._kept.move_to_end(grammar)
                self.statistics.hits += 1
        if base is None:
            start = time.perf_counter()
            base = self._compile(grammar)  # outside the lock: others need not wait
            with self._lock:
                self.statistics.misses += 1
                self.statistics.seconds += time.perf_counter() - start
                self._kept[grammar] = base
                while len(self._kept) > self._capacity:
                    self._kept.popitem(last=False)
        return GrammarConstraint(base.fork(), self.tokenizer, grammar.field)

    def warm_up(self, grammars: Sequence[Grammar]) -> None:
        """Compile grammars ahead of their first use."""
        for grammar in grammars:
            self.constraint(grammar)

    def _compile(self, grammar: Grammar) -> Parser:
        parser = self._backend.compile(grammar)
        trial = parser.fork()  # an error would stay with it; and it warms what they share
        try:
            some = bool(trial.bits().any())
        except ValueError:
            some = False
        if not some:
            raise ValueError(f"{grammar.field}: matches no text")
        if len(trial.forced()) >= MOST_FORCED:
            raise ValueError(
                f"{grammar.field}: begins with a text of {MOST_FORCED} bytes or more, or never ends"
            )
        return parser


def _literal(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def _check_counts(field: str, least: int, most: int) -> None:
    if not 0 <= least <= most or most < 1:
        raise ValueError(f"{field}: needs 0 <= least <= most and most >= 1, got {least} and {most}")


def _check_depth(schema: dict[str, Any]) -> None:
    """Raise `ValueError` for a schema nested too deep, naming where."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(schema, ())]
    while stack:
        value, path = stack.pop()
        if len(path) > MAX_DEPTH:
            where = "/".join(path[:6])
            raise ValueError(f"json_schema: nested deeper than {MAX_DEPTH} levels at {where}/...")
        if isinstance(value, dict):
            stack += [(inner, (*path, str(key))) for key, inner in value.items()]
        elif isinstance(value, list):
            stack += [(inner, (*path, str(place))) for place, inner in enumerate(value)]


def _closed(schema: Any) -> Any:
    """The schema with objects that have no other than the named properties."""
    if isinstance(schema, list):
        return [_closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed
