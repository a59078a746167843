"""EventTypes: retrieval with types of events, such as views and purchases.

It counts which items lead to an event of a target type, and finds the events of each type on an
item in a history. It does not rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import OTHER_TYPE, UNKNOWN_TYPE, Behaviour, Histories
from recsys.retrieval.item_item import ItemItem, decayed

SEEN_DECAY = 0.8  # of the events of a history on a candidate itself


@dataclass(frozen=True, eq=False)
class EventTypes:
    """The types of a data set, and what leads to an event of a target type.

    Attributes:
        behaviours: the types; `Histories.behaviours` numbers them.
        to_targets: scores of items by the target events that followed (`ItemItem.to_targets`).
        counts: (items,) float64 target events.
    """

    behaviours: tuple[Behaviour, ...]
    to_targets: ItemItem
    counts: NDArray[np.float64]

    def __post_init__(self) -> None:
        if len(self.behaviours) > OTHER_TYPE:
            raise ValueError(f"{len(self.behaviours)} types of events; {OTHER_TYPE} at most")
        if len(self.to_targets) != len(self.counts):
            raise ValueError(
                f"to_targets is of {len(self.to_targets)} items, its counts of {len(self.counts)}"
            )

    def __len__(self) -> int:
        return len(self.counts)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Name of a type in lower case -> its number."""
        return {behaviour.name.lower(): number for number, behaviour in enumerate(self.behaviours)}

    def number(self, names: Sequence[str | None]) -> NDArray[np.uint8]:
        """(n,) numbers of types by name; `OTHER_TYPE` for other names, `UNKNOWN_TYPE` for None."""
        return np.array(
            [
                UNKNOWN_TYPE if name is None else self.numbers.get(name.lower(), OTHER_TYPE)
                for name in names
            ],
            np.uint8,
        )

    def recency(self, histories: Histories, name: str) -> sparse.csr_array:
        """(n, items) decayed sums of the events of one type, on the items themselves.

        The age of an event counts all later events of the history.
        """
        if histories.behaviours is None:
            return sparse.csr_array((len(histories), len(self)), dtype=np.float32)
        wanted = histories.behaviours == self.numbers[name]
        return decayed(histories, len(self), SEEN_DECAY, wanted)
