"""The replicas and the door as deployments of Ray Serve.

`app` is the `import_path` of a config file for `serve deploy`, which may change the options of both
deployments, such as the number of replicas and their processor cores.
"""

import sys
from typing import Any

from recsys.errors import ConfigError
from recsys.serving import logs
from recsys.serving.cluster.door import Door, Handle
from recsys.serving.cluster.ray import import_ray
from recsys.serving.cluster.replica import Replica
from recsys.serving.settings import ServingSettings
from recsys.serving.stores import POSTGRES

REPLICAS, DOOR = "replicas", "door"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
BATCHES = 2  # batches of a replica at a time: one is computed, one waits
HEALTH_S = 5.0


class ServedReplica(Replica):
    """A replica that uses the processor cores that Ray gives it, and stops when Ray deletes it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Create the application with fields of `ServingSettings`."""
        resources = import_ray().get_runtime_context().get_assigned_resources()
        threads = settings["threads"] or max(1, int(resources.get("CPU", 1)))
        super().__init__({**settings, "threads": threads})

    async def __del__(self) -> None:
        """Answer the waiting requests and close the application. Ray awaits this method."""
        await self.stop()


def replicas(settings: ServingSettings) -> Any:
    """Build the replicas as an application of Ray Serve.

    Raises:
        ConfigError: the store is a file, and the cluster has several machines.
    """
    ray = import_ray()
    machines = sum(node["Alive"] for node in ray.nodes()) if ray.is_initialized() else 1
    if machines > 1 and not str(settings.store).startswith(POSTGRES):
        raise ConfigError(
            f"store {settings.store}: a file serves one machine and the cluster has {machines}; "
            "set serve.store to postgresql://..."
        )
    return (
        ray.serve.deployment(ServedReplica)
        .options(
            name=REPLICAS,
            num_replicas=2,
            ray_actor_options={"num_cpus": 1},
            max_ongoing_requests=BATCHES * settings.max_batch,
            max_queued_requests=settings.queue_limit,
            request_router_config={"request_router_class": ROUTER},
            user_config={},  # with one, Ray calls `reconfigure`
            health_check_period_s=HEALTH_S,
            graceful_shutdown_timeout_s=settings.deadline_ms / 1000 + HEALTH_S,
        )
        .bind(settings.model_dump())
    )


class ServedDoor(Door):
    """A door behind Ray's own proxies, which run on every machine of a cluster."""

    def __init__(self, settings: dict[str, Any], handle: Any) -> None:
        """Start with fields of `ServingSettings`, and Ray Serve's handle of the replicas."""
        logs.configure(sys.stdout)
        own = ServingSettings(**settings)
        super().__init__(
            Handle(handle), deadline_ms=own.deadline_ms, max_body_bytes=own.max_body_bytes
        )


def app(arguments: dict[str, Any]) -> Any:
    """Build the application of a config file for `serve deploy`.

    The section `serve` of the arguments has the settings.

    Raises:
        ConfigError: an unknown key, a value out of range, or neither `keys` nor `insecure_listen`.
    """
    import_ray()
    unknown = set(arguments) - {"serve"}
    if unknown:
        raise ConfigError(
            f"args: unknown key {unknown.pop()!r}; known: serve. Replicas and their resources are "
            "options of `deployments`"
        )
    from ray import serve

    # Ray's proxies listen on the network: without keys, `insecure_listen` must accept that
    values = {"host": "0.0.0.0", **arguments.get("serve", {})}  # noqa: S104
    settings = ServingSettings.load(None, (), **values)
    behind = replicas(settings)
    front = serve.deployment(ServedDoor).options(
        name=DOOR, max_ongoing_requests=settings.queue_limit, ray_actor_options={"num_cpus": 0.5}
    )
    return front.bind(settings.model_dump(), behind)
