"""Lists for a storefront on the wire."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema

from recsys.serving.bodies import MalformedError, parse
from recsys.serving.schemas.common import (
    CHAMPION,
    Alias,
    ItemId,
    K,
    ModelRef,
    Note,
    Query,
)

MAX_FILTER = 4_000  # characters; a target has 8 KiB
MAX_BASKET = 50  # items of a basket or of a session in a query

ListName = Literal["trending", "latest", "together"]


def _object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    if len(text) > MAX_FILTER:
        raise ValueError(f"has more than {MAX_FILTER:,} characters")
    try:
        value = parse(text.encode("utf-8", "surrogatepass"))
    except MalformedError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("is not a JSON object")
    return value


FilterText = Annotated[
    dict[str, Any],
    BeforeValidator(_object),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 2,
            "maxLength": MAX_FILTER,
            "description": "A filter as JSON, URL-encoded: as `filter` of POST "
            "/v1/recommendations.",
            "examples": ['{"must":[{"key":"categories","match":"Nails"}]}'],
        }
    ),
]


class ListQuery(Query):
    """Query parameters of every list."""

    k: K = 10
    filter: FilterText | None = None
    include: Annotated[list[Literal["metadata"]], Field(max_length=8)] = Field(
        [], description="`metadata` adds each item's attributes."
    )
    model: Alias = CHAMPION


class TogetherQuery(ListQuery):
    """Query parameters of items that are bought together."""

    item: list[ItemId] = Field(
        min_length=1,
        max_length=MAX_BASKET,
        description="An item, or each of a basket; what the model does not know is ignored.",
        examples=["B0012"],
    )


class ListedItem(BaseModel):
    """An item of a list."""

    item_id: str
    title: str
    rank: int = Field(ge=1)
    score: float | None = Field(
        None,
        description="The higher the better, within one list. `trending`: decayed weights of its "
        "users; `together`: share of the evidence; null for `latest`.",
    )
    time: float | None = Field(
        None,
        description="Unix seconds. `latest`: since when it is available, null if it was added "
        "without a date.",
    )
    because: str | None = Field(
        None, description="`together`: the given item with the most evidence for it."
    )
    metadata: dict[str, Any] | None = Field(None, description="Attributes, if asked for.")


class ListResponse(BaseModel):
    """A list, best item first; shorter than k where there is no more."""

    name: ListName
    model: ModelRef
    items: list[ListedItem]
    eligible_items: int = Field(
        description="Items that could have been listed, whatever is known of them."
    )
    note: Note | None = Field(description="Why the list is empty.")
    since: float | None = Field(
        None, description="`trending`: events from then on count, in unix seconds."
    )
    unknown_items: list[str] | None = Field(
        None, description="`together`: given items that the model does not know."
    )
    rules: list[str] | None = Field(None, description="Rules that were applied, if any were.")
