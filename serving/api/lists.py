"""Lists for a storefront, by GET, so that browsers and proxies can keep them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from recsys.errors import FilterError
from recsys.serving.api.routing import OnceRoute, Ready, in_time, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.errors import ProblemError, documented
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.lists import (
    ListQuery,
    ListResponse,
    TogetherQuery,
)
from recsys.serving.service import Service

router = APIRouter(prefix="/v1/lists", route_class=OnceRoute)
ANY = (
    "invalid_request", "invalid_filter", "unknown_model", "queue_full", "not_ready",
    "deadline_exceeded",
)  # fmt: skip
Wanted = Mapping[str, Any] | None
KEPT = "public, max-age=60"  # these lists are the same for everybody
CACHED: dict[int | str, dict[str, Any]] = {
    200: {"headers": {"Cache-Control": {"schema": {"type": "string"}, "description": KEPT}}}
}


@router.get(
    "/trending",
    response_model=ListResponse,
    responses=CACHED | documented("store_unavailable", *ANY),
)
@requires(Scope.READ)
async def trending_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """Items by the events of the last days, of which newer ones count more."""
    return await _answer(service, query, service.state.lists.trending)


@router.get("/latest", response_model=ListResponse, responses=CACHED | documented(*ANY))
@requires(Scope.READ)
async def latest_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """The newest items: those added last, then by the attribute `available_from`."""
    return await _answer(service, query, service.state.lists.latest)


@router.get(
    "/together",
    response_model=ListResponse,
    responses=CACHED | documented("unsupported_by_model", *ANY),
)
@requires(Scope.READ)
async def items_bought_together(
    query: Annotated[TogetherQuery, Query()], service: Ready
) -> Response:
    """Items that are bought together with an item, or with those of a basket."""
    return await _answer(service, query, service.state.lists.together)


async def _answer(
    service: Service, query: Any, make: Callable[[Any, Wanted], Awaitable[ListResponse]]
) -> Response:
    async def within() -> ListResponse:
        return await in_time(service, make(query, parse_filter(query.filter)))

    try:
        answer = await within()
    except FilterError as error:
        raise of_query(error) from error
    response = await service.reads(json_response, answer)
    # Also allowed if the request had a key, so a cache that ignores `Vary` gives it to anyone.
    response.headers.update({"Cache-Control": KEPT, "Vary": "Authorization"})
    return response


def parse_filter(text: str | None) -> Wanted:
    """The filter of a query, as an object."""
    if text is None:
        return None
    try:
        found = parse(text.encode("utf-8", "surrogatepass"))
    except MalformedError as error:
        raise _invalid(f"is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise _invalid("is not a JSON object")
    return found


def of_query(error: FilterError) -> ProblemError:
    """The problem of a filter that came with the query."""
    field = InvalidField(location="query", pointer="/filter", detail=str(error))
    return ProblemError("invalid_filter", str(error), errors=[field])


def _invalid(detail: str) -> ProblemError:
    field = InvalidField(location="query", pointer="/filter", detail=detail)
    return ProblemError("invalid_request", f"query /filter: {detail}", errors=[field])
