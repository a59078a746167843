"""Ending a search early: its caller says when the texts are not wanted any more."""

from __future__ import annotations

from collections.abc import Callable


class StoppedError(Exception):
    """The texts are not wanted any more."""


def raise_if_stopped(stopped: Callable[[], bool] | None) -> None:
    """Raise `StoppedError` if `stopped` returns True."""
    if stopped is not None and stopped():
        raise StoppedError
