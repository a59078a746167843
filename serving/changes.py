"""Changes of items, which other programs read by a cursor.

A cursor names the store and a place in it. A restored store has another name, so cursors from
before are refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from recsys.serving.following import LOOK_S
from recsys.serving.limits import CALLER
from recsys.serving.stores.store import Store

FoundT = TypeVar("FoundT", bound=Collection[object])
PATIENCE = 0.8  # share of the time until the deadline


class CursorError(ValueError):
    """A cursor is not of this store."""

    def __init__(self) -> None:
        super().__init__(
            "is of another store, or of this one before it was restored; forget what was read, "
            "and begin again without it"
        )


def write_cursor(store: Store, place: str) -> str:
    """The cursor of a place in a store."""
    return f"{store.store_id[:16]}-{place}"


def read_cursor(store: Store, cursor: str) -> str:
    """The place of a cursor in a store; empty for an empty cursor, which is the beginning.

    Raises:
        CursorError: it is of another store.
    """
    if not cursor:
        return ""
    name, _, place = cursor.partition("-")
    if name != store.store_id[:16]:
        raise CursorError
    return place


async def wait_for_any(read: Callable[[], Awaitable[FoundT]], wait_s: float) -> FoundT:
    """Read until something is found, for at most `wait_s` seconds, and return what was read.

    The wait ends early enough to answer before the request's deadline. Each further look is work of
    the client (`limits`).
    """
    caller, loop = CALLER.get(), asyncio.get_running_loop()
    end = start = loop.time()
    if wait_s:
        end = start + wait_s
        if caller.deadline is not None:
            end = min(end, start + PATIENCE * (caller.deadline - start))
    while not (found := await read()) and (left := end - loop.time()) > 0:
        await asyncio.sleep(min(LOOK_S, left))
        caller.charge(1.0)
    return found
