"""The OpenAPI document: FastAPI's own, with the scopes of keys and the problems before a route."""

import threading
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from recsys.serving.api.routes import ROUTES, methods_of
from recsys.serving.auth import Scope, scope_of
from recsys.serving.errors import documented
from recsys.serving.schemas.common import Problem

BEFORE_ANY_ROUTE = (
    "ambiguous_length", "malformed_target", "unknown_host", "target_too_long", "headers_too_large",
)  # fmt: skip
BEFORE_A_KEYED_ROUTE = ("unauthenticated", "forbidden", "rate_limited")
BEFORE_A_CHANGE = ("cross_origin",)


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
    schemas |= problem.pop("$defs") | {"Problem": problem}
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
                _describe(operation, method, scope_of(route.endpoint))
    return document


def _describe(operation: dict[str, Any], method: str, scope: Scope) -> None:
    """Add an operation's scope, and the problems that are answered before its route is run."""
    codes: tuple[str, ...] = BEFORE_ANY_ROUTE
    if scope is not Scope.PUBLIC:
        codes += BEFORE_A_KEYED_ROUTE
        operation["security"] = [{"key": []}]
        operation["x-scope"] = scope.word
    if method != "GET":
        codes += BEFORE_A_CHANGE
    for status, response in documented(*codes).items():
        found = operation["responses"].setdefault(str(status), response)
        for text in response["description"].split("; "):
            if text not in found["description"]:
                found["description"] += f"; {text}"
        if "headers" in response:
            found.setdefault("headers", response["headers"])
