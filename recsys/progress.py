"""Progress of long work: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

LINE_EVERY_S = 10.0
console = Console(stderr=True)


def say(text: str) -> None:
    """One line to the person who runs the program (standard error)."""
    console.print(text, highlight=False, soft_wrap=True)


class Bar(Protocol):
    """What the body of `track` advances."""

    def advance(self, amount: float = 1, **columns: float | str) -> None:
        """Move on by `amount`; `columns` are shown behind the bar (`loss=1.23`)."""


class _RichBar:
    def __init__(self, progress: Progress, task: int) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float = 1, **columns: float | str) -> None:
        if columns:
            self._progress.update(self._task, columns=_format(columns))  # type: ignore[arg-type]
        self._progress.advance(self._task, amount)  # type: ignore[arg-type]


class _LineBar:
    def __init__(self, name: str, total: float | None) -> None:
        self._name, self._total, self._done = name, total, 0.0
        self._start = self._printed = time.monotonic()

    def advance(self, amount: float = 1, **columns: float | str) -> None:
        self._done += amount
        now = time.monotonic()
        if now - self._printed < LINE_EVERY_S:
            return
        self._printed = now
        of = f"/{self._total:g}" if self._total else ""
        left = ""
        if self._total and self._done:
            left = f" ETA {(now - self._start) * (self._total / self._done - 1):.0f} s"
        print(  # noqa: T201 - the plain line is the interface here
            f"{self._name}: {self._done:g}{of}{left} {_format(columns)}".rstrip(),
            file=sys.stderr,
            flush=True,
        )


@contextmanager
def track(name: str, total: float | None = None) -> Iterator[Bar]:
    """Show progress of `total` units of work (None where unknown) under `name`."""
    if not console.is_terminal:
        yield _LineBar(name, total)
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[columns]}"),
        console=console,
    ) as progress:
        yield _RichBar(progress, progress.add_task(name, total=total, columns=""))


def _format(columns: dict[str, float | str]) -> str:
    return "  ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in columns.items()
    )
