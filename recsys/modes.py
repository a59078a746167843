"""Modes: the one vocabulary for how a batch is decoded, from the command line to the search."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum

from recsys.devices import AUTO


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


class Captured(StrEnum):
    """What is captured as graphs on a GPU, at the start.

    Attributes:
        PASSES: the models' passes, where the planner chooses plans.
        DECODES: passes, and whole decodes, one graph for each.
    """

    PASSES = "passes"
    DECODES = "decodes"


def check_mode(name: str, value: str, allowed: Collection[Mode] = tuple(Mode)) -> Mode:
    """The mode that `value` names.

    Raises:
        ValueError: `value` names none of the `allowed` modes; the text begins with `name`.
    """
    if value not in allowed:
        raise ValueError(f"{name} {value!r} is not one of {', '.join(allowed)}")
    return Mode(value)


def check_capture(capture: str, device: str, mode: str) -> Captured:
    """What to capture for a mode, on a device of torch, or `auto`: then on a GPU if it is one.

    Raises:
        ValueError: unknown, or nothing of it can be captured.
    """
    if capture not in tuple(Captured):
        raise ValueError(f"capture {capture!r} is not one of {', '.join(Captured)}")
    if capture == Captured.DECODES and not str(device).startswith((AUTO, "cuda")):
        raise ValueError(
            f"capture 'decodes' needs a GPU, and device is {str(device)!r}; set device to 'cuda', "
            "or leave capture out"
        )
    if capture == Captured.DECODES and mode == Mode.EXHAUSTIVE:
        raise ValueError(
            "capture 'decodes': those of mode 'exhaustive' cannot be captured; use mode 'auto', "
            "'beam' or 'draft'"
        )
    return Captured(capture)
