"""Plain beam search as one call of the native library, without a return to Python between passes.

It keeps what it computes of a prompt, counts its work and answers as `recsys.decoding.beam` does,
whose search is its reference. Samples, boosts, sums over the allowed tokens, rows of unequal
lengths and captured passes are left to that search.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.restrictions import Allowed, Excluded
from recsys.decoding.expand import TokenLogits
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import require_finite
from recsys.models.cache import SlotCache
from recsys.native import library


def searches_natively(search: Search) -> bool:
    """Whether `native_search` covers this search."""
    step, model = search.step, search.model
    return (
        step.noise is None
        and step.gains is None
        and step.normalize == "vocabulary"
        and step.trie.source.end is None
        and model.find_graph is None
        and model.native is not None
    )


def native_search(search: Search, widths: Sequence[int], num_beams: int) -> Beams:
    """A plain beam search that keeps `widths` beams a level; the answer is padded to `num_beams`.

    Raises:
        NonFiniteError: as `beam_search`.
    """
    model, prompts, store = search.model, search.prompts, search.model.prefixes
    nodes = sum(widths[:-1]) + (0 if search.rows is None else search.rows.width)
    slots = max(prompts.host_tokens.shape[1], prompts.slots)
    cached = np.zeros(len(search), np.int64)
    version, tokens, lengths = model.version, prompts.host_tokens, prompts.host_lengths
    with model.pool.lend(len(search), slots, nodes) as cache:
        if store is not None:
            with store.lookup(version, tokens, lengths) as hit:
                store.load(hit, cache.buffer)
                cached = hit.cached
        call = _Call(search, widths, num_beams, cache, cached)
        finite = call.run()
        if store is not None:
            store.insert(version, tokens, lengths, cache.buffer, finite)
        cache.note(finite.all())
        require_finite(finite)
        stats = [
            DecodeStats(
                target_passes=len(widths),
                target_tokens=length + nodes - kept,
                kv_slots=length + nodes,
                kv_bytes=(length + nodes) * cache.bytes_per_slot,
                cached_tokens=kept,
            )
            for length, kept in zip(lengths.tolist(), cached.tolist(), strict=True)
        ]
    return Beams(
        call.sequences,
        call.scores,
        call.rows,
        stats,
        call.complete,
        candidate_scores=call.candidate_scores,
    )


class _Call:
    """One call of the library, which keeps the arrays that it reads.

    Attributes:
        rows: (B, K) int64 after `run`, best first; -1 for none.
        sequences: (B, K, L) int64 tokens of the rows; -1 for none.
        scores: (B, K).
        complete: (B,) bool, whether no other row scores more.
        candidate_scores: (B, C) log-probabilities of the candidates; None without any.
    """

    candidate_scores: torch.Tensor | None = None

    def __init__(
        self,
        search: Search,
        widths: Sequence[int],
        num_beams: int,
        cache: SlotCache,
        cached: NDArray[np.int64],
    ) -> None:
        """Lay out the arguments."""
        batch, prompts, self._trie = len(search), search.prompts, search.step.trie
        source = self._trie.source
        self._decoder = search.model.native
        numbers = (prompts.host_tokens, prompts.host_lengths, cached, widths, source.alphabet)
        self._numbers = [np.ascontiguousarray(a, np.int64) for a in numbers]
        token, length, kept, width, alphabet = (a.ctypes.data for a in self._numbers)
        self.rows = torch.empty((batch, num_beams), dtype=torch.int64)
        self.sequences = torch.empty((batch, num_beams, source.num_levels), dtype=torch.int64)
        self.scores = torch.empty((batch, num_beams))
        self.complete = torch.empty(batch, dtype=torch.bool)
        self._finite = torch.empty(batch, dtype=torch.bool)
        self._allowed = _allowed(search.step.allowed, batch)
        self._dead, self._dead_count = _dead(search.step.excluded, source.num_levels)
        self._call = library.Search(
            batch=batch,
            longest=prompts.host_tokens.shape[1],
            slots=cache.slots,
            prompt=cache.prompt,
            beams=num_beams,
            token=token,
            length=length,
            cached=kept,
            width=width,
            window=(ctypes.c_int64 * 2)(*(w or 0 for w in search.model.mask_kinds.values())),
            allowed=_address(self._allowed),
            dead=_address(self._dead),
            dead_count=_address(self._dead_count),
            cache=cache.buffer.data_ptr(),
            cache_layer=cache.buffer.stride(0),
            cache_values=cache.buffer.stride(1),
            row=self.rows.data_ptr(),
            sequence=self.sequences.data_ptr(),
            score=self.scores.data_ptr(),
            complete=self.complete.data_ptr(),
            finite=self._finite.data_ptr(),
        )
        self._candidates, self._first = search.rows, torch.empty(0)
        if search.rows is not None:
            self._add_candidates(search.rows, search.model.vocabulary_size)
        arrays = (source.first_child, source.symbol, source.rows)
        self._arrays = [np.ascontiguousarray(a) for a in arrays]
        self._native_trie = library.Trie(
            levels=source.num_levels,
            leaves=source.depth_start[-2],
            wide_symbols=source.symbol.dtype == np.int32,
            wide_rows=source.rows.dtype == np.int32,
            first_child=self._arrays[0].ctypes.data,
            symbol=self._arrays[1].ctypes.data,
            rows=self._arrays[2].ctypes.data,
            alphabet=alphabet,
        )
        self._positions = int(prompts.host_lengths.max()) + source.num_levels

    def _add_candidates(self, rows: RowTree, vocabulary: int) -> None:
        """Run the nodes of the candidates in the first pass, and keep its logits."""
        self._extra = [t.contiguous() for t in (rows.tokens, rows.parents, rows.depth)]
        self._first = torch.empty((len(rows.tokens), 1 + rows.width, vocabulary))
        self._call.extra = rows.width
        for name, given in zip(("token", "parent", "depth"), self._extra, strict=True):
            setattr(self._call, f"extra_{name}", given.data_ptr())
        self._call.extra_logits = self._first.data_ptr()

    def run(self) -> torch.Tensor:
        """Search; returns (B,) whether all logits were finite."""
        if self._decoder is None:
            raise RuntimeError("the model is not run by the native library")
        self._decoder.reach(self._positions)
        self._decoder.search(self._native_trie, self._call)
        if self._candidates is None:
            return self._finite
        first = TokenLogits.of(self._first, self._trie)
        self.candidate_scores = self._candidates.scores(first)
        return self._finite & first.total.isfinite().all(1)


def _address(array: ctypes.Array[Any] | None) -> int | None:
    return None if array is None else ctypes.addressof(array)


def _allowed(allowed: Allowed | None, batch: int) -> ctypes.Array[ctypes.c_void_p] | None:
    """Where the flags of each request's states begin; None where all rows are allowed."""
    if allowed is None:
        return None
    lines, starts = allowed.line.tolist(), allowed.start.flatten().tolist()
    return (ctypes.c_void_p * batch)(
        *(allowed.alive[i].data_ptr() + start for i, start in zip(lines, starts, strict=True))
    )


def _dead(
    excluded: Excluded | None, levels: int
) -> tuple[ctypes.Array[ctypes.c_void_p] | None, ctypes.Array[ctypes.c_int64] | None]:
    """The excluded states of each depth, and how many per request."""
    if excluded is None:
        return None, None
    states = [d.data_ptr() if d.shape[1] else None for d in excluded.dead]
    counts = [d.shape[1] for d in excluded.dead]
    return (ctypes.c_void_p * levels)(*states), (ctypes.c_int64 * levels)(*counts)
