"""The OpenAPI document: FastAPI's own, with the keys and the codes of problems."""

import threading
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recsys.serving.errors import KINDS


def install(app: FastAPI) -> None:
    """Let the application answer `openapi()` with this document, which is made once."""
    making = threading.Lock()

    def openapi() -> dict[str, Any]:
        with making:
            if app.openapi_schema is None:
                app.openapi_schema = _document(app)
            return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title, version=app.version, summary=app.summary, routes=app.routes
    )
    components = document["components"]
    components["schemas"]["Problem"]["properties"]["code"]["enum"] = sorted(KINDS)
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "A key of `recsys keys create`. Scopes: read, write, admin; each "
            "includes those before it. Without a key file the service answers this machine without "
            "a key.",
        }
    }
    return document
