"""EventTypes: retrieval with types of events, such as views and purchases.

It counts which items lead to an event of a target type, and finds the events of each type on an
item in a history. It does not rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from recsys.event_names import WEIGHTS, level
from recsys.interactions import (
    NEGATIVE_TYPE,
    OTHER_TYPE,
    UNKNOWN_TYPE,
    Behaviour,
    Histories,
    count_as_seen,
)
from recsys.retrieval.item_item import ItemItem, PairRules
from recsys.retrieval.rows import Entries, WeightedItems

SEEN_DECAY = 0.8  # of the events of a history on a candidate itself


@dataclass(frozen=True, eq=False)
class EventTypes:
    """The types of a data set, and what leads to an event of a target type.

    Attributes:
        behaviours: the types; `Histories.behaviours` numbers them.
        to_targets: scores of items by the target events that followed.
        counts: (items,) float64 target events.
    """

    behaviours: tuple[Behaviour, ...]
    to_targets: ItemItem
    counts: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.behaviours) > NEGATIVE_TYPE:
            raise ValueError(f"{len(self.behaviours)} types of events; {NEGATIVE_TYPE} at most")
        if len(self.to_targets) != len(self.counts):
            raise ValueError(
                f"to_targets is of {len(self.to_targets)} items, its counts of {len(self.counts)}"
            )

    @classmethod
    def of(
        cls,
        histories: Histories,
        is_target: NDArray[np.bool_],
        size: int,
        behaviours: tuple[Behaviour, ...],
        rules: PairRules,
    ) -> EventTypes | None:
        """Count what leads to target events, `is_target` among those of the histories.

        None without types.
        """
        if not behaviours:
            return None
        counts = np.bincount(histories.items[is_target], minlength=size).astype(np.float64)
        to_targets = ItemItem.count(histories, size, replace(rules, reverse=0.0), is_target)
        return cls(behaviours, to_targets, counts)

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Name of a type in lower case -> its number."""
        return {behaviour.name.lower(): number for number, behaviour in enumerate(self.behaviours)}

    def number(self, names: Sequence[str | None]) -> NDArray[np.uint8]:
        """(n,) numbers of types by name.

        `UNKNOWN_TYPE` for None. A name that the data set does not have is the type that is usually
        meant by it: `purchase` is `Kauf`. `NEGATIVE_TYPE` for returns and dislikes, and
        `OTHER_TYPE` for names that mean nothing.
        """
        numbers: dict[str | None, int] = {None: UNKNOWN_TYPE}
        numbers |= {name: self._number_of(name) for name in set(names) if name is not None}
        return np.fromiter(map(numbers.__getitem__, names), np.uint8, len(names))

    def seen(self, events: Sequence[tuple[str, str | None]]) -> list[str]:
        """Of items and types of events, the items that count as seen for `exclude_seen`."""
        if not events:
            return []
        items, names = zip(*events, strict=True)
        numbers = self.number(names)
        counts = count_as_seen(numbers, self.behaviours) & (numbers != NEGATIVE_TYPE)
        return [item for item, count in zip(items, counts.tolist(), strict=True) if count]

    def _number_of(self, name: str) -> int:
        number = self.numbers.get(name.lower())
        if number is not None:
            return NEGATIVE_TYPE if self.behaviours[number].role == "negative" else number
        strength = level(name)
        if strength is None:
            return OTHER_TYPE
        return self._by_strength.get(strength, OTHER_TYPE) if strength else NEGATIVE_TYPE

    @cached_property
    def _by_strength(self) -> dict[int, int]:
        """Strength of a type -> its number; a target stands for all that are at least as strong."""
        strengths: dict[int, int] = {}
        for number, behaviour in enumerate(self.behaviours):
            if behaviour.role != "negative":
                strengths.setdefault(_strength(behaviour), number)
        targets = [n for n, behaviour in enumerate(self.behaviours) if behaviour.role == "target"]
        floor = min((_strength(self.behaviours[n]) for n in targets), default=None)
        for strength in range(len(WEIGHTS)):
            if floor is not None and strength >= floor:
                strengths.setdefault(strength, targets[0])
        return strengths

    def strength(self, name: str) -> int | None:
        """How strong a sign of interest a type is (`recsys.event_names.level`).

        A name that means nothing has the strength that the data set gave it; None if it is unknown
        there, too.
        """
        named_level, number = level(name), self.numbers.get(name.lower())
        if named_level is not None or number is None:
            return named_level
        behaviour = self.behaviours[number]
        return 0 if behaviour.role == "negative" else _strength(behaviour)

    def recency(self, histories: Histories, name: str) -> Entries:
        """(n, items) decayed sums of the events of one type, on the items themselves.

        The age of an event counts all later events of the history.
        """
        chosen = np.zeros(len(histories.items), np.bool_)
        if histories.behaviours is not None:
            chosen = histories.behaviours == self.numbers[name]
        return WeightedItems.decayed(histories, len(self), SEEN_DECAY, chosen).entries(len(self))


def _strength(behaviour: Behaviour) -> int:
    """The level of `recsys.event_names.level` whose weight is nearest."""
    return int(np.abs(np.array(WEIGHTS) - behaviour.weight).argmin())
