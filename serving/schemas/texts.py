"""Texts on the wire."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from recsys.serving.schemas.common import CHAMPION, Alias, Body, ModelRef

MAX_PROMPT = 2_000  # characters: a prompt is one pass, which nothing interrupts
MAX_SOURCE = 8_000  # characters
MAX_TOKENS = 512
MAX_TITLES = 20


class TitleFormat(Body):
    """Titles of the live catalog, those with the highest probability."""

    type: Literal["title"]
    limit: int = Field(5, ge=1, le=MAX_TITLES, description="Number of titles to return.")


class SubstringFormat(Body):
    """A part of a text, possibly empty."""

    type: Literal["substring"]
    text: str = Field(
        min_length=1, max_length=MAX_SOURCE, examples=["Rinse before use. Store in a cool place."]
    )
    unit: Literal["characters", "words"] = Field(
        "characters", description="Between which the part may begin and end."
    )


def _kind(value: Any) -> Any:
    """Whether a format is a name, or the type of an object."""
    if isinstance(value, dict):
        return value.get("type")
    return "name" if isinstance(value, str) else getattr(value, "type", None)


Format = Annotated[
    Annotated[str, Tag("name")]
    | Annotated[TitleFormat, Tag("title")]
    | Annotated[SubstringFormat, Tag("substring")],
    Discriminator(
        _kind,
        custom_error_type="format",
        custom_error_message="give the name of a format, or an object whose type is title or "
        "substring",
    ),
    Field(description="A name of `text_formats` of /v1/models, titles, or a part of a text."),
]


class TextsRequest(Body):
    """A prompt, and the texts that may follow it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"prompt": "A gift for a gardener: ", "format": {"type": "title", "limit": 3}},
                {"prompt": "Colour of the item, as JSON: ", "format": "colour"},
            ]
        }
    )

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT)
    format: Format
    max_tokens: int = Field(
        64, ge=1, le=MAX_TOKENS, description="Tokens of a text, the end token included."
    )
    model: Alias = CHAMPION


class WrittenTitle(BaseModel):
    """A title of the catalog."""

    title: str
    score: float = Field(description="Its log-probability.")
    item_ids: list[str] = Field(description="All items of this title.")


class TextsResponse(BaseModel):
    """Titles for the format `title`; a text for the others."""

    model: ModelRef = Field(description="The model whose catalog has the titles.")
    text_model: str = Field(description="Name of the folder of the text model.")
    titles: list[WrittenTitle] | None = Field(
        None, description="Best first, each once; may be fewer than asked for, or none."
    )
    text: str | None = Field(None, description="Without the prompt.")
    value: Any = Field(
        None,
        description="The value of a finished text of a JSON schema, if it keeps the rules for "
        "bodies.",
    )
    finished: bool | None = Field(
        None, description="Whether the text is complete; otherwise it was cut at `max_tokens`."
    )
    tokens: int | None = Field(None, description="Tokens of the text, the end token included.")
    forced_tokens: int | None = Field(
        None, description="Those of them that had no alternative and needed no pass of the model."
    )
