"""The figures of today on the wire."""

from pydantic import BaseModel, Field

from recsys.serving.schemas.common import Query


class TodayQuery(Query):
    """Query parameters of the figures of today."""

    days: int = Field(1, ge=1, le=7, description="Length of the period, which ends now.")


class Rate(BaseModel):
    """How many answers led to an event of a type."""

    type: str = Field(description="Type of the event.")
    followed: int = Field(
        description="Answers whose user sent an event of the type with their `recommendation_id`."
    )
    rate: float | None = Field(description="Their share of the answers; null without any.")
    low: float | None = Field(
        description="Lower end of its interval, in which the answers of one user count as "
        "dependent; null with fewer than two users."
    )
    high: float | None = Field(description="Upper end of its interval.")


class Coverage(BaseModel):
    """How much of the catalog was recommended."""

    items: int = Field(description="Items that can be recommended now.")
    shown: int = Field(description="Those that were in an answer.")
    never_shown: int = Field(description="Those that were in none.")
    never_followed: int = Field(
        description="Those that were in an answer, and no event came of it."
    )


class ItemFigures(BaseModel):
    """An item in the answers of the period."""

    item_id: str
    title: str
    shown: int = Field(description="Answers that had it.")
    followed: int = Field(
        description="Answers that had it and led to an event on it, such as a click."
    )
    people: int = Field(description="Users with an event on it, wherever they found it.")


class Today(BaseModel):
    """What was recommended in a period that ends now, and what came of it.

    An answer that was given need not have been seen.
    """

    since_ms: int = Field(description="Start of the period, in unix milliseconds.")
    until_ms: int = Field(description="Its end: when the figures were made.")
    answers: int = Field(
        description="Recommendations that were given. Batches of users scored offline do not count."
    )
    answers_complete: bool = Field(
        description="Whether the store remembers all answers of the period."
    )
    people: int = Field(description="Users with an answer.")
    answers_without_user: int = Field(
        description="Answers to an inline history; each counts as a user of its own."
    )
    events: int = Field(description="Events of the period that were looked at.")
    events_complete: bool = Field(
        description="Whether these are all; only the newest are looked at."
    )
    level: float = Field(description="Confidence level of the intervals.")
    rates: list[Rate] = Field(description="`click`, `purchase`, then other types of events.")
    coverage: Coverage
    most_shown: list[ItemFigures]
    never_shown: list[ItemFigures] = Field(
        description="Some of the items that were in no answer; first those with most users."
    )
    never_followed: list[ItemFigures] = Field(
        description="Items that were in an answer without an event on them, most shown first."
    )
