"""Recommendations."""

import asyncio
import logging
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from recsys.errors import FilterError
from recsys.serving.api.caching import CACHED, PRIVATE, cached, has, tag_of
from recsys.serving.api.lists import of_query, parse_filter
from recsys.serving.api.routing import (
    BODY,
    RECOMMEND,
    JsonRoute,
    PathId,
    Ready,
    json_response,
    while_connected,
)
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented, problem_body, problem_of
from recsys.serving.limits import CALLER
from recsys.serving.schemas.common import Problem
from recsys.serving.schemas.lists import RecommendationsQuery
from recsys.serving.schemas.recommendations import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    RecommendationsRequest,
    RecommendationsResponse,
    UserQuery,
)
from recsys.serving.service import Service

router = APIRouter(prefix="/v1", route_class=JsonRoute)
failures = logging.getLogger("recsys.serving.failures")
AT_ONCE = 16


@router.post(
    "/recommendations",
    response_model=RecommendationsResponse,
    responses=documented(*BODY, "invalid_filter", "unknown_user", "store_unavailable", *RECOMMEND),
)
@requires(Scope.READ)
async def recommend(body: RecommendationsRequest, request: Request, service: Ready) -> Response:
    """Top-k items for a history given inline, or for a user whose history the service has."""
    return json_response(await while_connected(request, service.recommend(body)))


@router.get(
    "/recommendations",
    response_model=RecommendationsResponse,
    responses=CACHED
    | documented(
        "unknown_user", "invalid_request", "invalid_filter", "store_unavailable", *RECOMMEND
    ),
)
@requires(Scope.READ)
async def get_recommendations(
    query: Annotated[RecommendationsQuery, Query()], request: Request, service: Ready
) -> Response:
    """Top-k items for a user, or for the items of a session, in a form that can be cached."""
    given = query.model_dump() | {"filter": parse_filter(query.filter)}
    if query.user is not None:
        given["history"] = None
    body = RecommendationsRequest.model_construct(**given)
    return await _cached(body, request, service)


@router.post(
    "/recommendations/batch",
    response_model=BatchResponse,
    responses=documented(*BODY, "not_ready"),
)
@requires(Scope.READ)
async def recommend_batch(body: BatchRequest, request: Request, service: Ready) -> Response:
    """Several requests at once; the result of one does not affect the others."""
    request_id = request.scope["state"].get("request_id")
    places = asyncio.Semaphore(AT_ONCE)  # a batch enters the queue one by one, not as a block

    async def result(one: RecommendationsRequest) -> str:
        async with places:
            found = await _result(service, one, request_id)
        return found.model_dump_json(exclude_unset=True, by_alias=True)  # less than objects

    async def each() -> str:
        results = await asyncio.gather(*map(result, body.requests))
        return f'{{"results":[{",".join(results)}]}}'

    text = await while_connected(request, each())
    return Response(text, media_type="application/json")


@router.get(
    "/users/{user_id:id}/recommendations",
    response_model=RecommendationsResponse,
    responses=CACHED
    | documented("unknown_user", "invalid_request", "store_unavailable", *RECOMMEND),
)
@requires(Scope.READ)
async def recommend_for_user(
    user_id: PathId, query: Annotated[UserQuery, Query()], request: Request, service: Ready
) -> Response:
    """Top-k items for a user whose history the service has."""
    body = RecommendationsRequest.model_construct(user=user_id, **query.model_dump())
    return await _cached(body, request, service)


async def _cached(body: RecommendationsRequest, request: Request, service: Service) -> Response:
    """The answer; 304 if the client has one with the same list, whose id it goes on to use."""
    tag = ""

    def is_known(answer: RecommendationsResponse) -> bool:
        nonlocal tag
        told = {"recommendation_id", "timing"}
        tag = tag_of(answer.model_dump_json(exclude=told, exclude_unset=True))
        return has(request, tag)

    try:
        answer = await while_connected(request, service.recommend(body, is_known))
    except FilterError as error:
        raise of_query(error) from error
    text = answer.model_dump_json(exclude_unset=True, by_alias=True)
    return cached(request, text, tag, PRIVATE)


async def _result(
    service: Service, body: RecommendationsRequest, request_id: str | None
) -> BatchResult:
    try:
        CALLER.get().charge(1)
        answer = await service.recommend(body)
    except Exception as error:
        problem = problem_of(error)
        if problem.code == "internal_error":
            failures.exception("unhandled", extra={"fields": {"request_id": request_id}})
        values = problem_body(problem, request_id)
        return BatchResult(status=problem.status_code, problem=Problem.model_validate(values))
    return BatchResult.model_construct(status=200, answer=answer)
