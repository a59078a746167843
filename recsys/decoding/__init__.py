"""Decoding: constrained beam search, plain and speculative. Knows tokens and rows, no items."""

from __future__ import annotations

from recsys.decoding.beam import beam_search
from recsys.decoding.best_first import complete
from recsys.decoding.candidates import CandidateDrafter
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter, Proposal
from recsys.decoding.engine import Decoded, Engine
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.planner import Plan
from recsys.decoding.score import score_rows
from recsys.decoding.shared import shared_beam_search
from recsys.decoding.speculative import speculative_beam_search
from recsys.decoding.trace import Trace, TraceNode

__all__ = [
    "Beams",
    "CandidateDrafter",
    "DecodeStats",
    "Decoded",
    "Drafter",
    "Engine",
    "ExhaustiveDrafter",
    "ModelDrafter",
    "Plan",
    "Proposal",
    "Trace",
    "TraceNode",
    "beam_search",
    "complete",
    "score_rows",
    "shared_beam_search",
    "speculative_beam_search",
]
