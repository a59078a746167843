"""The local server: binds the socket and runs the application until a signal."""

import asyncio
import contextlib
import sys
from typing import Any

import h11
import uvicorn
from rich.markup import escape
from uvicorn.protocols.http.h11_impl import H11Protocol

from recsys.errors import RecsysError
from recsys.progress import say
from recsys.recommender import Recommender
from recsys.serving import logs
from recsys.serving.api.pages import example
from recsys.serving.app import create_app
from recsys.serving.service import Phase, Service
from recsys.serving.settings import ServingSettings
from recsys.serving.sockets import Listener, bind
from recsys.serving.stores import POSTGRES
from recsys.serving.stores.database import UNAVAILABLE

IDLE_S = 5  # whole seconds between two requests of a connection; the proxy keeps less
MAX_HEAD, MAX_LINES = 32 * 1024, 256  # bytes and lines; the limits of `Guard` are lower
# Bytes that a turn of the event loop reads: heads and chunks (which may be a byte each) of all
# connections together, or LEAST_READ of each if they are many; and of a body of known length.
MAX_READ, LEAST_READ, MAX_BODY_READ = 16 * 1024, 512, 64 * 1024
MAX_WAITING = 16 * 1024  # bytes of requests behind the one that is answered
MAX_BACKLOG = 256  # connections that wait to be accepted
# The worker and the event loop need Python's global lock often and for a short time. Beside a
# thread that computes in Python they wait this long each time: with 0.5 ms, a client that sends
# 2,000 cheap requests a second slowed the worker down fiftyfold, with 0.1 ms threefold.
SWITCH_S = 0.0001
GRACE_S = 5  # time at shutdown to send the last responses, after the deadline of requests


def serve(
    settings: ServingSettings,
    listener: Listener | None = None,
    *,
    recommender: Recommender | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; requests in progress are answered first.

    `listener` is opened here if it is not given.

    Raises:
        ConfigError: the port is in use, or the address is not one of this machine.
        RecsysError: the bundle or the histories cannot be loaded.
        SystemExit: the store is away; the status is 1, since a later start may succeed.
    """
    opened, url = listener or bind(settings.host, settings.port)
    logs.configure(sys.stdout)
    sys.setswitchinterval(SWITCH_S)
    app = create_app(settings, recommender=recommender)
    service: Service = app.state.service
    server = http_server(app, settings)

    def on_phase(service: Service) -> None:
        if service.phase is Phase.READY:
            model = service.state.models.info()[0]
            name = f"{model.name} ({model.version}, {model.items:,} items)"
            say(escape(f"{name} answers at {url}, try"))
            say(escape(f"  {example(service, url)}"))
            say("Ctrl-C stops it.")
        elif service.phase is Phase.FAILED:
            server.should_exit = True

    service.on_phase = on_phase
    say(escape(f"Loading {settings.bundle} ..."))
    # after a clean stop, uvicorn raises the signal again
    with opened, contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[opened])
    if isinstance(service.failure, RecsysError):
        away = isinstance(service.failure.__cause__, UNAVAILABLE)
        if away and str(settings.store).startswith(POSTGRES):  # the supervisor tries again
            sys.exit(f"error: {service.failure}")
        raise service.failure
    if service.failure is not None:
        raise RecsysError(f"the service could not start: {service.failure}") from service.failure
    say("Stopped.")


def http_server(app: Any, settings: ServingSettings) -> uvicorn.Server:
    """The HTTP server of an ASGI application, to run on a socket of `bind`.

    It is h11 on asyncio whatever else is installed: others refuse and read different requests.
    """
    return uvicorn.Server(
        uvicorn.Config(
            app,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            forwarded_allow_ips=settings.forwarded_allow_ips,
            loop="asyncio",
            http=Protocol,
            h11_max_incomplete_event_size=MAX_HEAD,
            ws="none",
            backlog=MAX_BACKLOG,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=round(settings.deadline_ms / 1000) + GRACE_S,
        )
    )


class Protocol(H11Protocol):
    """Reads few pieces at a time, and ends a connection on which too many requests wait."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to read."""
        super().connection_made(transport)
        self._limit_reads()

    def data_received(self, data: bytes) -> None:
        """Handle what was read; each request that is received lets one more piece be read."""
        super().data_received(data)
        waiting, state = self.conn.trailing_data[0], self.conn.their_state
        has_lines = waiting.count(b"\n") > MAX_LINES  # h11 parses all of them in one turn
        if has_lines and state is h11.IDLE:
            self.send_400_response("The head has too many lines.")
        elif has_lines and state is h11.SEND_BODY:  # behind the last chunk
            self.transport.abort()
        elif self.cycle and len(waiting) > MAX_WAITING:
            self.cycle.keep_alive = False  # it is closed behind the answer
        self._limit_reads()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, once; the request that it is a part of has no other answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # it has one
            self.transport.close()
            return
        if self.cycle:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def _limit_reads(self) -> None:
        is_body = self.conn.their_state is h11.SEND_BODY
        is_chunked = is_body and any(name == b"transfer-encoding" for name, _ in self.headers)
        share = max(LEAST_READ, MAX_READ // len(self.connections))
        size = MAX_BODY_READ if is_body and not is_chunked else share
        self.transport.max_size = size  # type: ignore[attr-defined]
