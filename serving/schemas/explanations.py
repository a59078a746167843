"""Explanations on the wire."""

from typing import Annotated

from pydantic import ConfigDict, Field

from recsys.serving.schemas.common import CHAMPION, Alias, Answer, First, ItemId, ModelRef
from recsys.serving.schemas.recommendations import ONE_SUBJECT, Subject

MAX_EXPLAINED = 10


class ExplanationsRequest(Subject):
    """Items to explain to a user of the store, or for an inline history."""

    model_config = ConfigDict(
        json_schema_extra={
            **ONE_SUBJECT,
            "examples": [{"history": ["B0012", "B0034"], "items": ["B0077"]}],
        }
    )

    items: Annotated[list[ItemId], First] = Field(min_length=1, max_length=MAX_EXPLAINED)
    model: Alias = CHAMPION


class QuotedItem(Answer):
    """An item of the history that an explanation names."""

    item_id: str = Field(examples=["B0012"])
    title: str = Field(examples=["Rose soap"])


class ExplainedItem(Answer):
    """Why an item may be of interest."""

    item_id: str = Field(examples=["B0077"])
    title: str = Field(examples=["Rose hand cream"])
    because: list[QuotedItem] = Field(
        description="Items of the history that the reason refers to, each once; may be empty."
    )
    reason: str = Field(
        description="The text model's own words; nothing checks that they are true.",
        examples=["It has the scent of the soap that you liked."],
    )


class ExplanationsResponse(Answer):
    """An explanation of each item that the catalog has a title of, in the order of the request."""

    model: ModelRef
    text_model: str = Field(
        description="Name of the folder of the text model.", examples=["llama-1b"]
    )
    explanations: list[ExplainedItem]
    unknown_items: list[str] = Field(
        description="Requested items that the catalog lacks.", examples=[["B0099"]]
    )
    untitled_items: list[str] = Field(
        description="Requested items without a title, which cannot be explained.", examples=[[]]
    )
