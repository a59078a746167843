"""Pages for people."""

# Annotations stay live here: FastAPI reads them.
import json
import shlex
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, FileSystemLoader, select_autoescape

from serving.api.routing import AnyPhase
from serving.service import Phase, Service

WEB = Path(__file__).parent.parent / "web"
PAGES = Environment(loader=FileSystemLoader(WEB), autoescape=select_autoescape())

router = APIRouter(include_in_schema=False)


@router.get("/")
async def index(request: Request, service: AnyPhase) -> HTMLResponse:
    """What this is, and a line to try."""
    is_ready = service.phase is Phase.READY
    text = PAGES.get_template("index.html").render(
        phase=service.phase.value,
        model=service.model if is_ready else None,
        curl=example(service, str(request.base_url)) if is_ready else None,
    )
    return HTMLResponse(text)


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page."""
    return HTMLResponse(PAGES.get_template("docs.html").render(api=request.app.openapi()))


def example(service: Service, base_url: str) -> str:
    """A curl line that works against this model."""
    body = json.dumps({"history": service.catalog.item_ids[:2], "k": 5})
    url = f"{base_url.rstrip('/')}/v1/recommendations"
    return f"curl {shlex.quote(url)} -H 'content-type: application/json' -d {shlex.quote(body)}"
