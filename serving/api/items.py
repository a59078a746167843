"""Items of the catalogue."""

# Annotations stay live here: FastAPI reads them.
from fastapi import APIRouter

from serving.api.routing import JsonRoute, PathId, Ready
from serving.errors import documented
from serving.schemas.items import Item

router = APIRouter(prefix="/v1/items", route_class=JsonRoute)


@router.get("/{item_id}", responses=documented("unknown_item", "invalid_request", "not_ready"))
async def get_item(item_id: PathId, service: Ready) -> Item:
    """An item of the catalogue: title, semantic ID, attributes."""
    return service.item(item_id)
