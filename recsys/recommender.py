"""Recommender: a loaded bundle that turns histories into items. The first module that says "user".

What it keeps between calls changes no answer: equal requests get equal bits alone, in any batch and
after a restart, where it searches plainly (mode `beam`; float32, a fixed number of threads). Items
may come and go meanwhile (`recsys.live`): a batch decodes over the epoch that is current when it
begins, to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recsys.artifacts import Manifest
from recsys.blending import Lists, Union, allowed_items, candidate_rows
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.mask import RowMask
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.engine import Mode
from recsys.decoding.output import Beams
from recsys.decoding.trace import Trace
from recsys.errors import ArtifactError, RequestError
from recsys.interactions import Histories
from recsys.listing import covers, items_of_rows, named, told
from recsys.live import Epoch, Epochs, NewItem
from recsys.prompts import PromptEncoder
from recsys.requests import (
    SOURCES,
    Guarantee,
    Recommendation,
    RecommendRequest,
    RecommendResult,
    Source,
    Verification,
)
from recsys.retrieval import Candidates, Retrieval

Ranked = tuple[NDArray[np.int32], NDArray[np.float32]]

__all__ = [
    "SOURCES",
    "Guarantee",
    "RecommendRequest",
    "RecommendResult",
    "Recommendation",
    "Recommender",
    "Source",
    "Verification",
]
MIN_BEAMS = 20
DTYPES = ("float32", "bfloat16", "float64")
_TYPICAL_PROMPTS = 8


class Recommender:
    """Top-K over one bundle's catalog, as it is now.

    One thread at a time may ask for recommendations; any may change the catalog meanwhile.

    Attributes:
        bundle: what was loaded.
        model: the target (Hugging Face).
        engine: what decodes.
        retrieval: what similar items, fallbacks and blends come from; None if the bundle has none.
    """

    def __init__(
        self,
        bundle: Bundle,
        model: Any,
        *,
        draft: Any | None = None,
        mode: Mode = "beam",
        prefix_bytes: int = 0,
        filter_bytes: int = 1 << 28,
        max_batch: int = 8,
    ) -> None:
        """Use `model` for `bundle`; `load` does both."""
        from recsys.decoding import Engine

        self.bundle, self.model, self.mode = bundle, model, mode
        self.max_batch, self.retrieval = max_batch, bundle.retrieval
        # Nothing of it names the recommender: one that is dropped leaves the memory at once.
        prepare = partial(_prepared, str(model.device))
        self._epochs = Epochs(bundle, filter_bytes, coder=bundle.coder, prepare=prepare)
        self.engine = Engine(
            model,
            self.trie,
            draft=draft,
            prefix_bytes=prefix_bytes,
            version=bundle.manifest.digest,
            prompt_slots=self.encoder.max_tokens,
        )

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        mode: Mode | Literal["auto"] = "auto",
        prefix_bytes: int = 0,
        filter_bytes: int = 1 << 28,
        max_batch: int = 8,
        check: bool = True,
    ) -> Recommender:
        """Load a bundle's models.

        Args:
            path: the bundle's directory.
            device: a torch device.
            dtype: `float32`, `bfloat16` or `float64`.
            mode: how to decode (`recsys.decoding.Engine`). `auto` plans on an accelerator and
                searches plainly on a CPU, where equal requests then get equal bits.
            prefix_bytes: memory for the keys and values of histories seen before, from which a
                returning user's prompt goes on; 0 keeps none. It changes no bit of any answer.
            filter_bytes: memory for the masks of the filters asked for last.
            max_batch: largest batch that the planner measures in `warm_up`.
            check: compare every file with its checksum first.

        Raises:
            ArtifactError: not a bundle, a damaged one, or one without the draft that `mode` needs.
            ValueError: unknown dtype.
        """
        import torch

        from recsys.models.checkpoint import load_model
        from recsys.models.packed import pack

        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        bundle = Bundle.load(path, check=check)
        if mode == "auto":
            mode = "beam" if torch.device(device).type == "cpu" else "planned"
        if mode == "draft" and bundle.draft is None:
            raise ArtifactError(f"mode 'draft' needs a draft model; {path} has none")
        of = getattr(torch, dtype)
        model, draft = pack(load_model(bundle.target, dtype=of, device=device).eval()), None
        if bundle.draft is not None:  # whatever the mode, a request may ask for it
            draft = pack(load_model(bundle.draft, dtype=of, device=device).eval())
        return cls(
            bundle,
            model,
            draft=draft,
            mode=mode,
            max_batch=max_batch,
            prefix_bytes=prefix_bytes,
            filter_bytes=filter_bytes,
        )

    @property
    def epoch(self) -> Epoch:
        """The catalog as it is now; it never changes, the next one takes its place."""
        return self._epochs.current

    @property
    def catalog(self) -> Catalog:
        """Items of the current epoch."""
        return self.epoch.catalog

    @property
    def trie(self) -> ItemTrie:
        """The current epoch's trie."""
        return self.epoch.trie

    @property
    def encoder(self) -> PromptEncoder:
        """History -> tokens, in the current epoch."""
        return self.epoch.encoder

    @property
    def filters(self) -> FilterCache:
        """Row masks of the filters asked for last, in the current epoch."""
        return self.epoch.filters

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

        Requests are decoded in groups of one kind and beam width, so a neighbour's k changes
        nothing. Filters may differ. All of them see the epoch that is current when the call begins.

        Raises:
            FilterError: a filter or boost does not fit the items' attributes. `eligible` finds that
                out for one request alone.
            RequestError: a request's mode needs a draft, or its blend retrieval, and the bundle has
                none; `eligible` finds that out, too.
        """
        epoch = self._begin()
        results: dict[int, RecommendResult] = {}
        groups: dict[_Kind, list[int]] = {}
        for place, request in enumerate(requests):
            kind = _Kind.of(request, self._blends(request))
            groups.setdefault(kind, []).append(place)
        for kind, places in groups.items():
            group = [requests[i] for i in places]
            results |= zip(places, self._decode(epoch, group, kind), strict=True)
        return [results[i] for i in range(len(requests))]

    def eligible(self, request: RecommendRequest) -> int | None:
        """How many items the request's filter allows; None without a filter.

        Makes the masks of filter and boosts, in the calling thread, so that answering the request
        will not.

        Raises:
            FilterError: the filter or a boost does not fit the items' attributes.
            RequestError: the request's mode needs a draft, or its blend retrieval, and the bundle
                has none.
        """
        self._engine_mode(request.mode)
        self._blends(request)
        epoch = self.epoch
        mask, _ = _mask(epoch, request), _boost(epoch, request)
        return None if request.filter is None or mask is None else mask.eligible

    def upsert(self, items: Sequence[NewItem]) -> Epoch:
        """Add items, or replace those that are there (`recsys.live.Epochs.upsert`).

        All or none of them; what is returned has them. Any thread may call it; small calls that
        come together share one epoch.

        Raises:
            ItemError: an item is malformed or cannot be placed; the text names item and field.
        """
        return self._epochs.upsert(items)

    def remove(self, item_ids: Iterable[str]) -> list[str]:
        """Take items away: no batch that begins after the call has them. Those that were there."""
        return self._epochs.remove(item_ids)

    def rank(
        self,
        histories: Histories,
        k: int,
        exclude_seen: bool = True,
        *,
        beams: int | None = None,
        blend: bool | None = None,
        batch_size: int = 64,
        advance: Callable[[int], None] | None = None,
    ) -> Ranked:
        """Top-k of many histories of dense items, for evaluation.

        Args:
            histories: n sequences.
            k: items wanted.
            exclude_seen: leave out the items of the history.
            beams: beam width; by default max(20, k).
            blend: as a request's.
            batch_size: histories decoded together.
            advance: called with the number of histories done, for a progress bar.

        Returns:
            (n, k) items, -1 where there are no more, and (n, k) scores, -inf there.

        Raises:
            ValueError: k below 1.
            RequestError: a blend of a bundle that has no retrieval.
        """
        ((found, _),) = self.rank_modes(
            histories,
            k,
            (exclude_seen,),
            beams=beams,
            blend=blend,
            batch_size=batch_size,
            advance=advance,
        )
        return found

    def rank_modes(
        self,
        histories: Histories,
        k: int,
        exclude_seen: Sequence[bool] = (True, False),
        *,
        beams: int | None = None,
        blend: bool | None = None,
        batch_size: int = 64,
        advance: Callable[[int], None] | None = None,
    ) -> list[tuple[Ranked, Ranked]]:
        """As `rank`, with and without the items of the history, and what the model alone ranks.

        All of it comes from one search (`recsys.decoding.shared`), which costs little more than one
        of the lists would.

        Returns:
            For each of `exclude_seen` two rankings: what `rank` gives, and the model's own list.
            Without a blend both are the model's.

        Raises:
            ValueError: k below 1.
            RequestError: a blend of a bundle that has no retrieval.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        blends = self._blends(RecommendRequest([], k, blend=blend))
        kind = _Kind(beams or max(MIN_BEAMS, k), blend=blends)
        epoch, modes = self._begin(), len(exclude_seen)
        items = np.full((modes, 2, len(histories), k), -1, np.int32)
        scores = np.full(items.shape, -np.inf, np.float32)
        order = np.argsort(histories.lengths, kind="stable")  # alike lengths share a batch
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            group = histories.take(places)
            owner = np.tile(np.arange(len(group)), modes)
            seen = group.take(owner).where(np.repeat(exclude_seen, len(group.items)))
            found = self._top_shared(epoch, group, owner, seen, k, kind)
            for which, lists in enumerate(found):
                here = (slice(None), which, places)
                items[here] = lists.items.reshape(modes, len(group), k)
                scores[here] = lists.scores.reshape(modes, len(group), k)
            if advance is not None:
                advance(len(places))
        return [((i[0], s[0]), (i[1], s[1])) for i, s in zip(items, scores, strict=True)]

    def warm_up(self) -> None:
        """Pay one-time costs now: allocations, and the planner's measurements if one plans.

        Prompts to measure with are random histories; what the planner learns from real ones soon
        outweighs them.
        """
        rng = np.random.default_rng(0)
        items = rng.integers(
            0, len(self.catalog), (_TYPICAL_PROMPTS, self.encoder.config.max_items)
        )
        if self.mode == "planned":
            prompts = self.encoder.encode_all(Histories.of(items.tolist()))
            batches = sorted({1, min(8, self.max_batch), self.max_batch})
            self.engine.warm_up(prompts, MIN_BEAMS, batches)
        self.recommend([self.catalog.item_ids[:1]], k=1)
        self.engine.forget()

    def close(self) -> None:
        """Let go of tensors that would wait for the garbage collector; ask nothing afterwards."""
        self.engine.trie.release()
        self.trie.release()

    # Retrieval, blends and exact scores of given items.

    def score(
        self, histories: Sequence[Sequence[str]], items: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Exact log-probabilities of given items, one list a history; one pass for all of them.

        Raises:
            RequestError: an item that cannot be recommended; the text names it.
        """
        epoch = self._begin()
        wanted = [epoch.catalog.index(ids) for ids in items]
        for ids, found in zip(items, wanted, strict=True):
            if (found < 0).any():
                raise RequestError(f"item {ids[int(found.argmin())]!r} is not in the catalog")
        prompts = epoch.encoder.encode_all(self._known(epoch, histories))
        rows = [epoch.trie.item_row[found] for found in wanted]
        scores = self.engine.score(prompts, rows).tolist()
        return [line[: len(found)] for line, found in zip(scores, wanted, strict=True)]

    def similar(self, item_id: str, k: int) -> list[tuple[str, float]]:
        """Items that go with one item, best first, and how well (`Retrieval.similar`).

        Items that came after the bundle was made go with those of the nearest semantic IDs; the
        score is then the share of the codes that both begin with.

        Raises:
            RequestError: no such item, or a bundle without retrieval.
        """
        retrieval, epoch = self._need_retrieval(), self.epoch
        item = epoch.catalog.find(item_id)
        if item < 0:
            raise RequestError(f"item {item_id!r} is not in the catalog")
        found = np.zeros(0, np.int32)
        if item < len(retrieval):
            alive = epoch.alive[: len(retrieval)]
            named, rated = retrieval.similar(np.array([item]), k, alive)
            found, scores = named[0][named[0] >= 0], rated[0]
        if not len(found):
            codes = epoch.catalog.codes
            shared = (codes == codes[item]).cumprod(axis=1).mean(axis=1)
            shared[~epoch.alive] = shared[item] = 0
            found = np.argsort(-shared, kind="stable")[:k].astype(np.int32)
            found = found[shared[found] > 0]
            scores = shared[found].astype(np.float32)
        ids = [epoch.catalog.item_id(i) for i in found.tolist()]
        return list(zip(ids, scores.tolist(), strict=False))

    def fallback(self, request: RecommendRequest) -> list[tuple[str, float, Source]]:
        """A list without the model: what the history speaks for, then what is popular.

        Filter and exclusions hold, boosts do not count. Scores are retrieval's log-probabilities.

        Raises:
            FilterError: the filter does not fit the items' attributes.
            RequestError: a bundle without retrieval.
        """
        return self._retrieved(request, request.k, request.history)

    def popular(
        self, k: int, request: RecommendRequest | None = None
    ) -> list[tuple[str, float, Source]]:
        """The k most popular items that the request may get, whatever its history speaks for.

        Raises:
            FilterError: as `fallback`, like RequestError.
        """
        return self._retrieved(request or RecommendRequest([]), k, ())

    def _retrieved(
        self, request: RecommendRequest, k: int, history: Sequence[str]
    ) -> list[tuple[str, float, Source]]:
        retrieval, epoch = self._need_retrieval(), self.epoch
        seen = request.history if request.exclude_seen else ()
        excluded = epoch.catalog.known([*request.exclude_items, *seen])
        mask = _mask(epoch, request)
        found = retrieval.candidates(
            self._known(epoch, [history]),
            k,
            exclude_seen=False,
            excluded=Histories.of([excluded[excluded >= 0]]),
            allowed=[allowed_items(epoch.trie, epoch.alive, mask, len(retrieval))],
        )
        return [
            (epoch.catalog.item_id(item), score, "retrieval" if supported else "popular")
            for item, score, supported in zip(
                found.items[0].tolist(),
                found.log_probs[0].tolist(),
                found.supported[0].tolist(),
                strict=True,
            )
            if item >= 0
        ]

    def _need_retrieval(self) -> Retrieval:
        if self.retrieval is None:
            raise RequestError(
                f"bundle {self.bundle.path.name!r} has no part 'retrieval'; run the stage of that "
                "name and make the bundle again"
            )
        return self.retrieval

    def _blends(self, request: RecommendRequest) -> bool:
        """Whether the answer to a request is blended."""
        chosen = None if self.retrieval is None else self.retrieval.blend
        if request.blend is None:
            return request.searches_plainly and chosen is not None and chosen.weight > 0
        if request.blend and chosen is None:
            raise RequestError(
                f"blend: bundle {self.bundle.path.name!r} was made without one; run the stage "
                "'retrieval' and make the bundle again"
            )
        return request.blend

    def _known(self, epoch: Epoch, histories: Sequence[Sequence[str]]) -> Histories:
        """Dense items of histories of outside ids, without those that mean nothing."""
        found = [epoch.catalog.known(history) for history in histories]
        return Histories.of([items[items >= 0] for items in found])

    # What the above is made of.

    def _begin(self) -> Epoch:
        """The epoch that a batch is to see; what decodes is set to it."""
        epoch, before = self.epoch, self.engine.trie
        if epoch.trie is not before:
            self.engine.use(epoch.trie)
            before.release()
        return epoch

    def _engine_mode(self, mode: Verification) -> Mode:
        if mode == "strict":
            return "exhaustive" if self.engine.draft is None else "draft"
        if mode == "relaxed" and self.engine.draft is None:
            raise RequestError(
                "mode 'relaxed' needs a draft model, and this bundle has none; ask for 'strict'"
            )
        return self.mode if mode == "auto" else mode

    def _decode(
        self, epoch: Epoch, requests: Sequence[RecommendRequest], kind: _Kind
    ) -> list[RecommendResult]:
        known, unknown, excluded = [], [], []
        for request in requests:
            items = epoch.catalog.known(request.history)
            known.append(items[items >= 0])
            unknown.append([i for i, item in zip(request.history, items, strict=True) if item < 0])
            listed = epoch.catalog.index(request.exclude_items)
            excluded.append(
                np.concatenate(
                    [listed[listed >= 0], known[-1][: None if request.exclude_seen else 0]]
                )
            )
        k = max(request.k for request in requests)
        seeds = [r.seed for r in requests if r.seed is not None] or None
        hidden = Histories.of(excluded)
        masks = [_mask(epoch, request) for request in requests]
        boosts = [_boost(epoch, request) for request in requests]
        histories = Histories.of(known)
        found, _, beams = self._top(epoch, histories, hidden, masks, boosts, k, kind, seeds)
        because = None
        if self.retrieval is not None:
            because = self.retrieval.because(histories, found.items)
        traces: list[Trace | None] = [None] * len(requests)
        if kind.trace:
            traces = [
                told(trace, epoch.trie, self.bundle.vocabulary.level_sizes, mask)
                for trace, mask in zip(beams.traces, masks, strict=True)
            ]
        return [
            RecommendResult(
                named(epoch.catalog, found, i, request.k, None if because is None else because[i]),
                unknown[i],
                {"beams": kind.beams, **vars(beams.stats[i])},
                certificate
                if not kind.blend
                and covers(epoch.trie, beams, i, boost, found.scores[i, request.k - 1])
                else "approximate",
                None if request.filter is None or mask is None else mask.eligible,
                epoch.number,
                traces[i],
                kind.blend,
                epoch,
            )
            for i, (request, mask, boost, certificate) in enumerate(
                zip(requests, masks, boosts, beams.certificates, strict=True)
            )
        ]

    def _top(
        self,
        epoch: Epoch,
        histories: Histories,
        excluded: Histories,
        masks: Sequence[RowMask | None],
        boosts: Sequence[Boost | None],
        k: int,
        kind: _Kind,
        seeds: list[int] | None = None,
    ) -> tuple[Lists, Lists, Beams]:
        """The best k of each request of one batch, the model's own, and the search they are from.

        A blend's own list of the model is without boosts.
        """
        candidates, along = self._along(epoch, histories, excluded, masks, kind)
        beams = self.engine.decode(
            epoch.encoder.encode_all(histories),
            kind.beams,
            mode=self._engine_mode(kind.mode),
            exclude=[
                epoch.excluded_rows(items, mask)
                for items, mask in zip(excluded, masks, strict=True)
            ],
            masks=masks,
            boosts=boosts,
            seeds=seeds,
            temperature=kind.temperature,
            until_global=kind.guarantee == "global",
            traced=kind.trace,
            **along,
        ).beams
        lists = self._lists(epoch, histories, excluded, masks, boosts, k, candidates, beams)
        return *lists, beams

    def _top_shared(
        self,
        epoch: Epoch,
        histories: Histories,
        owner: NDArray[np.int64],
        excluded: Histories,
        k: int,
        kind: _Kind,
    ) -> tuple[Lists, Lists]:
        """As `_top`, by plain search, of requests that have `owner`'s histories."""
        from recsys.decoding import shared_beam_search

        asked, masks = histories.take(owner), [epoch.mask] * len(owner)
        candidates, along = self._along(epoch, asked, excluded, masks, kind)
        beams = shared_beam_search(
            self.engine.target,
            epoch.encoder.encode_all(histories),
            owner,
            epoch.trie,
            kind.beams,
            exclude=[epoch.excluded_rows(items, epoch.mask) for items in excluded],
            masks=masks,
            **along,
        )
        boosts = [None] * len(owner)
        return self._lists(epoch, asked, excluded, masks, boosts, k, candidates, beams)

    def _along(
        self,
        epoch: Epoch,
        histories: Histories,
        excluded: Histories,
        masks: Sequence[RowMask | None],
        kind: _Kind,
    ) -> tuple[Candidates | None, dict[str, Any]]:
        """What retrieval proposes if the kind blends, and the search's options for it."""
        blend = None if self.retrieval is None or not kind.blend else self.retrieval.blend
        if self.retrieval is None or blend is None:
            return None, {}
        size = len(self.retrieval)
        candidates = self.retrieval.candidates(
            histories,
            blend.candidates,
            False,
            excluded=excluded,
            allowed=[allowed_items(epoch.trie, epoch.alive, mask, size) for mask in masks],
        )
        rows = candidate_rows(epoch.trie, candidates)
        return candidates, {"candidates": rows, "candidate_nodes": blend.nodes}

    def _lists(
        self,
        epoch: Epoch,
        histories: Histories,
        excluded: Histories,
        masks: Sequence[RowMask | None],
        boosts: Sequence[Boost | None],
        k: int,
        candidates: Candidates | None,
        beams: Beams,
    ) -> tuple[Lists, Lists]:
        """The best k of each request, and the model's own."""
        rows, row_scores = beams.rows.cpu().numpy(), beams.scores.cpu().numpy()
        retrieval, scored = self.retrieval, beams.candidate_scores
        if retrieval is None or retrieval.blend is None or candidates is None or scored is None:
            own = Lists.of_model(
                *items_of_rows(epoch.trie, rows, row_scores, excluded, masks, boosts, k)
            )
            return own, own
        width, plainly = max(k, rows.shape[1]), [None] * len(rows)
        own = Lists.of_model(
            *items_of_rows(epoch.trie, rows, row_scores, excluded, masks, plainly, width)
        )
        union = Union.of(
            own,
            candidates,
            scored.cpu().numpy(),
            retrieval,
            histories,
            trie=epoch.trie,
            boosts=boosts,
        )
        return union.best(retrieval.blend, k), own.first(k)


def _prepared(device: str, trie: ItemTrie) -> None:
    """Make a new trie's tensors in the thread that made the trie."""
    if device == "cpu":  # elsewhere the device is left to the thread that decodes
        DeviceTrie.of(trie, device)


def _boost(epoch: Epoch, request: RecommendRequest) -> Boost | None:
    return epoch.filters.boost(request.item_boosts) if request.boosts else None


def _mask(epoch: Epoch, request: RecommendRequest) -> RowMask | None:
    return epoch.allowed(None if request.filter is None else request.item_filter)


@dataclass(frozen=True)
class _Kind:
    """What requests must share to be decoded together."""

    beams: int
    guarantee: Guarantee = "beam"
    sampled: bool = False
    temperature: float = 1.0
    mode: Verification = "auto"
    trace: bool = False
    blend: bool = False

    @classmethod
    def of(cls, request: RecommendRequest, blend: bool) -> _Kind:
        sampled = request.seed is not None
        temperature = request.temperature if sampled else 1.0
        return cls(
            max(MIN_BEAMS, request.k),
            request.guarantee,
            sampled,
            temperature,
            request.mode,
            request.trace,
            blend,
        )
