"""The web page, its files, and the list of endpoints."""

import asyncio
import json
import mimetypes
import shlex
import threading
from pathlib import Path
from typing import Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, FileSystemLoader, select_autoescape

from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.service import Phase, Service

WEB = Path(__file__).parent.parent / "web"
PAGES = Environment(loader=FileSystemLoader(WEB), autoescape=select_autoescape())
mimetypes.add_type("text/javascript", ".js")  # older tables have another type
STATIC = StaticFiles(directory=WEB / "static")

_making = threading.Lock()

router = APIRouter(include_in_schema=False)


@router.get("/")
@requires(Scope.PUBLIC)
async def index(request: Request, service: AnyPhase) -> HTMLResponse:
    """The page; without JavaScript, a short description and a command to try."""
    is_ready = service.phase is Phase.READY
    text = PAGES.get_template("index.html").render(
        phase=service.phase.value,
        model=service.model if is_ready else None,
        curl=example(service, str(request.base_url)) if is_ready else None,
        pictures=" ".join(service.settings.pictures),
    )
    return HTMLResponse(text)


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
    """The OpenAPI document."""
    return Response(await _made_once(request, "openapi"), media_type="application/json")


@router.get("/docs")
@requires(Scope.PUBLIC)
async def docs(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page."""
    return HTMLResponse(await _made_once(request, "docs"))


async def _made_once(request: Request, name: Literal["openapi", "docs"]) -> bytes:
    """The bytes of a document that anyone may get.

    They are made for the first request, off the event loop: it takes half a second.
    """
    kept: dict[str, bytes] = request.app.state.documents

    def make() -> bytes:
        with _making:
            if name not in kept:
                api = request.app.openapi()
                page = PAGES.get_template("docs.html").render(api=api) if name == "docs" else ""
                kept[name] = (page or json.dumps(api, ensure_ascii=False)).encode()
            return kept[name]

    return kept[name] if name in kept else await asyncio.to_thread(make)


def example(service: Service, base_url: str) -> str:
    """A curl command with a valid request for this model."""
    body = json.dumps({"history": service.catalog.item_ids[:2], "k": 5})
    url = f"{base_url.rstrip('/')}/v1/recommendations"
    key = "" if service.settings.keys is None else " -H 'authorization: Bearer KEY'"
    options = f"-H 'content-type: application/json'{key} -d {shlex.quote(body)}"
    return f"curl {shlex.quote(url)} {options}"
