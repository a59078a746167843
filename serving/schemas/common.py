"""Parts that several schemas share: ids, limits, health, problems."""

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints

from recsys.arguments import spelled

if TYPE_CHECKING:
    from recsys.live_catalog import EpochCatalog

MAX_ID = 256
MAX_K = 200
MAX_HISTORY = 2_000
CHAMPION = "champion"

# An id is any text without control characters: PostgreSQL cannot store NUL, and the others are
# mistakes that no log or terminal shows.
NO_CONTROLS = r"^[^\x00-\x1F\x7F]+$"
NAME = r"^[a-z0-9][a-z0-9_-]{0,63}$"
BUNDLE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
EVENT_TYPE = r"^[^\W_][\w -]{0,31}$"
# Not \d, which is a digit of any script, some of them newer than Python's.
CODES = r"^([0-9]{1,6}([.,][0-9]{1,6}){0,31})?$"
PATTERNS = {  # what they stand for, in errors
    NO_CONTROLS: "an id without control characters (U+0000 to U+001F, U+007F)",
    NAME: "a name: up to 64 of a to z, 0 to 9, _ and -, the first a letter or a digit",
    BUNDLE_NAME: "a bundle's name: up to 128 letters, digits, ., _ and -, the first a letter or a "
    "digit",
    EVENT_TYPE: "a type: up to 32 letters, digits, spaces, _ and -, the first a letter or a digit",
    CODES: "the first codes of a semantic ID, such as 3.0",
}


def before(change: Callable[[str], str]) -> BeforeValidator:
    """Change a text before it is checked."""
    return BeforeValidator(lambda value: change(value) if isinstance(value, str) else value)


Column = Annotated[str, StringConstraints(min_length=1, max_length=MAX_ID, pattern=NO_CONTROLS)]
# Both spellings of a letter in Unicode are one id, as in prepared data.
Id = Annotated[Column, before(spelled)]
ItemId = Id
UserId = Id
AliasName = Annotated[str, StringConstraints(pattern=NAME)]
K = Annotated[int, Field(ge=1, le=MAX_K, description="Number of items to return.")]
# In a body, the first invalid entry of a list is reported: a million of them would take seconds.
FailFast = Field(fail_fast=True)


def optional_list(**more: Any) -> Any:
    """A field that is an empty list by default, as `Field([])`, which is copied each time."""
    return Field(default_factory=list, json_schema_extra={"default": []}, **more)


Alias = Annotated[AliasName, Field(description="Alias of the model that answers.")]
Certificate = Literal["global-exact", "beam-exact", "approximate"]


ModelT = TypeVar("ModelT", bound=BaseModel)


def made(kind: type[ModelT], values: dict[str, Any]) -> ModelT:
    """`kind.model_construct(**values)` without the defaults of the other fields.

    Fields that were not set are left out of a response, and finding their defaults takes most of
    the time of `model_construct`. An answer has a dozen such parts.
    """
    part = kind.__new__(kind)
    for name, value in (
        ("__dict__", values),
        ("__pydantic_fields_set__", set(values)),
        ("__pydantic_extra__", None),
        ("__pydantic_private__", None),
    ):
        object.__setattr__(part, name, value)
    return part


def as_json(answer: BaseModel, items: Iterable[BaseModel] = ()) -> bytes:
    """An answer as JSON, without fields that were not set; a text would take four times that.

    `items` are those of its empty list `items`. They are made and written one by one: other threads
    have Python's lock between two, and only their JSON is in memory.
    """
    text = answer.__pydantic_serializer__.to_json(answer, exclude_unset=True, by_alias=True)
    before, name, behind = text.partition(b'"items":[')  # in a text its quotes would be escaped
    return b"".join((before, name, b",".join(map(as_json, items)), behind))


def metadata(catalog: "EpochCatalog", row: int) -> dict[str, Any]:
    """Attributes of an item; numbers that are not finite become null."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in catalog.attributes(row).items()
    }


class Body(BaseModel):
    """The body of a request: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Query(BaseModel):
    """The query parameters of a request: unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")


class ModelRef(BaseModel):
    """The model that answered."""

    name: str = Field(description="Name of its bundle.")
    version: str = Field(description="Digest of the bundle.")
    alias: str | None = Field(None, description="The alias that the request used.")
    epoch: int | None = Field(
        None, description="Version of its live catalog, which grows with each change."
    )


NoteCode = Literal[
    "unknown_user", "empty_history", "unknown_history", "nothing_eligible",
    "no_events", "no_dates", "no_evidence",
]  # fmt: skip


class Note(BaseModel):
    """A remark on an answer: what is unusual about its history, or why a list is empty."""

    code: NoteCode
    detail: str


class Health(BaseModel):
    """A health check that passed."""

    status: Literal["live", "ready"]


class InvalidField(BaseModel):
    """A field that was refused."""

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
