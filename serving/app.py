"""The ASGI application: lifespan, middleware and routes."""

# Annotations stay live here: FastAPI reads them.
import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import Message

from recsys import __version__
from recsys.recommender import Recommender
from recsys.serving import errors
from recsys.serving.api import openapi
from recsys.serving.api.routes import ROUTES
from recsys.serving.middleware import BodyLimit, around
from recsys.serving.service import Service
from recsys.serving.settings import ServingSettings
from recsys.serving.stores.store import Store
from recsys.serving.telemetry import OpenTelemetry, Telemetry

REHEARSALS = 3


def create_app(
    settings: ServingSettings,
    *,
    recommender: Recommender | None = None,
    store: Store | None = None,
) -> FastAPI:
    """Create the application of a serving process.

    It accepts connections at once and loads the model in the background; `/health/ready` reports
    when it is ready. Its `state.service` is the `Service` that the routes use. A loaded
    recommender replaces `settings.bundle`, an open store `settings.store`.
    """
    service = Service(settings, recommender, store)
    telemetry = OpenTelemetry.exporting() if settings.otel else Telemetry()
    service.metrics.telemetry = telemetry

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await _rehearse(app)
        starting = asyncio.create_task(service.start())
        yield
        await starting  # loading cannot be interrupted
        await service.stop()
        telemetry.close()

    app = FastAPI(
        title="recsys",
        summary="Generative recommendation: exact top-k over the catalog.",
        version=__version__,
        lifespan=lifespan,
        routes=list(ROUTES),
        openapi_url=None,  # `pages` declares the route, with its scope
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        middleware=around(settings, service.metrics, telemetry),
    )
    app.state.service = service
    errors.install(app)
    openapi.install(app)
    return app


async def _rehearse(app: FastAPI) -> None:
    """Send some requests to the routes before the model is loaded, to warm up their code.

    They bypass the middleware that counts, logs and checks requests.
    """
    stack: Any = app.build_middleware_stack()
    while not isinstance(stack, BodyLimit):
        stack = stack.app

    async def receive() -> Message:
        return {"type": "http.request", "body": b'{"history": ["1"]}'}

    async def send(message: Message) -> None:
        pass

    for _ in range(REHEARSALS):
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": "/v1/recommendations",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "state": {},
            "app": app,
        }
        await stack.app(scope, receive, send)  # responds 503: the model is not loaded
