"""What all routes share: bodies that are JSON and say so, a service that is ready, paths."""

# Annotations stay live here: FastAPI reads them.
import asyncio
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from fastapi import Path as PathParameter
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import ClientDisconnect

from serving.bodies import MalformedError, parse
from serving.errors import ProblemError
from serving.schemas.common import MAX_ID
from serving.service import Service

T = TypeVar("T")
BODY = ("malformed_body", "unsupported_media_type", "invalid_request")
RECOMMEND = ("unknown_model", "queue_full", "not_ready", "shutting_down", "deadline_exceeded")


class StrictRequest(Request):
    """A request whose JSON is read by `serving.bodies`."""

    async def json(self) -> Any:
        """The body's value.

        Raises:
            ProblemError: it is no JSON.
        """
        if not hasattr(self, "_value"):
            try:
                self._value = parse(await self.body())
            except MalformedError as error:
                raise ProblemError(
                    "malformed_body", f"The body is not valid JSON: {error}."
                ) from None
        return self._value


class JsonRoute(APIRoute):
    """A route whose body, if it has one, is JSON and says so."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler, behind a look at the content type."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def checked(request: Request) -> Response:
            given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if given != "application/json":
                detail = f"The content type is {given or 'missing'}; send application/json."
                raise ProblemError("unsupported_media_type", detail)
            strict = StrictRequest(request.scope, request.receive)
            await strict.body()  # FastAPI would call a client that leaves here malformed
            return await handle(strict)

        return checked


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _ready_service(service: Annotated[Service, Depends(_service)]) -> Service:
    service.require_ready()
    return service


AnyPhase = Annotated[Service, Depends(_service)]
Ready = Annotated[Service, Depends(_ready_service)]
PathId = Annotated[str, PathParameter(min_length=1, max_length=MAX_ID)]


def json_response(answer: BaseModel, status: int = 200) -> Response:
    """The answer as it is; what was not set is left out."""
    text = answer.model_dump_json(exclude_unset=True, by_alias=True)
    return Response(text, status, media_type="application/json")


async def while_connected(request: Request, answer: Coroutine[Any, Any, T]) -> T:
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
