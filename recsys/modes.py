"""Modes: the one vocabulary for how a batch is decoded, from the command line to the search."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum


class Mode(StrEnum):
    """How a batch is decoded. All modes but `relaxed` return the answer of beam search.

    Attributes:
        AUTO: of a request, the mode of the recommender; of a recommender, `planned` on an
            accelerator and `beam` on a CPU; of an engine, `planned`.
        PLANNED: the planner chooses one of the modes below for each batch, by expected time.
        BEAM: beam search without a draft tree.
        STRICT: speculative search with strict verification: `draft` if there is a draft model,
            otherwise `exhaustive`.
        EXHAUSTIVE: strict verification of a tree of all nodes of the first level.
        DRAFT: strict verification of a tree that the draft model proposes.
        RELAXED: relaxed verification, an approximate sample (`recsys.decoding.relaxed`).

    >>> Mode("strict") is Mode.STRICT
    True
    """

    AUTO = "auto"
    PLANNED = "planned"
    BEAM = "beam"
    STRICT = "strict"
    EXHAUSTIVE = "exhaustive"
    DRAFT = "draft"
    RELAXED = "relaxed"


REQUEST_MODES = (Mode.AUTO, Mode.STRICT, Mode.RELAXED, Mode.BEAM)
"""Modes that a request for recommendations may name."""


def check_mode(name: str, value: str, allowed: Collection[Mode] = tuple(Mode)) -> Mode:
    """The mode that `value` names.

    Raises:
        ValueError: `value` names none of the `allowed` modes; the text begins with `name`.
    """
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    return Mode(value)
