"""The ASGI application: lifespan, middleware and routes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from recsys import __version__
from recsys.recommender import Recommender
from recsys.serving import errors
from recsys.serving.api import openapi
from recsys.serving.api.routes import ROUTES
from recsys.serving.middleware import Entrance, Guard
from recsys.serving.service import Service
from recsys.serving.settings import ServingSettings
from recsys.serving.stores.store import Store


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
    guard = Guard(settings, service.metrics)  # it refuses keys that cannot be read

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        starting = asyncio.create_task(service.start())
        yield
        await starting  # loading cannot be interrupted
        await service.stop()

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
        middleware=[Middleware(Entrance, guard, settings, service.metrics)],
    )
    app.state.service = service
    app.state.exposition = (0.0, b"")  # of `operations`, and when it was made
    errors.install(app)
    openapi.install(app)
    return app
