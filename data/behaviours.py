"""Types of events: their roles are guessed from usual names, and the target is chosen by the data.

Roles and weights follow the strength of a type as a sign of interest: a purchase is stronger than a
rating or a like, these are stronger than a cart, and that is stronger than a view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from recsys.data.report import sentence
from recsys.errors import ConfigError, DataError
from recsys.event_names import WEIGHTS, level
from recsys.interactions import Behaviour, Role

CONTEXT = 1  # the level of an unknown name
ENOUGH_USERS = 0.05  # the share of users who have the target type at least twice


def choose_types(
    names: Sequence[str],
    given: Mapping[str, Role],
    repeated: NDArray[np.int64],
    users: int,
    column: str = "",
) -> tuple[tuple[Behaviour, ...], list[str]]:
    """The role and weight of each type.

    The target is what the settings say; else the strongest type that enough users have twice.
    Stronger types with fewer events are targets too.

    Args:
        names: of the types.
        given: name -> role, from the settings.
        repeated: (types,) users with at least two events of the type.
        users: number of users.
        column: the column of the types, for the error.

    Returns:
        the types in the order of the names, and sentences for the report.

    Raises:
        DataError: the types are numbers of which the settings do not say the meaning.
        ConfigError: the settings name a type that does not occur, or leave no target.
    """
    if unknown := sorted(set(given) - set(names)):
        raise ConfigError(sentence("no_such_type", name=unknown[0], names=", ".join(names)))
    numbers = [name for name in names if name.isdigit() and name not in given]
    if numbers:
        example = ", ".join(f"{name}: context" for name in numbers[1:])
        example = f"{numbers[0]}: target" + (f", {example}" if example else "")
        said = {"column": column, "numbers": ", ".join(numbers), "example": example}
        raise DataError(sentence("types_are_numbers", **said))
    levels = [_level(name, given.get(name)) for name in names]
    floor, notes = len(WEIGHTS), list[str]()  # no type is so strong
    if "target" not in given.values():
        floor, notes = _target_level(names, given, levels, repeated, users)
    roles = [
        given.get(name, "negative" if not at else "target" if at >= floor else "context")
        for name, at in zip(names, levels, strict=True)
    ]
    if "target" not in roles:
        every = ", ".join(names)
        raise ConfigError(sentence("types_without_target", names=every, first=names[0]))
    notes += [
        sentence(
            "unknown_type", name=name, role=role, other="context" if role == "target" else "target"
        )
        for name, role in zip(names, roles, strict=True)
        if name not in given and level(name) is None
    ]
    types = tuple(
        Behaviour(name, role, WEIGHTS[at])
        for name, role, at in zip(names, roles, levels, strict=True)
    )
    return types, notes


def _level(name: str, role: Role | None) -> int:
    """The strength of a type whose role may be given."""
    if role == "negative":
        return 0
    named = level(name)
    if role is None:
        return CONTEXT if named is None else named
    return named or (len(WEIGHTS) - 1 if role == "target" else CONTEXT)


def _target_level(
    names: Sequence[str],
    roles: Mapping[str, Role],
    levels: Sequence[int],
    repeated: NDArray[np.int64],
    users: int,
) -> tuple[int, list[str]]:
    """The lowest level of a target, and notes about stronger types that are too rare."""
    free = [number for number, name in enumerate(names) if name not in roles and levels[number]]
    if not free:
        return len(WEIGHTS), []
    by_level = {
        at: max(int(repeated[p]) for p in free if levels[p] == at)
        for at in {levels[p] for p in free}
    }
    ordered = sorted(by_level, reverse=True)
    enough = [at for at in ordered if by_level[at] >= ENOUGH_USERS * users]
    floor = enough[0] if enough else max(ordered, key=lambda at: by_level[at])
    rare = [names[p] for p in free if levels[p] > floor]
    chosen = [names[p] for p in free if levels[p] == floor]
    if not rare:
        return floor, []
    names_of = {"rare": " or ".join(rare), "chosen": " and ".join(chosen), "first": rare[0]}
    return floor, [sentence("rare_types", share=ENOUGH_USERS, **names_of)]
