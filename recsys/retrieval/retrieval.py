"""Retrieval: items for a history by co-occurrence and popularity, without the model.

It has four uses: similar items, answers for users without a known history, candidates for the model
to score, and the values from which the reranker computes the score of each candidate. Its item
probabilities are

    p(item | history) = (1 - s) * evidence(item) / sum of evidence + s * popularity(item)

The evidence is from a directional item-item model, popularity is smoothed by one event per item,
and s is the smoothing; without any evidence, p is the popularity. Items are dense items of the
catalog that it was fitted on. Later items have no evidence and no events; they are proposed and
ranked by their content (`recsys.retrieval.later`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.errors import ArtifactError
from recsys.interactions import Behaviour, Histories
from recsys.native.library import find_library
from recsys.retrieval.again import Repeats
from recsys.retrieval.content import ContentIndex, Terms
from recsys.retrieval.event_types import SEEN_DECAY, EventTypes
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.files import read_array, read_matrix, save_matrix
from recsys.retrieval.item_item import ItemItem, best_items
from recsys.retrieval.later import LaterItems, describe
from recsys.retrieval.native import NativeRetrieval
from recsys.retrieval.pool import Proposals
from recsys.retrieval.reranker import (
    RECENT,
    SASREC,
    SEEN,
    SOURCES,
    TARGET_POPULARITY,
    Network,
    Reranker,
)
from recsys.retrieval.rows import WeightedItems, repeated, without_repeats
from recsys.retrieval.sasrec import SasRec
from recsys.retrieval.vectors import VectorIndex, best_entries, nearest, product

SETTINGS, COUNTS = "retrieval.json", "popularity.npy"
VECTORS = "vectors.npy"
FORMAT = 10  # of the files; up to 7, scores depended on the candidates; 9 had no repeats
NETWORK = "reranker_network.npy"
TARGET_COUNTS = "target_popularity.npy"
RECENT_COUNTS = "recent_popularity.npy"
REPEATS = "repeats.npy"
TRAINED = "trained"  # folder of the counts of training events alone
WORDS, VALUES = "words", "values"  # parts of the content
# Stems of sparse matrices:
ITEM_ITEM, CONTENT, TO_TARGETS = "item_item", "content", "to_targets"


class Candidates(NamedTuple):
    """The most probable items for n histories, best first.

    Attributes:
        items: (n, k) int32, padded with -1.
        log_probs: (n, k) float32, padded with -inf.
        supported: (n, k) bool, whether the history has evidence for the item; otherwise it is
            proposed because it is popular.
    """

    items: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    supported: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Retrieval:
    """Neighbours, popularity and item vectors of one catalog.

    Attributes:
        item_item: scores given a history.
        counts: (items,) float64 events that it was fitted on, possibly decayed.
        smoothing: s, in (0, 1].
        vectors: item vectors, or None.
        content: words and attribute values of the items, or None.
        sasrec: a SASRec of the same items, or None. It is stored elsewhere in a bundle.
        types: what is known from the types of events; None without types.
        recent: (items,) float64 such events, much decayed; None if they rank no better.
        repeats: how items are chosen again; None where they are not.
        reranker: how to rank with the model, or None.
        fitted_on: `digest` of the histories that it was fitted on; None if unknown.
    """

    item_item: ItemItem
    counts: NDArray[np.float64]
    smoothing: float = 0.03
    vectors: VectorIndex | None = None
    content: ContentIndex | None = None
    sasrec: SasRec | None = None
    types: EventTypes | None = None
    recent: NDArray[np.float64] | None = None
    repeats: Repeats | None = None
    reranker: Reranker | None = None
    fitted_on: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.smoothing <= 1:
            raise ValueError(f"smoothing must lie in (0, 1], got {self.smoothing}")
        shapes = {"item_item": self.item_item.weights.shape[0]}
        for name in ("vectors", "content", "sasrec", "types", "recent", "repeats"):
            if (part := getattr(self, name)) is not None:
                shapes[name] = len(part)
        for name, size in shapes.items():
            if size != len(self.counts):
                raise ValueError(f"{name} is of {size} items, the counts of {len(self.counts)}")

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def sources(self) -> list[str]:
        """The sources of the reranker that this retrieval has, and the model."""
        parts = {
            "to_targets": self.types,
            TARGET_POPULARITY: self.types,
            RECENT: self.recent,
            "vectors": self.vectors,
            "content": self.content,
            SASREC: self.sasrec,
        }
        names = [] if self.types is None else [f"{SEEN}{name}" for name in self.types.numbers]
        return [source for source in SOURCES if parts.get(source, self) is not None] + names

    @property
    def native(self) -> NativeRetrieval | None:
        """The fitted parts in the native library; None without it, and with types."""
        library = find_library()
        return None if isinstance(library, str) or self.types is not None else self._native

    @cached_property
    def _native(self) -> NativeRetrieval:
        library = find_library()
        assert not isinstance(library, str)  # noqa: S101 - the caller has looked
        return NativeRetrieval(library, self)

    @cached_property
    def popularity(self) -> NDArray[np.float64]:
        """(items + 1,) probabilities, by `recent` if there is any; the last is for new items."""
        counts = self.counts if self.recent is None else self.recent
        smoothed = np.append(counts, 0.0) + 1.0
        return np.asarray(smoothed / smoothed[:-1].sum())

    @cached_property
    def popular_order(self) -> NDArray[np.int64]:
        """Items by descending popularity; ties by item."""
        return np.argsort(-self.popularity[:-1], kind="stable")

    def _popular(self, k: int, blocked: NDArray[np.bool_]) -> NDArray[np.int32]:
        """(n, k) the first items of `popular_order` that are not `blocked`, padded with -1."""
        width = 2 * k
        while True:
            popular = self.popular_order[:width]
            free = ~blocked[:, popular]
            if width >= len(self) or (np.count_nonzero(free, axis=1) >= k).all():
                break
            width *= 4
        column = np.argsort(~free, axis=1, kind="stable")[:, :k]
        items = np.full((len(blocked), k), -1, np.int32)
        there = np.take_along_axis(free, column, axis=1)
        items[:, : column.shape[1]] = np.where(there, popular[column], -1)
        return items

    def candidates(self, evidence: Evidence, k: int, blocked: NDArray[np.bool_]) -> Candidates:
        """The k most probable items of each history, of those that are not `blocked` (n, items)."""
        shares = evidence.shares
        popularity, smoothing = self.popularity, self.smoothing
        probs = (1 - smoothing) * shares.values + smoothing * popularity[shares.keys % len(self)]
        likely = best_items(replace(shares, values=probs.astype(np.float32)), k, blocked)
        popular = self._popular(k, blocked)
        again = (popular[:, :, None] == likely[:, None, :]).any(-1)
        items = np.concatenate([likely, np.where(again, -1, popular)], axis=1)
        share = shares.at(items)
        weight = np.where(shares.filled[:, None], smoothing, 1.0)
        probs = np.where(items >= 0, (1 - weight) * share + weight * popularity[items], 0)
        order = np.argsort(-probs, axis=1, kind="stable")[:, :k]
        with np.errstate(divide="ignore"):
            log_probs = np.log(np.take_along_axis(probs, order, axis=1)).astype(np.float32)
        supported = np.take_along_axis(share > 0, order, axis=1)
        items = np.take_along_axis(items, order, axis=1)
        return Candidates(items, log_probs, supported)

    def propose(self, evidence: Evidence, k: int, blocked: NDArray[np.bool_]) -> Proposals:
        """Items for the reranker: those of `candidates`, then k/2 of each further source.

        These are the nearest by content and by SASRec (or by vectors without one), k/4 popular
        items, and k/2 of the history itself, if it may get them. Of the later items it is the
        nearest by content and by SASRec. `blocked` (n, items and later items) are those that a
        history may not get.
        """
        if (native := evidence.native) is not None:
            items, supported, best = native.propose(evidence, k, blocked)
            vars(evidence)["native_best"] = best  # the same pass over the catalog finds them
            return self._with_chosen(Proposals(items, supported, evidence), k, blocked)
        free, blocked, later = blocked, blocked[:, : len(self)], evidence.later
        first, half = self.candidates(evidence, k, blocked), -(-k // 2)
        proposed = [first.items]
        if self.types is not None:
            proposed.append(best_items(evidence.to_targets, half, blocked))
            seen = WeightedItems.decayed(evidence.histories, len(self), SEEN_DECAY)
            proposed.append(best_items(seen.entries(len(self)), half, blocked))
        if self.content is not None:
            proposed.append(nearest(evidence.cosines, half, blocked))
        if self.sasrec is not None:
            unknown = ~evidence.states.any(axis=1, keepdims=True)
            proposed.append(best_entries(evidence.logits, half, blocked | unknown))
        elif self.vectors is not None:  # they would mostly repeat what SASRec proposes
            proposed.append(nearest(product(evidence.vectors, self.vectors.vectors), half, blocked))
        popular = self._popular(k // 4, blocked)
        proposed.append(popular)
        if later is not None and len(later):
            proposed += self._nearest_later(evidence, later, half, free[:, len(self) :])
        items = without_repeats(np.concatenate(proposed, axis=1))
        supported = (evidence.shares.at(items) > 0) | ~(items[:, :, None] == popular[:, None]).any(
            -1
        )
        return self._with_chosen(Proposals(items, supported, evidence), k, free)

    def _with_chosen(self, proposals: Proposals, k: int, blocked: NDArray[np.bool_]) -> Proposals:
        """Also k/2 items of each history that are not `blocked`, where items are chosen again."""
        if self.repeats is None:
            return proposals
        chosen = proposals.evidence.chosen.best(len(blocked), -(-k // 2), blocked)
        if not (chosen >= 0).any():
            return proposals
        items = np.concatenate([proposals.items, chosen], axis=1)
        supported = np.concatenate([proposals.supported, chosen >= 0], axis=1)
        again = repeated(items)
        to_left = np.argsort(again, axis=1, kind="stable")
        return Proposals(
            np.take_along_axis(np.where(again, np.int32(-1), items), to_left, axis=1),
            np.take_along_axis(supported & ~again, to_left, axis=1),
            proposals.evidence,
        )

    def _nearest_later(
        self, evidence: Evidence, later: LaterItems, width: int, blocked: NDArray[np.bool_]
    ) -> list[NDArray[np.int32]]:
        """(n, width) later items with the nearest content, and as many by SASRec or by vectors.

        `blocked` (n, later) are those that a history may not get.
        """
        assert evidence.later_cosines is not None  # noqa: S101 - there are later items
        proposed = [nearest(evidence.later_cosines, width, blocked)]
        if self.sasrec is not None and later.sasrec is not None:
            logits = product(evidence.states, np.nan_to_num(later.sasrec))
            known = np.any(evidence.states != 0, axis=1, keepdims=True)
            known = known & ~np.isnan(later.sasrec[:, 0])
            proposed.append(best_entries(logits, width, blocked | ~known))
        elif self.vectors is not None and later.vectors is not None:
            proposed.append(nearest(product(evidence.vectors, later.vectors), width, blocked))
        return [np.where(f >= 0, f + len(self), -1).astype(np.int32) for f in proposed]

    def describe(self, items: pa.Table) -> LaterItems | None:
        """What is known of items that are added later, a table with the columns of the catalog.

        None without content.
        """
        if self.content is None:
            return None
        return describe(
            self.content.encode(items),
            self.content.columns,
            None if self.vectors is None else self.vectors.vectors,
            None if self.sasrec is None else self.sasrec.vectors,
        )

    def because(self, histories: Histories, items: NDArray[np.integer]) -> NDArray[np.int64]:
        """For each item, the item of the history with the most evidence for it, or -1.

        Args:
            histories: n sequences of dense items, oldest first; items beyond the catalog have no
                evidence.
            items: (n, c) dense items, -1 for none.

        Returns:
            (n, c) dense items.
        """
        if (native := self.native) is not None:
            return native.because(histories, np.asarray(items, np.int32))
        items = np.asarray(items, np.int64)
        seen, owner, size = histories.items, histories.rows, len(self)
        if not len(seen) or not items.shape[1]:
            return np.full(items.shape, -1, np.int64)
        position = np.arange(len(seen)) - histories.offsets[owner]
        recency = self.item_item.decay ** (histories.lengths[owner] - 1 - position)
        shown = items[owner]
        known = (seen < size)[:, None] & (shown >= 0) & (shown < size)
        line = np.repeat(np.where(seen < size, seen, 0), shown.shape[1])
        evidence = self.item_item.weights[line, np.where(known, shown, 0).ravel()]
        evidence = evidence.reshape(shown.shape)
        shape = (len(items), int(histories.lengths.max()), items.shape[1])
        table = np.zeros(shape, np.float32)
        table[owner, position] = np.where(known, evidence * recency[:, None], 0)
        best = table.argmax(axis=1)
        supported = table.max(axis=1) > 0
        first = np.where(supported, histories.offsets[:-1, None] + best, 0)
        return np.where(supported, seen[first], -1)

    def save(self, folder: Path) -> None:
        """Write arrays and settings into `folder`, which exists."""
        self._save_counts(folder)
        if self.content is not None:
            save_matrix(folder, CONTENT, self.content.rows)
            for name in (WORDS, VALUES):
                terms = getattr(self.content, name)
                text = json.dumps(terms.names, ensure_ascii=False)
                (folder / f"{CONTENT}.{name}.json").write_text(text + "\n", encoding="utf-8")
                np.save(folder / f"{CONTENT}.{name}.npy", terms.idf, allow_pickle=False)
        if self.vectors is not None:
            np.save(folder / VECTORS, self.vectors.vectors, allow_pickle=False)
        settings = {
            "format": FORMAT,
            "decay": self.item_item.decay,
            "smoothing": self.smoothing,
            "behaviours": []
            if self.types is None
            else [behaviour._asdict() for behaviour in self.types.behaviours],
            "terms": None if self.content is None else self.content.rows.shape[1],
            "reranker": None if self.reranker is None else _save_reranker(self.reranker, folder),
            "fitted_on": self.fitted_on,
        }
        text = json.dumps(settings, indent=2)
        (folder / SETTINGS).write_text(text + "\n", encoding="utf-8")

    def save_trained(self, folder: Path) -> None:
        """Write what was counted of training events beside what `save` wrote of all events."""
        (folder / TRAINED).mkdir()
        self._save_counts(folder / TRAINED)
        text = json.dumps({"fitted_on": self.fitted_on})
        (folder / TRAINED / SETTINGS).write_text(text + "\n", encoding="utf-8")

    def _save_counts(self, folder: Path) -> None:
        """Write the arrays that depend on events."""
        save_matrix(folder, ITEM_ITEM, self.item_item.weights)
        np.save(folder / COUNTS, self.counts, allow_pickle=False)
        if self.recent is not None:
            np.save(folder / RECENT_COUNTS, self.recent, allow_pickle=False)
        if self.repeats is not None:
            repeats = np.stack([self.repeats.rates, self.repeats.gaps])
            np.save(folder / REPEATS, repeats, allow_pickle=False)
        if self.types is not None:
            save_matrix(folder, TO_TARGETS, self.types.to_targets.weights)
            np.save(folder / TARGET_COUNTS, self.types.counts, allow_pickle=False)

    @classmethod
    def load(cls, folder: Path, *, trained: bool = False) -> Retrieval:
        """Read what `save` wrote; with `trained`, the counts of `save_trained`, if there are any.

        Raises:
            ArtifactError: a file is missing or contradicts another; the text names the folder.
        """
        try:
            settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
            format_ = settings.get("format", 1)
        except (OSError, AttributeError, ValueError) as error:
            raise ArtifactError(f"{folder}: {error}; copy the bundle again") from error
        if format_ != FORMAT:
            raise ArtifactError(
                f"{folder} was made by another version of this program; give the command that made "
                "the bundle again, such as `recsys run --name NAME`"
            )
        try:
            counted, fitted_on = folder, settings.get("fitted_on")
            if trained and (folder / TRAINED).is_dir():
                counted = folder / TRAINED
                text = (counted / SETTINGS).read_text(encoding="utf-8")
                fitted_on = json.loads(text)["fitted_on"]
            weights = read_matrix(counted, ITEM_ITEM)
            vectors, size = folder / VECTORS, weights.shape[0]
            recent, repeats = counted / RECENT_COUNTS, counted / REPEATS
            reranker, content = settings["reranker"], None
            if settings["terms"] is not None:
                shape = size, settings["terms"]
                content = ContentIndex(
                    read_matrix(folder, CONTENT, shape, -np.inf),
                    *(_read_terms(folder, name) for name in (WORDS, VALUES)),
                )
            types = None
            if settings["behaviours"]:
                types = EventTypes(
                    tuple(Behaviour(**behaviour) for behaviour in settings["behaviours"]),
                    ItemItem(read_matrix(counted, TO_TARGETS), float(settings["decay"])),
                    read_array(counted / TARGET_COUNTS, least=0),
                )
            return cls(
                ItemItem(weights, float(settings["decay"])),
                read_array(counted / COUNTS, least=0),
                float(settings["smoothing"]),
                VectorIndex(read_array(vectors)) if vectors.is_file() else None,
                content,
                types=types,
                recent=read_array(recent, least=0) if recent.is_file() else None,
                repeats=Repeats(*read_array(repeats)) if repeats.is_file() else None,
                reranker=None if reranker is None else _read_reranker(reranker, folder),
                fitted_on=fitted_on,
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{folder}: {error}; copy the bundle again") from error


def _save_reranker(reranker: Reranker, folder: Path) -> dict[str, Any]:
    """Write the units of a network, if there is one; what the settings say of the reranker."""
    about = asdict(replace(reranker, network=None))
    if (network := reranker.network) is not None:
        np.save(folder / NETWORK, network.units, allow_pickle=False)
        about["network"] = list(network.features)
    return about


def _read_reranker(about: dict[str, Any], folder: Path) -> Reranker:
    names, network = about.get("network"), None
    if names is not None:
        network = Network(tuple(names), read_array(folder / NETWORK).astype(np.float64))
    return Reranker(**{**about, "network": network})


def _read_terms(folder: Path, name: str) -> Terms:
    names = json.loads((folder / f"{CONTENT}.{name}.json").read_text(encoding="utf-8"))
    return Terms(names, read_array(folder / f"{CONTENT}.{name}.npy"))


def digest(histories: Histories) -> str:
    """SHA-256 of sequences in hexadecimal."""
    hashed = hashlib.sha256(histories.offsets.astype("<i8").tobytes())
    hashed.update(histories.items.astype("<i4").tobytes())
    return hashed.hexdigest()
