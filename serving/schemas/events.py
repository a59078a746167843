"""Wire format of events and of what users did."""

# Annotations stay live here: pydantic reads them.
import uuid
from dataclasses import replace
from datetime import datetime
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    WithJsonSchema,
)

from recsys.serving.schemas.common import MAX_ID, Id
from recsys.serving.stores.protocol import Event, StoredEvent, content_digest

MAX_EVENTS = 5_000
MAX_PAGE = 1_000
LATEST_S = 4_102_444_800  # the year 2100; what lies beyond are milliseconds taken for seconds


def _from_text(given: object) -> object:
    if not isinstance(given, str):
        return given
    try:
        time = datetime.fromisoformat(given)
    except ValueError:
        raise ValueError("is neither a number nor a time of ISO 8601") from None
    if time.tzinfo is None:
        raise ValueError("has no time zone; add one, such as Z")
    return time.timestamp()


def _in_range(seconds: float) -> float:
    if not 0 <= seconds <= LATEST_S:
        raise ValueError("lies outside of 1970 to 2100; give seconds, not milliseconds")
    return seconds


Timestamp = Annotated[
    float,
    BeforeValidator(_from_text),
    AfterValidator(_in_range),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "minimum": 0, "maximum": LATEST_S},
                {"type": "string", "format": "date-time"},
            ]
        }
    ),
]


class EventIn(BaseModel):
    """Something a user did with an item."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    event_id: Id | None = Field(
        None,
        description="Names the event. A repetition of it counts once; an event without a name "
        "counts as often as it is sent.",
    )
    user: Id
    item: Id = Field(description="May be one that no model knows yet.")
    type: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")] = Field(
        "view",
        description="`view`, `click`, `cart`, `purchase`, `rating`, ... or what the shop calls it. "
        "`impression`, `dismiss`, `dislike`, `skip` and `feedback` are kept and are no part of the "
        "history (setting `not_history`).",
    )
    timestamp: Timestamp | None = Field(
        None,
        description="Unix seconds, or ISO 8601 with a time zone. Default: now. A time in the "
        "future counts as now.",
    )
    value: float | None = Field(None, description="Rating, price, ...: whatever the type means.")
    recommendation_id: Id | None = Field(
        None, description="The answer that this is feedback on; one nobody remembers is accepted."
    )

    def to_event(self, now_ms: int) -> Event:
        """The event, having arrived at `now_ms`."""
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


class StoredEventRow(EventIn):
    """A row of an export."""

    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{32}$")] | None = None
    seed: Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID)] | None = None

    def to_event(self, now_ms: int) -> Event:
        """The event as it was in the store that it comes from."""
        event = super().to_event(now_ms)
        return replace(event, digest=self.digest or event.digest, seed=self.seed)


class EventsRequest(BaseModel):
    """A batch of events: all of it is kept or nothing."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [
                {
                    "events": [
                        {
                            "event_id": "7d1f3c",
                            "user": "A1",
                            "item": "B0012",
                            "type": "click",
                            "timestamp": "2026-11-20T09:30:00Z",
                            "recommendation_id": "0b9c6a5c7f0e4c7c8d0f6a54f2f0a6f1",
                        }
                    ]
                }
            ]
        },
    )

    events: list[EventIn] = Field(max_length=MAX_EVENTS)


class EventsResponse(BaseModel):
    """What became of a batch. It is on disk, and in the next recommendation."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"accepted": 1, "duplicates": 0, "ignored": 0, "unlinked": 0}]
        }
    )

    accepted: int = Field(description="Written now.")
    duplicates: int = Field(description="There already, with the same content.")
    ignored: int = Field(
        description="Left out: their user was erased after the time that they bear."
    )
    unlinked: int = Field(
        description="Accepted, but nobody remembers the recommendation that they name."
    )


class HistoryEvent(BaseModel):
    """An event of a user."""

    event_id: str | None = Field(description="None for one of an imported data set.")
    item: str
    title: str | None = Field(description="None for an item that the model does not know.")
    type: str
    timestamp: float = Field(description="Unix seconds.")
    value: float | None
    recommendation_id: str | None
    linked: bool | None = Field(
        description="Whether its recommendation was remembered; null where it names none."
    )


class UserHistory(BaseModel):
    """What a user did, newest first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user": "A1",
                    "events": [
                        {
                            "event_id": "7d1f3c",
                            "item": "B0012",
                            "title": "Almond soap",
                            "type": "click",
                            "timestamp": 1795167000.0,
                            "value": None,
                            "recommendation_id": "0b9c6a5c7f0e4c7c8d0f6a54f2f0a6f1",
                            "linked": True,
                        }
                    ],
                    "next": None,
                }
            ]
        }
    )

    user: str
    events: list[HistoryEvent]
    next: str | None = Field(description="`before` of the next page; null on the last.")


class HistoryQuery(BaseModel):
    """Query parameters of a user's history."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(100, ge=1, le=MAX_PAGE)
    before: str | None = Field(
        None, pattern=r"^[0-9]{1,15}-[0-9]{1,18}$", description="`next` of the page before."
    )


class UserList(BaseModel):
    """Some users with events, by id."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"users": ["A1", "A2"]}]})

    users: list[str]


class UsersQuery(BaseModel):
    """Query parameters of the list of users."""

    model_config = ConfigDict(extra="forbid")

    limit: int = Field(20, ge=1, le=MAX_PAGE)
    prefix: str = Field("", max_length=MAX_ID, description="Of their ids.")


def page(
    user_id: str, events: list[StoredEvent], limit: int, titles: dict[str, str]
) -> UserHistory:
    """The wire form of a page of at most `limit` events."""
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
