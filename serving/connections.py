"""HTTP/1.1 connections with limits: uvicorn's h11 protocol, with timeouts and caps.

The limits hold without a proxy in front. They are those of one implementation of HTTP, whatever
else is installed: httptools is faster by a fraction of a millisecond for each request, but it has
no limit of headers and accepts two `Host` headers.

- A connection is closed if its first byte does not come within `IDLE_S`, or the next one within
  `IDLE_S` of an answer.
- A request must arrive within its deadline, head and body, and is answered 408 otherwise. The
  application gets the time of the first byte as `scope["state"]["arrived"]`, and can close the
  connection with `scope["state"]["disconnect"]`.
- `scope["state"]["meter"]` counts the processor time that Python takes for the connection.
- For `MALFORMED_S` after a request that is not HTTP, new connections of its address are read only
  after `PAUSE_S`. Reading it costs more than sending it.
- The head has at most `MAX_HEAD` bytes, and a body that comes in very many pieces is refused.
- A client that does not read its answer for `WRITE_S` is disconnected.
- The number of connections is limited in all and for each address. If there are too many, the one
  leaves that has waited longest without a complete request; if there is none, the new one.
- At shutdown, answers have `Connection: close`, and idle connections are closed after `DRAIN_S`.
"""

import asyncio
import json
import math
import re
import resource
import sys
import time
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from recsys.serving.errors import MEDIA_TYPE, ProblemError, problem_body
from recsys.serving.limits import network
from recsys.serving.meter import Meter

IDLE_S = 5  # whole seconds
WRITE_S = 30.0
DRAIN_S = 1.0
PAUSE_S, MALFORMED_S = 0.1, 1.0
MAX_HEAD = 32 * 1024  # in bytes; the limits of `Guard` are lower
FREE_PIECES, PIECE = 100, 64  # pieces of a body of any size; mean bytes of the pieces after them
ABSOLUTE = re.compile(rb"https?://([^/?#]*)", re.IGNORECASE)
OWN_FILES = 64  # files that the process needs besides connections


class Connections:
    """The connections of a server, limited in number."""

    def __init__(self, most: int, trusted: str) -> None:
        """Allow `most` connections, and a quarter of them for each address.

        The limit is lower if the process may not open twice as many files. Addresses of `trusted`
        proxies, separated by commas, have no limit of their own.
        """
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            most = max(1, min(most, (files - OWN_FILES) // 2))
        self.most = most
        self.most_of_one = max(1, most // 4)
        self._trusted = {address.strip() for address in trusted.split(",")}
        self._of: Counter[str] = Counter()
        # Connections without a complete request, the one that has waited longest first.
        self._waiting: dict[Connection, None] = {}
        self._all: set[Connection] = set()
        self._malformed: dict[str, float] = {}  # address -> time of its last malformed request

    def __len__(self) -> int:
        """Number of connections."""
        return len(self._all)

    def add(self, connection: "Connection") -> bool:
        """Add a connection, which waits for its first request; false if there is no room."""
        address = connection.address
        if len(self._all) >= self.most:
            crowd, _ = self._of.most_common(1)[0]
            if not (self._make_room(crowd) or self._make_room(None)):
                return False
        is_trusted = bool(self._trusted & {address, "*"})
        is_full = self._of[address] >= self.most_of_one and not is_trusted
        if is_full and not self._make_room(address):
            return False
        self._all.add(connection)
        self._of[address] += 1
        self._waiting[connection] = None
        return True

    def remove(self, connection: "Connection") -> None:
        """Forget a connection, if it is known."""
        if connection in self._all:
            self._all.discard(connection)
            self._waiting.pop(connection, None)
            self._of[connection.address] -= 1
            if not self._of[connection.address]:
                del self._of[connection.address]

    def waits(self, connection: "Connection", yes: bool) -> None:
        """Note whether a connection is without a complete request."""
        if connection in self._all:
            self._waiting.pop(connection, None)
            if yes:
                self._waiting[connection] = None

    def is_malformed(self, address: str, now: float) -> None:
        """Note that a client of the address sent what is not HTTP; `now` is the loop's time."""
        self._malformed.pop(address, None)  # the latest come last
        self._malformed[address] = now
        for other in list(self._malformed):
            if self._malformed[other] > now - MALFORMED_S:
                break
            del self._malformed[other]

    def pause(self, address: str, now: float) -> float:
        """Seconds before a new connection of the address is read."""
        recent = self._malformed.get(address, -math.inf) > now - MALFORMED_S
        return PAUSE_S if recent and not self._trusted & {address, "*"} else 0.0

    def _make_room(self, address: str | None) -> bool:
        """Disconnect the connection that has waited longest, of an address or of all."""
        for connection in self._waiting:
            if address is None or connection.address == address:
                self.remove(connection)
                connection.transport.abort()
                return True
        return False


def _of_origin(request: h11.Request) -> h11.Request:
    """A request for `http://host/path`, as proxies send it, in the form `/path` (RFC 9112, 3.2.2).

    The host of the target replaces that of the headers.
    """
    found = ABSOLUTE.match(request.target)
    if found is None:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"host"]
    path = request.target[found.end() :]
    return h11.Request(
        method=request.method,
        target=path if path.startswith(b"/") else b"/" + path,
        headers=[(b"host", found[1]), *headers],
        http_version=request.http_version,
    )


class Messages(h11.Connection):
    """The messages of a connection, which is told when a request begins and ends."""

    def __init__(self, owner: "Connection") -> None:
        super().__init__(h11.SERVER, MAX_HEAD)
        self._owner = owner
        self._pieces = self._bytes = 0

    def next_event(self) -> Any:
        """The next event of the client; `RemoteProtocolError` for a body in too many pieces."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            if not event.http_version.startswith(b"1."):
                raise h11.RemoteProtocolError("the version of HTTP is not 1.1 or 1.0")
            event = _of_origin(event)
            self._pieces = self._bytes = 0
            self._owner.begin()
        elif isinstance(event, h11.Data):
            self._pieces += 1
            self._bytes += len(event.data)
            if self._pieces > FREE_PIECES + self._bytes / PIECE:
                raise h11.RemoteProtocolError("the body comes in too many pieces")
        elif isinstance(event, h11.EndOfMessage):
            self._owner.end()
        return event


class Connection(H11Protocol):
    """One connection."""

    def __init__(
        self, *arguments: Any, limits: Connections, deadline_s: float, **more: Any
    ) -> None:
        """As `H11Protocol`, within limits that all connections share."""
        super().__init__(*arguments, **more)
        self.conn = Messages(self)
        self._meter = Meter()
        # It holds `arrived` and the meter of this connection, and the function that ends it.
        ours = {"disconnect": self._disconnect, "meter": self._meter}
        self.app_state = {**self.app_state, **ours}
        self._answer, self.app = self.app, self._metered
        self.address = ""
        self._limits, self._deadline_s = limits, deadline_s
        self._receiving: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    # Of asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request, if there is room."""
        super().connection_made(transport)
        self.address = network(self.client[0]) if self.client else "unknown"
        if not self._limits.add(self):
            transport.abort()
            return
        self._wait()
        if pause := self._limits.pause(self.address, self.loop.time()):
            transport.pause_reading()
            self.loop.call_later(pause, transport.resume_reading)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""
        self._limits.remove(self)
        self._unset_keepalive_if_required()
        self._stop("_receiving")
        self._stop("_writing")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read in slices: h11 does not limit a head that arrives as a whole."""
        if not self._is_busy:
            self.begin()
        began = time.thread_time()
        for start in range(0, len(data), MAX_HEAD):
            if self.transport.is_closing():
                break
            super().data_received(data[start : start + MAX_HEAD])
        self._meter.add(time.thread_time() - began)

    async def _metered(self, *call: Any) -> None:
        """The application, on the meter of this connection."""
        await self._meter.run(self._answer(*call))

    def send_400_response(self, msg: str) -> None:
        """What was read is not HTTP, or its head is too large: called while that is handled."""
        self._limits.is_malformed(self.address, self.loop.time())
        self.drop_request()  # its answer is this one
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # it has an answer already, or a part of it
            return
        error = sys.exception()
        hint = getattr(error, "error_status_hint", None)
        if hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE:
            self._refuse("headers_too_large", f"The head has more than {MAX_HEAD:,} bytes.")
        else:
            why = re.sub(r"bytearray\(b(.*)\)", r"\1", str(error))[:200]
            self._refuse("malformed_request", f"What was sent is not an HTTP request: {why}.")

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop("_writing")

    # Of a request

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def begin(self) -> None:
        """The first byte of a request, or its head, is here."""
        if self._receiving is None:
            self.app_state["arrived"] = self.loop.time()
            self._receiving = self.loop.call_later(self._deadline_s, self._too_slow)

    def end(self) -> None:
        """The last byte of a request is here."""
        self._stop("_receiving")
        if self._is_busy:
            self._limits.waits(self, False)
        else:  # it was answered before its body was here: the connection waits for the next one
            self._unset_keepalive_if_required()
            self._wait()

    def drop_request(self) -> None:
        """Let the application know that nobody waits for its answer."""
        if self._is_busy:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _disconnect(self) -> None:
        """Close the connection at once, in the middle of an answer."""
        self.drop_request()
        self.transport.abort()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._limits.waits(self, True)
        if self.transport.get_write_buffer_size():
            self._expect_reader()
        super().on_response_complete()

    def shutdown(self) -> None:
        """Answer what is under way, and for a moment what is on its way, then close."""
        headers = self.server_state.default_headers
        if CLOSE_HEADER not in headers:
            self.server_state.default_headers = [*headers, CLOSE_HEADER]
        if self._is_busy:
            self.cycle.default_headers = self.server_state.default_headers
            self.cycle.keep_alive = False
        else:
            self.loop.call_later(DRAIN_S, self._end_drain)

    def _wait(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def _end_drain(self) -> None:
        if not self._is_busy and self._receiving is None:
            self.timeout_keep_alive_handler()

    def _too_slow(self) -> None:
        """The request did not arrive in time."""
        self._receiving = None
        is_head = self.conn.our_state is h11.IDLE
        is_body = self._is_busy and not self.cycle.response_started
        if self.transport.is_closing() or not (is_head or is_body):
            self.transport.abort()  # the answer was sent before the whole request was here
            return
        if is_body:
            self.cycle.scope["state"]["answered"] = HTTPStatus.REQUEST_TIMEOUT.value  # for the log
        self.drop_request()
        self._refuse("request_timeout", "The request did not arrive in time.")

    def _refuse(self, code: str, detail: str) -> None:
        """Answer with a problem, past the application and h11, and close the connection."""
        error = ProblemError(code, detail)
        body = json.dumps(problem_body(error, None)).encode()
        status = HTTPStatus(error.status_code)
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {MEDIA_TYPE}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _expect_reader(self) -> None:
        if self._writing is None:
            self._writing = self.loop.call_later(WRITE_S, self._not_read)

    def _not_read(self) -> None:
        self._writing = None
        if self.transport.get_write_buffer_size():
            self.transport.abort()

    def _stop(self, timer: str) -> None:
        handle: asyncio.TimerHandle | None = getattr(self, timer)
        if handle is not None:
            handle.cancel()
            setattr(self, timer, None)


def protocol(connections: Connections, deadline_s: float) -> Any:
    """What makes a protocol for uvicorn; a request must arrive within `deadline_s`."""
    return partial(Connection, limits=connections, deadline_s=deadline_s)
