"""Texts of the service's text model."""

from fastapi import APIRouter, Response

from recsys.serving.api.routing import JsonRoute, Ready, json_response
from recsys.serving.auth import Scope, requires
from recsys.serving.schemas.texts import TextsRequest, TextsResponse

router = APIRouter(prefix="/v1", route_class=JsonRoute)


@router.post("/texts", response_model=TextsResponse)
@requires(Scope.READ)
async def write(body: TextsRequest, service: Ready) -> Response:
    """A text of a named format (`serve.text_formats`), by the text model of `serve.explainer`.

    What is written is the model's own.
    """
    return json_response(await service.write(body))
