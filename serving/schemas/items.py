"""Items on the wire."""

# Annotations stay live here: pydantic reads them.
from typing import Any

from pydantic import BaseModel, Field


class Item(BaseModel):
    """An item of the catalogue."""

    item_id: str
    title: str
    semantic_id: list[int] = Field(description="Codes, coarse to fine, 0-based.")
    metadata: dict[str, Any] = Field(description="Attributes.")
