"""Changes of items and events on the wire: what their readers ask for, and the lines of events."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, StringConstraints

from recsys.serving.schemas.common import Query

MAX_ITEMS = 200
MAX_EVENTS = 1_000
AFTER = "`cursor` of the last line that was read; by default from the beginning."
LIMIT = "Lines at most."
Wait = Annotated[
    float,
    Field(
        ge=0,
        le=30,
        description="Seconds to wait if there is no line yet. The answer comes earlier where the "
        "deadline of requests ends earlier.",
    ),
]


class ItemChangesQuery(Query):
    """Query parameters of changes of items."""

    after: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16}-[0-9]{1,18})?$")] = Field(
        "", description=AFTER
    )
    limit: int = Field(100, ge=1, le=MAX_ITEMS, description=LIMIT)
    wait: Wait = 0.0


class EventChangesQuery(Query):
    """Query parameters of changes of events."""

    after: Annotated[
        str, StringConstraints(pattern=r"^([0-9a-f]{16}-e[0-9]{1,18}([.][0-9]{1,18})?)?$")
    ] = Field("", description=AFTER)
    limit: int = Field(100, ge=1, le=MAX_EVENTS, description=LIMIT)
    wait: Wait = 0.0


class EventRecord(BaseModel):
    """A line of changes of events: an event that was stored, or the erasure of a user."""

    cursor: str = Field(examples=["3f2a9c0d1b7e4a55-e17"])
    op: Literal["append", "erase"] = Field(
        description="`append`: an event. `erase`: delete all earlier events with this `user_hash`."
    )
    user_hash: str | None = Field(
        None,
        description="The same for all events of a user of this store.",
        examples=["9b1f0c6d2e8a4b7790d3c1e5f6a7b8c9"],
    )
    user: str | None = Field(None, examples=["A1"])
    event_id: str | None = Field(None, examples=["7d1f3c"])
    item: str | None = Field(None, examples=["B0012"])
    type: str | None = Field(None, examples=["click"])
    timestamp: float | None = Field(
        None, description="Unix seconds, of the event or of the erasure.", examples=[1795167000.0]
    )
    value: float | None = None
    recommendation_id: str | None = None
