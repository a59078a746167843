"""Service: the state of one serving process, from start to stop, and its answers.

It combines models, catalog, shadow and store. It uses the wire schemas, but no HTTP.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from typing import Any

from recsys.errors import FilterError, RecsysError, RequestError
from recsys.live_catalog import EpochCatalog
from recsys.recommender import Recommender, RecommendRequest, RecommendResult, Source
from recsys.rules import Rule, apply_rules
from recsys.serving import answers
from recsys.serving.batcher import Answer, QueueFullError, until
from recsys.serving.catalog_changes import CatalogChanges, described, find
from recsys.serving.experiments import Experiments
from recsys.serving.explanations import explain
from recsys.serving.limits import CALLER, work_of
from recsys.serving.lists import Lists
from recsys.serving.metrics import Metrics
from recsys.serving.models import BundleRefusedError, KeptAlias, Model, Models
from recsys.serving.reads import Reads
from recsys.serving.rules import RuleReferenceError, Rules
from recsys.serving.schemas.common import CHAMPION, MAX_HISTORY
from recsys.serving.schemas.explanations import ExplanationsRequest, ExplanationsResponse
from recsys.serving.schemas.items import (
    DescribedItem,
    RankBody,
    RankResponse,
    ScoredItem,
    SimilarResponse,
)
from recsys.serving.schemas.models import ModelInfo
from recsys.serving.schemas.recommendations import (
    RecommendationsRequest,
    RecommendationsResponse,
    Subject,
)
from recsys.serving.schemas.texts import TextsRequest, TextsResponse
from recsys.serving.settings import ServingSettings
from recsys.serving.shadow import Shadow
from recsys.serving.stores import open_store
from recsys.serving.stores.records import (
    Served,
    StoreAwayError,
    StoreError,
    TypedHistory,
    told_history,
)
from recsys.serving.stores.store import Store
from recsys.serving.text_model import TextModel
from recsys.serving.texts import Texts
from recsys.serving.today import Figures
from recsys.serving.worker import DecodeWorker, Done, ScoreRequest, Work

logger = logging.getLogger("recsys.serving.service")
ALIASES = "aliases"
LARGE_K = 50  # items of an answer that take some milliseconds to describe
SHORT = 200  # items of a request that take no time worth mentioning
KEEP_S = 1.0  # between attempts to keep the aliases
RETRIES_S = (0.5, 1.0, 2.0, 5.0, 10.0)  # pauses between attempts to reach the store


class NotReadyError(Exception):
    """The model is not loaded yet, or no longer."""


class UnknownUserError(LookupError):
    """The store has no history of the user."""


class InvalidError(ValueError):
    """The fields of a request exclude each other, or the model does not support them."""


class Phase(StrEnum):
    """State of the service, from start to stop."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"


_UNREADY = {
    Phase.STARTING: "The models are being loaded.",
    Phase.FAILED: "The start failed; the service's log has the reason.",
    Phase.STOPPING: "The service is shutting down; use another instance.",
}


class Service:
    """Models and histories of one process, and the answers that need both.

    `failure` is the error of a failed start; `on_phase` is called after each change of phase.
    """

    def __init__(
        self,
        settings: ServingSettings,
        recommender: Recommender | None = None,
        store: Store | None = None,
    ) -> None:
        """Make a service; nothing is loaded before `start`.

        A loaded recommender replaces `settings.bundle`, and an open store `settings.store`; `stop`
        closes the store.
        """
        self.settings = settings
        self.phase = Phase.STARTING
        self.failure: Exception | None = None
        self.on_phase: Callable[[Service], None] = lambda service: None
        self.metrics = Metrics()
        self._store, self._given = store, recommender
        self._interrupted = asyncio.Event()
        self._waits_for_store = False
        self._unrestored: dict[str, KeptAlias] = {}  # their bundles could not be loaded
        self._unkept: Mapping[str, Any] | None = None  # aliases that the store could not take
        self._keeping: asyncio.Task[None] | None = None
        self._worker = DecodeWorker(settings)
        self.models = Models(
            settings,
            self._worker,
            self.metrics,
            prepare=self._prepare,
            changed=self._keep_aliases,
            check=self._check_rules,
            standing=lambda alias: self.rules.standing(alias),
        )
        self._reads = Reads(settings, self._worker.read)
        self.rules = Rules(self.models, self._reads)
        self.lists = Lists(self.models, self.rules, self._reads, settings.not_history)
        self.experiments = Experiments(self.models, self._reads)
        self.catalog_changes = CatalogChanges(self.models, self.metrics, self._reads)
        self.today = Figures(self.models, self._reads, settings.not_history)
        self._shadow = Shadow(settings, self.models, self._worker, self.metrics)
        self._text_model = TextModel(settings)
        self._texts = Texts(self._text_model, settings.text_formats)
        self.metrics.queue_depth = lambda: self.models.waiting
        self.metrics.filter_stats = self._filter_stats
        self.metrics.captured = self._captured

    # Start and stop

    async def start(self) -> None:
        """Open the store, load and warm up the models. An error is stored in `failure`.

        A store on a server that is away is waited for until `interrupt`.
        """
        try:
            if self._store is None:
                self._store = await self._reach_store()
            if self._store is None:
                return  # stopped meanwhile
            self._store.limit_reads(partial(Reads, self.settings))
            self.catalog_changes.store = self.lists.store = self._store
            await self.rules.start(self._store)
            await self.experiments.start(self._store)
            await self._load()
            await self._texts.start()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, BundleRefusedError) else None
            self.failure = cause if isinstance(cause, Exception) else error
            expected = isinstance(
                self.failure, RecsysError
            )  # its text is enough, without a traceback
            logger.error(
                "start failed: %s", self.failure, exc_info=None if expected else self.failure
            )
            self._enter(Phase.FAILED)
            return
        self._worker.freeze()
        self._shadow.start()
        self.catalog_changes.start()
        self.experiments.guard()
        self._enter(Phase.READY)

    async def stop(self) -> None:
        """Answer the waiting requests, then close everything."""
        self._enter(Phase.STOPPING)
        await self._shadow.close()
        await self.today.close()
        await self.lists.close()
        await self.catalog_changes.close()
        await self.rules.close()
        await self.experiments.close()
        await self._text_model.close()
        await self.models.close()
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)
        self._worker.close()
        if self._store is not None:
            self._store.close()

    def interrupt(self) -> None:
        """Wait for the store no longer."""
        self._interrupted.set()

    @property
    def unready(self) -> str | None:
        """Why recommendations are not answered now, for operators; None if they are."""
        if self.phase is Phase.STARTING and self._waits_for_store:
            return "The store cannot be reached; the start goes on when it can."
        if self.phase is not Phase.READY:
            return _UNREADY[self.phase]
        if not self.settings.ready_without_store and not self.store.reachable:
            return "The store cannot be reached now (ready_without_store)."
        return None

    def require_ready(self) -> None:
        """Raise `NotReadyError` unless the phase is READY."""
        if self.phase is not Phase.READY:
            raise NotReadyError(self.phase)

    @property
    def reads(self) -> Reads:
        """Calls on the helper threads."""
        return self._reads

    @property
    def store(self) -> Store:
        """The store of histories, events and state; `NotReadyError` until it is open."""
        if self._store is None:
            raise NotReadyError(self.phase)
        return self._store

    @property
    def catalog(self) -> EpochCatalog:
        """Items of the champion."""
        return self.models.get().recommender.catalog

    @property
    def model(self) -> ModelInfo:
        """The champion; `NotReadyError` until it is loaded."""
        if not self.models.loaded:
            raise NotReadyError(self.phase)
        return self.models.info()[0]

    # Recommendations

    async def recommend(
        self,
        body: RecommendationsRequest,
        is_known: Callable[[RecommendationsResponse], bool] = lambda answer: False,
    ) -> RecommendationsResponse:
        """Answer one request, of which `model` is an alias or an experiment.

        An answer that the client has already (`is_known`), under another `recommendation_id`, is
        not remembered again.

        Raises:
            UnknownModelError: of the alias.
            UnknownUserError: the store has no history of the user, and `fallback` is false.
            InvalidError, FilterError, RuleReferenceError: the request cannot be served as it is.
            QueueFullError, DeadlineExceededError, ClosedError, StoreError: of batcher and store.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        deadline = self.deadline
        assigned = self.experiments.assign(body.model, body.user)
        if assigned is not None:
            body = body.model_copy(update={"model": assigned.ref.arm})
        self.models.get(body.model)  # fail fast on an unknown alias
        rules = self.rules.of(body.model, body.rules)
        known = await self._history(body, deadline)
        read = clock()
        history = None if known is None else known.items
        if known is None and not body.fallback:
            raise _unknown_user(body)
        with self.models.lease(body.model) as model:
            request = await self._request(
                body, known or TypedHistory([], []), rules, model, deadline
            )
            answer: Answer[Done] | None = None
            unknown = answers.note_code(model.recommender.catalog, history)
            result = None
            if unknown is not None and not answers.for_the_model(body) and not request.boosts:
                result = await self._fallback(model, request, deadline)
            fallback = result is not None
            if result is not None and result.is_short(request.k):
                answer, result = await self._filled_up(model, request, result, deadline)
            elif result is None:
                answer = await self._decode(model, request, deadline)
                assert isinstance(answer.result, RecommendResult)  # noqa: S101 - asked for one
                result = answer.result
            remark = answers.note(
                unknown, fallback=fallback, filled_up=fallback and answer is not None
            )
            make = partial(answers.response, body, request, result, model, remark)
            # A trace has thousands of nodes, for which the event loop should not stand still.
            is_large = request.trace or request.k > LARGE_K
            response = await self._reads(make, deadline=deadline) if is_large else make()
            if rules:
                response.rules = list(rules)
            if assigned is not None:
                response.experiment = assigned.ref
            if not fallback:
                found = [one.item_id for one in result.recommendations]
                self._shadow.offer(body.model, request, found, blended=result.blended)
        total = clock() - start
        if "timing" in body.include:
            response.timing = answers.timing(answer, result.stats, read - start, total)
        self._count(response, result, answer, read - start, total, model)
        if is_known(response):
            return response
        self.store.remember(
            Served(
                response.recommendation_id,
                body.user,
                f"{model.name}@{model.version}",
                tuple(item.item_id for item in response.items),
                time.time_ns() // 1_000_000,
                None if assigned is None else assigned.exposure,
            )
        )
        return response

    async def rank(self, body: RankBody) -> RankResponse:
        """Put given items in order; errors are those of `recommend`."""
        deadline = self.deadline
        found = await self._history(body, deadline)
        history = None if found is None else found.items
        if history is None:
            raise _unknown_user(body)
        with self.models.lease(body.model) as model:
            given = list(dict.fromkeys(body.items))
            known, scores = await self._rated(model, history, given, deadline)
            # A thousand items take some milliseconds, for which the event loop must not stand.
            make = partial(_ranking, body, model, history, known, scores)
            return await self._reads(make, deadline=deadline)

    async def _rated(
        self, model: Model, history: Sequence[str], given: Sequence[str], deadline: float
    ) -> tuple[list[str], list[float]]:
        """The items that the catalog has, and their scores.

        If an item is removed between the look-up and the scoring, both are repeated.
        """
        while True:
            rows = model.recommender.catalog.index(given)
            known = [name for name, row in zip(given, rows, strict=True) if row >= 0]
            if not known:
                return [], []
            try:
                scored = ScoreRequest(history, known)
                answer = await self._submit(model, scored, deadline, 1 + len(known) / 100)
            except RequestError:
                if (model.recommender.catalog.index(known) >= 0).all():
                    raise
                continue
            scores: Any = answer.result
            return known, scores

    async def explain(self, body: ExplanationsRequest) -> ExplanationsResponse:
        """Explain items to a user; errors are those of `rank` and of `explanations`."""
        deadline = self.deadline
        found = await self._history(body, deadline)
        if found is None:
            raise _unknown_user(body)
        with self.models.lease(body.model) as model:
            return await explain(body, found.items, model, self._text_model, deadline)

    async def write(self, body: TextsRequest) -> TextsResponse:
        """Write a text after a prompt; errors are those of `Texts`."""
        deadline = self.deadline
        with self.models.lease(body.model) as model:
            return await self._texts.write(body, model, deadline)

    async def similar(self, item_id: str, k: int, alias: str) -> SimilarResponse:
        """The items most similar to one item.

        Raises:
            UnknownItemError: there is no item of this id.
            UnsupportedError: the bundle has no part `retrieval`.
        """
        with self.models.lease(alias) as model:
            recommender = model.recommender
            find(recommender.catalog, item_id)
            _ = model.retrieval  # fail if there is none
            try:
                found = await self._reads(recommender.similar, item_id, k)
            except RequestError:
                find(recommender.catalog, item_id)  # raises if it was removed meanwhile
                raise
            return SimilarResponse.model_construct(
                model=model.ref(alias),
                item_id=item_id,
                items=[
                    _scored(recommender.catalog, name, score, rank, "retrieval")
                    for rank, (name, score) in enumerate(found, start=1)
                ],
            )

    def item(self, item_id: str, alias: str = CHAMPION) -> DescribedItem:
        """An item of the catalog; `UnknownItemError` if there is none of this id."""
        catalog = self.models.get(alias).recommender.catalog
        return described(catalog, find(catalog, item_id))

    # Internals

    @property
    def deadline(self) -> float:
        """Time on the event loop's clock by which the current request is to be answered."""
        given = CALLER.get().deadline
        if given is not None:
            return given
        return asyncio.get_running_loop().time() + self.settings.deadline_ms / 1000

    async def _decode(
        self, model: Model, request: RecommendRequest, deadline: float
    ) -> Answer[Done]:
        most = model.recommender.bundle.prompt.max_items
        return await self._submit(model, request, deadline, work_of(request, most))

    async def _submit(
        self, model: Model, request: Work, deadline: float, work: float
    ) -> Answer[Done]:
        """Let the worker answer; the caller pays for the work, of which it has paid one unit."""
        CALLER.get().charge(work - 1)
        return await model.submit(request, deadline=deadline, work=work)

    async def _request(
        self,
        body: RecommendationsRequest,
        history: TypedHistory,
        rules: Mapping[str, Rule],
        model: Model,
        deadline: float,
    ) -> RecommendRequest:
        """The library's request; what takes long is made on a helper thread, with its masks."""

        def make() -> RecommendRequest:
            request = apply_rules(
                answers.to_request(body, history, model.recommender), rules.values()
            )
            if not is_plain:
                model.recommender.eligible(request)
            return request

        is_plain = body.filter is None and not (
            rules or body.boosts or body.blend or body.mode == "relaxed"
        )
        items = (history.items, history.disliked, history.earlier, body.exclude_items)
        is_short = sum(map(len, items)) <= SHORT
        try:
            return make() if is_plain and is_short else await self._reads(make, deadline=deadline)
        except FilterError:  # it has its own problem, unless a rule is the reason
            self.rules.check(rules, model)
            raise
        except RequestError as error:
            raise InvalidError(str(error)) from error
        except RecsysError:
            raise
        except ValueError as error:
            applied = f" (applied rules: {', '.join(rules)})" if rules else ""
            raise InvalidError(f"{error}{applied}") from error

    async def _fallback(
        self, model: Model, request: RecommendRequest, deadline: float
    ) -> RecommendResult | None:
        """An answer without the model; None if the bundle has no part `retrieval`."""
        if model.recommender.retrieval is None:
            return None
        result = await self._reads(model.recommender.fallback, request, deadline=deadline)
        sources = (one.source for one in result.recommendations if one.source != "pinned")
        self.metrics.fallback(next(sources, "popular"))
        return result

    async def _filled_up(
        self, model: Model, request: RecommendRequest, found: RecommendResult, deadline: float
    ) -> tuple[Answer[Done] | None, RecommendResult]:
        """A fallback that is too short, followed by the model's answer to what is missing.

        Retrieval knows the bundle's items only; the model also knows those that were added since.
        """
        try:
            answer = await self._decode(model, request.after(found), deadline)
            more = answer.result
            assert isinstance(more, RecommendResult)  # noqa: S101 - asked for one
            return answer, await self._reads(found.followed_by, more, deadline=deadline)
        except QueueFullError:
            return None, found  # a short list is better than none

    async def _history(self, body: Subject, deadline: float) -> TypedHistory | None:
        """The history of a request; None if the store has none of its user."""
        if body.history is not None:
            return told_history(body.history, body.history_types, self.settings.not_history)
        async with until(deadline):
            return await self.store.typed_history(str(body.user), MAX_HISTORY)

    def _count(
        self,
        response: RecommendationsResponse,
        result: RecommendResult,
        answer: Answer[Done] | None,
        history_s: float,
        total_s: float,
        model: Model,
    ) -> None:
        self.metrics.answered(
            {
                "total": total_s,
                "history": history_s,
                "queue": 0.0 if answer is None else answer.queue_s,
                "compute": 0.0 if answer is None else answer.compute_s,
            },
            stats=None if answer is None else result.stats,
            levels=model.recommender.catalog.codes.shape[1],
            model=model.name,
            certificate=response.certificate,
            sources=[item.source for item in response.items],
        )

    async def _reach_store(self) -> Store | None:
        """Open the store, again and again while its server is away; None if interrupted."""
        for pause in itertools.chain(RETRIES_S, itertools.repeat(RETRIES_S[-1])):
            try:
                return await asyncio.to_thread(self._open_store)
            except StoreAwayError as error:
                self._waits_for_store = True
                logger.warning("the store is away, next try in %g s: %s", pause, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._interrupted.wait()
            if self._interrupted.is_set():
                return None
        raise AssertionError  # pragma: no cover - the loop has no end

    async def _load(self) -> None:
        """Load the models of the stored aliases, or the bundle of the settings."""
        own = self.settings.bundle.absolute()
        state = await self.store.state_get(ALIASES) or {}
        kept = state.get("aliases", {}) if state.get("bundle") == str(own) else {}
        aliases = {name: KeptAlias.model_validate(value) for name, value in kept.items()}
        champion = aliases.pop(CHAMPION, None)
        if self._given is not None:
            await self.models.put(CHAMPION, own.name, loaded=self._given)
        elif champion is not None:
            await self._restore(CHAMPION, champion)
        if not self.models.loaded:
            await self.models.put(CHAMPION, own.name)
        for alias, value in aliases.items():
            await self._restore(alias, value)

    async def _restore(self, alias: str, kept: KeptAlias) -> None:
        """Restore an alias, or log that its bundle cannot be loaded any more."""
        try:
            await self.models.restore(alias, kept)
        except Exception as error:
            logger.error("alias %s is not restored: %s", alias, error)
            self._unrestored[alias] = kept

    async def _keep_aliases(self, changed: str, aliases: Mapping[str, KeptAlias]) -> None:
        """Keep all aliases after a change of one; one that was not restored stays as it was."""
        if self.phase is not Phase.READY:
            return  # the stored aliases are being restored
        self._unrestored.pop(changed, None)
        aliases = {**aliases, **self._unrestored}
        kept = {name: alias.model_dump(mode="json") for name, alias in aliases.items()}
        bundle = str(self.settings.bundle.absolute())
        self._unkept = {"bundle": bundle, "aliases": kept}
        try:
            await self._keep()
        except StoreError as error:  # the change is in effect, until a restart
            logger.error("aliases are not kept yet: %s", error)
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.create_task(self._keep_later(), name="aliases")

    async def _keep(self) -> None:
        """Write the aliases to the store, unless that is done; `StoreError` if it cannot be."""
        state = self._unkept
        if state is not None:
            await self.store.state_put(ALIASES, state)
            if self._unkept is state:
                self._unkept = None

    async def _keep_later(self) -> None:
        """Try again until the store has the aliases: it may have been full, or away."""
        while self._unkept is not None:
            await asyncio.sleep(KEEP_S)
            with contextlib.suppress(StoreError):
                await self._keep()
        logger.info("aliases are kept")

    async def _check_rules(self, alias: str, model: Model) -> None:
        """Refuse a model that an alias's standing rules do not fit, except while starting."""
        if self.phase is not Phase.READY:
            return
        try:
            await asyncio.to_thread(self.rules.check, self.rules.of(alias, ()), model)
        except RuleReferenceError as error:
            raise BundleRefusedError(
                f"{error}; change the rule, or take it out of the 'rules' of the alias {alias!r}."
            ) from error

    async def _prepare(self, model: Model) -> None:
        await self.catalog_changes.replay(model)

    def _filter_stats(self) -> Any:
        return self.models.get().recommender.epoch.filters.stats if self.models.loaded else None

    def _captured(self) -> dict[str, Any]:
        return {
            model.name: model.recommender.engine.statistics()
            for model in self.models.loaded
            if model.recommender.device.type != "cpu"
        }

    def _open_store(self) -> Store:
        settings = self.settings
        store = open_store(
            settings.store,
            history_cache=settings.history_cache,
            not_history=settings.not_history,
            observer=self.metrics,
        )
        try:
            if settings.histories is not None:
                events = store.seed(settings.histories)
                logger.info("histories", extra={"fields": {"imported": events}})
        except BaseException:
            store.close()
            raise
        return store

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.metrics.ready(phase is Phase.READY)
        self.on_phase(self)


def _unknown_user(body: Subject) -> UnknownUserError:
    text = f"There is no history of user {body.user!r}; send one inline as 'history'."
    return UnknownUserError(text)


def _ranking(
    body: RankBody,
    model: Model,
    history: Sequence[str],
    known: Sequence[str],
    scores: Sequence[float],
) -> RankResponse:
    """The answer to `rank`: the items that the catalog knows, best first."""
    catalog = model.recommender.catalog
    order = sorted(zip(scores, known, strict=True), key=lambda pair: -pair[0])
    there = set(known)
    return RankResponse.model_construct(
        model=model.ref(body.model),
        items=[
            _scored(catalog, name, score, rank, "model")
            for rank, (score, name) in enumerate(order, start=1)
        ],
        unknown_items=[name for name in dict.fromkeys(body.items) if name not in there],
        history_items=int((catalog.known(history) >= 0).sum()),
    )


def _scored(
    catalog: EpochCatalog, item_id: str, score: float, rank: int, source: Source
) -> ScoredItem:
    row = catalog.find(item_id)
    return ScoredItem.model_construct(
        item_id=item_id,
        score=score,
        title="" if row < 0 else catalog.title(row),  # removed meanwhile
        rank=rank,
        source=source,
    )
