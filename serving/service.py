"""Service: what one serving process holds, from start to stop, and how it answers.

Engine, batcher and history store meet here. It knows the wire format and no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from recsys.errors import RecsysError
from recsys.recommender import RecommendRequest, RecommendResult
from serving.batcher import Answer, Batcher, DeadlineExceededError
from serving.engine import Engine
from serving.metrics import Metrics
from serving.schemas.common import MAX_HISTORY, ModelRef
from serving.schemas.items import Item
from serving.schemas.models import ModelInfo
from serving.schemas.recommendations import (
    Note,
    RecommendationsRequest,
    RecommendationsResponse,
    RecommendedItem,
    Timing,
)
from serving.stores import SqliteHistoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from recsys.catalog import Catalog
    from serving.engine import Recommends
    from serving.settings import ServingSettings
    from serving.stores import HistoryStore

logger = logging.getLogger("serving.service")
BARE_PROMPT = "the model answered from the bare prompt, as for any new user"


class NotReadyError(Exception):
    """The model is not loaded yet, or no longer."""


class UnknownUserError(LookupError):
    """The store has no history of the user."""


class UnknownItemError(LookupError):
    """The catalogue has no such item."""


class Phase(StrEnum):
    """Where in its life the service is."""

    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"


class Service:
    """One model, its queue and its histories.

    Attributes:
        settings: of the process.
        phase: where in its life it is.
        failure: why it could not start, in phase FAILED.
        on_phase: called after each change of phase.
        metrics: of what it does.
    """

    def __init__(
        self,
        settings: ServingSettings,
        recommender: Recommends | None = None,
        store: HistoryStore | None = None,
    ) -> None:
        """Make a service; nothing is loaded before `start`.

        Args:
            settings: of the process.
            recommender: one that is loaded already, instead of `settings.bundle`.
            store: one that is open already, instead of `settings.store`; `stop` closes it.
        """
        self.settings = settings
        self.phase = Phase.STARTING
        self.failure: Exception | None = None
        self.on_phase: Callable[[Service], None] = lambda service: None
        self.metrics = Metrics()
        self._store = store
        self._model: ModelInfo | None = None
        self._engine = Engine(settings, recommender)
        self._batcher: Batcher[RecommendRequest, RecommendResult] = Batcher(
            self._engine.run,
            max_batch=settings.max_batch,
            max_wait_ms=settings.max_wait_ms,
            queue_limit=settings.queue_limit,
        )

    async def start(self) -> None:
        """Open the store, load the model, warm it up. A failure is kept in `failure`."""
        try:
            if self._store is None:
                self._store = await asyncio.to_thread(self._open_store)
            await self._engine.start()
        except Exception as error:
            expected = isinstance(error, RecsysError)  # its text says all there is to say
            logger.error("start failed: %s", error, exc_info=None if expected else error)
            self.failure = error
            self._enter(Phase.FAILED)
            return
        self._model = ModelInfo(
            name=self.settings.bundle.absolute().name,
            version=self._engine.recommender.manifest.digest,
            items=len(self.catalog),
            levels=self.catalog.codes.shape[1],
        )
        self._batcher.start()
        self._enter(Phase.READY)

    async def stop(self) -> None:
        """Answer what waits, then let go of everything."""
        self._enter(Phase.STOPPING)
        await self._batcher.close()
        self._engine.close()
        if self._store is not None:
            self._store.close()

    def require_ready(self) -> None:
        """Pass only in phase READY.

        Raises:
            NotReadyError: in any other.
        """
        if self.phase is not Phase.READY:
            raise NotReadyError(self.phase)

    @property
    def catalog(self) -> Catalog:
        """Items of the loaded model."""
        return self._engine.recommender.catalog

    @property
    def model(self) -> ModelInfo:
        """The loaded model.

        Raises:
            NotReadyError: it is not loaded yet.
        """
        if self._model is None:
            raise NotReadyError(self.phase)
        return self._model

    def item(self, item_id: str) -> Item:
        """An item of the catalogue.

        Raises:
            UnknownItemError: there is none of this id.
        """
        (row,) = self.catalog.index([item_id]).tolist()
        if row < 0:
            raise UnknownItemError(f"The model has no item {item_id!r}.")
        return Item(
            item_id=item_id,
            title=self.catalog.titles[row],
            semantic_id=self.catalog.codes[row].tolist(),
            metadata=_metadata(self.catalog, [row])[0],
        )

    async def recommend(self, request: RecommendationsRequest) -> RecommendationsResponse:
        """Answer one request.

        Raises:
            UnknownUserError: the store has no history of the user.
            QueueFullError, DeadlineExceededError, ClosedError: of the batcher.
            StoreError: the store cannot be read.
        """
        clock = asyncio.get_running_loop().time
        start = clock()
        deadline = start + self.settings.deadline_ms / 1000
        if request.history is not None:
            history = request.history
        else:
            history = await self._history(str(request.user), deadline)
        read = clock()
        answer = await self._batcher.submit(
            RecommendRequest(history, request.k, request.exclude_seen, request.exclude_items),
            deadline=deadline,
        )
        response = self._response(request, history, answer.result)
        if "timing" in request.include:
            response.timing = _timing(answer, history_s=read - start, total_s=clock() - start)
        return response

    async def _history(self, user_id: str, deadline: float) -> list[str]:
        if self._store is None:
            raise NotReadyError(self.phase)
        try:
            async with asyncio.timeout_at(deadline):
                history = await self._store.history(user_id, MAX_HISTORY)
        except TimeoutError:
            raise DeadlineExceededError from None
        if history is None:
            raise UnknownUserError(
                f"There is no history of user {user_id!r}; send one inline as 'history'."
            )
        return history

    def _response(
        self, request: RecommendationsRequest, history: list[str], result: RecommendResult
    ) -> RecommendationsResponse:
        catalog = self.catalog
        rows = catalog.index(history)
        rows = rows[rows >= 0]
        hidden = catalog.index(request.exclude_items)
        hidden = np.union1d(hidden[hidden >= 0], rows if request.exclude_seen else [])
        items = [
            RecommendedItem(
                item_id=found.item_id,
                score=found.score,
                title=found.title,
                rank=rank,
                source="model",
            )
            for rank, found in enumerate(result.recommendations, start=1)
        ]
        if "metadata" in request.include:
            places = catalog.index([item.item_id for item in items]).tolist()
            for item, metadata in zip(items, _metadata(catalog, places), strict=True):
                item.metadata = metadata
        model = self.model
        return RecommendationsResponse(
            recommendation_id=uuid.uuid4().hex,
            model=ModelRef(name=model.name, version=model.version),
            items=items,
            history_items=len(rows),
            unknown_items=result.unknown_items,
            eligible_items=len(catalog) - len(hidden),
            note=_note(history, known=len(rows)),
        )

    def _open_store(self) -> SqliteHistoryStore:
        store = SqliteHistoryStore(self.settings.store)
        try:
            if self.settings.histories is not None:
                events = store.seed(self.settings.histories)
                logger.info("histories", extra={"fields": {"imported": events}})
        except BaseException:
            store.close()
            raise
        return store

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self.on_phase(self)


def _note(history: Sequence[str], known: int) -> Note | None:
    if not history:
        return Note(code="empty_history", detail=f"The history is empty; {BARE_PROMPT}.")
    if known == 0:
        return Note(
            code="unknown_history",
            detail=f"The model knows none of the history's items; {BARE_PROMPT}.",
        )
    return None


def _metadata(catalog: Catalog, rows: Sequence[int]) -> list[dict[str, Any]]:
    """Attributes of several items at once; a number that is not one becomes null."""
    table = catalog.items.drop_columns(["item_id", "title", "text"]).take(rows)
    return [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        for row in table.to_pylist()
    ]


def _timing(answer: Answer[RecommendResult], *, history_s: float, total_s: float) -> Timing:
    return Timing(
        total_ms=round(total_s * 1000, 3),
        history_ms=round(history_s * 1000, 3),
        queue_ms=round(answer.queue_s * 1000, 3),
        compute_ms=round(answer.compute_s * 1000, 3),
        batch_size=answer.batch_size,
        decode={key: float(value) for key, value in answer.result.stats.items()},
    )
