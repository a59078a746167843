"""Recommendations, and texts of the service's text model."""

import asyncio
import logging

from fastapi import APIRouter, Request, Response

from recsys.serving.api.routing import Ready, Route, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import LARGE
from recsys.serving.errors import ProblemError, problem_body, problem_of
from recsys.serving.limits import CALLER
from recsys.serving.schemas.common import Problem, as_json
from recsys.serving.schemas.recommendations import (
    BatchRequest,
    BatchResponse,
    BatchResult,
    RecommendationsRequest,
    RecommendationsResponse,
)
from recsys.serving.schemas.texts import TextsRequest, TextsResponse
from recsys.serving.service import Service

router = APIRouter(prefix="/v1", route_class=Route)
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

    async def result(body: RecommendationsRequest) -> bytes:
        nonlocal held
        async with slots, service.state.batched:
            text = await _result(service, body, request_id)  # less than objects
        if len(text) > LARGE:
            if not room.take(len(text) - LARGE):
                detail = "Too many large answers of batches at once; ask for less in a batch."
                return _refused(ProblemError("queue_full", detail), request_id)
            held += len(text) - LARGE
        return text

    try:
        results = await asyncio.gather(*map(result, body.requests))
        return json_response(b'{"results":[' + b",".join(results) + b"]}")
    finally:
        room.give(held)


@router.post("/texts", response_model=TextsResponse)
@requires(Scope.READ)
async def write(body: TextsRequest, service: Ready) -> Response:
    """A text of a named format (`serve.text_formats`), by the text model of `serve.explainer`.

    What is written is the model's own.
    """
    return json_response(await service.texts.write(body, service.deadline))


async def _result(service: Service, body: RecommendationsRequest, request_id: str | None) -> bytes:
    """Answer one request of a batch: a `BatchResult` as JSON."""
    try:
        CALLER.get().charge(1)
        return b'{"status":200,"answer":' + await service.recommend(body) + b"}"
    except Exception as error:
        problem = problem_of(error)
        if problem.code == "internal_error":
            failures.exception("unhandled", extra={"fields": {"request_id": request_id}})
        return _refused(problem, request_id)


def _refused(problem: ProblemError, request_id: str | None) -> bytes:
    body = Problem.model_validate(problem_body(problem, request_id))
    return as_json(BatchResult(status=body.status, problem=body))
