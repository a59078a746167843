"""Explanations of recommended items."""

from fastapi import APIRouter, Response

from recsys.serving.api.routing import (
    BODY,
    RECOMMEND,
    JsonRoute,
    Ready,
    json_response,
)
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented
from recsys.serving.schemas.explanations import ExplanationsRequest, ExplanationsResponse

router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.post(
    "/explanations",
    response_model=ExplanationsResponse,
    responses=documented(
        *BODY, "unknown_user", "unsupported_by_model", "store_unavailable", *RECOMMEND
    ),
)
@requires(Scope.READ)
async def explain(body: ExplanationsRequest, service: Ready) -> Response:
    """Reasons in words for items, by the service's text model (`serve.explainer`), if it has one.

    The titles in `because` are those of the history. The words of `reason` are the model's own.
    """
    return json_response(await service.explain(body))
