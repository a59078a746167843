"""What decoding returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from recsys.decoding.trace import Trace

Certificate = Literal["global-exact", "beam-exact", "approximate"]


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
        cached_tokens: prompt tokens whose keys and values were kept from an earlier call.
        forced_levels: levels that needed no forward of their own, for nothing but one token was
            allowed; with log-probabilities over the allowed tokens only. With speculation, 1 where
            that spared a beam of the last level its forward.
    """

    target_passes: int
    target_tokens: int
    kv_slots: int
    kv_bytes: int
    accepted_levels: int = 0
    drafted_nodes: int = 0
    draft_passes: int = 0
    cached_tokens: int = 0
    forced_levels: int = 0


@dataclass(frozen=True)
class Beams:
    """The best sequences of each request, best first; ties by lower row.

    Attributes:
        tokens: (B, K, L) int64; -1 where fewer than K exist.
        scores: (B, K) float32 or float64, sum of log-probabilities; -inf where fewer than K exist.
            A sequence that the model gives probability 0 does not exist.
        rows: (B, K) int64 rows of the trie; -1 where fewer than K exist.
        stats: one entry a request.
        is_global: (B,) bool, whether no sequence outside the list can score more than its last (a
            prefix bounds its descendants); None where that is not known.
        traces: how each answer was found, if asked for.
        approximate: the answer may differ from the target's own.
        candidate_scores: (B, C) log-probabilities of the candidates that were given along, -inf for
            those that there was no room for; None if none were.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    rows: torch.Tensor
    stats: list[DecodeStats] = field(default_factory=list)
    is_global: torch.Tensor | None = None
    traces: list[Trace] = field(default_factory=list)
    approximate: bool = False
    candidate_scores: torch.Tensor | None = None

    @property
    def certificates(self) -> list[Certificate]:
        """How good each answer is.

        `global-exact`: the model's best K sequences of all. `beam-exact`: those that beam search of
        width K finds, or plain sampling draws. `approximate`: neither. Exact means in this run's
        arithmetic.
        """
        if self.approximate:
            return ["approximate"] * len(self.rows)
        if self.is_global is None:
            return ["beam-exact"] * len(self.rows)
        return ["global-exact" if g else "beam-exact" for g in self.is_global.tolist()]
