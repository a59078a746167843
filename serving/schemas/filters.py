"""Filters and boosts on the wire; `recsys.constraint.filters` defines their meaning."""

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from recsys.serving.schemas.common import Body

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
    """An addition to the scores of the items that match a filter."""

    filter: Filter
    weight: float = Field(ge=-1000, le=1000, description="Added to the log-probability.")
