"""The ASGI application: lifespan and routes, nothing else."""

# Annotations stay live here: FastAPI reads them.
import asyncio
import json
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, select_autoescape
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect

from recsys import __version__
from serving import errors
from serving.engine import Recommends
from serving.errors import ProblemError, documented
from serving.middleware import BodyLimit, RequestContext
from serving.schemas import (
    MAX_ID,
    Health,
    Item,
    ModelList,
    Problem,
    RecommendationsRequest,
    RecommendationsResponse,
    UserQuery,
)
from serving.service import Phase, Service
from serving.settings import ServingSettings
from serving.stores import HistoryStore

T = TypeVar("T")
PAGES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "web"), autoescape=select_autoescape()
)
RECOMMEND = ("queue_full", "not_ready", "shutting_down", "deadline_exceeded")


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON and says so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a look at the content type."""
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if self.body_field is not None:
                given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if given != "application/json":
                    detail = f"The content type is {given or 'missing'}; send application/json."
                    raise ProblemError("unsupported_media_type", detail)
                await request.body()  # FastAPI would call a client that leaves here malformed
            return await handle(request)

        return checked


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _ready_service(service: Annotated[Service, Depends(_service)]) -> Service:
    service.require_ready()
    return service


Ready = Annotated[Service, Depends(_ready_service)]
PathId = Annotated[str, PathParameter(min_length=1, max_length=MAX_ID)]

v1 = APIRouter(prefix="/v1", route_class=JsonRoute)
health = APIRouter(prefix="/health")
pages = APIRouter(include_in_schema=False)


@v1.post(
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
    return await _while_connected(request, service.recommend(body))


@v1.get(
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
    return await _while_connected(request, service.recommend(body))


@v1.get("/items/{item_id}", responses=documented("unknown_item", "invalid_request", "not_ready"))
async def get_item(item_id: PathId, service: Ready) -> Item:
    """An item of the catalogue: title, semantic ID, attributes."""
    return service.item(item_id)


@v1.get("/models", responses=documented("not_ready"))
async def list_models(service: Ready) -> ModelList:
    """The models that answer."""
    return ModelList(models=[service.model])


@health.get("/live", responses=documented())
async def live() -> Health:
    """The process runs."""
    return Health(status="live")


@health.get("/ready", responses=documented("not_ready"))
async def ready(service: Ready) -> Health:
    """The model is loaded and warm; recommendations are answered."""
    return Health(status="ready")


@pages.get("/")
async def index(request: Request, service: Annotated[Service, Depends(_service)]) -> HTMLResponse:
    """What this is, and a line to try."""
    is_ready = service.phase is Phase.READY
    text = PAGES.get_template("index.html").render(
        phase=service.phase.value,
        model=service.model if is_ready else None,
        curl=example(service, str(request.base_url)) if is_ready else None,
    )
    return HTMLResponse(text)


@pages.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page."""
    return HTMLResponse(PAGES.get_template("docs.html").render(api=request.app.openapi()))


def create_app(
    settings: ServingSettings,
    *,
    recommender: Recommends | None = None,
    store: HistoryStore | None = None,
) -> FastAPI:
    """The application of one serving process.

    It accepts connections at once and loads in the background; `/health/ready` tells when it is
    done. Its `state.service` is the `Service` behind the routes.

    Args:
        settings: of the process.
        recommender: one that is loaded already, instead of `settings.bundle`.
        store: one that is open already, instead of `settings.store`.
    """
    service = Service(settings, recommender, store)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        await starting  # loading cannot be left halfway
        await service.stop()

    app = FastAPI(
        title="recsys",
        summary="Generative recommendation: exact top-k over the catalogue.",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        middleware=[
            Middleware(RequestContext),
            Middleware(BodyLimit, max_bytes=settings.max_body_bytes),
        ],
    )
    app.state.service = service
    for router in (v1, health, pages):
        app.include_router(router)
    errors.install(app)
    _describe(app)
    return app


def example(service: Service, base_url: str) -> str:
    """A curl line that works against this model."""
    body = json.dumps({"history": service.catalog.item_ids[:2], "k": 5})
    url = f"{base_url.rstrip('/')}/v1/recommendations"
    return f"curl {shlex.quote(url)} -H 'content-type: application/json' -d {shlex.quote(body)}"


async def _while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
    """Await `answer`, but give up its place in the queue if the client goes away.

    Raises:
        ClientDisconnect: nobody waits for the answer.
    """
    answering = asyncio.create_task(answer)
    leaving = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            leaving.result()
            raise ClientDisconnect
        return answering.result()
    finally:
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass  # the rest of a body that nobody reads


def _describe(app: FastAPI) -> None:
    """Let the OpenAPI document know the form of problems."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes
            )
            template = "#/components/schemas/{model}"
            problem = Problem.model_json_schema(ref_template=template)
            schemas = schema.setdefault("components", {}).setdefault("schemas", {})
            schemas |= problem.pop("$defs") | {"Problem": problem}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
