"""The values that stores take and return: events, remembered answers, the journal of the catalog.

Users and items are outside ids; a store does not know which items the model has. Times are unix
milliseconds.
"""

import hashlib
import hmac
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice, zip_longest
from typing import NamedTuple

from recsys.errors import RecsysError
from recsys.event_names import is_denied, is_dislike, is_partial, level, normalised, takes_back

SEED_TYPE = "interaction"  # of a data set's events without types
NOT_HISTORY = (
    "impression", "dismiss", "dislike", "skip", "feedback", "return", "refund", "remove_from_cart"
)  # fmt: skip
SKEW_MS = 3_600_000  # by which the clock of whoever reports feedback may be behind
MOST_TYPES = 32  # of a history that are understood, its newest: a name takes up to 40 us
DISLIKES = ("dislike", "dismiss")  # of `NOT_HISTORY`: the user does not want to see the item


class Sign(Enum):
    """What an event is to the history of its user."""

    PART = "a part of it"
    LEFT_OUT = "no part of it"
    RETURN = "no part of it, and the item is not recommended until the user has a later event on it"
    DISLIKE = "no part of it, and the item is not recommended"


def sign_of(name: str, not_history: Collection[str]) -> Sign:
    """What events of a type are, if those of the types `not_history` are no part of histories.

    Names that mean something negative are known in six languages, as in exports
    (`recsys.event_names`). To count one of `NOT_HISTORY`, or all, leave it out of `not_history`.

    >>> [sign_of(n, NOT_HISTORY).name for n in ("view", "cancelled", "dislike", "return_requested")]
    ['PART', 'RETURN', 'DISLIKE', 'LEFT_OUT']
    """
    taken_back = level(name) == 0 and takes_back(name) and not is_partial(name)
    if name in not_history:
        if name in DISLIKES:
            return Sign.DISLIKE
        return Sign.RETURN if taken_back else Sign.LEFT_OUT
    if not_history and is_denied(name):
        return Sign.LEFT_OUT
    if name in NOT_HISTORY or not not_history or level(name) != 0:
        return Sign.PART
    if normalised(name) in map(normalised, not_history):  # such as `Remove from cart`
        return Sign.LEFT_OUT
    if taken_back:
        return Sign.RETURN
    return Sign.DISLIKE if is_dislike(name) else Sign.LEFT_OUT


def parts_of_history(
    items: list[str], types: list[str | None], not_history: Collection[str]
) -> tuple[list[str], list[str | None], tuple[str, ...]]:
    """Items and types of the parts of a history, and the items that are not recommended.

    A return or a dislike takes back what the user did with the item before, as in files.

    Args:
        items: those of a user's events, newest first, as the parts are.
        types: of the same events.
        not_history: as in `sign_of`. Further types than `MOST_TYPES` are not known.

    >>> types = ["view", "return", "return", "purchase"]
    >>> parts_of_history(["b", "a", "b", "a"], types, NOT_HISTORY)
    (['b'], ['view'], ('a',))
    """
    read = {*islice(filter(None, dict.fromkeys(types)), MOST_TYPES)} | {*not_history} & {*types}
    signs = {None: Sign.PART} | {name: sign_of(name, not_history) for name in read}
    types = [name if name in signs else None for name in types]
    if all(sign is Sign.PART for sign in signs.values()):  # as of almost all users
        return items, types, ()
    parts: list[tuple[str, str | None]] = []
    with_part, taken_back = set[str](), set[str]()
    hidden: dict[str, None] = {}
    for item, name in zip(items, types, strict=True):
        sign = signs[name]
        if sign is Sign.PART and item not in taken_back:
            parts.append((item, name))
            with_part.add(item)
        elif sign is Sign.RETURN or sign is Sign.DISLIKE:
            taken_back.add(item)
            if sign is Sign.DISLIKE or item not in with_part:
                hidden[item] = None
    return [item for item, _ in parts], [name for _, name in parts], tuple(hidden)


class TypedHistory(NamedTuple):
    """A user's latest items, oldest first, and the types of their events; None where not known.

    `disliked` are items that the user does not want to see, or returned last. `earlier` are the
    items and types of events before those, each pair once.
    """

    items: list[str]
    types: list[str | None]
    disliked: Sequence[str] = ()
    earlier: Sequence[tuple[str, str | None]] = ()

    def latest(self, limit: int) -> "TypedHistory":
        """The last `limit` events, and `earlier` those before them.

        >>> TypedHistory(["a", "b", "c"], ["order", "view", "view"]).latest(2).earlier
        (('a', 'order'),)
        """
        split = max(0, len(self.items) - limit)
        older = zip_longest(self.items[:split], self.types[:split])  # there may be no types
        earlier = tuple(dict.fromkeys([*self.earlier, *older]))
        return TypedHistory(self.items[split:], self.types[split:], self.disliked, earlier)


class StoreError(RecsysError):
    """The store cannot be read or written; nothing of the call was stored."""


class EventConflictError(RecsysError):
    """Events with these ids are stored with other content; nothing was written.

    Attributes:
        event_ids: the ids.
    """

    def __init__(self, event_ids: Sequence[str]) -> None:
        super().__init__(
            f"event {event_ids[0]!r} has other content than another with its id"
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


Observer = Callable[[str, float], None]  # counts a call of a store and its seconds


def now_ms() -> int:
    """The wall clock, in unix milliseconds."""
    return time.time_ns() // 1_000_000


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
    return hmac.digest(salt, plain.encode(), "sha256").hex()


def told_history(
    items: list[str], types: list[str | None], not_history: Collection[str]
) -> TypedHistory:
    """A history that a request brings along, without the events that are no part of one.

    `types` is empty if the request names none.
    """
    items, types, hidden = parts_of_history(items[::-1], types[::-1], not_history)
    return TypedHistory(items[::-1], types[::-1], hidden)
