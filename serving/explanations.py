"""Explanations: reasons in words for recommended items, written by a text model.

The text model is one folder for the whole process, beside the models that recommend. It has a
thread of its own, so that its passes delay recommendations no more than the cores must be shared.
One request is explained at a time. A request whose client has left, or whose deadline has passed,
stops before its next token.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from recsys.errors import RequestError
from recsys.live_catalog import EpochCatalog
from recsys.serving.batcher import ClosedError
from recsys.serving.limits import CALLER
from recsys.serving.models import Model, UnsupportedError
from recsys.serving.reads import Reads
from recsys.serving.schemas.explanations import (
    ExplainedItem,
    ExplanationsRequest,
    ExplanationsResponse,
    QuotedItem,
)
from recsys.serving.settings import ServingSettings

if TYPE_CHECKING:
    from recsys.text.explain import Explainer

TITLE = 200  # characters of a title that the text model reads
EVENTS = 100  # of a history, the last ones, whose titles may be quoted
WORK = 50.0  # of one explanation: a hundred passes or so of a model that is larger than the target


class Explanations:
    """Writes the explanations of a service whose settings name a text model."""

    def __init__(self, settings: ServingSettings) -> None:
        """Make it; the model is loaded by `start`."""
        self._folder = settings.explainer
        self._explainer: Explainer | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explainer")
        self._calls = Reads(settings, self._thread.submit, 1, rests=False)
        self._asked, self._closing, self._idle = 0, False, asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load the text model, if there is one; `ArtifactError` if it cannot be."""
        if self._folder is not None:
            from recsys.text.explain import Explainer  # with the parser, only where it is used

            loop = asyncio.get_running_loop()
            self._explainer = await loop.run_in_executor(self._thread, Explainer.load, self._folder)

    async def close(self) -> None:
        """Refuse new requests, answer the waiting ones, and end the thread."""
        self._closing = True
        await self._idle.wait()
        # What nobody waits for ends at its next token.
        await asyncio.to_thread(self._thread.shutdown)

    async def explain(
        self, body: ExplanationsRequest, history: Sequence[str], model: Model, deadline: float
    ) -> ExplanationsResponse:
        """Explain items of a model's catalog to one user.

        Args:
            body: the request.
            history: ids of the items that the user liked, oldest first.
            model: its catalog has the titles.
            deadline: on the event loop's clock.

        Raises:
            UnsupportedError: the service has no text model.
            QueueFullError, DeadlineExceededError, ClosedError: as of other requests.
        """
        if self._explainer is None or self._folder is None:
            raise UnsupportedError(
                "This service writes no explanations; the setting serve.explainer names the folder "
                "of a text model that does."
            )
        if self._closing:
            raise ClosedError
        catalog = model.recommender.catalog
        asked = list(dict.fromkeys(body.items))
        titles = _titles(catalog, asked)
        shown = [name for name, title in titles.items() if title]
        # By what the text model reads of a title. Of several items with one title, the last counts.
        liked: dict[str, QuotedItem] = {}
        for name, title in _titles(catalog, history[-EVENTS:]).items():
            liked.pop(title[:TITLE], None)
            liked[title[:TITLE]] = QuotedItem.model_construct(item_id=name, title=title)
        liked.pop("", None)
        work = WORK * len(shown)
        CALLER.get().charge(max(work - 1, 0.0))
        stop = threading.Event()
        write = partial(
            self._explainer.explain,
            list(liked),
            [titles[name][:TITLE] for name in shown],
            stopped=stop.is_set,
        )
        self._asked += 1
        self._idle.clear()
        try:
            found = await self._calls(write, deadline=deadline, work=max(work, 1.0))
        except RequestError as error:
            raise UnsupportedError(f"{self._folder.name} cannot explain this: {error}") from error
        finally:
            stop.set()
            self._asked -= 1
            if not self._asked:
                self._idle.set()
        return ExplanationsResponse.model_construct(
            model=model.ref(body.model),
            text_model=self._folder.name,
            explanations=[
                ExplainedItem.model_construct(
                    item_id=name,
                    title=titles[name],
                    because=[liked[title] for title in one.explanation.because],
                    reason=one.explanation.reason,
                )
                for name, one in zip(shown, found, strict=True)
            ],
            unknown_items=[name for name in asked if name not in titles],
            untitled_items=[name for name, title in titles.items() if not title],
        )


def _titles(catalog: EpochCatalog, names: Sequence[str]) -> dict[str, str]:
    """The titles of the items that the catalog has, each in the place of its last occurrence."""
    names = list(dict.fromkeys(reversed(names)))[::-1]
    rows = catalog.index(names).tolist()
    return {name: catalog.title(row) for name, row in zip(names, rows, strict=True) if row >= 0}
