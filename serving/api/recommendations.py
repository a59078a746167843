"""Recommendations."""

# Annotations stay live here: FastAPI reads them.
from typing import Annotated

from fastapi import APIRouter, Query, Request

from serving.api.routing import RECOMMEND, JsonRoute, PathId, Ready, while_connected
from serving.errors import documented
from serving.schemas.recommendations import (
    RecommendationsRequest,
    RecommendationsResponse,
    UserQuery,
)

router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.post(
    "/recommendations",
    response_model_exclude_unset=True,
    responses=documented(
        "malformed_body", "unknown_user", "unsupported_media_type", "invalid_request",
        "store_unavailable", *RECOMMEND,
    ),
)  # fmt: skip
async def recommend(
    body: RecommendationsRequest, request: Request, service: Ready
) -> RecommendationsResponse:
    """Top-k items for a history given inline, or for a user whose history the service has."""
    return await while_connected(request, service.recommend(body))


@router.get(
    "/users/{user_id}/recommendations",
    response_model_exclude_unset=True,
    responses=documented("unknown_user", "invalid_request", "store_unavailable", *RECOMMEND),
)
async def recommend_for_user(
    user_id: PathId, query: Annotated[UserQuery, Query()], request: Request, service: Ready
) -> RecommendationsResponse:
    """Top-k items for a user whose history the service has."""
    body = RecommendationsRequest(
        user=user_id, k=query.k, exclude_seen=query.exclude_seen, include=query.include
    )
    return await while_connected(request, service.recommend(body))
