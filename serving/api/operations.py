"""For operators and the page: health, Prometheus metrics, and the figures of today."""

from time import monotonic
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from recsys.serving.api.routing import AnyPhase, Ready, Route
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import ProblemError
from recsys.serving.metrics import CONTENT_TYPE
from recsys.serving.schemas.common import Health
from recsys.serving.schemas.today import Today, TodayQuery

router = APIRouter(route_class=Route)
MAX_AGE_S = 1.0  # how old an answer may be: making one takes milliseconds, however many ask


@router.get("/health/live")
@requires(Scope.PUBLIC)
async def live() -> Health:
    """Respond while the process is running."""
    return Health(status="live")


@router.get("/health/ready")
@requires(Scope.PUBLIC)
async def ready(service: AnyPhase) -> Health:
    """Respond with 200 while recommendations are answered, and with 503 and why otherwise."""
    if reason := service.unready:
        raise ProblemError("not_ready", reason)
    return Health(status="ready")


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
@requires(Scope.READ)
async def metrics(request: Request, service: AnyPhase) -> Response:
    """Get all metrics in Prometheus' text format, at most a second old."""
    state = request.app.state
    now, (since, text) = monotonic(), state.exposition
    if not text or now - since >= MAX_AGE_S:
        text = service.metrics.exposition()
        state.exposition = now, text
    return Response(text, headers={"content-type": CONTENT_TYPE})


@router.get("/v1/today", response_model=Today)
@requires(Scope.READ)
async def today(query: Annotated[TodayQuery, Query()], service: Ready) -> Response:
    """Get what was recommended today, and what came of it.

    Figures are kept for ten seconds, or longer if making them took long.
    """
    text = await service.state.today(service.store, query.days)
    return Response(text, media_type="application/json")
