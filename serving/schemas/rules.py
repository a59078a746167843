"""Business rules on the wire; `recsys.rules` defines their meaning."""

from typing import Annotated, Any, Self

from pydantic import BaseModel, Field, StringConstraints, WithJsonSchema, model_validator

from recsys.arguments import MOST_CAPS, MOST_PINS
from recsys.constraint.filters import MOST_BOOSTS, MOST_WEIGHT
from recsys.serving.schemas.common import MAX_K, NAME, Body, Column, ItemId

MAX_RULES = 16  # of one request, or of one alias
RuleName = Annotated[str, StringConstraints(pattern=NAME), Field(examples=["summer"])]
RuleNames = Annotated[list[RuleName], Field(max_length=MAX_RULES)]
_BURY: dict[str, Any] = {
    "filter": {"must": [{"key": "brand", "match": "Acme"}]},
    "weight": -2.0,
}


FILTER_EXAMPLE: dict[str, Any] = {
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
            "examples": [FILTER_EXAMPLE],
        }
    ),
]


class Boost(Body):
    """An addition to the scores of the items that match a filter."""

    filter: Filter
    weight: float = Field(
        ge=-MOST_WEIGHT, le=MOST_WEIGHT, description="Added to the log-probability."
    )


class RuleParts(BaseModel):
    """What a rule asks of the lists that it applies to."""

    filter: Filter | None = Field(
        None, description="Recommend only items that match.", examples=[FILTER_EXAMPLE]
    )
    boosts: list[Boost] = Field(
        [],
        max_length=MOST_BOOSTS,
        description="Weights added to the scores of the items that match a filter; a negative one "
        "buries them.",
        examples=[[_BURY]],
    )
    pin: list[ItemId] = Field(
        [],
        max_length=MOST_PINS,
        description="Items that take the first places, in this order, if the request's filter and "
        "exclusions, availability and `max_per` allow them.",
        examples=[["B0077"]],
    )
    max_per: dict[Column, Annotated[int, Field(ge=1, le=MAX_K)]] = Field(
        {},
        max_length=MOST_CAPS,
        description="By attribute: how many items of a list may have the same value of it.",
        examples=[{"brand": 2}],
    )


class RuleBody(Body, RuleParts):
    """A rule: at least one of `filter`, `boosts`, `pin` and `max_per`."""

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if not (self.filter or self.boosts or self.pin or self.max_per):
            raise ValueError("give at least one of 'filter', 'boosts', 'pin' and 'max_per'")
        return self


class RuleInfo(RuleParts):
    """A rule and its last change."""

    name: RuleName
    time_ms: int = Field(description="Unix milliseconds of its last change.")
    by: str | None = Field(description="Name of the key that made it; null without keys.")
    aliases: list[str] = Field(description="Aliases whose requests it always applies to.")


class RuleList(BaseModel):
    """Rules, sorted by name."""

    rules: list[RuleInfo]
