"""SASRec: the next item by self-attention over a history of items (Kang & McAuley, 2018).

This module has inference in NumPy; training is in `recsys.training.sasrec`. The layers are pre-norm
with learned positions, and one vector per item is both input and output embedding:

    logit(item | history) = last state of the history . vector(item)

Items are dense items of the catalog that the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from recsys.interactions import Histories
from recsys.native.library import find_library
from recsys.prompts import PromptConfig
from recsys.retrieval.native import NativeSasRec
from recsys.retrieval.vectors import largest

FILE, ABOUT = "sasrec.safetensors", "about"
ITEMS, POSITIONS, NORM = "items", "positions", "norm"
STEP = 8  # histories whose lengths round up to the same multiple of it are computed together
HISTORIES_AT_A_TIME = 256  # bounds memory: each has a row of logits
LOGITS_AT_A_TIME = 2**25
EPSILON = 1e-5  # of the layer norms


@dataclass(frozen=True, eq=False)
class SasRec:
    """A trained model.

    Attributes:
        weights: float32 arrays by name: `items` (items, D), `positions` (W, D), `norm.weight` and
            `norm.bias`, and `layers.<i>.<name>` as in `torch.nn.TransformerEncoderLayer`.
        heads: attention heads.
        window: which items of a history are read; at most W.
    """

    weights: Mapping[str, NDArray[np.float32]]
    heads: int
    window: PromptConfig

    def __len__(self) -> int:
        return len(self.weights[ITEMS])

    @property
    def vectors(self) -> NDArray[np.float32]:
        """(items, D) item vectors."""
        return self.weights[ITEMS]

    @cached_property
    def _native(self) -> NativeSasRec:
        library = find_library()
        assert not isinstance(library, str)  # noqa: S101 - the caller has looked
        self.check()
        return NativeSasRec(library, self)

    @cached_property
    def num_layers(self) -> int:
        """Number of layers."""
        return len({name.split(".")[1] for name in self.weights if name.startswith("layers.")})

    def without(self, items: NDArray[np.integer]) -> SasRec:
        """The same with item vectors of 0 for these items."""
        vectors = self.vectors.copy()
        vectors[items] = 0
        return replace(self, weights={**self.weights, ITEMS: vectors})

    def states(self, histories: Histories) -> NDArray[np.float32]:
        """(n, D) last states; 0 for a history without a known item.

        Args:
            histories: n sequences of dense items, oldest first; unknown items are skipped.
        """
        if not isinstance(find_library(), str):
            return self._native.states(histories)
        known = histories.where(histories.items < len(self))
        start = self.window.start(known.lengths)
        position = np.arange(len(known.items)) - known.offsets[known.rows]
        known = known.where(position >= start[known.rows])
        lengths = known.lengths
        states = np.zeros((len(known), self.weights[ITEMS].shape[1]), np.float32)
        widths = np.minimum(-(-lengths // STEP) * STEP, self.window.max_items)
        for width in np.unique(widths[lengths > 0]):
            rows = np.flatnonzero(widths == width)
            items = known.take(rows).padded(0, int(width))
            states[rows] = self._forward(items, lengths[rows] - 1)
        return states

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Best k items of each history; ties are in item order, except at the k-th place.

        Args:
            histories: n sequences of dense items, oldest first.
            k: length of the lists.
            exclude_seen: whether to leave out the items of the history.

        Returns:
            (n, k) int32 items, padded with -1, and their (n, k) float32 logits, padded with -inf.
        """
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        step = max(1, min(HISTORIES_AT_A_TIME, LOGITS_AT_A_TIME // len(self)))
        for start in range(0, len(histories), step):
            rows = np.arange(start, min(start + step, len(histories)))
            batch = histories.take(rows)
            states = self.states(batch)
            logits = states @ self.vectors.T
            left_out = batch.left_out(exclude_seen)
            known = left_out.items < len(self)
            logits[left_out.rows[known], left_out.items[known]] = -np.inf
            best = largest(logits, k)
            score = np.take_along_axis(logits, best, axis=1)
            there = (score > -np.inf) & np.any(states != 0, axis=1, keepdims=True)
            items[rows, : best.shape[1]] = np.where(there, best, -1)
            scores[rows, : best.shape[1]] = np.where(there, score, -np.inf)
        return items, scores

    def save(self, folder: Path) -> None:
        """Write `sasrec.safetensors` into `folder`, which exists."""
        from safetensors.numpy import save_file

        about = json.dumps({"heads": self.heads, **self.window.as_dict()})
        save_file(
            {name: np.ascontiguousarray(array) for name, array in self.weights.items()},
            folder / FILE,
            {ABOUT: about},  # one entry: several are written in a random order
        )

    @classmethod
    def load(cls, folder: Path) -> SasRec:
        """Read what `save` wrote.

        Raises:
            OSError: there is no such file.
            ValueError: it is damaged.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(folder / FILE, "numpy") as file:
                metadata = file.metadata() or {}
                if ABOUT not in metadata:
                    raise ValueError(
                        f"{FILE} is of another version of recsys; `recsys run --name NAME` makes "
                        "it anew"
                    )
                about = json.loads(metadata[ABOUT])
                weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            window = PromptConfig(int(about["max_items"]), int(about["block"]))
            model = cls(weights, int(about["heads"]), window)
        except (SafetensorError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"{FILE}: {error}") from error
        model.check()
        return model

    def check(self) -> None:
        """Raise `ValueError` unless all weights are there, fit together, and are finite."""
        items, positions = (self.weights.get(name) for name in (ITEMS, POSITIONS))
        if items is None or items.ndim != 2 or positions is None or positions.ndim != 2:
            raise ValueError(f"{FILE}: {ITEMS} or {POSITIONS} is missing, or no matrix")
        if not len(items):
            raise ValueError(f"{FILE}: it is of no items")
        first = self.weights.get("layers.0.linear1.weight")
        inner = 0 if first is None or not first.ndim else len(first)
        size, window = items.shape[1], len(positions)
        if self.heads < 1 or size % self.heads:
            raise ValueError(f"{FILE}: {self.heads} heads do not divide {size} dimensions")
        if self.window.max_items > window:
            raise ValueError(
                f"{FILE}: {self.window.max_items} items are read, with {window} positions"
            )
        shapes = {ITEMS: items.shape, POSITIONS: (window, size)}
        norms = [NORM]
        for layer in range(self.num_layers):
            own = f"layers.{layer}."
            norms += [f"{own}norm1", f"{own}norm2"]
            linear = {
                "self_attn.in_proj_": (3 * size, size),
                "self_attn.out_proj.": (size, size),
                "linear1.": (inner, size),
                "linear2.": (size, inner),
            }
            for name, shape in linear.items():
                shapes |= {f"{own}{name}weight": shape, f"{own}{name}bias": shape[:1]}
        shapes |= {f"{norm}.{part}": (size,) for norm in norms for part in ("weight", "bias")}
        for name, shape in shapes.items():
            array = self.weights.get(name)
            if array is None or array.shape != shape or array.dtype != np.float32:
                there = "missing" if array is None else f"{array.shape} {array.dtype}"
                raise ValueError(f"{FILE}: {name} is {there}, not {shape} float32")
            if not np.isfinite(array).all():
                raise ValueError(f"{FILE}: {name} has values that are not finite")

    def _forward(self, items: NDArray[np.int32], last: NDArray[np.int64]) -> NDArray[np.float32]:
        """(n, D) states at the positions `last` of (n, T) items, padded on the right."""
        width, lines = items.shape[1], np.arange(len(items))
        states = self.weights[ITEMS][items] + self.weights[POSITIONS][:width]
        later = np.triu(np.full((width, width), -np.inf, np.float32), 1)
        for layer in range(self.num_layers):
            w = {
                name.split(".", 2)[2]: array
                for name, array in self.weights.items()
                if name.startswith(f"layers.{layer}.")
            }
            normed = _norm(states, w["norm1.weight"], w["norm1.bias"])
            mixed = normed @ w["self_attn.in_proj_weight"].T + w["self_attn.in_proj_bias"]
            shape = (len(items), width, 3, self.heads, -1)
            q, k, v = mixed.reshape(shape).transpose(2, 0, 3, 1, 4)
            weight = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5) + later
            weight = np.exp(weight - weight.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            attended = (weight @ v).swapaxes(1, 2).reshape(states.shape)
            states = (
                states + attended @ w["self_attn.out_proj.weight"].T + w["self_attn.out_proj.bias"]
            )
            normed = _norm(states, w["norm2.weight"], w["norm2.bias"])
            inner = np.maximum(normed @ w["linear1.weight"].T + w["linear1.bias"], 0)
            states = states + inner @ w["linear2.weight"].T + w["linear2.bias"]
        return _norm(
            states[lines, last], self.weights[f"{NORM}.weight"], self.weights[f"{NORM}.bias"]
        )


def _norm(
    states: NDArray[np.float32], weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> NDArray[np.float32]:
    centred = states - states.mean(axis=-1, keepdims=True)
    spread = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(EPSILON))
    return np.asarray(centred / spread * weight + bias)
