"""Events and histories on the wire."""

import uuid
from datetime import datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
)

from recsys.event_names import PURCHASE, level
from recsys.serving.schemas.common import EVENT_TYPE, Body, FailFast, Id, Query, before
from recsys.serving.stores.records import Event, StoredEvent, content_digest

MAX_EVENTS = 5_000
MAX_PAGE = 1_000
EventType = Annotated[
    str, StringConstraints(pattern=EVENT_TYPE), before(lambda name: name.strip().lower())
]
LATEST_S = 4_102_444_800  # the year 2100; larger values are usually milliseconds


def _parse_time(value: object) -> object:
    if not isinstance(value, str):
        return value
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        raise ValueError("is neither a number nor a time in ISO 8601") from None
    if time.tzinfo is None:
        raise ValueError("has no time zone; add one, such as Z")
    return time.timestamp()


def _check_range(seconds: float) -> float:
    if seconds > LATEST_S:
        raise ValueError(f"{seconds:.0f} is after 2100; send seconds, not milliseconds")
    if seconds < 0:
        raise ValueError(f"{seconds:.0f} is before 1970; send seconds since then")
    return seconds


def _check_bought(value: float | None, info: ValidationInfo) -> float | None:
    if value is not None and value <= 0 and level(info.data.get("type", "")) == PURCHASE:
        raise ValueError(
            f"{value:g} of a purchase; send what was taken back as a `return`, no event where "
            "nothing was bought, and no value if it was free"
        )
    return value


Timestamp = Annotated[
    float,
    BeforeValidator(_parse_time),
    AfterValidator(_check_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": LATEST_S},
                {"type": "string", "format": "date-time"},
            ]
        }
    ),
]


class EventIn(Body):
    """An action of a user on an item."""

    event_id: Id | None = Field(
        None,
        description="Identifies the event. A repeated event is stored once; an event without an id "
        "is stored each time that it is sent.",
        examples=["7d1f3c"],
    )
    user: Id = Field(examples=["A1"])
    item: Id = Field(description="May be unknown to the model.", examples=["B0012"])
    type: EventType = Field(
        "view",
        description="A type of the data set, or a usual name such as `view`, `click`, `cart`, "
        "`purchase` or `rating`, in any case; stored in lower case. Letters, digits, blanks, `-` "
        "and `_`. `impression`, `dismiss`, `dislike`, `skip`, `feedback`, `return`, `refund` and "
        "`remove_from_cart` are stored and are not part of the history (setting `not_history`).",
        examples=["click"],
    )
    timestamp: Timestamp | None = Field(
        None,
        description="Unix seconds, or ISO 8601 with a time zone. Default: now. A time in the "
        "future is replaced by now.",
        examples=["2026-11-20T09:30:00Z"],
    )
    value: Annotated[float | None, AfterValidator(_check_bought)] = Field(
        None,
        description="Rating, price, ...: its meaning depends on the type. Of a purchase it is "
        "above 0. A `return` takes back all that the user did with the item before, whatever its "
        "value, and a `partial_return` nothing.",
    )
    recommendation_id: Id | None = Field(
        None,
        description="The answer that this is feedback on; an unknown one is accepted.",
        examples=["0b9c6a5c7f0e4c7c8d0f6a54f2f0a6f1"],
    )

    def to_event(self, now_ms: int) -> Event:
        """Convert to an event that arrived at `now_ms`."""
        sent_ms = None if self.timestamp is None else round(self.timestamp * 1000)
        return Event(
            event_id=self.event_id or uuid.uuid4().hex,
            user=self.user,
            item=self.item,
            type=self.type,
            time_ms=now_ms if sent_ms is None else min(sent_ms, now_ms),
            value=self.value,
            recommendation_id=self.recommendation_id,
            digest=content_digest(
                self.user, self.item, self.type, sent_ms, self.value, self.recommendation_id
            ),
        )


class EventsBody(Body):
    """A batch of events: all of them are stored, or none."""

    events: Annotated[list[EventIn], FailFast] = Field(max_length=MAX_EVENTS)


class EventsResponse(BaseModel):
    """The outcome of a batch, which is on disk and part of the next recommendation."""

    accepted: int = Field(description="Events that were written.")
    duplicates: int = Field(description="Events that were stored before with the same content.")
    ignored: int = Field(description="Events from before the erasure of their user.")
    unlinked: int = Field(
        description="Written events whose recommendation is not remembered (any more)."
    )


class HistoryEvent(BaseModel):
    """An event of a user."""

    event_id: str | None = Field(description="Null for an event of an imported data set.")
    item: str
    title: str | None = Field(description="Null for an item that the model does not know.")
    type: str
    timestamp: float = Field(description="Unix seconds.")
    value: float | None
    recommendation_id: str | None
    linked: bool | None = Field(
        description="Whether its recommendation was remembered; null without a recommendation."
    )


class UserHistory(BaseModel):
    """The events of a user, newest first."""

    user: str
    events: list[HistoryEvent]
    next: str | None = Field(description="`before` of the next page; null on the last.")


class HistoryQuery(Query):
    """Query parameters of a user's history."""

    limit: int = Field(100, ge=1, le=MAX_PAGE)
    before: str | None = Field(
        None, pattern=r"^[0-9]{1,15}-[0-9]{1,18}$", description="`next` of the previous page."
    )


def history_page(
    user_id: str, events: list[StoredEvent], limit: int, titles: dict[str, str]
) -> UserHistory:
    """A page of at most `limit` events on the wire, given the titles of items by id."""
    last = events[-1] if len(events) == limit else None
    return UserHistory(
        user=user_id,
        events=[
            HistoryEvent(
                event_id=event.event_id,
                item=event.item,
                title=titles.get(event.item),
                type=event.type,
                timestamp=event.time_ms / 1000,
                value=event.value,
                recommendation_id=event.recommendation_id,
                linked=event.linked,
            )
            for event in events
        ],
        next=None if last is None else f"{last.time_ms}-{last.place}",
    )
