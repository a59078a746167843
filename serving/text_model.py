"""TextModel: the text model of a service, for everything that writes texts.

The text model is one folder for the whole process, beside the models that recommend. It has a
thread of its own, so that its passes delay recommendations no more than the cores must be shared.
One request is answered at a time. A request whose client has left, or whose deadline has passed,
stops before its next token.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from recsys.errors import RequestError
from recsys.serving.batcher import ClosedError
from recsys.serving.limits import CALLER
from recsys.serving.models import UnsupportedError
from recsys.serving.reads import Reads
from recsys.serving.settings import ServingSettings

if TYPE_CHECKING:
    from recsys.text.explain import Explainer

T = TypeVar("T")
Stopped = Callable[[], bool]
TITLE = 200  # characters of a title that the text model reads


class TextModel:
    """The text model that the settings name, its thread, and the queue for it."""

    def __init__(self, settings: ServingSettings) -> None:
        """Make it; the model is loaded by `start`."""
        self._folder = settings.explainer
        self._explainer: Explainer | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="explainer")
        self._calls = Reads(settings, self._thread.submit)
        self._asked, self._closing, self._idle = 0, False, asyncio.Event()
        self._idle.set()

    async def start(self) -> "Explainer | None":
        """Load the text model, if there is one, and return it; `ArtifactError` if it cannot be."""
        if self._folder is not None:
            from recsys.text.explain import Explainer  # with the parser, only where it is used

            loop = asyncio.get_running_loop()
            self._explainer = await loop.run_in_executor(self._thread, Explainer.load, self._folder)
        return self._explainer

    async def close(self) -> None:
        """Refuse new requests, answer the waiting ones, and end the thread."""
        self._closing = True
        await self._idle.wait()
        # What nobody waits for ends at its next token.
        await asyncio.to_thread(self._thread.shutdown)

    @property
    def name(self) -> str:
        """Name of its folder.

        Raises:
            UnsupportedError: the service has no text model.
            ClosedError: it accepts no more requests.
        """
        if self._explainer is None or self._folder is None:
            raise UnsupportedError(
                "This service has no text model, which writes explanations and texts; the setting "
                "serve.explainer names the folder of one."
            )
        if self._closing:
            raise ClosedError
        return self._folder.name

    async def write(
        self, function: "Callable[[Explainer, Stopped], T]", work: float, deadline: float
    ) -> T:
        """Call a function with the model, on its thread, when it is the client's turn.

        Args:
            function: it is given the model, and asks whether to write no further.
            work: units of work, for which the client pays; it has paid for one of them.
            deadline: on the event loop's clock.

        Raises:
            UnsupportedError: there is no text model, or the request is more than it can read.
            QueueFullError, DeadlineExceededError, ClosedError: as of other requests.
        """
        name, explainer = self.name, self._explainer
        assert explainer is not None  # noqa: S101 - it has a name
        CALLER.get().charge(max(work - 1, 0.0))
        stop = threading.Event()
        self._asked += 1
        self._idle.clear()
        try:
            return await self._calls(function, explainer, stop.is_set, deadline=deadline)
        except RequestError as error:
            raise UnsupportedError(f"{name} cannot write this: {error}") from error
        finally:
            stop.set()
            self._asked -= 1
            if not self._asked:
                self._idle.set()
