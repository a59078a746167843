"""Rules: the filters, boosts, pins and caps that a shop adds to requests.

Rules are combined with a request and with each other: an item must pass all filters, boosts add up,
pins follow one another, and the smallest cap of an attribute counts. A request with rules is an
ordinary request with their filters and boosts, and is answered as exactly as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from recsys import arguments
from recsys.constraint.attributes import Attributes
from recsys.constraint.caps import Caps
from recsys.constraint.filters import ItemBoosts, ItemFilter
from recsys.errors import FilterError, RuleError
from recsys.requests import RecommendRequest


@dataclass(frozen=True)
class Rule:
    """What a shop asks of every list that the rule applies to.

    >>> Rule(boosts=[{"filter": {"must": [{"key": "brand", "match": "Acme"}]}, "weight": -5}]).pin
    ()

    Attributes:
        filter: recommend only items that match (`recsys.constraint.filters`); None for all.
        boosts: filters with weights that are added to the scores of matching items; a negative
            weight buries them.
        pin: ids of items that take the first places, if they may be recommended.
        max_per: attribute -> how many items of a list may have the same value of it, at least 1.

    Raises:
        RuleError: a field is malformed; the text begins with its path.
    """

    filter: Mapping[str, Any] | None = None
    boosts: Sequence[Mapping[str, Any]] = ()
    pin: Sequence[str] = ()
    max_per: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            _ = self._parsed
            arguments.strings("pin", self.pin)
            if len(self.pin) > arguments.MOST_PINS:
                raise RuleError(
                    f"pin: want at most {arguments.MOST_PINS} items, got {len(self.pin)}"
                )
            arguments.counts("max_per", self.max_per)
            if len(self.max_per) > arguments.MOST_CAPS:
                raise RuleError(
                    f"max_per: want at most {arguments.MOST_CAPS} attributes, "
                    f"got {len(self.max_per)}"
                )
        except RuleError:
            raise
        except ValueError as error:
            raise RuleError(str(error)) from None

    def check(self, attributes: Attributes) -> None:
        """Check the rule against the items' attributes.

        Raises:
            RuleError: an attribute that items do not have, or that has another type.
        """
        try:
            for part in self._parsed:
                part.check(attributes)
            Caps(attributes, self.max_per)
        except FilterError as error:
            raise RuleError(str(error)) from None

    @cached_property
    def _parsed(self) -> tuple[ItemFilter, ItemBoosts]:
        item_filter = ItemFilter.parse({} if self.filter is None else self.filter)
        return item_filter, ItemBoosts.parse(self.boosts)


def apply_rules(request: RecommendRequest, rules: Iterable[Rule]) -> RecommendRequest:
    """The request with the filters, boosts, pins and caps of rules beside its own.

    The sizes of filters and boosts are limited for the rules together, and for the request apart.

    Raises:
        FilterError, ValueError: the rules are too large together, or their boosts meet a seed.
    """
    rules = list(rules)
    if not rules:
        return request
    of_rules: Mapping[str, Any] | None = None
    caps = dict(request.max_per)
    for rule in rules:
        of_rules = _both(of_rules, rule.filter)
        for name, count in rule.max_per.items():
            caps[name] = min(count, caps.get(name, count))
    item_filter, boosts = request.filter, request.boosts
    if of_rules:
        item_filter = request.item_filter & ItemFilter.parse(of_rules)
    if more := [boost for rule in rules for boost in rule.boosts]:
        boosts = request.item_boosts + ItemBoosts.parse(more)
    return replace(
        request,
        filter=item_filter,
        boosts=boosts,
        pin=list(dict.fromkeys([*request.pin, *(item for rule in rules for item in rule.pin)])),
        max_per=caps,
    )


def _both(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    """A filter that items pass if they pass both; clauses of the first keep their paths."""
    if not first or not second:
        return first or second
    both = {
        name: [*_listed(first.get(name)), *_listed(second.get(name))]
        for name in ("must", "must_not")
    }
    should = [_listed(part.get("should")) for part in (first, second)]
    if all(should):
        both["must"].append({"should": should.pop()})
    return both | {"should": should[0] or should[-1]}


def _listed(clauses: Any) -> list[Any]:
    """The clauses of a group, which may be one clause without a list."""
    if clauses is None:
        return []
    return [clauses] if isinstance(clauses, Mapping) else list(clauses)
