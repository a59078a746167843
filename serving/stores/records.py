"""The values that stores take and return: events, remembered answers, the journal of the catalog.

Users and items are outside ids; a store does not know which items the model has. Times are unix
milliseconds.
"""

import hashlib
import hmac
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from recsys.errors import RecsysError

SEED_TYPE = "interaction"  # of a data set's events without types
NOT_HISTORY = (
    "impression", "dismiss", "dislike", "skip", "feedback", "return", "refund", "remove_from_cart"
)  # fmt: skip
DISLIKES = ("dislike", "dismiss")  # of `NOT_HISTORY`: the user does not want to see the item


class TypedHistory(NamedTuple):
    """A user's items, oldest first, and the types of their events; None where it is not known.

    `disliked` are items that the user does not want to see.
    """

    items: list[str]
    types: list[str | None]
    disliked: Sequence[str] = ()


class StoreError(RecsysError):
    """The store cannot be read or written; nothing of the call was stored."""


class StoreAwayError(StoreError):
    """The server of the store cannot be reached now; it may come back."""


class AheadError(RecsysError):
    """A place of a change is behind all changes of the store, which was put back to a copy."""

    def __init__(self) -> None:
        super().__init__("it is behind the last change of the store")


class EventConflictError(RecsysError):
    """Events with these ids are stored with other content; nothing was written.

    Attributes:
        event_ids: the ids.
    """

    def __init__(self, event_ids: Sequence[str]) -> None:
        super().__init__(
            f"event {event_ids[0]!r} is stored already with other content"
            + (f" (and {len(event_ids) - 1} more)" if len(event_ids) > 1 else "")
            + "; give a new event a new event_id"
        )
        self.event_ids = tuple(event_ids)


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a user on an item, by their outside ids.

    Attributes:
        event_id: identifies the event; None for one of a data set.
        time_ms: its time; for a data set without times, the position in the user's sequence.
        value: rating, price, seconds, ..., depending on the type.
        recommendation_id: the answer that it is feedback on.
        digest: of the content as it was sent; repeated deliveries are compared by it.
        seed: digest of the data set that it was imported from, or None.
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
    """An event in a store.

    Attributes:
        place: number in the order of arrival, which breaks ties of time.
        linked: whether the answer `recommendation_id` was remembered; None without an id.
    """

    place: int = 0
    linked: bool | None = None


class Change(NamedTuple):
    """An event or an erasure of a store; with neither, a place up to which there is none.

    `user_hash` is that of the event's user, or of the erased one; `erased_ms` is its time.
    """

    place: tuple[int, ...]
    user_hash: str | None = None
    event: StoredEvent | None = None
    erased_ms: int | None = None


class Act(NamedTuple):
    """What an event of a store says about the interest in an item, and in an answer."""

    user: str
    item: str
    type: str
    time_ms: int
    recommendation_id: str | None = None


@dataclass(frozen=True, slots=True)
class Appended:
    """Outcome of a batch of events.

    Attributes:
        accepted: number of events that were written.
        duplicates: number of events that were there before, with the same content.
        ignored: number of events from before the erasure of their user.
        unlinked: number of accepted events whose answer is not remembered.
    """

    accepted: int = 0
    duplicates: int = 0
    ignored: int = 0
    unlinked: int = 0


@dataclass(frozen=True, slots=True)
class Exposure:
    """What makes an answer count in an experiment.

    Attributes:
        experiment: its id.
        arm: the alias that answered.
        window_ms: how long after the user's first answer of the experiment others count.
    """

    experiment: str
    arm: str
    window_ms: int


@dataclass(frozen=True, slots=True)
class Served:
    """An answered recommendation, remembered to link feedback to it.

    `user` is None for an inline history; `items` are outside ids, best first. An answer to a user
    may count in an experiment.
    """

    recommendation_id: str
    user: str | None
    model: str
    items: tuple[str, ...]
    time_ms: int
    exposure: Exposure | None = None


class Exposed(NamedTuple):
    """A user's answers that count in an experiment.

    `first_ms` is the time of the first; of `shown` answers, `followed` led to an event.
    """

    user: str
    arm: str
    first_ms: int
    shown: int
    followed: int


class Given(NamedTuple):
    """A remembered answer as it is stored: `items` is a JSON list of ids, `place` its number."""

    place: int
    recommendation_id: str
    user: str | None
    items: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class Journal:
    """Changes of a catalog as JSON objects, oldest first.

    `place` is that of the last record; without records, the place that was asked for.
    """

    records: list[dict[str, Any]]
    place: int


@dataclass(frozen=True, slots=True)
class Journaled:
    """Range of places of written records: after `before`, up to `last`, without other records."""

    before: int
    last: int


class Observer(Protocol):
    """Counts the calls of a store, for example `recsys.serving.metrics.Metrics`."""

    def history_cache(self, *, hit: bool) -> None:
        """Count a lookup in the history cache."""

    def store_call(self, operation: str, seconds: float) -> None:
        """Count a call of the store and its duration."""


def content_digest(*content: str | float | None) -> str:
    """Digest of an event's content (128 bits, hex), equal for repeated deliveries."""
    text = json.dumps(content, ensure_ascii=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def user_hash(user_id: str, salt: bytes) -> str:
    """Hash of an erased user's id, which is kept instead of the id.

    The salt is random and of one store: hashes of two stores, or of a list of known ids, do not
    match each other.
    """
    plain = hashlib.sha256(user_id.encode("utf-8", "surrogatepass")).hexdigest()
    return salted(plain, salt)


def salted(plain: str, salt: bytes) -> str:
    """The salted hash of an unsalted one, which stores had up to schema 3."""
    return hmac.digest(salt, plain.encode(), "sha256").hex()
