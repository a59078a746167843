"""Items on the wire: the catalog read, changed, and ranked."""

# Annotations stay live here: pydantic reads them.
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from recsys.serving.schemas.common import (
    CHAMPION,
    MAX_K,
    MODEL_EXAMPLE,
    Alias,
    Body,
    ItemId,
    K,
    ModelRef,
    Source,
)
from recsys.serving.schemas.recommendations import ONE_SUBJECT, Subject

MAX_PAGE = 200
MAX_UPSERT = 1_000
MAX_RANK = 1_000
_Word = Annotated[str, StringConstraints(max_length=1_000)]
_Scalar = bool | int | float | _Word
Attribute = _Scalar | list[_Scalar] | None


class Item(BaseModel):
    """An item of the catalog."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "item_id": "B0077",
                    "title": "Rose hand cream",
                    "semantic_id": [3, 0, 7],
                    "metadata": {"price": 4.5, "categories": ["Hand Cream"]},
                }
            ]
        }
    )

    item_id: str
    title: str
    semantic_id: list[int] = Field(description="Codes, coarse to fine, 0-based.")
    metadata: dict[str, Any] = Field(description="Attributes.")


class ItemQuery(BaseModel):
    """Query parameters of a look through the catalog."""

    model_config = ConfigDict(extra="forbid")

    prefix: Annotated[str, StringConstraints(pattern=r"^(\d{1,6}([.,]\d{1,6}){0,31})?$")] = Field(
        "",
        description="First codes of the semantic ID, with dots: `3.0`.",
        examples=["3", "3.0"],
    )
    q: Annotated[str, StringConstraints(max_length=200)] = Field(
        "", description="Text that the id or the title contains, in any case."
    )
    limit: int = Field(50, ge=1, le=MAX_PAGE, description="Items on a page.")
    cursor: Annotated[str, StringConstraints(pattern=r"^\d{0,18}$")] = Field(
        "", description="`next` of the page before."
    )
    model: Alias = CHAMPION


class Branch(BaseModel):
    """One code that goes on from a prefix."""

    code: int
    items: int = Field(description="Items below it.")


class ItemPage(BaseModel):
    """A page of the catalog, in the order of semantic IDs."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "items": [
                        {
                            "item_id": "B0077",
                            "title": "Rose hand cream",
                            "semantic_id": [3, 0, 7],
                            "metadata": {"price": 4.5},
                        }
                    ],
                    "total": 38,
                    "next": "1",
                    "prefix": [3, 0],
                    "children": [{"code": 7, "items": 2}],
                }
            ]
        }
    )

    items: list[Item]
    total: int = Field(description="Items that match, on all pages.")
    next: str | None = Field(description="Cursor of the next page; null on the last.")
    prefix: list[int]
    children: list[Branch] = Field(description="Codes that follow the prefix.")


class ItemBody(Body):
    """An item to put into the catalog, or to put in another's place."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "title": "Rose hand cream",
                    "text": "50 ml, with shea butter",
                    "attributes": {"price": 4.5, "categories": ["Hand Cream"]},
                }
            ]
        }
    )

    title: str = Field("", max_length=10_000)
    text: str = Field("", max_length=100_000, description="What its semantic ID is made from.")
    attributes: dict[ItemId, Attribute] = Field(
        {}, max_length=200, description="By which filters find it."
    )
    semantic_id: list[Annotated[int, Field(ge=0, lt=2**31)]] | None = Field(
        None, min_length=1, max_length=32, description="Its codes; by default they are computed."
    )
    like: ItemId | None = Field(
        None, description="An item whose semantic ID it shares, if no codes can be computed."
    )


class NewItemBody(ItemBody):
    """An item with its id."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"item_id": "B9001", "title": "Rose hand cream", "like": "B0012"}]
        }
    )

    item_id: ItemId


class UpsertRequest(Body):
    """Items to put into the catalog: all of them, or none if one is refused."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"items": [{"item_id": "B9001", "title": "Rose hand cream", "like": "B0012"}]}
            ]
        }
    )

    items: list[NewItemBody] = Field(min_length=1, max_length=MAX_UPSERT)


class UpsertResponse(BaseModel):
    """The items as they are recommended from now on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "epoch": 4,
                    "items": [
                        {
                            "item_id": "B9001",
                            "title": "Rose hand cream",
                            "semantic_id": [3, 0, 8],
                            "metadata": {"price": 4.5},
                        }
                    ],
                }
            ]
        }
    )

    epoch: int = Field(description="State of the catalog that has them.")
    items: list[Item]


class ItemChange(BaseModel):
    """One item as it is recommended from now on."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "epoch": 4,
                    "item": {
                        "item_id": "B9001",
                        "title": "Rose hand cream",
                        "semantic_id": [3, 0, 8],
                        "metadata": {"price": 4.5},
                    },
                }
            ]
        }
    )

    epoch: int = Field(description="State of the catalog that has it.")
    item: Item


class SimilarQuery(BaseModel):
    """Query parameters of similar items."""

    model_config = ConfigDict(extra="forbid")

    k: K = 10
    model: Alias = CHAMPION


class ScoredItem(BaseModel):
    """An item in an order."""

    item_id: str
    score: float
    title: str
    rank: int = Field(ge=1)
    source: Source


class SimilarResponse(BaseModel):
    """Items that go with one item, best first."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": MODEL_EXAMPLE,
                    "item_id": "B0012",
                    "items": [
                        {
                            "item_id": "B0077",
                            "score": 0.31,
                            "title": "Rose hand cream",
                            "rank": 1,
                            "source": "retrieval",
                        }
                    ],
                }
            ]
        }
    )

    model: ModelRef
    item_id: str
    items: list[ScoredItem] = Field(max_length=MAX_K)


class RankRequest(Subject):
    """Items to put in order for a user of the store, or for a history given inline."""

    model_config = ConfigDict(
        json_schema_extra={
            **ONE_SUBJECT,
            "examples": [{"history": ["B0012", "B0034"], "items": ["B0077", "B0099"]}],
        }
    )

    items: list[ItemId] = Field(min_length=1, max_length=MAX_RANK)
    model: Alias = CHAMPION


class RankResponse(BaseModel):
    """The items that the model knows, most probable first; scores are exact log-probabilities."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": MODEL_EXAMPLE,
                    "items": [
                        {
                            "item_id": "B0077",
                            "score": -3.2,
                            "title": "Rose hand cream",
                            "rank": 1,
                            "source": "model",
                        }
                    ],
                    "unknown_items": ["B0099"],
                    "history_items": 2,
                }
            ]
        }
    )

    model: ModelRef
    items: list[ScoredItem]
    unknown_items: list[str] = Field(description="Given items that the catalog lacks.")
    history_items: int = Field(description="Items of the history that the model knows.")
