"""Recommendations on the wire."""

# Annotations stay live here: pydantic reads them.
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serving.schemas.common import MAX_HISTORY, ItemId, K, ModelRef, UserId

Include = Literal["metadata", "timing"]
ExcludeSeen = Annotated[bool, Field(description="Leave out the items of the history.")]
Includes = Annotated[
    list[Include],
    Field(
        max_length=8,
        description="`metadata` adds each item's attributes, `timing` where the time went.",
    ),
]


class RecommendationsRequest(BaseModel):
    """Top-k for a user of the store, or for a history given inline: exactly one of the two."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "oneOf": [{"required": ["user"]}, {"required": ["history"]}],
            "examples": [
                {"history": ["B0012", "B0034"], "k": 5},
                {"user": "A1", "k": 10, "exclude_items": ["B0099"], "include": ["metadata"]},
            ],
        },
    )

    user: UserId | None = Field(None, description="A user whose history the service has.")
    history: Annotated[list[ItemId], Field(max_length=MAX_HISTORY)] | None = Field(
        None, description="Item ids, oldest first. Ids that the model lacks are passed over."
    )
    k: K = 10
    exclude_seen: ExcludeSeen = True
    exclude_items: list[ItemId] = Field(
        [], max_length=MAX_HISTORY, description="Leave out these items."
    )
    include: Includes = []

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.user is None) == (self.history is None):
            raise ValueError("give exactly one of 'user' and 'history'")
        return self


class UserQuery(BaseModel):
    """Query parameters of a known user's recommendations."""

    model_config = ConfigDict(extra="forbid")

    k: K = 10
    exclude_seen: ExcludeSeen = True
    include: Includes = []


class RecommendedItem(BaseModel):
    """One recommended item."""

    item_id: str
    score: float = Field(description="Log-probability of its semantic ID given the history.")
    title: str
    rank: int = Field(ge=1)
    source: Literal["model"] = Field("model", description="What proposed it.")
    metadata: dict[str, Any] | None = Field(None, description="Attributes, if asked for.")


class Note(BaseModel):
    """Something about the answer that a caller should know."""

    code: Literal["empty_history", "unknown_history"]
    detail: str


class Timing(BaseModel):
    """Where the time went, in milliseconds, and what the decoder counted."""

    total_ms: float
    history_ms: float = Field(description="Reading the user's history.")
    queue_ms: float = Field(description="Waiting for the worker.")
    compute_ms: float = Field(description="The whole batch's computation.")
    batch_size: int = Field(description="Requests computed together.")
    decode: dict[str, float] = Field(description="Counters of the decoder for this request.")


class RecommendationsResponse(BaseModel):
    """An answer, best item first; shorter than k where the catalogue has no more."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "recommendation_id": "0b9c6a5c7f0e4c7c8d0f6a54f2f0a6f1",
                    "model": {"name": "demo", "version": "3f2a9c0d1b7e4a55"},
                    "items": [
                        {
                            "item_id": "B0077",
                            "score": -3.2,
                            "title": "Rose hand cream",
                            "rank": 1,
                            "source": "model",
                        }
                    ],
                    "history_items": 2,
                    "unknown_items": [],
                    "eligible_items": 598,
                    "note": None,
                }
            ]
        }
    )

    recommendation_id: str = Field(description="Names this answer, for feedback.")
    model: ModelRef
    items: list[RecommendedItem]
    history_items: int = Field(description="Items of the history that the model knows.")
    unknown_items: list[str] = Field(description="Items of the history that it does not.")
    eligible_items: int = Field(description="Items that could have been recommended.")
    note: Note | None
    timing: Timing | None = None
