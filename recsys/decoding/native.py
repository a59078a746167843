"""Plain beam search as one call of the native library, without a return to Python between passes.

It keeps what it computes of a prompt, counts its work and answers as `recsys.decoding.beam` does,
whose search is its reference. Samples, boosts, candidates, sums over the allowed tokens, rows of
unequal lengths and captured passes are left to that search.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.trie import ItemTrie
from recsys.decoding.expand import Frontier
from recsys.decoding.output import DecodeStats
from recsys.decoding.request import Search
from recsys.decoding.tree import require_finite
from recsys.models.cache import SlotCache
from recsys.native import library


def searches_natively(search: Search) -> bool:
    """Whether `native_search` covers this search."""
    step, model = search.step, search.model
    return (
        search.rows is None
        and step.noise is None
        and step.gains is None
        and step.normalize == "vocabulary"
        and step.trie.source.end is None
        and model.find_graph is None
        and model.native is not None
    )


def native_search(search: Search, widths: Sequence[int]) -> tuple[Frontier, list[DecodeStats]]:
    """The last frontier of a plain beam search that keeps `widths` beams a level, and its work.

    Raises:
        NonFiniteError: as `beam_search`.
    """
    model, prompts, trie = search.model, search.prompts, search.step.trie.source
    store, nodes = model.prefixes, sum(widths[:-1])
    slots = max(prompts.host_tokens.shape[1], prompts.slots)
    cached = np.zeros(len(search), np.int64)
    version, tokens, lengths = model.version, prompts.host_tokens, prompts.host_lengths
    with model.pool.lend(len(search), slots, nodes) as cache:
        with nullcontext() if store is None else store.lookup(version, tokens, lengths) as hit:
            if store is not None and hit is not None:
                store.load(hit, cache.buffer)
                cached = hit.cached
        frontier, finite = _run(search, widths, trie, cache, cached)
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
    return frontier, stats


def _run(
    search: Search,
    widths: Sequence[int],
    trie: ItemTrie,
    cache: SlotCache,
    cached: NDArray[np.int64],
) -> tuple[Frontier, torch.Tensor]:
    """Call the library; returns the last frontier and (B,) whether all logits were finite."""
    model, prompts, batch = search.model, search.prompts, len(search)
    decoder = model.native
    if decoder is None:
        raise RuntimeError("the model is not run by the native library")
    decoder.reach(int(prompts.host_lengths.max()) + trie.num_levels)
    arrays = [
        np.ascontiguousarray(a, np.int64)
        for a in (prompts.host_tokens, prompts.host_lengths, cached, widths, trie.alphabet)
    ]
    token, length, kept, width, alphabet = (a.ctypes.data for a in arrays)
    first_child, symbol = (np.ascontiguousarray(a) for a in (trie.first_child, trie.symbol))
    shape = (batch, widths[-1])
    states, scores = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
    rest, finite = torch.empty((batch, 1)), torch.empty(batch, dtype=torch.bool)
    allowed = _allowed(search.step.allowed, batch)
    dead, dead_count = _dead(search.step.excluded, trie.num_levels)
    call = library.Search(
        batch=batch,
        longest=prompts.host_tokens.shape[1],
        slots=cache.slots,
        prompt=cache.prompt,
        token=token,
        length=length,
        cached=kept,
        width=width,
        window=(ctypes.c_int64 * 2)(*(window or 0 for window in model.mask_kinds.values())),
        allowed=_address(allowed),
        dead=_address(dead),
        dead_count=_address(dead_count),
        cache=cache.buffer.data_ptr(),
        cache_layer=cache.buffer.stride(0),
        cache_values=cache.buffer.stride(1),
        state=states.data_ptr(),
        score=scores.data_ptr(),
        rest=rest.data_ptr(),
        finite=finite.data_ptr(),
    )
    decoder.search(
        library.Trie(
            levels=trie.num_levels,
            wide=symbol.dtype == np.int32,
            first_child=first_child.ctypes.data,
            symbol=symbol.ctypes.data,
            alphabet=alphabet,
        ),
        call,
    )
    nothing = torch.zeros_like(states)  # nobody asks for the last tokens and parents
    return Frontier(states, scores, nothing, nothing, scores, rest), finite


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
