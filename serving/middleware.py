"""Middleware: what every request passes before its route, and its answer afterwards.

That is: an id, a line of the log, metrics, `Guard`, the deadline, the limit of bodies,
and security headers.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from recsys.serving import logs
from recsys.serving.api.routes import find_route
from recsys.serving.batcher import DeadlineExceededError, until
from recsys.serving.bodies import LARGE
from recsys.serving.errors import ProblemError, problem_of, problem_response
from recsys.serving.guard import Guard
from recsys.serving.limits import CALLER, Caller, Room
from recsys.serving.metrics import Metrics
from recsys.serving.settings import ServingSettings

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
CLIENT_CLOSED = 499  # status that nginx logs when the client has left
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
UNMATCHED = "unmatched"  # an unknown path is not logged: it may hold a user's id
BODIES = 8  # large bodies in memory, of the largest size
ANSWER_S = 0.5  # time to send what is ready at the deadline
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_REQUEST_ID = REQUEST_ID.encode()

access = logging.getLogger("recsys.serving.access")
failures = logging.getLogger("recsys.serving.failures")


class Entrance:
    """The middleware of an application."""

    def __init__(
        self, app: ASGIApp, guard: Guard, settings: ServingSettings, metrics: Metrics
    ) -> None:
        self.app, self.metrics, self._guard = app, metrics, guard
        self._bodies = BodyLimit(settings.max_body_bytes)
        self._deadline_s = settings.deadline_ms / 1000
        images = "".join(f" https://{host}" for host in settings.pictures)
        policy = CSP.replace("img-src 'self' data:", f"img-src 'self' data:{images}")
        headers = SECURITY_HEADERS | {"content-security-policy": policy}
        self._security = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, arrived = time.perf_counter(), asyncio.get_running_loop().time()
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        inner, is_head = scope, scope["method"] == "HEAD"
        if is_head:  # answered as GET, without the body
            inner = {**scope, "method": "GET"}
        state["route"], state["methods"] = find_route(inner)
        if is_head and "GET" not in state["methods"]:
            inner = scope
        status: int | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ours = [(_REQUEST_ID, request_id.encode()), *self._security]
                if scope["path"].startswith(("/v1/", "/metrics")):
                    ours.append((b"cache-control", _may_be_kept(message)))
                names = {name for name, _ in ours}
                theirs = [pair for pair in message.get("headers", ()) if pair[0] not in names]
                message["headers"] = [*theirs, *ours]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        self.metrics.in_flight.inc()
        caller = CALLER.set(Caller())
        with logs.of_request(request_id):
            try:
                self._guard.check(scope, headers)
                deadline = arrived + self._deadline_s
                CALLER.set(Caller(deadline, state.get("charge", Caller.charge)))
                is_unhurried = getattr(
                    getattr(state["route"], "endpoint", None), "unhurried", False
                )
                with self._bodies.counted(headers, receive) as receive_counted:
                    # Routes answer by the deadline; what does not is cancelled a little later.
                    async with until(None if is_unhurried else deadline + ANSWER_S):
                        await self.app(inner, receive_counted, send_marked)
            except ClientDisconnect:
                pass
            except Exception as error:
                if not isinstance(error, DeadlineExceededError | ProblemError):
                    failures.exception("unhandled", extra={"fields": {"request_id": request_id}})
                if status is not None:
                    raise  # the response has begun: the connection is closed
                response = problem_response(Request(scope), problem_of(error))
                await response(scope, receive, send_marked)
            finally:
                CALLER.reset(caller)
                answered = CLIENT_CLOSED if status is None else status
                self._record(scope, answered, time.perf_counter() - start)

    def _record(self, scope: AsgiScope, status: int, seconds: float) -> None:
        """Log and count a request."""
        state, method = scope["state"], scope["method"]
        # Paths hold user ids and are unlimited in number; their templates are few.
        route = state["route"]
        template = UNMATCHED if route is None else route.path_format
        fields = {
            "request_id": state["request_id"],
            "method": method,
            "route": template,
            "status": status,
            "ms": round(seconds * 1000, 2),
        }
        fields |= {name: state[name] for name in ("problem", "key") if name in state}
        access.info("request", extra={"fields": fields})
        label = method if method in METHODS else "OTHER"
        self.metrics.responded(label, template, status, seconds)
        if "problem" in state:
            self.metrics.errors.labels(state["problem"]).inc()


class BodyLimit:
    """Refuses bodies over a limit: by their Content-Length, or else while they are received.

    It also limits the memory of all large bodies together, from their arrival to their answer.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.room = Room(BODIES * max_bytes)  # for bytes beyond the first `LARGE` of each body

    @contextmanager
    def counted(self, headers: Headers, receive: Receive) -> Iterator[Receive]:
        """`receive` of one request, which then raises a `ProblemError` where a limit is passed."""
        too_large = ProblemError("body_too_large", f"The limit is {self.max_bytes} bytes.")
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            raise too_large
        received = in_queue = 0

        async def receive_counted() -> Message:
            nonlocal received, in_queue
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise too_large
            more = max(0, received - LARGE) - in_queue
            if not self.room.take(more):
                detail = "Too many large bodies at once; try again shortly."
                raise ProblemError("queue_full", detail)
            in_queue += more
            return message

        try:
            yield receive_counted
        finally:
            self.room.give(in_queue)


def _may_be_kept(message: Message) -> bytes:
    """How long a response may be kept: not at all, unless its route says so."""
    kept: bytes = dict(message.get("headers", ())).get(b"cache-control", b"no-store")
    return kept
