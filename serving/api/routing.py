"""Common parts of the routes: strict JSON bodies, ids in paths, the service as a dependency."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeVar, get_origin

from fastapi import Depends, Request, Response
from fastapi import Path as PathParameter
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Scope

from recsys.serving.auth import Scope as AccessScope
from recsys.serving.auth import scope_of
from recsys.serving.bodies import MalformedError, parse, read
from recsys.serving.errors import MEDIA_TYPE, ProblemError
from recsys.serving.limits import CALLER
from recsys.serving.schemas.common import Id, as_json
from recsys.serving.service import Service

ModelT = TypeVar("ModelT", bound=BaseModel)
EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])


class IdConvertor(PathConvertor):
    """An outside id in a path: any characters, including slashes; the route checks them."""

    regex = r"[\s\S]*"


register_url_convertor("id", IdConvertor())
PROBLEM = {
    "description": "A problem (RFC 9457): `code` says which.",
    "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    "headers": {
        "Retry-After": {"schema": {"type": "integer"}, "description": "Seconds, if it may help."}
    },
}
WATCH_S = 0.1
PAGE = 100  # entries of a list that a request pays for


class StrictRequest(Request):
    """A request whose body is parsed and validated by `bodies`, off the event loop if it is large.

    FastAPI passes an instance of the endpoint's model on as it is.
    """

    model: type[BaseModel]

    async def json(self) -> Any:
        """Parse and validate the body."""
        if not hasattr(self, "_value"):
            body = await self.body() or b"null"  # nothing is not malformed: a field is missing
            self._value = await read(lambda body: document(body, self.model), body)
        return self._value


def document(body: bytes, model: type[ModelT]) -> ModelT:
    """Parse and validate a JSON document; `RequestValidationError` names the refused fields."""
    try:
        value = parse(body)
    except MalformedError as error:
        raise ProblemError("malformed_body", f"The body is not valid JSON: {error}.") from None
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        raise RequestValidationError(
            [{**entry, "loc": ("body", *entry["loc"])} for entry in errors]
        ) from None


class Route(APIRoute):
    """A route whose bodies are strict JSON, and whose query parameters are given once.

    FastAPI takes the last of several values without a word. A route that only reads is given up
    when its client leaves.

    A path may end with a word after an id that may contain slashes: `/v1/items/a/similar` is the
    similar items of `a`, and `/v1/items/a%2Fsimilar` is the item `a/similar`: an encoded slash
    belongs to the id.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """Make a route, which the OpenAPI document describes with its problems and its scope."""
        scope = scope_of(endpoint)
        if scope is not AccessScope.PUBLIC:
            options["openapi_extra"] = {"security": [{"key": []}], "x-scope": scope.word}
        options["responses"] = {**options.get("responses", {}), "default": PROBLEM}
        super().__init__(path, endpoint, **options)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """Match as any route, but only if the slash before the last word is not encoded."""
        match, child = super().matches(scope)
        _, is_behind_an_id, word = self.path_format.rpartition("}/")
        written = scope.get("raw_path")
        if match is Match.NONE or not is_behind_an_id or written is None:
            return match, child
        is_apart = written.partition(b"?")[0].endswith(f"/{word}".encode())
        return (match, child) if is_apart else (Match.NONE, {})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap the handler in the checks of body and query."""
        handle: Callable[[Any], Coroutine[Any, Any, Response]] = super().get_route_handler()
        if scope_of(self.endpoint) is AccessScope.READ:
            handle = partial(while_connected, handle)
        fields = {parameter.name: parameter.field_info for parameter in self.dependant.query_params}
        for info in list(fields.values()):
            if inspect.isclass(info.annotation) and issubclass(info.annotation, BaseModel):
                fields = dict(info.annotation.model_fields)  # FastAPI allows one model, alone
        once = {name for name, info in fields.items() if get_origin(info.annotation) is not list}
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def checked(request: Request) -> Response:
            if model is not None:
                request = await _strict(request, model)
            counts = Counter(name for name, _ in request.query_params.multi_items())
            if twice := [name for name, times in counts.items() if times > 1 and name in once]:
                message = "give it once"
                raise RequestValidationError(
                    [{"loc": ("query", name), "type": "twice", "msg": message} for name in twice]
                )
            return await handle(request)

        return checked


async def _strict(request: Request, model: type[BaseModel]) -> StrictRequest:
    """The request with its body as an instance of `model`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        detail = f"The content type is {media_type or 'missing'}; send application/json."
        raise ProblemError("unsupported_media_type", detail)
    strict = StrictRequest(request.scope, request.receive)
    strict.model = model
    await strict.json()  # FastAPI would report any exception of it as a malformed body
    return strict


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _ready_service(request: Request) -> Service:
    service: Service = request.app.state.service
    service.require_ready()
    return service


async def _key_name(request: Request) -> str | None:
    name: str | None = request.scope.get("state", {}).get("key")
    return name


AnyPhase = Annotated[Service, Depends(_service)]
Ready = Annotated[Service, Depends(_ready_service)]
By = Annotated[str | None, Depends(_key_name)]
PathId = Annotated[Id, PathParameter()]


def json_response(answer: BaseModel | bytes) -> Response:
    """The response of an answer, or of its JSON, which is made off the event loop if large."""
    text = answer if isinstance(answer, bytes) else as_json(answer)
    return Response(text, media_type="application/json")


def pay_for(entries: int) -> None:
    """Charge the client for a list of up to `entries`; it has paid for one unit of work."""
    CALLER.get().charge(max(0.0, entries / PAGE - 1))


def unhurried(endpoint: EndpointT) -> EndpointT:
    """Declare that an endpoint may take longer than the deadline of requests."""
    endpoint.unhurried = True  # type: ignore[attr-defined]
    return endpoint


async def while_connected(
    handle: Callable[[Request], Coroutine[Any, Any, Response]], request: Request
) -> Response:
    """Handle a request; if its client disconnects, cancel that and raise `ClientDisconnect`.

    The client is watched from `WATCH_S` on: most answers are ready by then.
    """
    asking = asyncio.current_task()
    assert asking is not None  # noqa: S101 - a coroutine runs in a task
    left = False

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass  # the rest of an unread body
        left = True
        asking.cancel()

    watching: asyncio.Task[None] | None = None

    def begin() -> None:
        nonlocal watching
        watching = asyncio.create_task(watch())

    later = asyncio.get_running_loop().call_later(WATCH_S, begin)
    try:
        return await handle(request)
    except asyncio.CancelledError:
        if left and not asking.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        later.cancel()
        if watching is not None:
            watching.cancel()
