"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere.

Within `working`, there is a line at least every ten seconds, whatever the work does.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 6.0  # so that no ten seconds pass while a long call keeps other threads waiting
LOOK_EVERY_S = 1.0
console = Console(stderr=True)


class _Shown:
    """What stands on the terminal: the moment of the last line, and the bars below it."""

    def __init__(self) -> None:
        self.at = time.monotonic()
        self.bars: list[Bar] = []
        self.working: list[Heartbeat] = []

    def is_stale(self) -> bool:
        """Whether it is time for another line."""
        return time.monotonic() - self.at >= LINE_EVERY_S

    def line(self, text: str) -> None:
        """Write a plain line."""
        self.at = time.monotonic()
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - the plain line is the interface


_shown = _Shown()


def say(text: str) -> None:
    """One line to the person who runs the program (standard error)."""
    _shown.at = time.monotonic()
    console.print(text, highlight=False, soft_wrap=True)


class Heartbeat:
    """Says that work goes on, whenever nothing else was written for `LINE_EVERY_S`."""

    def __init__(self, name: str) -> None:
        """Name the work; it begins now."""
        self._name, self._start = name, time.monotonic()

    def beat(self) -> None:
        """Write a line if it is time for one; a bar of a terminal moves by itself."""
        bar = next(reversed(_shown.bars), None)  # another thread may remove it meanwhile
        if self is not _shown.working[-1]:  # a part of the work says more
            return
        if not _shown.is_stale() or (bar is not None and console.is_terminal):
            return
        if bar is not None:
            bar.show()
        else:
            _shown.line(f"{self._name}: at work for {time.monotonic() - self._start:.0f} s")


@contextmanager
def working(name: str) -> Iterator[None]:
    """While the body runs, let a thread write a line whenever nothing else was for a while.

    Within another one, the inner name is written. Of several processes that train together, the
    first one writes.
    """
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    heartbeat, ended = Heartbeat(name), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_EVERY_S):
            heartbeat.beat()

    _shown.working.append(heartbeat)
    thread = threading.Thread(target=watch, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        _shown.working.remove(heartbeat)


class Bar:
    """Progress of some work, which the body of `track` advances."""

    def __init__(self, name: str, total: float | None) -> None:
        """Begin at 0 of `total`; None where that is unknown."""
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[columns]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task(name, total=total, columns="")
        self._start = time.monotonic()

    def advance(self, amount: float = 1, **columns: float | str) -> None:
        """Move on by `amount`; `columns` are shown behind the bar (`loss=1.23`)."""
        texts = [f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in columns.items()]
        shown: dict[str, Any] = {"columns": "  ".join(texts)} if columns else {}
        self.progress.update(self._task, advance=amount, **shown)
        if _shown.is_stale() and not console.is_terminal:
            self.show()

    def show(self) -> None:
        """Write the present state as a line."""
        (task,) = self.progress.tasks
        of = left = ""
        if task.total:
            of = f"/{task.total:.6g}"
            if task.completed:
                seconds = (time.monotonic() - self._start) * (task.total / task.completed - 1)
                left = f" ETA {max(seconds, 0):.0f} s"
        line = f"{task.description}: {task.completed:.6g}{of}{left} {task.fields['columns']}"
        _shown.line(line.rstrip())


@contextmanager
def track(name: str, total: float | None = None) -> Iterator[Bar]:
    """Show progress of `total` units of work (None where unknown) under `name`."""
    bar = Bar(name, total)
    _shown.bars.append(bar)
    try:
        with bar.progress:
            yield bar
    finally:
        _shown.bars.remove(bar)
