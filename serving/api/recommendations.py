"""Recommendations."""

import asyncio
import logging

from fastapi import APIRouter, Request, Response

from recsys.serving.api.routing import JsonRoute, Ready, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import LARGE
from recsys.serving.errors import ProblemError, problem_body, problem_of
from recsys.serving.limits import CALLER
from recsys.serving.schemas.common import Problem
from recsys.serving.schemas.recommendations import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    RecommendationsRequest,
    RecommendationsResponse,
)
from recsys.serving.service import Service

router = APIRouter(prefix="/v1", route_class=JsonRoute)
failures = logging.getLogger("recsys.serving.failures")
AT_ONCE = 16  # requests of one batch


@router.post("/recommendations", response_model=RecommendationsResponse)
@requires(Scope.READ)
async def recommend(body: RecommendationsRequest, service: Ready) -> Response:
    """Top-k items for a history given inline, or for a user whose history the service has."""
    return json_response(await service.recommend(body))


@router.post("/recommendations/batch", response_model=BatchResponse)
@requires(Scope.READ)
async def recommend_batch(body: BatchRequest, request: Request, service: Ready) -> Response:
    """Several requests at once; the result of one does not affect the others."""
    request_id = request.scope["state"].get("request_id")
    slots = asyncio.Semaphore(AT_ONCE)  # a batch enters the queue one by one, not as a block
    room, held = service.state.answer_bytes, 0

    async def result(body: RecommendationsRequest) -> str:
        nonlocal held
        async with slots, service.state.batched:
            text = _dump(await _result(service, body, request_id))  # less than objects
        if len(text) > LARGE:
            if not room.take(len(text) - LARGE):
                detail = "Too many large answers of batches at once; ask for less in a batch."
                return _dump(_refused(ProblemError("queue_full", detail), request_id))
            held += len(text) - LARGE
        return text

    try:
        results = await asyncio.gather(*map(result, body.requests))
        text = f'{{"results":[{",".join(results)}]}}'
    finally:
        room.give(held)
    return Response(text, media_type="application/json")


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
        return _refused(problem, request_id)
    return BatchResult.model_construct(status=200, answer=answer)


def _refused(problem: ProblemError, request_id: str | None) -> BatchResult:
    values = problem_body(problem, request_id)
    return BatchResult(status=problem.status_code, problem=Problem.model_validate(values))


def _dump(result: BatchResult) -> str:
    return result.model_dump_json(exclude_unset=True, by_alias=True)
