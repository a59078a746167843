"""`recsys serve --engine ray`: a door in this process, and replicas in others, until Ctrl-C.

Host, port, keys and logs are as for the local server; Ray's own proxies are not started.
"""

import contextlib
import sys
from collections.abc import Iterator

from rich.markup import escape

from recsys.errors import RecsysError
from recsys.progress import say
from recsys.serving import logs
from recsys.serving.cluster.deployment import APPLICATION, door, replicas
from recsys.serving.cluster.door import Door
from recsys.serving.cluster.ray import import_ray, start_ray
from recsys.serving.cluster.settings import ClusterSettings
from recsys.serving.server import http_server
from recsys.serving.settings import ServingSettings
from recsys.serving.sockets import Listener


@contextlib.contextmanager
def deployed(settings: ServingSettings, cluster: ClusterSettings) -> Iterator[Door]:
    """Run replicas behind a door until the block is left.

    They run on the cluster of `RAY_ADDRESS`, or on this machine. A running application of the same
    name is updated in place.

    Raises:
        ConfigError: Ray is not installed, or the store does not fit the cluster.
        RecsysError: the replicas cannot start; the text is that of the first one.
    """
    ray = import_ray("serve")
    from ray import serve

    ours = not ray.is_initialized()
    if ours:
        # a nominal number of cores, so that the replicas fit on any machine
        cores = int(cluster.cpus * (cluster.max_replicas or cluster.replicas)) + 1
        start_ray(ray, num_cpus=cores)
    try:
        serve.start(proxy_location="Disabled")
        try:
            handle = serve.run(replicas(settings, cluster), name=APPLICATION, route_prefix=None)
        except RuntimeError as error:
            raise RecsysError(f"the replicas cannot start: {error}") from error
        yield door(settings, handle)
    finally:
        serve.delete(APPLICATION)
        if ours:
            serve.shutdown()
            ray.shutdown()


def serve_on_ray(settings: ServingSettings, cluster: ClusterSettings, listener: Listener) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are answered first."""
    import_ray("serve")
    opened, url = listener
    logs.configure(sys.stdout)
    say(escape(f"Loading {settings.bundle} in {cluster.replicas} replicas ..."))
    with opened, deployed(settings, cluster) as app, contextlib.suppress(KeyboardInterrupt):
        say(escape(f"{settings.bundle.name} answers at {url} from Ray."))
        say("Ctrl-C stops it.")
        http_server(app, settings, lifespan="off").run(sockets=[opened])
    say("Stopped.")
