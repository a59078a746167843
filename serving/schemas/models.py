"""Models and aliases on the wire."""

from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from recsys.serving.schemas.common import BUNDLE_NAME, AliasName, Answer, Body, ModelRef
from recsys.serving.schemas.experiments import ExperimentInfo
from recsys.serving.schemas.rules import RuleNames

BundleName = Annotated[str, StringConstraints(pattern=BUNDLE_NAME, max_length=128)]


class ModelInfo(ModelRef):
    """A loaded model."""

    items: int = Field(description="Number of items that it can recommend.", examples=[600])
    levels: int = Field(description="Number of codes in a semantic ID.", examples=[3])
    aliases: list[str] = Field(
        [], description="Aliases that stand for it.", examples=[["champion"]]
    )


class AliasBody(Body):
    """The bundle that an alias shall stand for, its standing rules, or both."""

    bundle: BundleName | None = Field(
        None,
        description="Name of a bundle, one of `available` of /v1/models; null keeps the model.",
        examples=["demo"],
    )
    wait: bool = Field(
        True, description="Whether to respond when the new model answers, or at once with 202."
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
        if self.bundle is not None and self.rules is not None and not self.wait:
            raise ValueError("'bundle' and 'rules' together need 'wait': true; or send two calls")
        return self


class AliasInfo(Answer):
    """An alias and the model behind it."""

    name: AliasName = Field(examples=["champion"])
    bundle: str | None = Field(
        description="The bundle that answers; null before the first is loaded.", examples=["demo"]
    )
    version: str | None = Field(examples=["3f2a9c0d1b7e4a55"])
    previous: str | None = Field(
        description="The bundle that a rollback returns to.", examples=["demo-old"]
    )
    previous_version: str | None = Field(None, description="Its digest.")
    status: Literal["ready", "loading"]
    refused: str | None = Field(description="Why the last bundle was refused, if it was.")
    rules: list[str] = Field(
        description="Rules that apply to all its recommendations.", examples=[["summer"]]
    )


class ModelList(Answer):
    """What answers, the bundles that an alias may be given, and the formats of texts."""

    models: list[ModelInfo]
    aliases: list[AliasInfo]
    experiments: list[ExperimentInfo] = Field(description="Sorted by name.")
    available: list[str] = Field([], description="Names of bundles.", examples=[["demo", "demo-2"]])
    text_formats: list[str] = Field(
        [], description="Formats of /v1/texts that the operator named.", examples=[["colour"]]
    )
