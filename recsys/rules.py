"""Rules: the filters, boosts, pins and caps that a shop adds to requests.

Rules are combined with a request and with each other: an item must pass all filters, boosts add up,
pins follow one another, and the smallest cap of an attribute counts. A request with rules is an
ordinary request with their filters and boosts, and is answered as exactly as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from operator import add, and_
from typing import Any

from recsys import arguments
from recsys.constraint.attributes import Attributes
from recsys.constraint.caps import Caps
from recsys.constraint.filters import MOST_BOOSTS, MOST_PARTS, ItemBoosts, ItemFilter
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
            _ = self.item_filter, self.item_boosts
            arguments.strings("pin", self.pin)
            arguments.counts("max_per", self.max_per)
            for name, most in (("pin", arguments.MOST_PINS), ("max_per", arguments.MOST_CAPS)):
                if (count := len(getattr(self, name))) > most:
                    raise ValueError(f"{name}: want at most {most}, got {count}")
        except ValueError as error:
            raise RuleError(str(error)) from None

    def check(self, attributes: Attributes) -> None:
        """Check the rule against the items' attributes.

        Raises:
            RuleError: an attribute that items do not have, or that has another type.
        """
        try:
            self.item_filter.check(attributes)
            self.item_boosts.check(attributes)
            Caps(attributes, self.max_per)
        except FilterError as error:
            raise RuleError(str(error)) from None

    @cached_property
    def item_filter(self) -> ItemFilter:
        """The filter, parsed."""
        return ItemFilter.parse({} if self.filter is None else self.filter)

    @cached_property
    def item_boosts(self) -> ItemBoosts:
        """The boosts, parsed."""
        return ItemBoosts.parse(self.boosts)


def apply_rules(request: RecommendRequest, rules: Iterable[Rule]) -> RecommendRequest:
    """The request with the filters, boosts, pins and caps of rules beside its own.

    The sizes of filters and boosts are limited for the rules together, and for the request apart.
    A sample (a seed) is drawn without the boosts of rules, which are for the best items.

    Raises:
        FilterError: the rules are too large together.
    """
    rules = list(rules)
    if not rules:
        return request
    caps = dict(request.max_per)
    for rule in rules:
        for name, count in rule.max_per.items():
            caps[name] = min(count, caps.get(name, count))
    item_filter, boosts = request.filter, request.boosts
    if filters := [rule.item_filter for rule in rules if rule.filter]:
        _check_size("filter", sum(each.size for each in filters))
        item_filter = reduce(and_, filters, request.item_filter)
    sampled = request.seed is not None
    if more := [rule.item_boosts for rule in rules if rule.boosts and not sampled]:
        parts = [part for each in more for part, _ in each.parts]
        _check_size("boosts", sum(part.size for part in parts))
        if len(parts) > MOST_BOOSTS:
            raise FilterError(f"boosts: want at most {MOST_BOOSTS} together, got {len(parts)}")
        boosts = reduce(add, more, request.item_boosts)
    return request.changed(
        filter=item_filter,
        boosts=boosts,
        pin=list(dict.fromkeys([*request.pin, *(item for rule in rules for item in rule.pin)])),
        max_per=caps,
    )


def _check_size(name: str, size: int) -> None:
    """Refuse rules whose filters or boosts are larger together than one of them may be."""
    if size > MOST_PARTS:
        raise FilterError(f"{name}: want at most {MOST_PARTS:,} values together, got {size:,}")
