"""The rules by which events are filtered and split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from recsys.data.cleaning import CleanConfig
from recsys.interactions import Role

Split = Literal["leave-one-out", "global-temporal", "own"]
Duplicates = Literal["keep", "drop-exact", "keep-first"]


@dataclass(frozen=True)
class Rules:
    """How rows are filtered and split; see `DataConfig`.

    The default split is the source's own; else by time if the source was cleaned, has times, and
    enough users can be asked; else leave-one-out. Dates are unix seconds.
    """

    duplicates: Duplicates = "drop-exact"
    min_rating: float | None = None
    k_core: int = 0
    split: Split | None = None
    ratio: tuple[float, float] = (0.8, 0.1)
    dates: tuple[int, int] | None = None
    clean: CleanConfig = field(default_factory=CleanConfig)
    roles: Mapping[str, Role] = field(default_factory=dict)


def decided_rules(rules: Rules) -> tuple[str, ...]:
    """The rules of cleaning of which the settings say what they remove."""
    decided = []
    if rules.clean.negative_rating is not None:
        decided.append("low_ratings_dropped")
    if "negative" in rules.roles.values():
        decided.append("negative_events_dropped")
    return (*decided, "events_before_negative_dropped") if decided else ()
