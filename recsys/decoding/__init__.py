"""Decoding: constrained beam search, plain and speculative. Knows tokens and rows, no items."""

from __future__ import annotations

from recsys.decoding.beam import beam_search
from recsys.decoding.best_first import complete
from recsys.decoding.draft import (
    CandidateDrafter,
    Drafter,
    ExhaustiveDrafter,
    ModelDrafter,
    Proposal,
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
    "CandidateDrafter",
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
    "Trace",
    "TraceNode",
    "beam_search",
    "complete",
    "score_rows",
    "speculative_beam_search",
]
