"""Decoding: constrained beam search over a shared-prefix cache. Knows tokens and rows, no items."""

from __future__ import annotations

from recsys.decoding.beam import beam_search
from recsys.decoding.output import Beams, DecodeStats

__all__ = ["Beams", "DecodeStats", "beam_search"]
