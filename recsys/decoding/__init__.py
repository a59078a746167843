"""Decoding: constrained beam search, plain and speculative. Knows tokens and rows, no items."""

from __future__ import annotations

from recsys.decoding.beam import beam_search
from recsys.decoding.completion import complete
from recsys.decoding.draft import (
    Drafter,
    ExhaustiveDrafter,
    ModelDrafter,
    Proposal,
    StateDrafter,
)
from recsys.decoding.engine import Decoded, Engine
from recsys.decoding.output import Beams, DecodeStats, Trace, TraceNode
from recsys.decoding.planner import Plan
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.score import score_rows
from recsys.decoding.speculative import speculative_beam_search
from recsys.modes import Mode

__all__ = [
    "Beams",
    "DecodeStats",
    "Decoded",
    "Drafter",
    "Engine",
    "ExhaustiveDrafter",
    "Mode",
    "ModelDrafter",
    "Plan",
    "Proposal",
    "Search",
    "SearchRequest",
    "StateDrafter",
    "Trace",
    "TraceNode",
    "beam_search",
    "complete",
    "score_rows",
    "speculative_beam_search",
]
