"""All routes of the service, in the order in which they are matched."""

from functools import lru_cache
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import Scope

from recsys.serving.api import events, items, models, operations, pages, recommendations, users

_MODULES = (recommendations, items, events, users, models, operations, pages)
ROUTES = [
    route for module in _MODULES for route in module.router.routes if isinstance(route, APIRoute)
]


def find_route(scope: Scope) -> tuple[APIRoute | None, set[str]]:
    """Find the route of a request without running it.

    Returns the route and the methods that its path answers to. If the request's method is not
    among them, it is the first route of the path. If there is no such path, None and no methods.
    """
    return _find(scope["method"], scope["path"], scope.get("raw_path"), scope.get("root_path", ""))


@lru_cache(maxsize=256)  # most requests are for few paths, and matching one takes up to 0.2 ms
def _find(
    method: str, path: str, raw_path: bytes | None, root_path: str
) -> tuple[APIRoute | None, set[str]]:
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "root_path": root_path}
    if raw_path is not None:
        scope["raw_path"] = raw_path
    fitting: list[APIRoute] = []
    for route in ROUTES:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route, route.methods or set()
        if match is Match.PARTIAL:
            fitting.append(route)
    methods = {method for route in fitting for method in route.methods or ()}
    return (fitting[0] if fitting else None), methods
