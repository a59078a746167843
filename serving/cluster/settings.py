"""Settings of a cluster: the number of replicas, and their resources."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt

from recsys.config import internal, section
from recsys.errors import ConfigError


class Runner(StrEnum):
    """Where models run: in this process, or on Ray."""

    local = "local"
    ray = "ray"


@section
class ClusterSettings:
    """The section `cluster` of a configuration."""

    replicas: PositiveInt = 2
    """Minimum number of replicas."""
    max_replicas: int | None = None
    """Maximum number of replicas; None for `replicas`, without autoscaling."""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """Processor cores of one replica."""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """Share of a GPU of one replica: 0.5 puts two replicas on each GPU."""
    target_requests: PositiveFloat | None = internal(default=None)
    """Number of requests in progress or waiting, per replica, that autoscaling aims at; None for
    `serve.max_batch`."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas: {self.max_replicas} is below replicas, {self.replicas}"
            )
