"""Texts of the service's text model."""

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
from recsys.serving.schemas.texts import TextsRequest, TextsResponse

router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.post(
    "/texts",
    response_model=TextsResponse,
    responses=documented(*BODY, "unsupported_by_model", *RECOMMEND),
)
@requires(Scope.READ)
async def write(body: TextsRequest, service: Ready) -> Response:
    """Titles of the catalog, a part of a text, or a text of a named format, by the text model.

    The text model is that of `serve.explainer`, if there is one, and the named formats are those of
    `serve.text_formats`. What `title` and `substring` return cannot be invented; what is written in
    a named format is the model's own.
    """
    return json_response(await service.write(body))
