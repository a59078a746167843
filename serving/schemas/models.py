"""Models and aliases on the wire."""

# Annotations stay live here: pydantic reads them.
from pydantic import BaseModel, Field

from serving.schemas.common import ModelRef


class ModelInfo(ModelRef):
    """A loaded model."""

    items: int = Field(description="Items it can recommend.")
    levels: int = Field(description="Codes in a semantic ID.")


class ModelList(BaseModel):
    """The loaded models."""

    models: list[ModelInfo]
