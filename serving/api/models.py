"""Models and aliases."""

# Annotations stay live here: FastAPI reads them.
from fastapi import APIRouter

from serving.api.routing import JsonRoute, Ready
from serving.errors import documented
from serving.schemas.models import ModelList

router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.get("/models", responses=documented("not_ready"))
async def list_models(service: Ready) -> ModelList:
    """The models that answer."""
    return ModelList(models=[service.model])
