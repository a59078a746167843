"""Beam search as one call of the native library, without a return to Python between passes.

It keeps what it computes of a prompt, counts its work and answers as `recsys.decoding.beam` does,
whose search is its reference. Samples, sums over the allowed tokens and captured passes are left to
that search.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.restrictions import Allowed, Excluded, Gains
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import TokenLogits
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search
from recsys.decoding.row_tree import RowTree
from recsys.errors import NonFiniteError
from recsys.models.cache import Finite, SlotCache
from recsys.native.decoder import NativeDecoder
from recsys.native.library import address, ffi


def native_decoder(search: Search) -> NativeDecoder | None:
    """The model's decoder in the library, if `native_search` covers this search."""
    step, model = search.step, search.model
    covered = step.noise is None and step.normalize == "vocabulary" and model.find_graph is None
    return model.native if covered else None


def native_search(
    search: Search,
    decoder: NativeDecoder,
    widths: Sequence[int],
    num_beams: int,
    limits: torch.Tensor | None = None,
) -> Beams:
    """A plain beam search that keeps `widths` beams a level; the answer is padded to `num_beams`.

    `decoder` is that of `native_decoder`. With `limits`, (B,) scores, prefixes that score less are
    pruned, and the statistics count the nodes that were run; otherwise those of full levels.

    Raises:
        NonFiniteError: as `beam_search`.
    """
    model, prompts, store = search.model, search.prompts, search.model.prefixes
    nodes = sum(widths[:-1]) + (0 if search.rows is None else search.rows.width)
    slots = max(prompts.host_tokens.shape[1], prompts.slots)
    cached = np.zeros(len(search), np.int64)
    tokens, lengths = prompts.host_tokens, prompts.host_lengths
    with model.pool.lend(len(search), slots, nodes) as cache:
        if store is not None:
            with store.lookup(tokens, lengths) as hit:
                store.load(hit, cache.buffer)
                cached = hit.cached
        call = _Call(search, widths, num_beams, cache, cached, limits)
        call.run(decoder)
        finite = call.finite
        if store is not None:
            store.insert(tokens, lengths, cache.buffer, Finite(torch.tensor(finite)))
        if not all(finite):  # the error drops the cache
            raise NonFiniteError([i for i, good in enumerate(finite) if not good])
        run = [nodes] * len(search) if limits is None else call.nodes.tolist()
        stats = DecodeStats.of_beams(len(widths), lengths, cached, run, cache)
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
        nodes: (B,) int64 beams that were run.
        finite: B flags, whether all logits were finite.
        candidate_scores: (B, C) log-probabilities of the candidates; None without any.
    """

    finite: list[bool]
    candidate_scores: torch.Tensor | None = None

    def __init__(
        self,
        search: Search,
        widths: Sequence[int],
        num_beams: int,
        cache: SlotCache,
        cached: NDArray[np.int64],
        limits: torch.Tensor | None,
    ) -> None:
        """Lay out the arguments."""
        batch, self._prompts, self._trie = len(search), search.prompts, search.step.trie
        source = self._trie.source
        self._cached, self._widths = _integers(cached.tolist()), _integers(widths)
        self.rows = torch.empty((batch, num_beams), dtype=torch.int64)
        self.sequences = torch.empty((batch, num_beams, source.num_levels), dtype=torch.int64)
        self.scores = torch.empty((batch, num_beams))
        self.complete = torch.empty(batch, dtype=torch.bool)
        self.nodes = torch.empty(batch, dtype=torch.int64)
        self._limits = None if limits is None else limits.to(torch.float32).contiguous()
        self._finite = torch.empty(batch, dtype=torch.bool)
        self._allowed = _allowed(search.step.allowed)
        self._dead, self._dead_count = _dead(search.step.excluded, source.num_levels)
        self._gains = _gains(search.step.gains)
        fields = {
            "batch": batch,
            "longest": self._prompts.tokens.shape[1],
            "slots": cache.slots,
            "prompt": cache.prompt,
            "beams": num_beams,
            "token": self._prompts.tokens.data_ptr(),
            "length": self._prompts.lengths.data_ptr(),
            "cached": address(self._cached),
            "width": address(self._widths),
            "window": [w or 0 for w in search.model.mask_kinds.values()],
            "allowed": address(self._allowed),
            "dead": address(self._dead),
            "dead_count": address(self._dead_count),
            "gains": address(self._gains),
            "limit": address(self._limits),
            "cache": cache.buffer.data_ptr(),
            "cache_layer": cache.buffer.stride(0),
            "cache_values": cache.buffer.stride(1),
            "row": self.rows.data_ptr(),
            "sequence": self.sequences.data_ptr(),
            "log_prob": self.scores.data_ptr(),
            "complete": self.complete.data_ptr(),
            "finite": self._finite.data_ptr(),
            "nodes": self.nodes.data_ptr(),
        }
        self._call = ffi.new("Search *", fields)
        self._candidates = search.rows
        if search.rows is not None:
            self._add_candidates(search.rows, search.model.vocabulary_size)
        self._positions = max(self._prompts.host_lengths.tolist()) + source.num_levels

    def _add_candidates(self, rows: RowTree, vocabulary: int) -> None:
        """Run the nodes of the candidates in the first pass, and keep its logits."""
        arrays = (rows.tokens, rows.parents, rows.depth, rows.states)
        self._extra = [t.contiguous() for t in arrays]
        self._first = torch.empty((len(rows.tokens), 1 + rows.width, vocabulary))
        self._call.extra = rows.width
        names = ("token", "parent", "depth", "state")
        for name, tensor in zip(names, self._extra, strict=True):
            setattr(self._call, f"extra_{name}", tensor.data_ptr())
        self._call.extra_logits = self._first.data_ptr()

    def run(self, decoder: NativeDecoder) -> None:
        """Search."""
        decoder.reach(self._positions)
        decoder.search(_native_trie(self._trie), self._call)
        self.finite = self._finite.tolist()
        if self._candidates is not None:
            first = TokenLogits.of(self._first, self._trie)
            self.candidate_scores = self._candidates.scores(first)
            scored = first.total.isfinite().all(1).tolist()
            self.finite = [a and b for a, b in zip(self.finite, scored, strict=True)]


_tries: weakref.WeakKeyDictionary[DeviceTrie, Any] = weakref.WeakKeyDictionary()


def _native_trie(trie: DeviceTrie) -> Any:
    """The trie's tensors, which live as long as it does, as the library reads them."""
    made = _tries.get(trie)
    if made is None:
        source = trie.source
        fields = {
            "levels": source.num_levels,
            "leaves": source.depth_start[-2],
            "wide_symbols": trie.symbol.dtype == torch.int32,
            "wide_rows": trie.rows.dtype == torch.int32,
            "first_child": trie.first_child.data_ptr(),
            "symbol": trie.symbol.data_ptr(),
            "rows": trie.rows.data_ptr(),
            "alphabet": trie.alphabet.data_ptr(),
        }
        made = _tries[trie] = ffi.new("Trie *", fields)
    return made


def _integers(values: Sequence[int]) -> Any:
    """An array of integers or of addresses for the library."""
    return ffi.new("int64_t[]", values)


def _allowed(allowed: Allowed | None) -> Any:
    """Where the flags of each request's states begin; None where all rows are allowed."""
    if allowed is None:
        return None
    lines, starts = allowed.line.tolist(), allowed.start.flatten().tolist()
    flags = [allowed.alive[i].data_ptr() + s for i, s in zip(lines, starts, strict=True)]
    return _integers(flags)


def _gains(gains: Gains | None) -> Any:
    """Where the boosts of each request's states begin; None where no request has any."""
    if gains is None:
        return None
    return _integers([gains.most[line].data_ptr() for line in gains.line.tolist()])


def _dead(excluded: Excluded | None, levels: int) -> tuple[Any, Any]:
    """The excluded states of each depth, and how many per request."""
    if excluded is None:
        return None, None
    states, counts = ffi.new("int64_t[]", levels), ffi.new("int64_t[]", levels)
    for depth, dead in enumerate(excluded.dead):
        states[depth] = dead.data_ptr() if dead.shape[1] else 0
        counts[depth] = dead.shape[1]
    return states, counts
