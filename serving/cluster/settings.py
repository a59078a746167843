"""Settings of a cluster: how many replicas, and what each takes."""

# Annotations stay live here: pydantic reads them.
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from recsys.config import Settings
from recsys.errors import ConfigError

SECTION = "cluster"


class ClusterSettings(BaseModel):
    """The section `cluster` of a configuration.

    Attributes:
        replicas: that run at least.
        max_replicas: that run at most; None for as many as `replicas`, so always.
        cpus: processor cores that one replica takes.
        gpus: share of a GPU that one takes: 0.5 puts two on each.
        target_requests: requests under way or waiting, for each replica, that autoscaling aims
            at; None for `serve.max_batch`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    replicas: int = Field(2, ge=1)
    max_replicas: int | None = Field(None, ge=1)
    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    target_requests: float | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is below replicas {self.replicas}")
        return self

    @classmethod
    def load(cls, config: Path | None = None, **flags: Any) -> "ClusterSettings":
        """The section of a file, and flags above it; those that are None are skipped.

        Raises:
            ConfigError: an unknown key or a value out of range, naming it.
        """
        section = Settings.load(config).values.get(SECTION) or {}
        if not isinstance(section, dict):
            raise ConfigError(f"{SECTION}: expected a mapping, found {section!r}")
        given = section | {key: value for key, value in flags.items() if value is not None}
        return cls.of(given)

    @classmethod
    def of(cls, values: dict[str, Any]) -> "ClusterSettings":
        """Settings of plain values.

        Raises:
            ConfigError: an unknown key or a value out of range, naming it.
        """
        try:
            return cls(**values)
        except ValidationError as error:
            found = error.errors()[0]
            key = ".".join(str(part) for part in found["loc"])
            text = found["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{SECTION}{f'.{key}' if key else ''}: {text}") from error
