"""Lists for a storefront, by GET, so that browsers and proxies can keep them."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from recsys.errors import FilterError
from recsys.serving.api.caching import CACHED, SHARED, cached, tag_of
from recsys.serving.api.routing import OnceRoute, Ready, in_time
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.errors import ProblemError, documented
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.lists import (
    ListQuery,
    ListResponse,
    TogetherQuery,
    TrendingQuery,
)
from recsys.serving.service import Service

router = APIRouter(prefix="/v1/lists", route_class=OnceRoute)
ANY = (
    "invalid_request", "invalid_filter", "unknown_model", "queue_full", "not_ready",
    "deadline_exceeded",
)  # fmt: skip
Wanted = Mapping[str, Any] | None


@router.get(
    "/trending",
    response_model=ListResponse,
    responses=CACHED | documented("store_unavailable", *ANY),
)
@requires(Scope.READ)
async def trending_items(
    query: Annotated[TrendingQuery, Query()], request: Request, service: Ready
) -> Response:
    """Items by the events of the last days, of which newer ones count more."""
    return await _answer(request, service, query, service.state.lists.trending, SHARED)


@router.get("/latest", response_model=ListResponse, responses=CACHED | documented(*ANY))
@requires(Scope.READ)
async def latest_items(
    query: Annotated[ListQuery, Query()], request: Request, service: Ready
) -> Response:
    """The newest items: those added last, then by the attribute `available_from`."""
    return await _answer(request, service, query, service.state.lists.latest, SHARED)


@router.get(
    "/together",
    response_model=ListResponse,
    responses=CACHED | documented("unsupported_by_model", *ANY),
)
@requires(Scope.READ)
async def items_bought_together(
    query: Annotated[TogetherQuery, Query()], request: Request, service: Ready
) -> Response:
    """Items that are bought together with an item, or with those of a basket."""
    return await _answer(request, service, query, service.state.lists.together, SHARED)


async def _answer(
    request: Request,
    service: Service,
    query: Any,
    make: Callable[[Any, Wanted], Awaitable[ListResponse]],
    policy: str,
) -> Response:
    async def within() -> ListResponse:
        return await in_time(service, make(query, parse_filter(query.filter)))

    try:
        answer = await within()
    except FilterError as error:
        raise of_query(error) from error

    def written() -> Response:
        # Scores of trending items change all the time; a list with the same items is as good.
        told: Any = {"since": True, "items": {"__all__": {"score"}}}
        tag = tag_of(answer.model_dump_json(exclude=told, exclude_unset=True))
        return cached(request, answer.model_dump_json(exclude_unset=True), tag, policy)

    return await service.reads(written)


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
