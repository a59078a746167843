"""What decoding returns: the best sequences, counters of the work, and traces if asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.models.cache import SlotCache
from recsys.modes import Trace

Certificate = Literal["global-exact", "beam-exact", "approximate"]


@dataclass(frozen=True)
class DecodeStats:
    """Counters of one request; `TokenTree.stats` reads them off the tree that was run.

    Attributes:
        target_passes: forward passes of the target, the prefill included.
        target_tokens: tokens that the target was run on. A candidate's prefix that becomes a beam
            counts twice, also where the native search runs it once.
        kv_slots: cache slots that the request held, one a token; beams share their prompt.
        kv_bytes: the same in bytes.
        accepted_levels: drafted levels that the first pass accepted, at most L - 1.
        drafted_nodes: nodes that were proposed.
        draft_passes: forward passes of the draft model.
        cached_tokens: prompt tokens whose keys and values were kept from an earlier call.
    """

    target_passes: int
    target_tokens: int
    kv_slots: int
    kv_bytes: int
    accepted_levels: int = 0
    drafted_nodes: int = 0
    draft_passes: int = 0
    cached_tokens: int = 0

    @classmethod
    def of_beams(
        cls,
        passes: int,
        lengths: NDArray[np.int64],
        cached: NDArray[np.int64],
        nodes: Sequence[int],
        cache: SlotCache,
    ) -> list[DecodeStats]:
        """Those of B plain searches: (B,) prompt tokens, how many were cached, and nodes."""
        size = cache.bytes_per_slot
        return [
            cls(passes, slots - known, slots, slots * size, cached_tokens=known)
            for slots, known in zip((lengths + nodes).tolist(), cached.tolist(), strict=True)
        ]

    def plus(self, more: DecodeStats) -> DecodeStats:
        """These counters and the work of a second search over the target.

        Passes and tokens add up; slots were held one after the other, so the larger number counts.
        """
        return replace(
            self,
            target_passes=self.target_passes + more.target_passes,
            target_tokens=self.target_tokens + more.target_tokens,
            kv_slots=max(self.kv_slots, more.kv_slots),
            kv_bytes=max(self.kv_bytes, more.kv_bytes),
        )


@dataclass(frozen=True)
class Beams:
    """The best sequences of each request, best first; ties go to the lower row.

    The tensors are on the host, wherever the model is.

    Attributes:
        tokens: (B, K, L) int64; -1 where fewer than K exist.
        scores: (B, K) float32 or float64, sum of log-probabilities; -inf where fewer than K exist.
            A sequence that the model gives probability 0 does not exist.
        rows: (B, K) int64 rows of the trie; -1 where fewer than K exist.
        stats: one entry a request.
        is_global: (B,) bool, whether no sequence outside the list can score more than its last (the
            score of a prefix bounds its descendants'); None where that is not known.
        traces: how each answer was found, if asked for.
        approximate: the answer may differ from the target's own.
        candidate_scores: (B, C) log-probabilities of the request's `candidates`, -inf for those
            that there was no room for; None without candidates.
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
        width K finds, or plain sampling draws. `approximate`: neither. Exact means in the
        arithmetic of this run.
        """
        if self.approximate:
            return ["approximate"] * len(self.rows)
        if self.is_global is None:
            return ["beam-exact"] * len(self.rows)
        return ["global-exact" if g else "beam-exact" for g in self.is_global.tolist()]
