"""Settings of a cluster: the number of replicas, and their resources."""

from dataclasses import dataclass
from enum import StrEnum

from recsys.errors import ConfigError

SECTION = "cluster"


class Runner(StrEnum):
    """Where models run: in this process, or on Ray."""

    local = "local"
    ray = "ray"


@dataclass(frozen=True)
class ClusterSettings:
    """The section `cluster` of a configuration.

    Attributes:
        replicas: minimum number of replicas.
        max_replicas: maximum number of replicas; None for `replicas`, without autoscaling.
        cpus: processor cores of one replica.
        gpus: share of a GPU of one replica: 0.5 puts two replicas on each GPU.
        target_requests: number of requests in progress or waiting, per replica, that autoscaling
            aims at; None for `serve.max_batch`.
    """

    replicas: int = 2
    max_replicas: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0
    target_requests: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ConfigError: a value is out of range.
        """
        from recsys.config import check_bounds  # commands read this module for --help

        least = {"replicas": 1, "cpus": 0, "gpus": 0}
        check_bounds(self, f"{SECTION}.", at_least=least, above_zero=("target_requests",))
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"{SECTION}: max_replicas {self.max_replicas} is below replicas {self.replicas}"
            )
