"""All routes of the service, in the order in which they are matched."""

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
    key = (scope["method"], scope["path"])
    is_as_written = scope.get("raw_path") == key[1].encode() and not scope.get("root_path")
    return (is_as_written and _FOUND.get(key)) or _search(scope)


def _search(scope: Scope) -> tuple[APIRoute | None, set[str]]:
    fitting: list[APIRoute] = []
    for route in ROUTES:
        match, _ = route.matches(scope)
        if match is Match.FULL:
            return route, methods_of(route)
        if match is Match.PARTIAL:
            fitting.append(route)
    methods = {method for route in fitting for method in methods_of(route)}
    return (fitting[0] if fitting else None), methods


def methods_of(route: APIRoute) -> set[str]:
    """HTTP methods that a route answers to."""
    return route.methods or set()


def _found(method: str, path: str) -> tuple[APIRoute | None, set[str]]:
    return _search({"type": "http", "method": method, "path": path, "raw_path": path.encode()})


# What is found for the paths without parameters: most requests are for one of them.
_FOUND = {
    (method, route.path): _found(method, route.path)
    for route in ROUTES
    if "{" not in route.path
    for method in methods_of(route)
}
