"""Replica: the application in a process of a cluster, and what it exchanges with the door.

It does not import Ray, which calls `reconfigure` and `check_health` by name.
"""

import asyncio
import os
import socket
import sys
from dataclasses import dataclass
from typing import Any, Self

from starlette.types import ASGIApp, Message
from starlette.types import Scope as AsgiScope
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from recsys.errors import RecsysError
from recsys.serving import logs
from recsys.serving.app import create_app
from recsys.serving.batcher import DeadlineExceededError
from recsys.serving.service import Phase, Service
from recsys.serving.settings import ServingSettings

_SENT = ("type", "http_version", "method", "scheme", "path", "query_string", "client", "server")


@dataclass(frozen=True)
class Call:
    """A complete HTTP request: its ASGI scope, without what belongs to the process that read it."""

    scope: dict[str, Any]
    body: bytes = b""

    @classmethod
    def of(cls, scope: AsgiScope, body: bytes) -> Self:
        """Take the parts of a scope that can be sent to another process."""
        fields = {name: scope.get(name) for name in _SENT}
        fields["raw_path"] = scope.get("raw_path") or scope["path"].encode()
        fields["headers"] = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        return cls(fields, body)


@dataclass(frozen=True)
class Reply:
    """A complete HTTP response, by the replica of this host and process id."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    replica: str = ""


async def answer(app: ASGIApp, call: Call) -> Reply:
    """Run a call through an application of this process."""
    incoming: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    started: Message = {}
    pieces: list[bytes] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # the door stays connected until the reply is complete
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))
            started["more_body"] = message.get("more_body", False)

    asgi = {"version": "3.0", "spec_version": "2.4"}
    await app({**call.scope, "asgi": asgi, "root_path": ""}, receive, send)
    if started["more_body"]:
        raise DeadlineExceededError  # a part of an answer is none
    headers = [(bytes(name), bytes(value)) for name, value in started["headers"]]
    here = f"{socket.gethostname()}:{os.getpid()}"
    return Reply(started["status"], headers, b"".join(pieces), here)


class Replica:
    """One process of a cluster, with its own application and models."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """Create the application with fields of `ServingSettings`; `reconfigure` starts it."""
        logs.configure(sys.stdout)
        self.settings = ServingSettings(**settings)
        self._app = create_app(self.settings)
        self._service: Service = self._app.state.service
        entrance: Any = self._app
        self._entrance: ASGIApp = ProxyHeadersMiddleware(  # type: ignore[assignment]
            entrance, trusted_hosts=self.settings.forwarded_allow_ips
        )
        self._life: Any = None

    async def reconfigure(self, config: Any = None) -> None:
        """Start the application; returns when it is ready.

        Raises:
            RecsysError: the application could not start, or there is a `user_config`.
        """
        if config:
            raise RecsysError("user_config: leave it out; aliases change by PUT /v1/aliases/{name}")
        if self._life is not None:
            return
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        while self._service.phase is Phase.STARTING:
            await asyncio.sleep(0.02)
        if self._service.failure is not None:
            raise RecsysError(f"the replica could not start: {self._service.failure}")

    async def answer(self, call: Call) -> Reply:
        """Answer one request."""
        return await answer(self._entrance, call)

    def check_health(self) -> None:
        """Raise `RecsysError` if the application failed."""
        if self._service.phase is Phase.FAILED:
            raise RecsysError(f"the replica failed: {self._service.failure}")

    async def stop(self) -> None:
        """Answer the waiting requests, then close the application."""
        life, self._life = self._life, None
        if life is not None:
            await life.__aexit__(None, None, None)
