"""Decoding: constrained beam search, plain and speculative. Knows tokens and rows, no items."""

from __future__ import annotations

from recsys.decoding.beam import beam_search
from recsys.decoding.draft import Drafter, ExhaustiveDrafter, ModelDrafter, Proposal
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.speculative import speculative_beam_search

__all__ = [
    "Beams",
    "DecodeStats",
    "Drafter",
    "ExhaustiveDrafter",
    "ModelDrafter",
    "Proposal",
    "beam_search",
    "speculative_beam_search",
]
