"""Recommender: a loaded bundle that turns histories into items. The first module that says "user".

It holds no state between calls, so equal requests get equal answers: alone, in any batch, and after
a restart (float32, a fixed number of threads).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.interactions import Histories

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from recsys.artifacts import Manifest
    from recsys.catalog import Catalog

MIN_BEAMS = 20
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class Recommendation:
    """One recommended item.

    Attributes:
        item_id: outside id.
        score: log-probability of its semantic ID given the history, over the whole vocabulary.
        title: from the catalogue.
        semantic_id: its codes, 0-based.
    """

    item_id: str
    score: float
    title: str
    semantic_id: tuple[int, ...]


@dataclass(frozen=True)
class RecommendRequest:
    """What is asked for one user.

    Attributes:
        history: outside item ids, oldest first; unknown ones are passed over.
        k: items wanted.
        exclude_seen: leave out the items of the history.
        exclude_items: leave out these as well.
    """

    history: Sequence[str]
    k: int = 10
    exclude_seen: bool = True
    exclude_items: Sequence[str] = ()


@dataclass(frozen=True)
class RecommendResult:
    """The answer to one request.

    Attributes:
        recommendations: best first; fewer than k where the catalogue has no more.
        unknown_items: ids of the history that the catalogue does not have.
        stats: counters of the decode (`recsys.decoding.DecodeStats`) and its beam width.
    """

    recommendations: list[Recommendation]
    unknown_items: list[str]
    stats: dict[str, int] = field(default_factory=dict)


class Recommender:
    """Beam search over one bundle's catalogue.

    Attributes:
        bundle: what was loaded.
        trie: its catalogue as a trie.
        model: the target (Hugging Face).
    """

    def __init__(self, bundle: Bundle, model: Any) -> None:
        """Use `model` for `bundle`; `load` does both."""
        self.bundle, self.model = bundle, model
        self.encoder = bundle.encoder
        self.trie = ItemTrie.build(self.encoder.item_tokens)

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        check: bool = True,
    ) -> Recommender:
        """Load a bundle's target.

        Args:
            path: the bundle's directory.
            device: a torch device.
            dtype: `float32`, `bfloat16` or `float64`.
            check: compare every file with its checksum first.

        Raises:
            ArtifactError: not a bundle, or a damaged one.
            ValueError: unknown dtype.
        """
        import torch

        from recsys.models.checkpoint import load_model

        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        bundle = Bundle.load(path, check=check)
        model = load_model(bundle.target, dtype=getattr(torch, dtype), device=device)
        return cls(bundle, model.eval())

    @property
    def catalog(self) -> Catalog:
        """Items that can be recommended."""
        return self.bundle.catalog

    @property
    def manifest(self) -> Manifest:
        """Of the bundle; its digest is the model's version."""
        return self.bundle.manifest

    def recommend(
        self, histories: Sequence[Sequence[str]], k: int = 10, *, exclude_seen: bool = True
    ) -> list[list[Recommendation]]:
        """Top-k of each history of outside item ids."""
        requests = [RecommendRequest(h, k, exclude_seen) for h in histories]
        return [result.recommendations for result in self.recommend_batch(requests)]

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """Answer requests of any mix of lengths and k together.

        Requests are decoded in groups of one beam width, so a neighbour's k changes nothing.

        Raises:
            ValueError: k below 1.
        """
        results: list[RecommendResult | None] = [None] * len(requests)
        widths = [_beams(request.k) for request in requests]
        for width in sorted(set(widths)):
            places = [i for i, w in enumerate(widths) if w == width]
            group = [requests[i] for i in places]
            for place, result in zip(places, self._decode(group, width), strict=True):
                results[place] = result
        return [r for r in results if r is not None]

    def rank(
        self,
        histories: Histories,
        k: int,
        exclude_seen: bool = True,
        *,
        beams: int | None = None,
        batch_size: int = 64,
        advance: Callable[[int], None] | None = None,
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Top-k of many histories of dense items, for evaluation.

        Args:
            histories: n sequences.
            k: items wanted.
            exclude_seen: leave out the items of the history.
            beams: beam width; by default max(20, k).
            batch_size: histories decoded together.
            advance: called with the number of histories done, for a progress bar.

        Returns:
            (n, k) items, -1 where there are no more, and (n, k) scores, -inf there.
        """
        items = np.full((len(histories), k), -1, np.int32)
        scores = np.full((len(histories), k), -np.inf, np.float32)
        order = np.argsort(histories.lengths, kind="stable")  # alike lengths share a batch
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            group = histories.take(places)
            seen = group if exclude_seen else Histories.of([[]] * len(group))
            items[places], scores[places], _ = self._top(group, seen, k, beams or _beams(k))
            if advance is not None:
                advance(len(places))
        return items, scores

    def warm_up(self) -> None:
        """Run one request, so that the first real one finds everything allocated and loaded."""
        self.recommend([self.catalog.item_ids[:1]], k=1)

    def _decode(self, requests: Sequence[RecommendRequest], beams: int) -> list[RecommendResult]:
        known, unknown, excluded = [], [], []
        for request in requests:
            items = self.catalog.index(request.history)
            known.append(items[items >= 0])
            unknown.append([i for i, item in zip(request.history, items, strict=True) if item < 0])
            listed = self.catalog.index(request.exclude_items)
            excluded.append(
                np.concatenate(
                    [listed[listed >= 0], known[-1][: None if request.exclude_seen else 0]]
                )
            )
        k = max(request.k for request in requests)
        items, scores, stats = self._top(Histories.of(known), Histories.of(excluded), k, beams)
        return [
            RecommendResult(self._name(items[i], scores[i], request.k), unknown[i], stats[i])
            for i, request in enumerate(requests)
        ]

    def _top(
        self, histories: Histories, excluded: Histories, k: int, beams: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32], list[dict[str, int]]]:
        """(n, k) items and scores of one batch, and its counters."""
        from recsys.decoding import beam_search

        found = beam_search(
            self.model,
            self.encoder.encode_all(histories),
            self.trie,
            beams,
            exclude=[self.trie.excluded_rows(items) for items in excluded],
            prompt_slots=self.encoder.max_tokens,
        )
        rows, row_scores = found.rows.cpu().numpy(), found.scores.cpu().numpy()
        items, scores = _items_of_rows(self.trie, rows, row_scores, excluded, k)
        return items, scores, [{"beams": beams, **vars(s)} for s in found.stats]

    def _name(
        self, items: NDArray[np.int32], scores: NDArray[np.float32], k: int
    ) -> list[Recommendation]:
        catalog = self.catalog
        return [
            Recommendation(
                catalog.item_ids[item],
                float(score),
                catalog.titles[item],
                tuple(int(c) for c in catalog.codes[item]),
            )
            for item, score in zip(items[:k], scores[:k], strict=True)
            if item >= 0
        ]


def _beams(k: int) -> int:
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    return max(MIN_BEAMS, k)


def _items_of_rows(
    trie: ItemTrie,
    rows: NDArray[np.int64],
    row_scores: NDArray[np.floating[Any]],
    excluded: Histories,
    k: int,
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Items of the rows (n, K), best first; a shared leaf gives its items one by one."""
    n, _ = rows.shape
    items = np.full((n, k), -1, np.int32)
    scores = np.full((n, k), -np.inf, np.float32)
    sizes = np.where(rows >= 0, np.diff(trie.row_item_start)[rows], 0).reshape(-1)
    if not sizes.sum():
        return items, scores
    start = np.repeat(trie.row_item_start[rows.reshape(-1)], sizes)
    inside = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    flat = trie.row_items[start + inside]
    owner = np.repeat(np.arange(rows.size) // rows.shape[1], sizes)
    flat_scores = np.repeat(row_scores.reshape(-1), sizes)
    if len(excluded.items):
        keys = excluded.rows * trie.num_items + excluded.items
        keep = ~np.isin(owner * trie.num_items + flat, keys)
        flat, owner, flat_scores = flat[keep], owner[keep], flat_scores[keep]
    first = np.searchsorted(owner, np.arange(n))
    place = np.arange(len(flat)) - first[owner]
    kept = place < k
    items[owner[kept], place[kept]] = flat[kept]
    scores[owner[kept], place[kept]] = flat_scores[kept]
    return items, scores
