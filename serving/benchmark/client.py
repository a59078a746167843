"""A client that costs little: HTTP/1.1 over kept connections, on asyncio's transports.

It knows what this service sends (a Content-Length, no chunks) and no more.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass(frozen=True)
class Request:
    """What is sent.

    Attributes:
        method: of HTTP.
        path: with its query.
        body: JSON, or empty.
    """

    method: str
    path: str
    body: bytes = b""

    @classmethod
    def post(cls, path: str, body: Any) -> Request:
        """A POST of a JSON value."""
        return cls("POST", path, json.dumps(body).encode())


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


class ConnectionLostError(Exception):
    """The server closed the connection before the answer was whole."""


class _Connection(asyncio.Protocol):
    """One request at a time over one connection."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self._buffer = bytearray()
        self._waiter: asyncio.Future[Reply] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(ConnectionLostError(str(exc or "closed")))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[:end])
        found = _LENGTH.search(head)
        size = end + 4 + (int(found[1]) if found else 0)
        if len(self._buffer) < size or self._waiter is None:
            return
        reply = Reply(int(head[9:12]), bytes(self._buffer[end + 4 : size]))
        del self._buffer[:size]
        self.closed = self.closed or _CLOSE.search(head) is not None
        waiter, self._waiter = self._waiter, None
        if not waiter.done():
            waiter.set_result(reply)

    def send(self, data: bytes) -> asyncio.Future[Reply]:
        assert self.transport is not None  # noqa: S101 - connection_made came first
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return self._waiter


class Client:
    """Kept connections to one server; as many as there are requests under way."""

    def __init__(self, host: str, port: int, key: str | None = None) -> None:
        """Talk to `host` and `port`, with an API key if one is needed."""
        self._host, self._port = host, port
        self._head = f"Host: {host}:{port}\r\n"
        if key is not None:
            self._head += f"Authorization: Bearer {key}\r\n"
        self._free: list[_Connection] = []

    async def send(self, request: Request) -> Reply:
        """Send a request and wait for its answer.

        Raises:
            OSError, ConnectionLostError: no connection, or one that broke.
        """
        connection = await self._connection()
        kind = "Content-Type: application/json\r\n" if request.body else ""
        head = (
            f"{request.method} {request.path} HTTP/1.1\r\n{self._head}{kind}"
            f"Content-Length: {len(request.body)}\r\n\r\n"
        )
        try:
            reply = await connection.send(head.encode() + request.body)
        except BaseException:
            if connection.transport is not None:
                connection.transport.close()
            raise
        if not connection.closed:
            self._free.append(connection)
        elif connection.transport is not None:
            connection.transport.close()
        return reply

    async def connect(self, count: int) -> None:
        """Have so many connections ready, so that none is opened while the clock runs."""
        made = [await self._open() for _ in range(count - len(self._free))]
        self._free += made

    def close(self) -> None:
        """Close the connections."""
        for connection in self._free:
            if connection.transport is not None:
                connection.transport.close()
        self._free.clear()

    async def _connection(self) -> _Connection:
        while self._free:
            connection = self._free.pop()
            if not connection.closed:
                return connection
        return await self._open()

    async def _open(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection
