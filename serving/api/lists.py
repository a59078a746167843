"""Lists for a storefront, by GET, so that browsers and proxies can keep them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from recsys.serving.api.routing import OnceRoute, Ready, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import parse
from recsys.serving.schemas.lists import (
    ListQuery,
    ListResponse,
    TogetherQuery,
)
from recsys.serving.service import Service

router = APIRouter(prefix="/v1/lists", route_class=OnceRoute)
Wanted = Mapping[str, Any] | None
KEPT = "public, max-age=60"  # these lists are the same for everybody


@router.get("/trending", response_model=ListResponse)
@requires(Scope.READ)
async def trending_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """Items by the events of the last days, of which newer ones count more."""
    return await _answer(service, query, service.state.lists.trending)


@router.get("/latest", response_model=ListResponse)
@requires(Scope.READ)
async def latest_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """The newest items: those added last, then by the attribute `available_from`."""
    return await _answer(service, query, service.state.lists.latest)


@router.get("/together", response_model=ListResponse)
@requires(Scope.READ)
async def items_bought_together(
    query: Annotated[TogetherQuery, Query()], service: Ready
) -> Response:
    """Items that are bought together with an item, or with those of a basket."""
    return await _answer(service, query, service.state.lists.together)


async def _answer(
    service: Service, query: Any, make: Callable[[Any, Wanted], Awaitable[ListResponse]]
) -> Response:
    wanted = None if query.filter is None else parse(query.filter.encode())
    answer = await make(query, wanted)
    response = await service.off_loop(json_response, answer)
    # Also allowed if the request had a key, so a cache that ignores `Vary` gives it to anyone.
    response.headers.update({"Cache-Control": KEPT, "Vary": "Authorization"})
    return response
