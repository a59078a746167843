"""What decoding returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DecodeStats:
    """Counters of one request.

    Attributes:
        target_passes: forwards of the target, the prefill included.
        target_tokens: tokens the target was run on.
        kv_slots: cache slots the request held, one a token; beams share their prompt.
        kv_bytes: the same in bytes.
        accepted_levels: drafted levels that the first pass accepted, at most L - 1.
        drafted_nodes: nodes that were proposed.
        draft_passes: forwards of the draft model.
    """

    target_passes: int
    target_tokens: int
    kv_slots: int
    kv_bytes: int
    accepted_levels: int = 0
    drafted_nodes: int = 0
    draft_passes: int = 0


@dataclass(frozen=True)
class Beams:
    """The best sequences of each request, best first; ties by lower row.

    Attributes:
        tokens: (B, K, L) int64; rows of missing beams repeat an arbitrary sequence.
        scores: (B, K) float32 or float64, sum of log-probabilities; -inf where fewer than K exist.
        rows: (B, K) int64 rows of the trie; -1 where fewer than K exist.
        stats: one entry a request.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    rows: torch.Tensor
    stats: list[DecodeStats] = field(default_factory=list)
