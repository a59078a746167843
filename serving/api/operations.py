"""For operators and the page: Prometheus metrics, short series, and the figures of today."""

import threading
from collections.abc import Callable
from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from prometheus_client import CollectorRegistry

from recsys import __version__
from recsys.serving.api.routing import QUEUE, AnyPhase, OnceRoute, Ready, in_time
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented
from recsys.serving.metrics import CONTENT_TYPE
from recsys.serving.schemas.operations import Process, Queue, Stats
from recsys.serving.schemas.today import Today, TodayQuery
from recsys.serving.service import Phase, Service

router = APIRouter(route_class=OnceRoute)
_STARTED = monotonic()
KEPT_S = 1.0  # how old an answer may be: making one takes milliseconds, however many ask


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {}}}, **documented()},
)
@requires(Scope.READ)
async def metrics(request: Request, service: AnyPhase) -> Response:
    """Get all metrics in Prometheus' text format, at most a second old."""
    text = _kept(request, service.metrics.exposition)
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/v1/stats", response_model=Stats, responses=documented())
@requires(Scope.READ)
async def stats(request: Request, service: AnyPhase) -> Response:
    """Get phase, models, queue, and the last ten minutes in slots of five seconds.

    They are at most a second old.
    """
    text = _kept(request, lambda: _stats(service).model_dump_json().encode())
    return Response(text, media_type="application/json")


@router.get(
    "/v1/today",
    response_model=Today,
    responses=documented("invalid_request", "store_unavailable", *QUEUE, "not_ready"),
)
@requires(Scope.READ)
async def today(query: Annotated[TodayQuery, Query()], service: Ready) -> Response:
    """Get what was recommended today, what came of it, and what is trending.

    Figures are kept for ten seconds, or longer if making them took long.
    """
    text = await in_time(service, service.today(service.store, query.days))
    return Response(text, media_type="application/json")


def _kept(request: Request, make: Callable[[], bytes]) -> bytes:
    """What `make` returns for this path, or returned less than `KEPT_S` ago."""
    kept: dict[str, tuple[float, bytes]] = request.app.state.kept
    now, (since, text) = monotonic(), kept.get(request.scope["path"], (0.0, b""))
    if not text or now - since >= KEPT_S:
        text = make()
        kept[request.scope["path"]] = now, text
    return text


def _stats(service: Service) -> Stats:
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
        uptime_s=round(monotonic() - _STARTED, 1),
        rss_bytes=None if rss is None else int(rss),
        open_files=None if files is None else int(files),
        threads=threading.active_count(),
    )
