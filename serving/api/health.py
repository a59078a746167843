"""Health checks."""

from fastapi import APIRouter

from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.common import Health

router = APIRouter(prefix="/health")


@router.get("/live")
@requires(Scope.PUBLIC)
async def live() -> Health:
    """Respond while the process is running."""
    return Health(status="live")


@router.get("/ready")
@requires(Scope.PUBLIC)
async def ready(service: AnyPhase) -> Health:
    """Respond with 200 while recommendations are answered, and with 503 and why otherwise."""
    if reason := service.unready:
        raise ProblemError("not_ready", reason)
    return Health(status="ready")
