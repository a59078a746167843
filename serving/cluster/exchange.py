"""The request and the reply that travel between the door and a replica, as plain values."""

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any, Self

from starlette.types import ASGIApp, Message
from starlette.types import Scope as AsgiScope

Headers = list[tuple[bytes, bytes]]
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

    @property
    def method(self) -> str:
        """HTTP method, in upper case."""
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Decoded path."""
        return str(self.scope["path"])

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        return next((value for key, value in self.scope["headers"] if key == name), None)


@dataclass(frozen=True)
class Reply:
    """A complete HTTP response, by the replica of this host and process id."""

    status: int
    headers: Headers
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

    asgi = {"version": "3.0", "spec_version": "2.4"}
    await app({**call.scope, "asgi": asgi, "root_path": ""}, receive, send)
    headers = [(bytes(name), bytes(value)) for name, value in started["headers"]]
    here = f"{socket.gethostname()}:{os.getpid()}"
    return Reply(started["status"], headers, b"".join(pieces), here)
