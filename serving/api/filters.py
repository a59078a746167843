"""Check filters before they are used."""

from fastapi import APIRouter, Request

from recsys.errors import FilterError
from recsys.serving.api.routing import BODY, RECOMMEND, JsonRoute, Ready, while_connected
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented, invalid_part
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.filters import FilterCheck, FilterReport

router = APIRouter(prefix="/v1/filters", route_class=JsonRoute)


@router.post("/validate", responses=documented(*BODY, *RECOMMEND))
@requires(Scope.READ)
async def validate_filter(body: FilterCheck, request: Request, service: Ready) -> FilterReport:
    """Count the items that match a filter, or report what is wrong with it."""
    try:
        return await while_connected(request, service.check_filter(body))
    except FilterError as error:
        whole = InvalidField(location="body", pointer="/filter", detail=str(error))
        return FilterReport(
            valid=False,
            eligible_items=None,
            items=service.models.get(body.model).recommender.epoch.num_items,
            canonical=None,
            problems=invalid_part(error) or [whole],
        )
