"""The OpenAPI document: FastAPI's own, with the scopes of keys and one form of problems."""

import threading
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recsys.serving.api.routes import ROUTES, methods_of
from recsys.serving.auth import Scope, scope_of
from recsys.serving.errors import KINDS, MEDIA_TYPE
from recsys.serving.schemas.common import Problem

PROBLEM = {
    "description": "A problem (RFC 9457): `code` says which.",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    "headers": {
        "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds, if it may help."}
    },
}


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
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    problem["properties"]["code"]["enum"] = sorted(KINDS)
    schemas |= problem.pop("$defs") | {"Problem": problem}
    for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own
        schemas.pop(name, None)
    components.setdefault("securitySchemes", {})["key"] = {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of `recsys keys create`. Scopes: read, write, admin; each includes "
        "those before it. Without a key file the service answers this machine without a key.",
    }
    for route in ROUTES:
        if route.include_in_schema:
            for method in methods_of(route):
                operation = document["paths"][route.path_format][method.lower()]
                operation["responses"].pop("422", None)  # FastAPI's own form
                operation["responses"]["default"] = PROBLEM
                if (scope := scope_of(route.endpoint)) is not Scope.PUBLIC:
                    operation["security"] = [{"key": []}]
                    operation["x-scope"] = scope.word
    return document
