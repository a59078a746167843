"""The figures of today on the wire."""

from pydantic import BaseModel, Field

from recsys.serving.schemas.common import Answer, Query


class TodayQuery(Query):
    """Query parameters of the figures of today."""

    days: int = Field(1, ge=1, le=7, description="Length of the period, which ends now.")


class Rate(BaseModel):
    """How many answers led to an event of a type."""

    type: str = Field(description="Type of the event.", examples=["click"])
    followed: int = Field(
        description="Answers whose user sent an event of the type with their `recommendation_id`.",
        examples=[31],
    )
    rate: float | None = Field(
        description="Their share of the answers; null without any.", examples=[0.062]
    )
    low: float | None = Field(
        description="Lower end of its interval, in which the answers of one user count as "
        "dependent; null with fewer than two users.",
        examples=[0.043],
    )
    high: float | None = Field(description="Upper end of its interval.", examples=[0.088])


class Slots(BaseModel):
    """The period in equal parts, oldest first."""

    seconds: float = Field(description="Length of a part.", examples=[3600.0])
    answers: list[int] = Field(examples=[[21, 34]])
    followed: list[int] = Field(
        description="Answers with an event that belongs to a history, such as a click.",
        examples=[[1, 3]],
    )


class Coverage(BaseModel):
    """How much of the catalog was recommended."""

    items: int = Field(description="Items that can be recommended now.", examples=[600])
    shown: int = Field(description="Those that were in an answer.", examples=[412])
    never_shown: int = Field(description="Those that were in none.", examples=[188])
    never_followed: int = Field(
        description="Those that were in an answer, and no event came of it.", examples=[310]
    )


class ItemFigures(BaseModel):
    """An item in the answers of the period."""

    item_id: str = Field(examples=["B0077"])
    title: str = Field(examples=["Rose hand cream"])
    shown: int = Field(description="Answers that had it.", examples=[57])
    followed: int = Field(
        description="Answers that had it and led to an event on it, such as a click.", examples=[4]
    )
    people: int = Field(
        description="Users with an event on it, wherever they found it.", examples=[9]
    )


class Trend(BaseModel):
    """An item with many recent events."""

    item_id: str = Field(examples=["B0077"])
    title: str = Field(examples=["Rose hand cream"])
    score: float = Field(
        description="Sum over users of 0.5 to the power of the age of their last event in "
        "half-lives (6 hours for each day of the period).",
        examples=[7.2],
    )
    people: int = Field(description="Users with an event on it.", examples=[9])
    shown: int = Field(description="Answers that had it.", examples=[57])


class Today(Answer):
    """What was recommended in a period that ends now, and what came of it.

    An answer that was given need not have been seen.
    """

    since_ms: int = Field(
        description="Start of the period, in unix milliseconds.", examples=[1_700_000_000_000]
    )
    until_ms: int = Field(
        description="Its end: when the figures were made.", examples=[1_700_086_400_000]
    )
    answers: int = Field(
        description="Recommendations that were given. Batches of users scored offline do not "
        "count.",
        examples=[500],
    )
    answers_complete: bool = Field(
        description="Whether the store remembers all answers of the period.", examples=[True]
    )
    people: int = Field(description="Users with an answer.", examples=[140])
    answers_without_user: int = Field(
        description="Answers to an inline history; each counts as a user of its own.", examples=[12]
    )
    events: int = Field(description="Events of the period that were looked at.", examples=[2_300])
    events_complete: bool = Field(
        description="Whether these are all; only the newest are looked at.", examples=[True]
    )
    level: float = Field(description="Confidence level of the intervals.", examples=[0.95])
    rates: list[Rate] = Field(description="`click`, `purchase`, then other types of events.")
    slots: Slots
    coverage: Coverage
    most_shown: list[ItemFigures]
    never_shown: list[ItemFigures] = Field(
        description="Some of the items that were in no answer; first those with most users."
    )
    never_followed: list[ItemFigures] = Field(
        description="Items that were in an answer without an event on them, most shown first."
    )
    trending: list[Trend]
