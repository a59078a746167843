"""Items on the wire: reading, changing and ranking the catalog."""

from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from recsys.serving.schemas.common import (
    CHAMPION,
    CODES,
    MAX_K,
    Alias,
    Body,
    Column,
    FailFast,
    ItemId,
    K,
    ModelRef,
    Query,
    made,
    metadata,
)
from recsys.serving.schemas.lists import ListedItem
from recsys.serving.schemas.recommendations import ONE_SUBJECT, Subject

if TYPE_CHECKING:
    from recsys.live_catalog import EpochCatalog

MAX_PAGE = 200
MAX_UPSERT = 1_000
MAX_RANK = 1_000
_Word = Annotated[str, StringConstraints(max_length=1_000)]
_Scalar = bool | int | float | _Word


def _attribute(value: object, check: ValidatorFunctionWrapHandler) -> object:
    """Report a value that is of no kind once, and not for each kind that it might be of."""
    try:
        return check(value)
    except ValidationError:
        raise PydanticCustomError("attribute", _ATTRIBUTE_KINDS) from None


_ATTRIBUTE_KINDS = (
    "want text of at most 1000 characters, a finite number, true, false, a list of these, or null"
)
Attribute = Annotated[
    _Scalar | Annotated[list[_Scalar], FailFast] | None, WrapValidator(_attribute)
]


class Item(BaseModel):
    """An item of the catalog."""

    item_id: str
    title: str
    semantic_id: list[int] = Field(description="Codes, coarse to fine, 0-based.")
    metadata: dict[str, Any] = Field(description="Attributes.")

    @classmethod
    def of(cls, catalog: "EpochCatalog", row: int) -> Self:
        """The item of a row of the catalog."""
        values = {
            "item_id": catalog.item_id(row),
            "title": catalog.title(row),
            "semantic_id": catalog.codes[row].tolist(),
            "metadata": metadata(catalog, row),
        }
        if "text" in cls.model_fields:
            values["text"] = str(catalog.row(row)["text"] or "")
        return made(cls, values)


class DescribedItem(Item):
    """An item of the catalog with its text."""

    text: str = Field(
        description="Its description, from which its semantic ID is computed; may be empty."
    )


class ItemQuery(Query):
    """Query parameters of a page of the catalog."""

    prefix: Annotated[str, StringConstraints(pattern=CODES)] = Field(
        "",
        description="First codes of the semantic ID, with dots: `3.0`.",
        examples=["3", "3.0"],
    )
    q: Annotated[str, StringConstraints(max_length=200)] = Field(
        "", description="Text that the id or the title contains, case-insensitive."
    )
    limit: int = Field(50, ge=1, le=MAX_PAGE, description="Items per page.")
    cursor: Annotated[
        str,
        StringConstraints(pattern=r"^([0-9]{1,9}([.][0-9]{1,9}){0,31}-[^\x00-\x1F\x7F]{1,256})?$"),
    ] = Field("", description="`next` of the previous page.", examples=["3.0.1-B0077"])
    model: Alias = CHAMPION


class Branch(BaseModel):
    """A code that follows a prefix."""

    code: int
    items: int = Field(description="Number of items below it.")


class ItemPage(BaseModel):
    """A page of the catalog, in the order of semantic IDs."""

    items: list[Item]
    total: int = Field(description="Number of matches on all pages.")
    next: str | None = Field(description="Cursor of the next page; null on the last.")
    prefix: list[int]
    children: list[Branch] = Field(description="Codes that follow the prefix.")


class ItemBody(Body):
    """An item to add or to replace."""

    item_id: ItemId = Field(examples=["B9001"])
    title: str = Field("", max_length=1_000, examples=["Rose hand cream"])
    text: str = Field(
        "",
        max_length=100_000,
        description="Text from which its semantic ID is computed.",
        examples=["50 ml, with shea butter"],
    )
    attributes: dict[Column, Attribute] = Field(
        {},
        max_length=200,
        description="Attributes for filters.",
        examples=[{"price": 4.5, "categories": ["Hand Cream"]}],
    )
    semantic_id: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast] | None = Field(
        None, min_length=1, max_length=32, description="Its codes; by default they are computed."
    )
    like: ItemId | None = Field(
        None, description="An item whose semantic ID it shares, if no codes can be computed."
    )


class ItemPatch(Body):
    """Changes of an item: what is not given stays."""

    title: str | None = Field(None, max_length=1_000, examples=["Rose hand cream, 75 ml"])
    text: str | None = Field(None, max_length=100_000)
    attributes: dict[Column, Attribute] = Field(
        {},
        max_length=200,
        description="Attributes to set, by name; null removes one.",
        examples=[{"available": False}],
    )


class UpsertBody(Body):
    """Items to add or to replace: all of them, or none if one is refused."""

    items: Annotated[list[ItemBody], FailFast] = Field(min_length=1, max_length=MAX_UPSERT)


class UpsertResponse(BaseModel):
    """The items as the catalog has them now."""

    epoch: int = Field(description="Version of the catalog with these items.")
    items: list[Item]


class ItemChange(BaseModel):
    """An item as the catalog has it now."""

    epoch: int = Field(description="Version of the catalog with this item.")
    item: DescribedItem


class SimilarQuery(Query):
    """Query parameters of similar items."""

    k: K = 10
    model: Alias = CHAMPION


class SimilarResponse(BaseModel):
    """Items similar to one item, best first."""

    model: ModelRef
    item_id: str
    items: list[ListedItem] = Field(max_length=MAX_K)


class RankBody(Subject):
    """Items to rank for a user of the store, or for an inline history."""

    model_config = ConfigDict(
        json_schema_extra={
            **ONE_SUBJECT,
            "examples": [{"history": ["B0012", "B0034"], "items": ["B0077", "B0099"]}],
        }
    )

    items: Annotated[list[ItemId], FailFast] = Field(min_length=1, max_length=MAX_RANK)
    model: Alias = CHAMPION


class RankResponse(BaseModel):
    """The items that the model knows, best first, with the scores of a recommended list."""

    model: ModelRef
    items: list[ListedItem]
    unknown_items: list[str] = Field(description="Requested items that the catalog lacks.")
    history_items: int = Field(description="Number of items of the history that the model knows.")
