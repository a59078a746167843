"""The web page, its files, and the OpenAPI document."""

import asyncio
import json
import mimetypes
import shlex
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, select_autoescape

from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.service import Service

WEB = Path(__file__).parent.parent / "web"
PAGES = Environment(loader=FileSystemLoader(WEB), autoescape=select_autoescape())
mimetypes.add_type("text/javascript", ".js")  # older tables have another type
STATIC = StaticFiles(directory=WEB / "static")

router = APIRouter(include_in_schema=False)


@router.get("/")
@requires(Scope.PUBLIC)
async def index(service: AnyPhase) -> HTMLResponse:
    """The page, which says nothing of the models: those need a key."""
    pictures = " ".join(service.settings.pictures)
    return HTMLResponse(PAGES.get_template("index.html").render(pictures=pictures))


@router.get("/static/{path:path}")
@requires(Scope.PUBLIC)
async def static(path: str, request: Request) -> Response:
    """Scripts, styles and pictures of the page, which browsers revalidate on each use."""
    response = await STATIC.get_response(path, request.scope)
    response.headers["cache-control"] = "no-cache"
    return response


@router.get("/openapi.json")
@requires(Scope.PUBLIC)
async def openapi(request: Request) -> Response:
    """The OpenAPI document, made off the event loop: the first time takes half a second."""
    text = await asyncio.to_thread(lambda: json.dumps(request.app.openapi()))
    return Response(text, media_type="application/json")


def example(service: Service, base_url: str) -> str:
    """A curl command with a valid request for this model."""
    body = json.dumps(
        {"history": service.state.models.get().recommender.catalog.item_ids[:2], "k": 5}
    )
    url = f"{base_url.rstrip('/')}/v1/recommendations"
    key = "" if service.settings.keys is None else " -H 'authorization: Bearer KEY'"
    options = f"-H 'content-type: application/json'{key} -d {shlex.quote(body)}"
    return f"curl {shlex.quote(url)} {options}"
