"""Recommender: a loaded bundle that turns histories into items.

Equal requests get equal bits, alone, in any batch and after a restart, in mode `beam` with float32
and a fixed number of threads. Items may be added and removed at any time (`recsys.live`): a batch
is decoded over the epoch that is current when it begins.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys import arguments
from recsys.artifacts import Manifest, read_whole
from recsys.bundle import Bundle
from recsys.capped import fill_lists
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.engine import Engine
from recsys.decoding.score import score_rows
from recsys.devices import AUTO, or_on_cpu
from recsys.errors import RequestError
from recsys.global_lists import complete_lists
from recsys.interactions import Histories
from recsys.listing import (
    Batch,
    Lists,
    boost_of,
    caps_of,
    describe,
    mask_of,
    most_likely,
    rank,
)
from recsys.live import Epoch, Epochs, NewItem
from recsys.live_catalog import EpochCatalog
from recsys.loading import Models
from recsys.modes import Captured, Mode, check_capture, check_mode
from recsys.requests import MIN_BEAMS as MIN_BEAMS
from recsys.requests import Kind as Kind
from recsys.requests import Recommendation as Recommendation
from recsys.requests import RecommendRequest as RecommendRequest
from recsys.requests import RecommendResult as RecommendResult
from recsys.requests import Source as Source
from recsys.retrieval import Proposals, Reranker, Retrieval
from recsys.retrieval.event_types import EventTypes
from recsys.retrieval.pool import score_items
from recsys.retrieval.related import related_items
from recsys.rules import Rule, apply_rules

LOAD_MODES = tuple(mode for mode in Mode if mode is not Mode.RELAXED)
DTYPES = ("float32", "bfloat16", "float64")


class Recommender:
    """Top-K over one bundle's catalog, as it is now.

    One thread at a time may call the methods that decode, another one those of `aside`. Any thread
    may change the catalog. A process that is forked after a load (`gunicorn --preload`, Celery)
    answers with one thread; on a GPU it has to load a bundle itself.

    Attributes:
        bundle: the parts of the bundle.
        model: the target (Hugging Face).
        mode: how requests in mode `auto` are decoded.
        capture: what `recsys.warm_up` captures, a `Captured`.
        engine: decodes batches.
        retrieval: source of similar items, fallbacks and blends; None if the bundle has none.
    """

    def __init__(
        self,
        bundle: Bundle,
        model: Any,
        *,
        draft: Any | None = None,
        mode: str = Mode.BEAM,
        prefix_bytes: int = 0,
        max_batch: int = 8,
        capture: str = Captured.PASSES,
        retrieval: Retrieval | None = None,
    ) -> None:
        """Use `model` for `bundle`; `load` does both. `retrieval` replaces the bundle's."""
        self.capture = Captured(capture)
        self.bundle, self.model, self._draft = bundle, model, draft
        self.mode = check_mode("mode", mode, LOAD_MODES)
        self.max_batch = max_batch
        self.retrieval = bundle.retrieval if retrieval is None else retrieval
        # The epochs hold no reference to the recommender, so that it is freed when it is dropped.
        self._epochs = Epochs(
            bundle,
            coder=bundle.coder,
            describe=None if self.retrieval is None else self.retrieval.describe,
            prepare=partial(_prepared, str(model.device)),
        )
        self.engine = Engine(
            model,
            self.epoch.trie,
            draft=draft,
            prefix_bytes=prefix_bytes,
            prompt_slots=self.epoch.encoder.max_tokens,
        )

    @classmethod
    def load(
        cls,
        path: Path | str,
        *,
        device: str = AUTO,
        dtype: str = "float32",
        mode: str = Mode.AUTO,
        prefix_bytes: int = 0,
        max_batch: int = 8,
        capture: str = Captured.PASSES,
        check: bool = True,
        trained: bool = False,
    ) -> Recommender:
        """Load a bundle's models.

        Args:
            path: the bundle's directory.
            device: a torch device, or `auto`: a GPU, where there is one and it answers sooner than
                the CPU (`recsys.devices`); the CPU, too, if the GPU's memory does not hold the
                models.
            dtype: `float32`, `bfloat16` or `float64`. On a CPU, the native library runs float32.
            mode: a `Mode` other than `relaxed`. `auto` means `planned` on an accelerator, and
                `beam` on a CPU, where equal requests then get equal bits.
            prefix_bytes: memory for the keys and values of earlier histories, so that a returning
                user's prompt is computed in part; 0 keeps none. It changes no bit of any answer.
            max_batch: largest batch that the planner measures, and that is captured.
            capture: what `recsys.warm_up` captures on a GPU: `passes` in mode `planned`, or whole
                `decodes`, too, in each mode but `exhaustive`.
            check: compare every file with its checksum first.
            trained: whether counts and SASRec are of training events alone, as an evaluation needs
                them, and not of all events.

        Raises:
            ArtifactError: not a bundle, a damaged one, or one without the draft that `mode` needs.
            ValueError: unknown dtype, mode or capture, or a capture that device or mode rule out.
        """
        check_capture(capture, device, mode)
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")

        def read(device: str) -> Recommender:
            bundle = Bundle.load(path, check=check, trained=trained)
            models = Models.of(bundle, device, dtype, mode)
            return cls(
                bundle,
                models.target,
                draft=models.draft,
                mode=models.mode,
                max_batch=max_batch,
                capture=Captured.PASSES if models.on_cpu else capture,
                prefix_bytes=prefix_bytes,
            )

        return read_whole(Path(path), partial(or_on_cpu, device, f"answers of {path}", read))

    @contextmanager
    def aside(self) -> Iterator[Recommender]:
        """The same models and catalog, to decode on another thread at the same time.

        Weights are shared. The engine is another one, without kept prompts and measured plans.
        """
        other = copy.copy(self)
        slots = self.epoch.encoder.max_tokens
        other.engine = Engine(self.model, self.epoch.trie, draft=self._draft, prompt_slots=slots)
        try:
            yield other
        finally:
            other.engine.close()

    @property
    def device(self) -> torch.device:
        """Device of the models."""
        return self.engine.target.device

    @property
    def epoch(self) -> Epoch:
        """The catalog as it is now. An epoch never changes; a new one replaces it."""
        return self._epochs.current

    @property
    def catalog(self) -> EpochCatalog:
        """Items of the current epoch."""
        return self.epoch.catalog

    @property
    def manifest(self) -> Manifest:
        """The bundle's manifest; its digest is the model's version."""
        return self.bundle.manifest

    def recommend(
        self,
        histories: Sequence[Sequence[str]],
        k: int = 10,
        *,
        exclude_seen: bool | None = None,
        rules: Sequence[Rule] = (),
    ) -> list[list[Recommendation]]:
        """The k best items of each history of outside item ids, by some business rules."""
        requests = [apply_rules(RecommendRequest(h, k, exclude_seen), rules) for h in histories]
        return [result.recommendations for result in self.recommend_batch(requests)]

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        """Answer requests of any mix of lengths and k together.

        Requests are decoded in groups of one kind and beam width, so that the k of one request does
        not change the answer to another. Filters may differ. All requests use the epoch that is
        current when the call begins.

        Raises:
            FilterError: a filter, boost or cap does not fit the items' attributes. `eligible`
                checks one request alone.
            RequestError: a request's mode needs a draft, or its blend retrieval, and the bundle has
                none; `eligible` checks this, too.
        """
        epoch = self.begin()
        groups: dict[Kind, list[int]] = {}
        for number, request in enumerate(requests):
            kind = Kind.of(request, self.blends(request))
            groups.setdefault(kind, []).append(number)
        results: dict[int, RecommendResult] = {}
        for kind, positions in groups.items():
            own = [requests[i] for i in positions]
            batch = Batch.of(epoch, own, self.types, self.exclude_seen)
            if kind.capped:
                lists = fill_lists(batch, kind.beams, partial(self.search, kind))
            else:
                lists = self.search(kind, batch, max(batch.k))
            described = describe(batch, lists, self.bundle.vocabulary, self.retrieval)
            results |= zip(positions, described, strict=True)
        return [results[i] for i in range(len(requests))]

    def search(self, kind: Kind, batch: Batch, k: int) -> Lists:
        """The k best items of each request, by one search with a beam for each of them at least."""
        beams = max(kind.beams, k)
        proposals: Proposals | None = None
        nodes: int | None = None
        reranker = self.reranker if kind.blend else None
        if reranker is not None and self.retrieval is not None:
            proposals = batch.proposals(self.retrieval, max(reranker.candidates, beams))
            nodes = reranker.nodes * beams // MIN_BEAMS
            proposals = proposals.best(reranker, nodes, batch.gains(proposals.items))
        decoded = self.engine.decode(
            batch.search_request(proposals, nodes),
            beams,
            mode=self._mode(kind.mode),
            until_global=kind.guarantee == "global" and proposals is None,
            traced=kind.trace,
        )
        lists = rank(batch, decoded.beams, k, proposals, reranker)
        if kind.guarantee == "global" and proposals is not None:
            lists = complete_lists(self.engine, batch, lists, proposals.evidence.retrieval)
        return lists

    def eligible(self, request: RecommendRequest) -> int | None:
        """How many items the request's filter allows; None without a filter.

        Makes the masks of filter and boosts in the calling thread; answering the request then finds
        them in the cache.

        Raises:
            FilterError: the filter, a boost or a cap does not fit the items' attributes.
            RequestError: the request's mode needs a draft, or its blend retrieval, and the bundle
                has none.
        """
        self._mode(request.mode)
        self.blends(request)
        epoch = self.epoch
        caps_of(epoch, request)
        mask, _ = mask_of(epoch, request), boost_of(epoch, request)
        return None if request.filter is None or mask is None else mask.eligible

    def upsert(self, items: Sequence[NewItem]) -> Epoch:
        """Add items, or replace existing ones, all or none (`recsys.live.Epochs.upsert`).

        Any thread may call it. Returns the first epoch that has the items.

        Raises:
            ItemError: an item is malformed or cannot be placed; the text names item and field.
        """
        return self._epochs.upsert(items)

    def remove(self, item_ids: Iterable[str]) -> list[str]:
        """Remove items: no batch that begins after the call lists them. Returns those removed."""
        return self._epochs.remove(item_ids)

    def close(self) -> None:
        """Free what would wait for the garbage collector; do not use it afterwards.

        A service excludes loaded objects from garbage collection, so it would wait for ever.
        """
        self.engine.close()
        self.engine.trie.release()
        self.epoch.trie.release()

    def score(
        self, histories: Sequence[Sequence[str]], items: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """Exact log-probabilities of given items, one list a history; one pass for all of them.

        Raises:
            RequestError: an item that cannot be recommended; the text names it.
        """
        epoch = self.begin()
        own = Histories.of([h[h >= 0] for h in map(epoch.catalog.known, histories)])
        numbers = _numbers(epoch, items)
        return _cut(_log_probs(self.engine, epoch, own, numbers), numbers)

    def rank(
        self, requests: Sequence[RecommendRequest], items: Sequence[Sequence[str]]
    ) -> list[list[float]]:
        """The scores of given items in the default lists of the requests, without their boosts.

        Raises:
            RequestError: an item that cannot be recommended; the text names it.
        """
        epoch = self.begin()
        batch = Batch.of(epoch, requests, self.types, self.exclude_seen)
        numbers = _numbers(epoch, items)
        scores = _log_probs(self.engine, epoch, batch.histories, numbers)
        if self.retrieval is not None and self.blends(RecommendRequest([])):
            scores = score_items(batch.evidence(self.retrieval), numbers, scores)
        return _cut(scores, numbers)

    def similar(self, item_id: str, k: int) -> list[tuple[str, float]]:
        """The k items most similar to one item, with scores, best first.

        For items that were added after the bundle was made, these are the items with the nearest
        semantic IDs; the score is then the share of leading codes in common.

        Raises:
            RequestError: no such item, or a bundle without retrieval.
        """
        retrieval, epoch = _retrieval_of(self), self.epoch
        item = epoch.catalog.find(arguments.spelled(item_id))
        if item < 0:
            raise RequestError(f"item {item_id!r} is not in the catalog")
        nearest, scores = related_items(retrieval, epoch.catalog.codes, item, k, epoch.alive)
        ids = [epoch.catalog.item_id(i) for i in nearest.tolist()]
        return list(zip(ids, scores.tolist(), strict=False))

    def fallback(self, request: RecommendRequest) -> RecommendResult:
        """A list without the model: items that the history supports, then popular ones.

        Filter, exclusions, pins and caps hold, boosts do not count. Scores are retrieval's
        log-probabilities.

        Raises:
            FilterError: the filter or a cap does not fit the items' attributes.
            RequestError: a bundle without retrieval.
        """
        retrieval, epoch = _retrieval_of(self), self.epoch
        batch = Batch.of(epoch, [request.changed(boosts=())], self.types, self.exclude_seen)
        search = partial(most_likely, retrieval)
        search = partial(fill_lists, search=search) if request.max_per else search
        lists = search(batch, request.k)
        (result,) = describe(batch, lists, self.bundle.vocabulary)
        return result

    def blends(self, request: RecommendRequest) -> bool:
        """Whether the answer to a request is blended."""
        chosen = self.reranker
        if request.blend is None:
            return request.seed is None and chosen is not None and bool(chosen.weights)
        if request.blend and chosen is None:
            raise RequestError(
                f"blend: bundle {self.bundle.path.name!r} was made without one; run the stage "
                "'retrieval' and make the bundle again"
            )
        return request.blend

    def begin(self) -> Epoch:
        """The epoch for a new batch; the engine is set to its trie."""
        epoch, before = self.epoch, self.engine.trie
        if epoch.trie is not before:
            self.engine.use(epoch.trie)
            before.release()
        return epoch

    def _mode(self, mode: str) -> Mode:
        """The mode that a request is decoded in."""
        if mode == Mode.RELAXED and self.engine.draft is None:
            raise RequestError(
                "mode 'relaxed' needs a draft model, and this bundle has none; ask for 'strict'"
            )
        return self.mode if mode == Mode.AUTO else Mode(mode)

    @property
    def exclude_seen(self) -> bool:
        """Whether lists leave out the items of the history, unless a request says otherwise."""
        return self.reranker is None or not self.reranker.lists_seen

    @property
    def types(self) -> EventTypes | None:
        """What retrieval knows from the types of events."""
        return None if self.retrieval is None else self.retrieval.types

    @property
    def reranker(self) -> Reranker | None:
        """What ranks blended lists."""
        return None if self.retrieval is None else self.retrieval.reranker


def _retrieval_of(recommender: Recommender) -> Retrieval:
    if recommender.retrieval is None:
        raise RequestError(
            f"bundle {recommender.bundle.path.name!r} has no part 'retrieval'; run the stage of "
            "that name and make the bundle again"
        )
    return recommender.retrieval


def _log_probs(
    engine: Engine, epoch: Epoch, histories: Histories, items: Sequence[NDArray[np.int32]]
) -> NDArray[np.float32]:
    """(n, w) the model's log-probabilities of n arrays of dense items, -inf behind their ends."""
    prompts = epoch.encoder.encode_all(histories)
    rows = [epoch.trie.item_row[numbers] for numbers in items]
    scores = score_rows(engine.target, prompts, engine.trie, rows, prompt_slots=engine.prompt_slots)
    return scores.cpu().numpy()


def _cut(values: NDArray[np.float32], items: Sequence[NDArray[np.int32]]) -> list[list[float]]:
    return [line[: len(own)] for line, own in zip(values.tolist(), items, strict=True)]


def _numbers(epoch: Epoch, items: Sequence[Sequence[str]]) -> list[NDArray[np.int32]]:
    """Dense numbers of items; RequestError for one that cannot be recommended."""
    numbers = [epoch.catalog.index(arguments.strings("items", ids)) for ids in items]
    for ids, known in zip(items, numbers, strict=True):
        if (known < 0).any():
            raise RequestError(f"item {ids[int(known.argmin())]!r} is not in the catalog")
    return numbers


def _prepared(device: str, trie: ItemTrie) -> None:
    """Make a new trie's tensors in the thread that made the trie."""
    if device == "cpu":  # another device is used by the decoding thread only
        DeviceTrie.of(trie, device)
