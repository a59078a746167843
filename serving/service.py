"""Service: one serving process, from start to stop, and its answers, without HTTP."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, reduce
from typing import Any, Self

from recsys.errors import FilterError, RecsysError, RequestError
from recsys.recommender import Recommender, RecommendRequest, RecommendResult
from recsys.rules import Rule, apply_rules
from recsys.serving.aliases import Aliases
from recsys.serving.batcher import Answer, QueueFullError, until
from recsys.serving.catalog_changes import CatalogChanges
from recsys.serving.daily_figures import DailyFigures
from recsys.serving.errors import ProblemError
from recsys.serving.experiments import Assignment, Experiments
from recsys.serving.limits import CALLER, Room, work_of
from recsys.serving.lists import Lists
from recsys.serving.metrics import Metrics
from recsys.serving.models import Model, Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.rules import Rules
from recsys.serving.schemas.common import MAX_HISTORY, NoteCode, as_json, made
from recsys.serving.schemas.items import RankBody
from recsys.serving.schemas.recommendations import (
    NOTHING,
    RecommendationsRequest,
    RecommendationsResponse,
    RecommendedItem,
    Subject,
    Timing,
    note_code,
    note_of,
)
from recsys.serving.settings import ServingSettings
from recsys.serving.stores import open_store
from recsys.serving.stores.records import Served, TypedHistory, now_ms, told_history
from recsys.serving.stores.store import Store
from recsys.serving.texts import Texts
from recsys.serving.worker import DecodeWorker, Done

logger = logging.getLogger("recsys.serving.service")
LARGE_K = 50  # items of an answer that take some milliseconds to describe
SHORT = 200  # items of a request that take no time worth mentioning
MOST_ANSWERS = 8 << 20  # bytes of large answers that batches have at a time
BATCHED = 1 / 4  # share of the queue for requests of batches; the proxy bounds the others


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


@dataclass(frozen=True)
class State:
    """What a process serves with: the store, and what is made of it and of the loaded models.

    It is made once, when the store is open, and never changes. Each part knows those before it, and
    none behind it.
    """

    store: Store
    models: Models
    rules: Rules
    experiments: Experiments
    catalog_changes: CatalogChanges
    aliases: Aliases
    lists: Lists
    today: DailyFigures
    answer_bytes: Room
    batched: asyncio.Semaphore

    @classmethod
    def of(
        cls,
        settings: ServingSettings,
        store: Store,
        worker: DecodeWorker,
        metrics: Metrics,
        off_loop: OffLoop,
    ) -> Self:
        """Make the parts; nothing is loaded before `start`."""
        models = Models()
        rules = Rules(store, models)
        changes = CatalogChanges(store, models, off_loop)
        metrics.registry.register(models)
        return cls(
            store=store,
            models=models,
            rules=rules,
            experiments=Experiments(store, models, off_loop),
            catalog_changes=changes,
            aliases=Aliases(settings, store, worker, metrics, models, rules, changes),
            lists=Lists(store, models, rules, off_loop, settings.not_history),
            today=DailyFigures(models, off_loop, settings.not_history),
            answer_bytes=Room(MOST_ANSWERS),
            batched=asyncio.Semaphore(max(1, int(settings.queue_limit * BATCHED))),
        )

    async def start(self, recommender: Recommender | None) -> None:
        """Read rules and experiments, and load the models; a loaded recommender is the champion."""
        await self.rules.start()
        await self.experiments.start()
        await self.aliases.start(recommender)

    async def close(self) -> None:
        """Answer the waiting requests, and end what runs beside them."""
        await self.today.cached.close()
        await self.lists.close()
        await self.catalog_changes.close()
        await self.rules.close()
        await self.experiments.close()
        await self.aliases.close()


@dataclass(frozen=True)
class Asked:
    """A request with all that it refers to.

    Attributes:
        body: as it was sent.
        alias: of the model; the arm of an experiment.
        model: that answers.
        request: the library's.
        rules: names of the rules that are applied.
        unusual: what is unusual about the history.
        deadline: on the event loop's clock.
        start: monotonic time.
        read_s: seconds that reading the history took.
    """

    body: RecommendationsRequest
    alias: str
    model: Model
    request: RecommendRequest
    rules: tuple[str, ...]
    unusual: NoteCode | None
    deadline: float
    start: float
    read_s: float


@dataclass(frozen=True)
class Answered:
    """The result of a request; without `decoded`, no model was used."""

    result: RecommendResult
    decoded: Answer[Done] | None = None
    is_fallback: bool = False

    def times(self, read_s: float, total_s: float) -> dict[str, float]:
        """Seconds of each stage, in the order of `Timing`."""
        return {
            "total": total_s,
            "history": read_s,
            "queue": 0.0 if self.decoded is None else self.decoded.queue_s,
            "compute": 0.0 if self.decoded is None else self.decoded.compute_s,
        }


class Service:
    """One serving process, and the answers that need models and histories.

    Attributes:
        failure: the error of a failed start.
        on_phase: called after each change of phase.
        off_loop: calls on the helper threads.
        texts: writes texts.
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
        self._state: State | None = None
        self._worker = DecodeWorker(settings, self.metrics)
        self.off_loop = OffLoop(settings, self._worker.read)
        self.texts = Texts(settings)

    # Start and stop

    async def start(self) -> None:
        """Open the store, load and warm up the models. An error is stored in `failure`."""
        try:
            if self._store is None:
                self._store = await asyncio.to_thread(
                    open_store,
                    self.settings.store,
                    not_history=self.settings.not_history,
                    observer=self.metrics.store_call,
                    histories=self.settings.histories,
                )
            store = self._store
            await store.prepare()
            store.limit_reads(partial(OffLoop, self.settings))
            self._state = State.of(self.settings, store, self._worker, self.metrics, self.off_loop)
            await self._state.start(self._given)
            await self.texts.start()
        except Exception as error:
            cause = error.__cause__ if isinstance(error, ProblemError) else None
            self.failure = cause if isinstance(cause, Exception) else error
            trace = None if isinstance(self.failure, RecsysError) else self.failure  # text will do
            logger.error("start failed: %s", self.failure, exc_info=trace)
            self._enter(Phase.FAILED)
            return
        self._worker.freeze()
        self._worker.trim()
        self._state.catalog_changes.follow()
        self._state.experiments.bound()
        self._enter(Phase.READY)

    async def stop(self) -> None:
        """Answer the waiting requests, then close everything."""
        self._enter(Phase.STOPPING)
        await self.texts.close()
        if self._state is not None:
            await self._state.close()
        self._worker.close()
        if self._store is not None:
            self._store.close()

    @property
    def unready(self) -> str | None:
        """Why recommendations are not answered now, for operators; None if they are."""
        if self.phase is not Phase.READY:
            return _UNREADY[self.phase]
        if not self.settings.ready_without_store and self.store.database.is_away:
            return "The store cannot be reached now (ready_without_store)."
        return None

    def require_ready(self) -> None:
        """Raise `ProblemError` (`not_ready`) unless the phase is READY."""
        if self.phase is not Phase.READY:
            raise _not_ready()

    @property
    def state(self) -> State:
        """What it serves with; `ProblemError` until the store is open."""
        if self._state is None:
            raise _not_ready()
        return self._state

    @property
    def store(self) -> Store:
        """The store of histories, events and state; `ProblemError` until it is open."""
        return self.state.store

    # Recommendations

    async def recommend(self, body: RecommendationsRequest) -> bytes:
        """Answer one request, of which `model` is an alias or an experiment, in JSON.

        Raises:
            ProblemError, FilterError: there is no such model, no history of the user while
                `fallback` is false, or the request cannot be served as it is.
            QueueFullError, DeadlineExceededError, ClosedError, StoreError: of batcher and store.
        """
        assigned = self.state.experiments.assign(body.model, body.user)
        alias = body.model if assigned is None else assigned.ref.arm
        with self.state.models.lease(alias) as model:
            asked = await self._resolve(body, alias, model)
            answered = await self._answer(asked)
            recommendation_id, text = await self._respond(asked, answered, assigned)
        self.store.served.remember(
            Served(
                recommendation_id,
                body.user,
                f"{model.name}@{model.version}",
                tuple(item.item_id for item in answered.result.recommendations),
                now_ms(),
                None if assigned is None else assigned.exposure,
            )
        )
        return text

    async def _resolve(self, body: RecommendationsRequest, alias: str, model: Model) -> Asked:
        """The library's request: with the history of the user, and with the rules by their names.

        What takes long is made on a helper thread, with its masks.
        """
        start, deadline = time.monotonic(), self.deadline
        rules, standing = self.state.rules.of(alias, body.rules), self.state.rules.standing(alias)
        history = await self._history(body, deadline)
        read_s = time.monotonic() - start
        if history is None and not body.fallback:
            raise _unknown_user(body)
        known = history or TypedHistory([], [])
        is_plain = body.filter is None and not (
            rules or body.boosts or body.blend or body.mode == "relaxed"
        )
        parts = known.items, known.disliked, known.earlier, body.exclude_items
        groups = [
            [rule for name, rule in rules.items() if (name in standing) is is_standing]
            for is_standing in (True, False)
        ]
        make = partial(_request, body, known, groups, model.recommender, is_plain=is_plain)
        try:
            if is_plain and sum(map(len, parts)) <= SHORT:
                request = make()
            else:
                request = await self.off_loop(make)
        except FilterError:  # it has its own problem, unless a rule is the reason
            self.state.rules.check(rules, model)
            raise
        except RequestError as error:
            raise ProblemError("invalid_request", str(error)) from error
        except RecsysError:
            raise
        except ValueError as error:
            applied = f" (applied rules: {', '.join(rules)})" if rules else ""
            raise ProblemError("invalid_request", f"{error}{applied}") from error
        catalog = model.recommender.catalog
        unusual = note_code(catalog, None if history is None else history.items)
        return Asked(body, alias, model, request, tuple(rules), unusual, deadline, start, read_s)

    async def _answer(self, asked: Asked) -> Answered:
        """The model's list; for a history that it does not know, that of retrieval if it may be.

        Retrieval knows the bundle's items only. The model also knows those that were added since,
        and adds what is missing.
        """
        request, recommender = asked.request, asked.model.recommender
        may_fall_back = recommender.retrieval is not None and not request.boosts
        if asked.unusual is None or not may_fall_back or asked.body.needs_model:
            return await self._decode(asked, request)
        listed = await self.off_loop(recommender.fallback, request)
        sources = (item.source for item in listed.recommendations if item.source != "pinned")
        self.metrics.fallbacks.labels(next(sources, "popular")).inc()
        if not listed.is_short(request.k):
            return Answered(listed, is_fallback=True)
        try:
            more = await self._decode(asked, request.after(listed))
        except QueueFullError:
            return Answered(listed, is_fallback=True)  # a short list is better than none
        result = await self.off_loop(listed.followed_by, more.result)
        return Answered(result, more.decoded, is_fallback=True)

    async def _respond(
        self, asked: Asked, answered: Answered, assigned: Assignment | None
    ) -> tuple[str, bytes]:
        """The answer on the wire as `response`, and its metrics."""
        request, result = asked.request, answered.result
        times = answered.times(asked.read_s, time.monotonic() - asked.start)
        make = partial(response, asked, answered, assigned, times)
        # A trace has thousands of nodes, for which the event loop should not stand still.
        most = LARGE_K // 10 if "metadata" in asked.body.include else LARGE_K
        is_large = request.trace or request.k > most or len(result.unknown_items) > SHORT
        answer = await self.off_loop(make) if is_large else make()
        self.metrics.answered(
            times,
            stats=None if answered.decoded is None else result.stats,
            levels=asked.model.recommender.catalog.codes.shape[1],
            model=asked.model.name,
            certificate=result.certificate,
            sources=[item.source for item in result.recommendations],
        )
        return answer

    async def rank(self, body: RankBody) -> bytes:
        """Put given items in order: a `RankResponse` as JSON; errors are those of `recommend`."""
        deadline = self.deadline
        history = await self._history(body, deadline)
        if history is None:
            raise _unknown_user(body)
        return await self.state.lists.rank(body, history, deadline)

    @property
    def deadline(self) -> float:
        """Time on the event loop's clock by which the current request is to be answered."""
        explicit = CALLER.get().deadline
        if explicit is not None:
            return explicit
        return asyncio.get_running_loop().time() + self.settings.deadline_ms / 1000

    async def _decode(self, asked: Asked, request: RecommendRequest) -> Answered:
        recommender = asked.model.recommender
        work = work_of(request, recommender.bundle.prompt.max_items, recommender.blends(request))
        CALLER.get().charge(work - 1)  # the client has paid for one unit
        decoded = await asked.model.queue(work).submit(request, deadline=asked.deadline, work=work)
        assert isinstance(decoded.result, RecommendResult)  # noqa: S101 - asked for one
        return Answered(decoded.result, decoded)

    async def _history(self, body: Subject, deadline: float) -> TypedHistory | None:
        """The history of a request; None if the store has none of its user."""
        if body.history is not None:
            return told_history(body.history, body.history_types, self.settings.not_history)
        async with until(deadline):
            return await self.store.history.read(str(body.user), MAX_HISTORY)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.metrics.ready.set(phase is Phase.READY)
        self.on_phase(self)


def _request(
    body: RecommendationsRequest,
    history: TypedHistory,
    groups: Iterable[Iterable[Rule]],
    recommender: Recommender,
    *,
    is_plain: bool,
) -> RecommendRequest:
    """The library's request; the masks of one that is not plain are made now.

    The standing rules are a group apart, so that they leave room for those of the request.
    """
    request = reduce(apply_rules, groups, body.request(history, recommender))
    if not is_plain:
        recommender.eligible(request)
    return request


def response(
    asked: Asked, answered: Answered, assigned: Assignment | None, times: Mapping[str, float]
) -> tuple[str, bytes]:
    """The id of an answer, and the answer on the wire, a `RecommendationsResponse` as JSON."""
    body, result, is_fallback = asked.body, answered.result, answered.is_fallback
    note = note_of(asked.unusual, fallback=is_fallback, model=answered.decoded is not None)
    items = RecommendedItem.listed(result.recommendations, result.epoch.catalog, body.include)
    recommendation_id = uuid.uuid4().hex
    values: dict[str, Any] = {
        "recommendation_id": recommendation_id,
        "model": asked.model.ref(asked.alias, result.epoch_number),
        "items": [],
        "certificate": result.certificate,
        "history_items": len(asked.request.history) - len(result.unknown_items),
        "unknown_items": result.unknown_items,
        "eligible_items": result.eligible_items,
        "note": NOTHING if note is None and result.eligible_items == 0 else note,
    }
    if asked.rules:
        values["rules"] = list(asked.rules)
    if result.trace is not None:
        values["trace"] = result.trace
    if assigned is not None:
        values["experiment"] = assigned.ref
    if "timing" in body.include:
        size = 0 if answered.decoded is None else answered.decoded.batch_size
        values["timing"] = Timing.of(times, size, result.stats)
    return recommendation_id, as_json(made(RecommendationsResponse, values), items)


def _not_ready() -> ProblemError:
    return ProblemError("not_ready", "The model is being loaded; see /health/ready.")


def _unknown_user(body: Subject) -> ProblemError:
    return ProblemError(
        "unknown_user", f"There is no history of user {body.user!r}; send one inline as 'history'."
    )
