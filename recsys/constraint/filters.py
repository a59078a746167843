"""Filters and boosts: JSON expressions over item attributes, parsed and evaluated.

    {"must": [{"key": "brand", "any": ["Acme", "Bolt"]}, {"key": "price", "range": {"lt": 20}}],
     "must_not": [{"key": "categories", "match": "Nails"}],
     "should": [{"key": "stock", "exists": true}, {"must": [...]}]}

An item passes a group if it passes all of `must`, at least one of `should` (if there are any) and
none of `must_not`; groups nest. It passes a clause if the attribute equals `match`, is one of
`any`, lies within `range` (`gt`, `gte`, `lt`, `lte`), or exists (`exists`). If the attribute is a
list, one element must pass. An item that lacks the attribute fails every clause except
`"exists": false`. Values of `item_id` are ids, of which both spellings in Unicode are one.

Boosts are filters with weights: `{"filter": {...}, "weight": 0.5}`. An item that passes several
gets the sum of their weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.arguments import spelled
from recsys.constraint.attributes import Attributes, Column, Kind, Scalar, Test
from recsys.errors import FilterError

MOST_DEPTH = 16
MOST_PARTS = 10_000
CLAUSE = 10  # a clause or a group counts as so many values: it takes as long to read
MOST_CHARACTERS = 1000
MOST_BOOSTS = 100
MOST_WEIGHT = 1000.0

_PART = 1 << 16  # items that are evaluated together
_GROUPS = ("must", "should", "must_not")
_TESTS = ("match", "any", "range", "exists")
_BOUNDS = ("gt", "gte", "lt", "lte")


@dataclass(frozen=True)
class _Clause:
    """A condition on one attribute.

    For messages: `at` is its path in the expression, and `written` the name of its test there.
    """

    key: str
    test: str
    values: tuple[Any, ...]
    at: str
    written: str

    @cached_property
    def canonical(self) -> str:
        """JSON that is equal for equal clauses."""
        return _text([self.key, self.test, self.values])

    def bound(self, attributes: Attributes) -> Test:
        """The clause as a test of items; FilterError if no such column or kind exists."""
        try:
            column = attributes.column(self.key)
        except FilterError as error:
            raise FilterError(f"{self.at}.key: {error}") from None
        if self.test == "exists":
            exists = column.exists()
            return exists if self.values[0] else lambda part: ~exists(part)
        if self.test == "range":
            self._check(column, "number", "range compares numbers")
            return column.within(self.values)
        for value in self.values:
            kind = _kind(value)
            self._check(column, kind, f"{_show(value)} is a {kind}")
        return column.one_of(self.values)

    def _check(self, column: Column, kind: Kind, because: str) -> None:
        if column.kind != kind:
            actual = f"attribute {self.key!r} is a {column.kind}"
            raise FilterError(f"{self.at}.{self.written}: {because}, but {actual}")


@dataclass(frozen=True)
class _Group:
    must: tuple[_Clause | _Group, ...]
    should: tuple[_Clause | _Group, ...]
    must_not: tuple[_Clause | _Group, ...]

    @cached_property
    def canonical(self) -> str:
        """JSON that is equal for groups that differ in order and repetition only.

        Parts are joined without quoting them again, which would double the text with every level.
        """
        groups = (
            f'"{name}":[{",".join(sorted({part.canonical for part in parts}))}]'
            for name in _GROUPS
            if (parts := getattr(self, name))
        )
        return "{" + ",".join(groups) + "}"

    def bound(self, attributes: Attributes) -> Test:
        """As `_Clause.bound`."""
        must, must_not, should = (
            [part.bound(attributes) for part in parts]
            for parts in (self.must, self.must_not, self.should)
        )

        def test(part: slice) -> NDArray[np.bool_]:
            matches = np.ones(part.stop - part.start, np.bool_)
            for each in must:
                matches &= each(part)
            for each in must_not:
                matches &= ~each(part)
            if should:
                some = should[0](part)
                for each in should[1:]:
                    some = some | each(part)
                matches &= some
            return matches

        return test


@dataclass(frozen=True)
class ItemFilter:
    """A parsed expression.

    >>> wanted = ItemFilter.parse({"must": [{"key": "brand", "match": "Acme"}]})
    >>> import pyarrow as pa
    >>> table = pa.table({"brand": ["Acme", "Bolt", None]})
    >>> wanted.evaluate(Attributes(table, np.arange(3, dtype=np.int32))).tolist()
    [True, False, False]

    Attributes:
        key: equal for expressions that differ in order and repetition only.
        size: number of values; a clause or a group counts as `CLAUSE` values.
    """

    key: str
    _root: _Group
    size: int

    @classmethod
    def parse(cls, expression: Mapping[str, Any], at: str = "filter") -> ItemFilter:
        """Parse a JSON expression, called `at` in messages; `evaluate` checks the attributes.

        Raises:
            FilterError: malformed, too deep or too long; the message contains the path.
        """
        parser = _Parser()
        root = parser.group(expression, at, 1)
        return cls(root.canonical, root, parser.size)

    def __and__(self, other: ItemFilter) -> ItemFilter:
        """What both let pass; the limits of `parse` are for each of them alone."""
        root = _Group((self._root, other._root), (), ())
        return ItemFilter(root.canonical, root, self.size + other.size)

    def check(self, attributes: Attributes) -> None:
        """FilterError as `evaluate`, without the work."""
        self._root.bound(attributes)

    def evaluate(self, attributes: Attributes) -> NDArray[np.bool_]:
        """(items,) bool, whether each item passes, in the attributes' order.

        Raises:
            FilterError: an attribute that items do not have, or that has another type.
        """
        test, count = self._root.bound(attributes), len(attributes.order)
        matches = np.empty(count, np.bool_)
        for start in range(0, count, _PART):
            part = slice(start, min(start + _PART, count))
            matches[part] = test(part)
        return matches


@dataclass(frozen=True)
class ItemBoosts:
    """Parsed boosts.

    Attributes:
        key: equal for boosts that differ in order only.
        parts: filters, each with the weight of the items that pass it.
    """

    key: str
    parts: tuple[tuple[ItemFilter, float], ...]

    @classmethod
    def parse(cls, boosts: Sequence[Mapping[str, Any]]) -> ItemBoosts:
        """Parse a JSON list of boosts.

        Raises:
            FilterError: malformed, too many, or a weight beyond 1000; the message has the path.
        """
        if not isinstance(boosts, list | tuple):
            raise FilterError(f"boosts: want a list of boosts, got {_show(boosts)}")
        if len(boosts) > MOST_BOOSTS:
            raise FilterError(f"boosts: want at most {MOST_BOOSTS}, got {len(boosts)}")
        parts, parser = [], _Parser()  # the bound holds for all boosts together
        for i, boost in enumerate(boosts):
            at = f"boosts[{i}]"
            if not isinstance(boost, Mapping) or not {"filter", "weight"} <= boost.keys():
                raise FilterError(f"{at}: want an object with filter and weight")
            _check_keys(boost, ("filter", "weight"), at)
            weight = float(_number(boost["weight"], f"{at}.weight"))
            if abs(weight) > MOST_WEIGHT:
                raise FilterError(f"{at}.weight: want -{MOST_WEIGHT:g} .. {MOST_WEIGHT:g}")
            before = parser.size
            root = parser.group(boost["filter"], f"{at}.filter", 1)
            parts.append((ItemFilter(root.canonical, root, parser.size - before), weight))
        return cls._of(parts)

    @classmethod
    def _of(cls, parts: Iterable[tuple[ItemFilter, float]]) -> ItemBoosts:
        ordered = sorted(parts, key=lambda part: (part[0].key, part[1]))
        texts = (f"[{condition.key},{weight}]" for condition, weight in ordered)
        return cls(f"[{','.join(texts)}]", tuple(ordered))

    def __add__(self, other: ItemBoosts) -> ItemBoosts:
        """The boosts of both; the limits of `parse` are for each of them alone."""
        return self._of((*self.parts, *other.parts))

    def check(self, attributes: Attributes) -> None:
        """FilterError as `evaluate`, without the work."""
        for condition, _ in self.parts:
            condition.check(attributes)

    def evaluate(self, attributes: Attributes) -> NDArray[np.float32]:
        """(items,) float32 boost of each item, in the attributes' order.

        Raises:
            FilterError: an attribute that items do not have, or that has another type.
        """
        total = np.zeros(len(attributes.order), np.float32)
        for condition, weight in self.parts:
            total[condition.evaluate(attributes)] += weight
        return total


class _Parser:
    """Counts parts while it parses, so that parsing takes bounded time."""

    def __init__(self) -> None:
        self.size = 0

    def group(self, value: Any, at: str, depth: int) -> _Group:
        if not isinstance(value, Mapping):
            raise FilterError(f"{at}: want an object with {_or(_GROUPS)}, got {_show(value)}")
        if depth > MOST_DEPTH:
            raise FilterError(f"{at}: nested deeper than {MOST_DEPTH} groups; flatten it")
        _check_keys(value, _GROUPS, at)
        return _Group(*(self._parts_of(value, name, at, depth) for name in _GROUPS))

    def _parts_of(
        self, group: Mapping[str, Any], name: str, at: str, depth: int
    ) -> tuple[_Clause | _Group, ...]:
        at = f"{at}.{name}"
        values = group.get(name, ())
        if isinstance(values, Mapping):
            values = [values]
        if not isinstance(values, list | tuple):
            raise FilterError(f"{at}: want a list of clauses, got {_show(values)}")
        self._count(CLAUSE * len(values), at)
        return tuple(self._part(v, f"{at}[{i}]", depth) for i, v in enumerate(values))

    def _part(self, value: Any, at: str, depth: int) -> _Clause | _Group:
        if not isinstance(value, Mapping) or "key" not in value:
            return self.group(value, at, depth + 1)
        key = value["key"]
        if not isinstance(key, str):
            raise FilterError(f"{at}.key: want an attribute's name, got {_show(key)}")
        _check_keys(value, ("key", *_TESTS), at)
        tests = [name for name in _TESTS if name in value]
        if len(tests) != 1:
            raise FilterError(f"{at}: want exactly one of {_or(_TESTS)}, got {len(tests)}")
        test, at_test = tests[0], f"{at}.{tests[0]}"
        kind, values = self._test(test, value[test], at_test)
        if key == "item_id":
            values = tuple(spelled(v) if isinstance(v, str) else v for v in values)
        return _Clause(key, kind, values, at, test)

    def _test(self, test: str, value: Any, at: str) -> tuple[str, tuple[Any, ...]]:
        if test == "match":
            return "any", (_scalar(value, at),)
        if test == "exists":
            if not isinstance(value, bool):
                raise FilterError(f"{at}: want true or false, got {_show(value)}")
            return test, (value,)
        if test == "range":
            if not isinstance(value, Mapping) or not value:
                raise FilterError(f"{at}: want an object with {_or(_BOUNDS)}, got {_show(value)}")
            _check_keys(value, _BOUNDS, at)
            return test, tuple(
                (name, _number(value[name], f"{at}.{name}")) for name in _BOUNDS if name in value
            )
        if not isinstance(value, list | tuple):
            raise FilterError(f"{at}: want a list of values, got {_show(value)}")
        self._count(len(value), at)
        values = {_text(v): v for v in (_scalar(v, f"{at}[{i}]") for i, v in enumerate(value))}
        return test, tuple(values[text] for text in sorted(values))

    def _count(self, more: int, at: str) -> None:
        self.size += more
        if self.size > MOST_PARTS:
            raise FilterError(
                f"{at}: more than {MOST_PARTS // CLAUSE:,} clauses, or {MOST_PARTS:,} values; list "
                "values in one `any`, or add an attribute for what they have in common"
            )


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _kind(value: Scalar) -> Kind:
    if isinstance(value, bool):
        return "truth value"
    return "text" if isinstance(value, str) else "number"


def _scalar(value: Any, at: str) -> Scalar:
    """Check a value to compare with; 2.0 becomes 2."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        if len(value) > MOST_CHARACTERS:
            raise FilterError(f"{at}: longer than {MOST_CHARACTERS} characters")
        return value
    return _number(value, at, "text, a number, true or false")


def _number(value: Any, at: str, want: str = "a number") -> int | float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FilterError(f"{at}: want {want}, got {_show(value)}")
    if not -(2**63) <= value < 2**63:  # also false for NaN
        raise FilterError(f"{at}: want a number that fits 64 bits")
    return int(value) if math.floor(value) == value else value


def _check_keys(value: Mapping[str, Any], known: tuple[str, ...], at: str) -> None:
    for key in value:
        if key not in known:
            raise FilterError(f"{at}: unknown key {_show(key)}; want {_or(known)}")


def _or(names: tuple[str, ...]) -> str:
    return " or ".join([", ".join(names[:-1]), names[-1]])


def _show(value: Any) -> str:
    """A short description of any value."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:60] + "…")
    if isinstance(value, int | float):
        return repr(value) if abs(value) < 2**63 else "a huge number"
    if isinstance(value, Mapping):
        return "an object"
    return "a list" if isinstance(value, list | tuple) else f"a {type(value).__name__}"
