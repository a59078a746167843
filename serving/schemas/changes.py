"""Changes of items on the wire: what their readers ask for."""

from typing import Annotated

from pydantic import Field, StringConstraints

from recsys.serving.schemas.common import Query

MAX_ITEMS = 200


class ItemChangesQuery(Query):
    """Query parameters of changes of items."""

    after: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{16}-[0-9]{1,18})?$")] = Field(
        "", description="`cursor` of the last line that was read; by default from the beginning."
    )
    limit: int = Field(100, ge=1, le=MAX_ITEMS, description="Lines at most.")
    wait: float = Field(
        0.0,
        ge=0,
        le=30,
        description="Seconds to wait if there is no line yet. The answer comes earlier where the "
        "deadline of requests ends earlier.",
    )
