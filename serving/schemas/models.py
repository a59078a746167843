"""Models and aliases on the wire."""

from typing import Annotated, Self

from pydantic import BaseModel, Field, StringConstraints, model_validator

from recsys.serving.schemas.common import BUNDLE_NAME, AliasName, Body, ModelRef
from recsys.serving.schemas.experiments import ExperimentInfo
from recsys.serving.schemas.rules import RuleNames

BundleName = Annotated[str, StringConstraints(pattern=BUNDLE_NAME, max_length=128)]


class ModelInfo(ModelRef):
    """A loaded model."""

    items: int = Field(description="Number of items that it can recommend.")
    levels: int = Field(description="Number of codes in a semantic ID.")
    exclude_seen: bool = Field(
        description="Whether its lists leave out the items of the history by default."
    )
    aliases: list[str] = Field([], description="Aliases that stand for it.")


class AliasBody(Body):
    """The bundle that an alias shall stand for, its standing rules, or both."""

    bundle: BundleName | None = Field(
        None,
        description="Name of a bundle, one of `available` of /v1/models; null keeps the model.",
        examples=["demo"],
    )
    rules: RuleNames | None = Field(
        None,
        description="Rules that apply to all recommendations of the alias; null keeps them.",
        examples=[["summer"]],
    )

    @model_validator(mode="after")
    def _not_empty(self) -> Self:
        if self.bundle is None and self.rules is None:
            raise ValueError("give 'bundle', 'rules', or both")
        return self


class AliasInfo(BaseModel):
    """An alias and the model behind it."""

    name: AliasName
    bundle: str = Field(description="The bundle that answers.")
    version: str
    previous: str | None = Field(description="The bundle that a rollback returns to.")
    previous_version: str | None = Field(None, description="Its digest.")
    rules: list[str] = Field(description="Rules that apply to all its recommendations.")


class ModelList(BaseModel):
    """What answers, the bundles that an alias may be given, and the formats of texts."""

    models: list[ModelInfo]
    aliases: list[AliasInfo]
    experiments: list[ExperimentInfo] = Field(description="Sorted by name.")
    available: list[str] = Field([], description="Names of bundles.")
    text_formats: list[str] = Field([], description="Formats of /v1/texts that the operator named.")
