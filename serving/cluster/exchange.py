"""Exchange: a request and its answer as values, and an ASGI application that turns one into other.

This is all that travels between the door and a replica.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message
from starlette.types import Scope as AsgiScope

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Call:
    """An HTTP request, whole.

    Attributes:
        method: upper case.
        path: decoded.
        raw_path: as it came.
        query: without the question mark.
        headers: lower-case names.
        client: address and port of who asks.
        server: address and port that were asked.
        scheme: `http` or `https`.
        body: all of it.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: Headers
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    scheme: str
    body: bytes

    @classmethod
    def of(cls, scope: AsgiScope, body: bytes) -> Call:
        """A request that has been read."""
        return cls(
            scope["method"],
            scope["path"],
            scope.get("raw_path") or scope["path"].encode(),
            scope["query_string"],
            [(bytes(name), bytes(value)) for name, value in scope["headers"]],
            scope.get("client"),
            scope.get("server"),
            scope.get("scheme", "http"),
            body,
        )

    def header(self, name: bytes) -> bytes | None:
        """The first header of a name."""
        return next((value for key, value in self.headers if key == name), None)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer, whole.

    Attributes:
        status: of the answer.
        headers: lower-case names.
        body: all of it.
        replica: host and process that answered.
    """

    status: int
    headers: Headers
    body: bytes
    replica: str = ""


async def answer(app: ASGIApp, call: Call) -> Reply:
    """What an application in this process answers."""
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": call.scheme,
        "path": call.path,
        "raw_path": call.raw_path,
        "query_string": call.query,
        "root_path": "",
        "headers": call.headers,
        "client": call.client,
        "server": call.server,
    }
    incoming: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    started: Message = {}
    pieces: list[bytes] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        await asyncio.Event().wait()  # whoever asks stays to the end
        raise AssertionError

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started.update(message)
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    headers = [(bytes(name), bytes(value)) for name, value in started["headers"]]
    here = f"{socket.gethostname()}:{os.getpid()}"
    return Reply(started["status"], headers, b"".join(pieces), here)
