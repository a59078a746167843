"""Blended lists in the native library: proposals, scores, reasons, and the states of SASRec.

`Retrieval`, `Reranker` and `SasRec` are the reference, and serve where there is no library; the
first two also with types of events and with later items. Products of vectors add up in another
order in the library, so values may differ in their last bits.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from recsys.interactions import Histories
from recsys.native.library import PANEL, Library, address, constants, ffi
from recsys.retrieval.reranker import (
    ADDED,
    AGAIN,
    AGAIN_VALUES,
    KNEES,
    MOST_RANK,
    NEW,
    OF_NEW,
    Network,
    Reranker,
    names_of,
    of_log_probs,
    rank_of,
)
from recsys.retrieval.vectors import select_largest

# Sources that the library ranks by, as native.h names them.
_SOURCES = {
    name: int(getattr(constants, name.upper()))
    for name in (
        "item_item", "vectors", "content", "sasrec", "model", "popularity", "recent"
    )
}  # fmt: skip
_LOG_RANKS = np.log1p(np.arange(MOST_RANK + 1.0))


class _Arrays:
    """Arrays as the library reads them, which are kept, and memory of each thread."""

    def __init__(self, native: Library) -> None:
        self._call, self._own = native.call, threading.local()
        self._kept: list[Any] = []

    def _keep(self, array: Any, dtype: Any = np.float32) -> int:
        """Address of an array of this type, which is kept."""
        self._kept.append(np.ascontiguousarray(array, dtype))
        return int(self._kept[-1].ctypes.data)

    def _memory(self, size: int) -> int:
        """Address of memory of this thread, which calls leave as they found it."""
        room: tuple[int, int, Any] = getattr(self._own, "room", (0, 0, None))
        if room[0] < size:
            memory = np.zeros(size + 64, np.uint8)
            room = size, -(-memory.ctypes.data // 64) * 64, memory
            self._own.room = room
        return room[1]


class NativeRetrieval(_Arrays):
    """The arrays of one retrieval as the library reads them; it keeps and shares them."""

    def __init__(self, native: Library, retrieval: Any) -> None:
        """Copy what has another type; the large arrays of the `Retrieval` are shared."""
        super().__init__(native)
        self._decay = retrieval.item_item.decay
        content = retrieval.content
        fields = {
            "items": len(retrieval),
            "item_item": self._matrix(retrieval.item_item.weights),
            "popularity": self._keep(retrieval.popularity, np.float64),
            "order": self._keep(retrieval.popular_order, np.int64),
            "log_counts": self._keep(np.log1p(retrieval.counts), np.float64),
            "eventless": self._keep(retrieval.counts == 0, np.bool_),
            "smoothing": retrieval.smoothing,
        }
        self._fitted = ffi.new("Fitted *", fields)
        fitted = self._fitted
        if content is not None:
            fitted.content, fitted.terms = self._matrix(content.rows), content.rows.shape[1]
            fitted.postings = self._matrix(content.columns)
        if (vectors := retrieval.vectors) is not None:
            fitted.vectors = self._keep(vectors.vectors, np.float32)
            fitted.vector_size = vectors.vectors.shape[1]
        if (sasrec := retrieval.sasrec) is not None:
            fitted.states = self._keep(sasrec.vectors, np.float32)
            fitted.state_size = sasrec.vectors.shape[1]
        if (recent := retrieval.recent) is not None:
            fitted.log_recent = self._keep(np.log1p(recent), np.float64)
        nearest = vectors if sasrec is None else sasrec
        if nearest is not None:
            fitted.panels = self._panels(nearest.vectors)
        # that propose half as many items
        self._parts = sum(part is not None for part in (content, sasrec or vectors))

    def propose(
        self, evidence: Any, k: int, blocked: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]:
        """Items and `supported` of `Retrieval.propose`, (n, w) each, and `Evidence.native_best`.

        Args:
            evidence: of n histories.
            k: items by evidence.
            blocked: (n, items) which items each history may not get.
        """
        n, fitted, half, quarter = len(evidence.histories), self._fitted, -(-k // 2), k // 4
        asked, cached = self._asked(evidence.histories, blocked, self._states(evidence))
        width = k + half * self._parts + quarter
        items, supported = np.empty((n, width), np.int32), np.empty((n, width), np.bool_)
        best = np.full((n, 2, MOST_RANK), -np.inf, np.float32)
        fields = {
            "k": k,
            "half": half,
            "quarter": quarter,
            "width": width,
            "items": items.ctypes.data,
            "supported": supported.ctypes.data,
            "best": best.ctypes.data,
        }
        call = ffi.new("Proposals *", fields)
        workspace = self._workspace(n, 2 * k + half + quarter, 0)
        if fitted.terms and half:
            cosines = np.empty(blocked.shape, np.float32)
            self._call.recsys_cosines(fitted, asked, workspace, cosines.ctypes.data)
            # Items with equal contents are many: which of them is taken must be as before.
            nearest = select_largest(cosines, half)
            call.cosines, call.nearest = cosines.ctypes.data, nearest.ctypes.data
            call.near = nearest.shape[1]
            cached += [cosines, nearest]
        self._call.recsys_propose(fitted, asked, call, workspace)
        return items, supported, best

    def rank(
        self, pool: Any, reranker: Reranker, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], NDArray[np.int8]]:
        """`Pool.rank`.

        Raises:
            ValueError: arrays of other sizes.
        """
        n, width = pool.items.shape
        histories = pool.evidence.histories
        if n != len(histories) or not pool.log_probs.shape == pool.source.shape == pool.items.shape:
            raise ValueError(f"arrays of {n} requests do not fit {len(histories)} histories")
        asked, _ = self._asked(histories, None, self._states(pool.evidence))
        log_probs = pool.log_probs
        items = np.where(log_probs > -np.inf, pool.items, -1).astype(np.int32)
        source = np.ascontiguousarray(pool.source, np.int8)
        best, score = np.empty((n, k), np.int32), np.empty((n, k), np.float32)
        best_source = np.empty((n, k), np.int8)
        known = np.where(log_probs > -np.inf, log_probs, 0).astype(np.float64)
        model, top = of_log_probs(known), np.ascontiguousarray(pool.evidence.native_best)
        packed = _packed(tuple(reranker.weights.items()), reranker.network)  # kept during the call
        call, again = ffi.new("Ranking *", packed.call[0]), None
        if AGAIN in reranker.sources:
            values = pool.evidence.again(items)
            again = sum(reranker.weights.get(name, 0.0) * values[name] for name in AGAIN_VALUES)
            again = np.where(values[AGAIN] > 0, again, np.nan)
        call.width, call.k, call.log_rank = width, k, _LOG_RANKS.ctypes.data
        call.items, call.model, call.top = items.ctypes.data, model.ctypes.data, top.ctypes.data
        call.source = source.ctypes.data
        call.gains, call.again = address(pool.gains), address(again)
        call.best, call.score = best.ctypes.data, score.ctypes.data
        call.best_source = best_source.ctypes.data
        self._call.recsys_rank(self._fitted, asked, call, self._workspace(1, k, width))
        return best, score, best_source

    def because(self, histories: Histories, items: NDArray[np.int32]) -> NDArray[np.int64]:
        """`Retrieval.because`."""
        asked, _ = self._asked(histories, None, None)
        items = np.ascontiguousarray(items, np.int32)
        reasons = np.empty(items.shape, np.int64)
        self._call.recsys_because(
            self._fitted,
            asked,
            items.ctypes.data,
            items.shape[1],
            self._workspace(0, 0, 0),
            reasons.ctypes.data,
        )
        return reasons

    def _panels(self, vectors: NDArray[np.float32]) -> int:
        """Vectors by dimension, `ITEMS_OF_PANEL` items beside each other, as native.h says."""
        lanes = int(constants.ITEMS_OF_PANEL)
        padded = np.pad(vectors, [(0, -size % lanes) for size in vectors.shape])
        panels = padded.reshape(-1, lanes, padded.shape[1]).transpose(0, 2, 1)
        return self._keep(panels)

    def _matrix(self, matrix: sparse.csr_array) -> tuple[int, int, int]:
        return (
            self._keep(matrix.indptr, np.int64),
            self._keep(matrix.indices, np.int32),
            self._keep(matrix.data, np.float32),
        )

    def _states(self, evidence: Any) -> NDArray[np.float32] | None:
        """Last states of SASRec; None without one."""
        states: NDArray[np.float32] | None = evidence.states if self._fitted.state_size else None
        return states

    def _asked(
        self,
        histories: Histories,
        blocked: NDArray[np.bool_] | None,
        states: NDArray[np.float32] | None,
    ) -> tuple[Any, list[Any]]:
        """The histories as the library reads them, and the arrays that must live as long.

        Those of the last call are kept: a list is made by three calls with the same histories.
        ValueError if sizes do not fit together.
        """
        n, fitted = len(histories), self._fitted
        if blocked is not None and blocked.shape != (n, fitted.items):
            raise ValueError(f"blocked is {blocked.shape}, not ({n}, {fitted.items})")
        if states is not None and states.shape != (n, fitted.state_size):
            raise ValueError(f"states are {states.shape}, not ({n}, {fitted.state_size})")
        last = getattr(self._own, "asked", None)
        if last is None or last[0] is not histories:
            last = self._own.asked = histories, *self._laid_out(histories)
        asked = ffi.new("Asked *", last[1][0])
        if blocked is not None:
            blocked = np.ascontiguousarray(blocked)
            asked.blocked = blocked.ctypes.data
        if states is not None:
            asked.states = states.ctypes.data
        return asked, [*last[2], blocked, states]

    def _laid_out(self, histories: Histories) -> tuple[Any, list[Any]]:
        offsets = np.ascontiguousarray(histories.offsets, np.int64)
        items = np.ascontiguousarray(histories.items, np.int32)
        longest = int(np.diff(offsets).max(initial=0))
        decays = _decays(self._decay, 64 * (longest // 64 + 1))
        fields = {
            "batch": len(histories),
            "offset": offsets.ctypes.data,
            "history": items.ctypes.data,
            "decay": decays.ctypes.data,
        }
        return ffi.new("Asked *", fields), [offsets, items, decays]

    def _workspace(self, batch: int, most: int, width: int) -> int:
        size = self._call.recsys_blend_workspace(self._fitted, batch, most, width)
        return self._memory(size)


class NativeSasRec(_Arrays):
    """The weights of one SASRec as the library reads them."""

    def __init__(self, native: Library, sasrec: Any) -> None:
        """Pack the matrices of the `SasRec`; the item vectors are shared."""
        super().__init__(native)
        self._weights = sasrec.weights
        count, vectors = sasrec.num_layers, sasrec.vectors
        layers = ffi.new("SasrecLayer[]", [self._layer(i) for i in range(count)])
        fields = {
            "items": len(sasrec),
            "layers": count,
            "hidden": vectors.shape[1],
            "inner": layers[0].inner.outputs if count else 0,
            "heads": sasrec.heads,
            "window": sasrec.window.max_items,
            "block": sasrec.window.block,
            "vectors": self._keep(vectors),
            "positions": self._keep(sasrec.weights["positions"]),
            "norm": self._addresses("norm.weight", "norm.bias"),
            "layer": layers,
        }
        self._model = ffi.new("Sasrec *", fields)
        self._kept.append(layers)

    def states(self, histories: Histories) -> NDArray[np.float32]:
        """`SasRec.states`."""
        offsets = np.ascontiguousarray(histories.offsets, np.int64)
        items = np.ascontiguousarray(histories.items, np.int32)
        fields = {
            "batch": len(histories),
            "offset": offsets.ctypes.data,
            "history": items.ctypes.data,
        }
        asked = ffi.new("Asked *", fields)
        states = np.empty((len(histories), self._model.hidden), np.float32)
        workspace = self._memory(self._call.recsys_states_workspace(self._model))
        self._call.recsys_states(self._model, asked, workspace, states.ctypes.data)
        return states

    def _layer(self, number: int) -> tuple[Any, ...]:
        own = f"layers.{number}."
        norms = [f"{own}norm{i}.{part}" for i in (1, 2) for part in ("weight", "bias")]
        return (
            self._linear(f"{own}self_attn.in_proj_weight", f"{own}self_attn.in_proj_bias"),
            self._linear(f"{own}self_attn.out_proj.weight", f"{own}self_attn.out_proj.bias"),
            self._linear(f"{own}linear1.weight", f"{own}linear1.bias"),
            self._linear(f"{own}linear2.weight", f"{own}linear2.bias"),
            self._addresses(*norms),
        )

    def _linear(self, weight: str, bias: str) -> tuple[int, ...]:
        """A matrix in panels, as native.h describes them."""
        matrix = self._weights[weight]
        outputs, inputs = matrix.shape
        missing = -outputs % PANEL
        wide = np.pad(matrix, ((0, missing), (0, 0)))
        panels = wide.reshape(-1, PANEL, inputs).transpose(0, 2, 1)
        rest = np.pad(self._weights[bias], (0, missing))
        return self._keep(panels), self._keep(rest), inputs, outputs

    def _addresses(self, *names: str) -> list[int]:
        return [self._keep(self._weights[name]) for name in names]


@lru_cache(maxsize=16)
def _decays(decay: float, count: int) -> NDArray[np.float64]:
    """(count,) decay**age."""
    return np.asarray(decay ** np.arange(count), np.float64)


def covers(reranker: Reranker) -> bool:
    """Whether the library knows all sources of a reranker."""
    return all(source in _SOURCES or source in ADDED for source in reranker.sources)


class _Packed:
    """The weights of a reranker as the library reads them, and the arrays that they point to."""

    def __init__(self, weights: Mapping[str, float], network: Network | None) -> None:
        call, places = ffi.new("Ranking *"), {}
        sources = Reranker(weights, network=network).sources
        for source in (name for name in sources if name not in ADDED):
            for knee, name in zip((0.0, *KNEES), names_of(source), strict=False):
                feature, places[name] = call.feature[call.features], call.features
                feature.source, feature.weight = _SOURCES[source], weights.get(name, 0.0)
                feature.form = constants.RANK if name == rank_of(source) else constants.VALUE
                if feature.form == constants.VALUE and name != source:
                    feature.form, feature.knee = constants.ABOVE, knee
                call.features += 1
            if source in OF_NEW:
                call.feature[places[source]].of_new = weights.get(f"{NEW}.{source}", 0.0)
            call.feature[places[source]].of_again = weights.get(f"{AGAIN}.{source}", 0.0)
        call.weighs_new, call.is_new = NEW in sources, weights.get(NEW, 0.0)
        if network is not None:
            self._inputs = np.array([places[name] for name in network.features], np.int64)
            self._units = np.ascontiguousarray(network.units.T)
            call.input_count, call.units = len(self._inputs), len(network.units)
            call.input, call.network = self._inputs.ctypes.data, self._units.ctypes.data
        self.call = call


@lru_cache(maxsize=16)
def _packed(weights: tuple[tuple[str, float], ...], network: Network | None) -> _Packed:
    return _Packed(dict(weights), network)
