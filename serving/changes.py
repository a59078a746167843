"""Changes that other programs read by a cursor: of items and of events.

A cursor names the store and a place in it. A restored store has another name, so cursors from
before are refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

from recsys.serving.following import LOOK_S
from recsys.serving.limits import CALLER
from recsys.serving.schemas.changes import EventRecord
from recsys.serving.stores.records import AheadError, Change
from recsys.serving.stores.store import Store

FoundT = TypeVar("FoundT", bound=Collection[object])
EVENT = "e"  # before the place in a cursor of events: it is not one of items
HASH = 32  # digits of the hash of a user, as in the audit log
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


async def events_since(store: Store, cursor: str, limit: int) -> list[Change]:
    """Changes of events after a cursor, at most `limit` (`Store.changes`).

    Raises:
        CursorError: the cursor is of another store, or of a state that this one is behind.
        StoreError: the store cannot be read.
    """
    place = read_cursor(store, cursor).removeprefix(EVENT)
    after = tuple(int(number) for number in place.split(".")) if place else ()
    if len(after) not in (0, len(store.order)):
        raise CursorError
    try:
        return await store.changes(after, limit)
    except AheadError:
        raise CursorError from None


def event_record(store: Store, change: Change) -> EventRecord:
    """A change of events as clients read it."""
    cursor = write_cursor(store, EVENT + ".".join(map(str, change.place)))
    event, name = change.event, change.user_hash
    if event is None:
        assert change.erased_ms is not None  # noqa: S101 - it is an erasure
        return EventRecord.model_construct(
            cursor=cursor, op="erase", user_hash=name[:HASH], timestamp=change.erased_ms / 1000
        )
    more: dict[str, Any] = {"value": event.value, "recommendation_id": event.recommendation_id}
    return EventRecord.model_construct(
        cursor=cursor,
        op="append",
        user_hash=name[:HASH],
        user=event.user,
        event_id=event.event_id,
        item=event.item,
        type=event.type,
        timestamp=event.time_ms / 1000,
        **{key: value for key, value in more.items() if value is not None},
    )


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
