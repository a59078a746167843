"""What the OpenAPI document says of keys and of what is refused before a route is reached."""

from __future__ import annotations

from typing import Any

from recsys.serving import auth
from recsys.serving.auth import Scope
from recsys.serving.errors import documented

BEFORE_ANY_ROUTE = ("unknown_host", "target_too_long", "headers_too_large")
BEFORE_A_KEYED_ROUTE = ("unauthenticated", "forbidden", "rate_limited")
BEFORE_A_CHANGE = ("cross_origin",)


def describe(schema: dict[str, Any]) -> None:
    """Add the security scheme, each operation's scope, and the problems of the guard."""
    schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
    schemes["key"] = {
        "type": "http",
        "scheme": "bearer",
        "description": "A key of `recsys keys create`. Scopes: read, write, admin; each includes "
        "those before it. Without a key file the service answers this machine without a key.",
    }
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            scope = auth.scope_of(method.upper(), path)
            keyed = scope is not Scope.PUBLIC
            codes = BEFORE_ANY_ROUTE + (BEFORE_A_KEYED_ROUTE if keyed else ())
            if method not in ("get", "head"):
                codes += BEFORE_A_CHANGE
            if keyed:
                operation["security"] = [{"key": []}]
                operation["x-scope"] = (scope or Scope.ADMIN).word
            for status, response in documented(*codes).items():
                found = operation["responses"].setdefault(str(status), response)
                for text in response["description"].split("; "):
                    if text not in found["description"]:
                        found["description"] += f"; {text}"
                if "headers" in response:
                    found.setdefault("headers", response["headers"])
