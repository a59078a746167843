"""Texts on the wire."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from recsys.serving.schemas.common import Body

MAX_PROMPT = 2_000  # characters, and tokens: attention over them takes quadratic work
MAX_TOKENS = 512


class TextsRequest(Body):
    """A prompt, and the texts that may follow it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"prompt": "Colour of the item, as JSON: ", "format": "colour"}]
        }
    )

    prompt: str = Field(min_length=1, max_length=MAX_PROMPT)
    format: str = Field(description="A name of `text_formats` of /v1/models.")
    max_tokens: int = Field(
        64, ge=1, le=MAX_TOKENS, description="Tokens of the text, the end token included."
    )


class TextsResponse(BaseModel):
    """A text of a format."""

    text: str = Field(description="Without the prompt.")
    value: Any = Field(
        None,
        description="The value of a finished text of a JSON schema, if it keeps the rules for "
        "bodies.",
    )
    finished: bool = Field(
        description="Whether the text is complete; otherwise it was cut at `max_tokens`."
    )
    tokens: int = Field(description="Tokens of the text, the end token included.")
    forced_tokens: int = Field(
        description="Those of them that had no alternative and needed no pass of the model."
    )
