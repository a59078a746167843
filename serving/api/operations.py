"""For operators: Prometheus metrics, and short series for the page."""

import threading
import time

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry

from recsys import __version__
from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented
from recsys.serving.metrics import CONTENT_TYPE
from recsys.serving.schemas.operations import Process, Queue, Stats
from recsys.serving.service import Phase

router = APIRouter()
_STARTED = time.monotonic()


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **documented()},
)
@requires(Scope.READ)
async def metrics(service: AnyPhase) -> Response:
    """Get all metrics in Prometheus' text format."""
    return Response(service.metrics.exposition(), headers={"content-type": CONTENT_TYPE})


@router.get("/v1/stats", responses=documented())
@requires(Scope.READ)
async def stats(service: AnyPhase) -> Stats:
    """Get phase, models, queue, and the last ten minutes in slots of five seconds."""
    found = service.metrics.series.snapshot()
    return Stats.model_validate(
        {
            "phase": service.phase.value,
            "version": __version__,
            "models": service.models.info() if service.phase is Phase.READY else [],
            "aliases": {a.name: a.bundle for a in service.models.aliases() if a.bundle},
            "queue": Queue(depth=service.metrics.queue_depth(), limit=service.settings.queue_limit),
            "process": process(service.metrics.registry),
            "last_minute": found.pop("last_minute"),
            "series": found,
        }
    )


def process(metrics: CollectorRegistry) -> Process:
    """The resources of this process, as its metrics have them."""
    rss = metrics.get_sample_value("process_resident_memory_bytes")
    files = metrics.get_sample_value("process_open_fds")
    return Process(
        uptime_s=round(time.monotonic() - _STARTED, 1),
        rss_bytes=None if rss is None else int(rss),
        open_files=None if files is None else int(files),
        threads=threading.active_count(),
    )
