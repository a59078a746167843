"""Filters and boosts on the wire; what they mean is `recsys.constraint.filters`' business."""

# Annotations stay live here: pydantic reads them.
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from recsys.serving.schemas.common import CHAMPION, Alias, Body, InvalidField

MAX_BOOSTS = 100
EXAMPLE: dict[str, Any] = {
    "must": [{"key": "price", "range": {"lt": 20}}],
    "must_not": [{"key": "categories", "match": "Nails"}],
}
_PARTS = {"type": "array", "items": {"type": "object"}}

Filter = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "description": "All of `must`, one of `should` (if there are any), none of "
            "`must_not`; each a list of clauses or of such groups. A clause has a `key` and one "
            "of `match`, `any`, `range` (`gt`, `gte`, `lt`, `lte`) and `exists`.",
            "properties": {"must": _PARTS, "should": _PARTS, "must_not": _PARTS},
            "additionalProperties": False,
            "examples": [EXAMPLE],
        }
    ),
]


class Boost(Body):
    """What the items that fit a filter gain."""

    filter: Filter
    weight: float = Field(ge=-1000, le=1000, description="Added to the log-probability.")


class FilterCheck(Body):
    """A filter to look at, and boosts."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"filter": EXAMPLE}]})

    filter: Filter = Field({}, description="The empty one allows everything.")
    boosts: list[Boost] = Field([], max_length=MAX_BOOSTS)
    model: Alias = CHAMPION


class FilterReport(BaseModel):
    """What a filter comes to; an invalid one is no error here."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "valid": True,
                    "eligible_items": 120,
                    "items": 600,
                    "canonical": EXAMPLE,
                    "problems": [],
                }
            ]
        }
    )

    valid: bool
    eligible_items: int | None = Field(description="Items that fit; null if it is not valid.")
    items: int = Field(description="Items of the catalog.")
    canonical: dict[str, Any] | None = Field(
        description="An equal filter in the form that is kept: sorted, nothing twice."
    )
    problems: list[InvalidField]
