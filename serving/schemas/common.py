"""What several parts of the wire format share: ids, limits, health, problems."""

# Annotations stay live here: pydantic reads them.
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from pydantic.config import JsonDict

MAX_K = 200
MAX_HISTORY = 2_000
MAX_ID = 256
CHAMPION = "champion"

# Outside ids are any text without control characters: PostgreSQL has no NUL in texts, and the
# others are slips that no log or terminal shows.
NO_CONTROLS = r"^[^\x00-\x1F\x7F]+$"
Id = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID, pattern=NO_CONTROLS)]
ItemId = Id
UserId = Id
AliasName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
K = Annotated[int, Field(ge=1, le=MAX_K, description="Items wanted.")]
Alias = Annotated[AliasName, Field(description="Alias of the model to ask.")]
Certificate = Literal["global-exact", "beam-exact", "approximate"]
Source = Literal["model", "retrieval", "popular"]


class Body(BaseModel):
    """A request's body: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ModelRef(BaseModel):
    """The model that answered."""

    name: str = Field(description="Its bundle.")
    version: str = Field(description="Digest of the bundle.")
    alias: str | None = Field(None, description="The alias by which it was asked.")
    epoch: int | None = Field(
        None, description="State of its live catalog; it grows with each change."
    )


MODEL_EXAMPLE: JsonDict = {
    "name": "demo",
    "version": "3f2a9c0d1b7e4a55",
    "alias": "champion",
    "epoch": 0,
}


class Health(BaseModel):
    """A health check that passed."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ready"}]})

    status: Literal["live", "ready"]


class InvalidField(BaseModel):
    """One field that was refused."""

    location: Literal["body", "query", "path", "header"]
    pointer: str = Field(description="JSON pointer within the location.")
    detail: str


class Problem(BaseModel):
    """An error (RFC 9457). `code` is stable; `title` and `detail` are for people."""

    type: str = Field(description="`urn:recsys:problem:` and the code.")
    title: str
    status: int
    code: str
    detail: str
    request_id: str | None = Field(None, description="As in the header X-Request-ID.")
    errors: list[InvalidField] | None = Field(None, description="Refused fields.")
