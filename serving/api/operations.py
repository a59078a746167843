"""For operators: Prometheus metrics, and short series for the page."""

# Annotations stay live here: FastAPI reads them.
import os
import threading
import time
from pathlib import Path

from fastapi import APIRouter, Response

from recsys import __version__
from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented
from recsys.serving.metrics import CONTENT_TYPE
from recsys.serving.schemas.operations import Process, Queue, Stats
from recsys.serving.service import Phase

router = APIRouter()
_STARTED = time.monotonic()
_PROC = Path("/proc/self")


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
            "process": process(),
            "last_minute": found.pop("last_minute"),
            "series": found,
        }
    )


def process() -> Process:
    """Read the resources of this process."""
    rss = files = None
    if _PROC.is_dir():
        rss = int((_PROC / "statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        files = len(list((_PROC / "fd").iterdir()))
    return Process(
        uptime_s=round(time.monotonic() - _STARTED, 1),
        rss_bytes=rss,
        open_files=files,
        threads=threading.active_count(),
    )
