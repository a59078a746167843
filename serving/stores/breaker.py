"""Breaker: refuses calls at once while a server does not answer, and ends calls that hang."""

import threading
import time
from collections.abc import Callable


class Breaker:
    """Open after a failure: one call at a time tries again, after a pause; the others are refused.

    >>> breaker = Breaker(1.0, clock=lambda: 0.0)
    >>> breaker.failed()
    >>> breaker.enter()
    False
    """

    def __init__(self, pause_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._pause_s, self._clock = pause_s, clock
        self._lock = threading.Lock()
        self._is_open = self._trying = False
        self._again_at = 0.0

    def enter(self) -> bool:
        """Begin a call, unless it is refused; `leave` ends it."""
        with self._lock:
            if not self._is_open:
                return True
            if self._trying or self._clock() < self._again_at:
                return False
            self._trying = True
            return True

    def leave(self) -> None:
        """End a call, whatever came of it."""
        with self._lock:
            self._trying = False

    def failed(self) -> None:
        """The server did not answer."""
        with self._lock:
            self._is_open, self._again_at = True, self._clock() + self._pause_s

    def worked(self) -> None:
        """The server answered."""
        self._is_open = False


class Watch:
    """Ends calls that take too long, on a thread that looks from time to time."""

    def __init__(self, most_s: float, end: Callable[[object], None]) -> None:
        """Call `end` with the connection of a call that has taken `most_s` seconds."""
        self._most_s, self._end = most_s, end
        self._calls: dict[int, tuple[float, object]] = {}
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-watch", daemon=True)
        self._thread.start()

    def begin(self, connection: object) -> None:
        """A call of this thread begins."""
        self._calls[threading.get_ident()] = (time.monotonic() + self._most_s, connection)

    def finish(self) -> None:
        """The call of this thread has ended."""
        self._calls.pop(threading.get_ident(), None)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._most_s / 10):
            now = time.monotonic()
            for thread, (deadline, connection) in list(self._calls.items()):
                if now >= deadline and self._calls.pop(thread, None) is not None:
                    self._end(connection)
