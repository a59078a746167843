"""Pages for people."""

# Annotations stay live here: FastAPI reads them.
import hashlib
import json
import mimetypes
import shlex
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from jinja2 import Environment, FileSystemLoader, select_autoescape

from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import ProblemError
from recsys.serving.service import Phase, Service

WEB = Path(__file__).parent.parent / "web"
PAGES = Environment(loader=FileSystemLoader(WEB), autoescape=select_autoescape())


@dataclass(frozen=True)
class StaticFile:
    """A file of the page, kept in memory."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: Path) -> "StaticFile":
        """What is in the file; its name tells the type."""
        content = path.read_bytes()
        kind = "text/javascript" if path.suffix == ".js" else mimetypes.guess_type(path.name)[0]
        return cls(content, kind or "text/plain", f'"{hashlib.sha256(content).hexdigest()[:32]}"')


# All that /static has: a name that is not here cannot lead anywhere.
STATIC = {path.name: StaticFile.read(path) for path in sorted((WEB / "static").iterdir())}

router = APIRouter(include_in_schema=False)


@router.get("/")
@requires(Scope.PUBLIC)
async def index(request: Request, service: AnyPhase) -> HTMLResponse:
    """The page; without scripts, what this is and a line to try."""
    is_ready = service.phase is Phase.READY
    text = PAGES.get_template("index.html").render(
        phase=service.phase.value,
        model=service.model if is_ready else None,
        curl=example(service, str(request.base_url)) if is_ready else None,
    )
    return HTMLResponse(text)


@router.get("/static/{path:path}")
@requires(Scope.PUBLIC)
async def static(path: str, request: Request) -> Response:
    """Scripts, styles and pictures of the page; browsers ask again whether they have changed."""
    file = STATIC.get(path)
    if file is None:
        raise ProblemError("not_found", f"The page has no file {path!r}.")
    headers = {"etag": file.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.media_type, headers=headers)


@router.get("/openapi.json")
@requires(Scope.PUBLIC)
async def openapi(request: Request) -> JSONResponse:
    """The OpenAPI document."""
    return JSONResponse(request.app.openapi())


@router.get("/docs")
@requires(Scope.PUBLIC)
async def docs(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page."""
    return HTMLResponse(PAGES.get_template("docs.html").render(api=request.app.openapi()))


def example(service: Service, base_url: str) -> str:
    """A curl line that works against this model."""
    body = json.dumps({"history": service.catalog.item_ids[:2], "k": 5})
    url = f"{base_url.rstrip('/')}/v1/recommendations"
    key = "" if service.settings.keys is None else " -H 'authorization: Bearer KEY'"
    told = f"-H 'content-type: application/json'{key} -d {shlex.quote(body)}"
    return f"curl {shlex.quote(url)} {told}"
