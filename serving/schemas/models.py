"""Models and aliases on the wire."""

# Annotations stay live here: pydantic reads them.
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from recsys.serving.schemas.common import MODEL_EXAMPLE, AliasName, Body, ModelRef

BundleName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", max_length=128)
]


class ModelInfo(ModelRef):
    """A loaded model."""

    items: int = Field(description="Items it can recommend.")
    levels: int = Field(description="Codes in a semantic ID.")
    aliases: list[str] = Field([], description="Aliases that it answers to.")


class ModelList(BaseModel):
    """The loaded models, and the bundles that an alias may be given."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "models": [
                        {
                            "name": "demo",
                            "version": "3f2a9c0d1b7e4a55",
                            "alias": None,
                            "epoch": 0,
                            "items": 600,
                            "levels": 3,
                            "aliases": ["champion"],
                        }
                    ],
                    "available": ["demo", "demo-2"],
                }
            ]
        }
    )

    models: list[ModelInfo]
    available: list[str] = Field([], description="Names of bundles.")


class AliasBody(Body):
    """The bundle that an alias shall stand for."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"bundle": "demo"}]})

    bundle: BundleName = Field(description="Name of a bundle, see `available` of /v1/models.")
    wait: bool = Field(
        True, description="Answer when the new model answers; if false, at once with 202."
    )


class AliasInfo(BaseModel):
    """An alias and the model behind it."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "name": "champion",
                    "bundle": "demo",
                    "version": "3f2a9c0d1b7e4a55",
                    "previous": "demo-old",
                    "previous_version": "9d04c2e1aa65b370",
                    "status": "ready",
                    "refused": None,
                }
            ]
        }
    )

    name: AliasName
    bundle: str | None = Field(description="The one that answers; null before the first is loaded.")
    version: str | None
    previous: str | None = Field(description="The bundle that a rollback goes back to.")
    previous_version: str | None = Field(None, description="Its digest.")
    status: Literal["ready", "loading"]
    refused: str | None = Field(description="Why the bundle given last was refused, if it was.")


class AliasList(BaseModel):
    """All aliases."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "aliases": [
                        {
                            "name": "champion",
                            "bundle": "demo",
                            "version": "3f2a9c0d1b7e4a55",
                            "previous": None,
                            "previous_version": None,
                            "status": "ready",
                            "refused": None,
                        }
                    ]
                }
            ]
        }
    )

    aliases: list[AliasInfo]


class Evaluation(BaseModel):
    """What is known of a model's quality."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": MODEL_EXAMPLE,
                    "files": {"validation": {"recall@10": 0.09}},
                }
            ]
        }
    )

    model: ModelRef
    files: dict[str, Any] = Field(
        description="JSON files of the bundle's folder `eval`, by name, and as `report` what "
        "`recsys evaluate` found of this bundle."
    )
