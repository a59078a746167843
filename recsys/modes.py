"""Modes, the one vocabulary for how a batch is decoded, and traces of how answers were found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import ConfigDict

from recsys.devices import AUTO

Fate = Literal["accepted", "rejected", "patched"]


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


@dataclass(frozen=True)
class TraceNode:
    """One node of a request's tree."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    parent: int
    """Place of its parent in the list of nodes; -1 for the prompt."""
    depth: int
    """1 for the first token of a semantic ID."""
    token: int
    """The token that leads into the node."""
    state: int
    """State of the trie."""
    target_pass: int
    """Number of the target's pass that ran it, from 1."""
    draft_log_prob: float | None
    """The drafter's score: a model's log-probability, 0 from the exhaustive drafter, minus the rank
    from candidates. None for a patched node, and for a node that was added to score a candidate
    (the draft may hold the same node again)."""
    target_log_prob: float
    """The target's log-probability of the path; boosts are not part of it."""
    fate: Fate
    """`accepted`: a beam of the target's search that the draft had. `rejected`: run in any pass,
    but not a beam. `patched`: a beam that the draft lacked, added by a patch pass."""
    code: int | None = None
    """The code of its token, 0-based; None in a search that knows no codes."""
    items: int | None = None
    """Items below the node that the request may get; None where they are not counted."""


@dataclass(frozen=True)
class Trace:
    """The tree of one request."""

    __pydantic_config__ = ConfigDict(use_attribute_docstrings=True)

    nodes: list[TraceNode]
    """Parents before children."""
    blocked: dict[int, int] = field(default_factory=dict)
    """By level, from 1, how many codes the catalog or a mask closed below the search's beams; empty
    where they are not counted."""


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
