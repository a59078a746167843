"""What a store is: events and histories, served recommendations, the catalog's journal, state.

A store knows users, items and times by their outside ids; it does not know which items the model
has. Times are unix milliseconds. Whatever an awaited write has returned for is on disk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from recsys.errors import RecsysError

SEED_TYPE = "interaction"
NOT_HISTORY = ("impression", "dismiss", "dislike", "skip", "feedback")


class StoreError(RecsysError):
    """The store cannot be read or written; nothing of the call was kept."""


class EventConflictError(RecsysError):
    """Events of these ids are there already and say something else; nothing was written.

    Attributes:
        event_ids: the ids.
    """

    def __init__(self, event_ids: Sequence[str]) -> None:
        """Name the ids."""
        super().__init__(
            f"event {event_ids[0]!r} is there already with other content"
            + (f" (and {len(event_ids) - 1} more)" if len(event_ids) > 1 else "")
            + "; give a new event a new event_id"
        )
        self.event_ids = tuple(event_ids)


@dataclass(frozen=True, slots=True)
class Event:
    """Something a user did with an item.

    Attributes:
        event_id: names it; None for one of a data set.
        user: outside id.
        item: outside id.
        type: `view`, `click`, `purchase`, ...
        time_ms: when; the place in the user's sequence for a data set without times.
        value: rating, price, seconds; whatever the type means by it.
        recommendation_id: the answer that it is feedback on.
        digest: of what its sender said, which a repetition is compared by.
        seed: digest of the data set that it was imported from, else None.
    """

    event_id: str | None
    user: str
    item: str
    type: str
    time_ms: int
    value: float | None = None
    recommendation_id: str | None = None
    digest: str | None = None
    seed: str | None = None


@dataclass(frozen=True, slots=True)
class StoredEvent(Event):
    """An event as it lies in a store.

    Attributes:
        place: order of arrival, which breaks ties of time.
        linked: whether its `recommendation_id` is of an answer that was remembered; None without.
    """

    place: int = 0
    linked: bool | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """What became of a batch of events.

    Attributes:
        accepted: written now.
        duplicates: there already, with the same content.
        ignored: passed over, because their user was erased after they happened.
        unlinked: accepted ones whose `recommendation_id` nobody remembers.
    """

    accepted: int = 0
    duplicates: int = 0
    ignored: int = 0
    unlinked: int = 0


@dataclass(frozen=True, slots=True)
class Served:
    """A recommendation that was answered, remembered so that feedback can be told from noise.

    Attributes:
        recommendation_id: of the answer.
        user: outside id, or None for an inline history.
        model: name and version.
        items: outside ids, best first.
        time_ms: when.
    """

    recommendation_id: str
    user: str | None
    model: str
    items: tuple[str, ...]
    time_ms: int


@dataclass(frozen=True, slots=True)
class Journal:
    """Changes of a catalog.

    Attributes:
        records: oldest first.
        place: of the last of them, or where was looked from if there are none.
    """

    records: list[dict[str, Any]]
    place: int


@dataclass(frozen=True, slots=True)
class Journaled:
    """Where records were written: behind `before` and up to `last`, with none of others between."""

    before: int
    last: int


class Observer(Protocol):
    """Who counts what a store does (`recsys.serving.metrics.Metrics` does)."""

    def history_cache(self, *, hit: bool) -> None:
        """The history cache was asked."""

    def store_call(self, operation: str, seconds: float) -> None:
        """The store was called."""


class HistoryStore(Protocol):
    """All that a service needs to answer recommendations."""

    async def history(self, user_id: str, limit: int) -> list[str] | None:
        """The user's latest items, oldest first, or None if the user is unknown.

        Equal times are in order of arrival. Events of the types `not_history` are passed over.

        Raises:
            StoreError: the store cannot be read.
        """

    def close(self) -> None:
        """Write what waits and release what is held; no call may follow."""


class Store(HistoryStore, Protocol):
    """Everything that a service keeps. Every call may raise `StoreError`."""

    async def append(self, events: Sequence[Event]) -> Appended:
        """Write a batch durably: all of it or nothing. The next `history` holds it.

        Raises:
            EventConflictError: an event of this id has other content.
        """

    async def events(
        self, user_id: str, limit: int, before: tuple[int, int] | None = None
    ) -> list[StoredEvent]:
        """A user's events of every type, newest first, from before (`time_ms`, `place`)."""

    async def users(self, limit: int, prefix: str = "") -> list[str]:
        """Users with events, by id."""

    async def erase(self, user_id: str) -> None:
        """Forget a user: events, remembered recommendations, cached history.

        Events that happened until now do not come back with a late delivery, an import or a data
        set; later ones are welcome. Erasing twice is erasing once.
        """

    def remember(self, served: Served) -> None:
        """Remember an answer. Returns at once; written in the background, the oldest forgotten."""

    async def served(self, recommendation_id: str) -> Served | None:
        """A remembered answer."""

    async def journal_append(self, model: str, records: Sequence[Mapping[str, Any]]) -> Journaled:
        """Write changes of a model's catalog (JSON objects) durably: all or nothing.

        A record with an `item_id` takes the place of earlier ones about the item, so the journal
        grows with the items that were changed and not with the changes.
        """

    async def journal(self, model: str, after: int = 0) -> Journal:
        """Changes of a model's catalog behind a place.

        Places grow in the order of commits, over all processes that share the store: whoever looks
        again behind the last place misses nothing.
        """

    async def state_get(self, key: str) -> Any:
        """A value that the service keeps (aliases), or None."""

    async def state_put(self, key: str, value: Any) -> None:
        """Keep a JSON value durably."""

    def seed(self, dataset: Path) -> int:
        """Import the histories of a canonical data set, once for each of its versions.

        An earlier version of the seed is replaced in the same transaction; events that came from
        elsewhere stay.

        Returns:
            Events imported; 0 if this version is there already.

        Raises:
            ArtifactError: no data set there, or an altered one.
        """


def content_digest(*content: str | float | None) -> str:
    """What equal deliveries of one event have in common (128 bits, hex)."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def user_hash(user_id: str) -> str:
    """What is kept of an erased user, to know the id again without keeping it."""
    return hashlib.sha256(user_id.encode("utf-8", "surrogatepass")).hexdigest()
