"""Middleware: what every request passes before its route, and its answer afterwards.

`Entrance` gives it an id, a line of the log, metrics, a deadline, a limit of bodies and security
headers. `Guard` refuses it before its body is read: by framing, size of target and headers, host,
origin, rate and key, in this order. Connections, slow clients and fairness among addresses are the
proxy's (`deploy/nginx.conf`).
"""

import asyncio
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from urllib.parse import unquote_to_bytes

from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from recsys.serving import logs
from recsys.serving.api.routes import find_route
from recsys.serving.auth import Keyring, Scope, scope_of
from recsys.serving.batcher import DeadlineExceededError, until
from recsys.serving.bodies import LARGE
from recsys.serving.errors import ProblemError, problem_of, problem_response
from recsys.serving.limits import CALLER, Caller, RateLimit, Room
from recsys.serving.metrics import Metrics
from recsys.serving.settings import ServingSettings

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
CLIENT_CLOSED = 499  # status that nginx logs when the client has left
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}
MAX_TARGET = 8 * 1024
MAX_HEADERS = 64
MAX_HEADER_BYTES = 16 * 1024
BODIES = 8  # large bodies in memory, of the largest size
ANSWER_S = 0.5  # time to send what is ready at the deadline
PART = 64 * 1024  # bytes of an answer that a connection gets before it has sent earlier ones
ANSWERS = 8 << 20  # bytes of answers, beyond the first part of each, that wait to be sent
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


class Guard:
    """The checks of one application."""

    def __init__(self, settings: ServingSettings, metrics: Metrics) -> None:
        """Accept the keys of the settings (none: every client), with a limit for each client."""
        self.metrics = metrics
        self.keys = None if settings.keys is None else Keyring(settings.keys)
        self.limits: tuple[RateLimit, ...] = ()  # of addresses, however many, and of keys
        if settings.rate_limit is not None:
            about = settings.rate_limit, settings.rate_burst
            self.limits = RateLimit(*about), RateLimit(*about)
        self.hosts = settings.hosts

    def check(self, scope: AsgiScope, headers: Headers) -> None:
        """Refuse a request, or note its key and how to charge its client.

        Raises:
            ProblemError: it is refused.
        """
        check_framing(scope.get("http_version"), headers)  # first: it ends the connection
        target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if target > MAX_TARGET:
            raise ProblemError("target_too_long", f"The limit is {MAX_TARGET} bytes.")
        _check_encoding(scope)
        raw = scope["headers"]
        size = sum(map(len, chain.from_iterable(raw)))
        if len(raw) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            text = f"The limits are {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes."
            raise ProblemError("headers_too_large", text)
        self._check_host(headers, scope["path"])
        _check_origin(scope["method"], headers)
        route: APIRoute | None = scope["state"]["route"]
        if route is not None and route.path_format.startswith("/health/"):
            return  # orchestrators ask often, and without a key
        if len(headers.getlist("authorization")) > 1:
            raise _unauthenticated("There is more than one header Authorization.")
        kind, _, secret = headers.get("authorization", "").partition(" ")
        shown = secret.strip() if kind.lower() == "bearer" else None
        key = None if self.keys is None or shown is None else self.keys.find(shown)
        if key is not None:
            scope["state"]["key"] = key.name
        client = _address(scope) if key is None else key.name
        if self.limits:
            limit = self.limits[0 if key is None else 1]
            self._refuse(limit.take(client))
            scope["state"]["charge"] = lambda work: self._refuse(limit.charge(client, work))
        if self.keys is None:
            return
        needed = Scope.READ if route is None else scope_of(route.endpoint)
        if needed is Scope.PUBLIC:
            return
        if key is None:
            detail = (
                "Send 'Authorization: Bearer rk_...' with a key of this service."
                if shown is None
                else "The key is not one of this service's; it may be revoked or expired."
            )
            raise _unauthenticated(detail)
        if route is None or scope["method"] not in scope["state"]["methods"]:
            return  # the router answers 404 or 405
        if key.may < needed:
            detail = f"{scope['method']} {route.path_format} needs a key of scope {needed.word}."
            raise ProblemError("forbidden", f"{detail} This one is of scope {key.scope}.")

    def _check_host(self, headers: Headers, path: str) -> None:
        """Refuse host names that are not this service's (DNS rebinding).

        Orchestrators check the health by address, and metrics are scraped by address. A health
        check tells nothing, and an address as a host name is not the result of DNS.
        """
        hosts = headers.getlist("host")
        if len(hosts) > 1:
            raise ProblemError("unknown_host", "There is more than one header Host.")
        if not hosts or "*" in self.hosts or path.startswith("/health/"):
            return
        host = re.sub(r":\d+$", "", hosts[0]).lower().removesuffix(".").strip("[]")
        with suppress(ValueError):
            if path == "/metrics" and ipaddress.ip_address(host):
                return
        for allowed in self.hosts:
            if host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:])):
                return
        raise ProblemError(
            "unknown_host",
            f"The host {host[:60]!r} is not a name of this service (allowed_hosts).",
        )

    def _refuse(self, wait: float) -> None:
        if wait:
            self.metrics.rate_limited.inc()
            raise ProblemError(
                "rate_limited",
                "Too much work for this client; send fewer or smaller requests.",
                headers={"Retry-After": str(math.ceil(wait))},
            )


class Entrance:
    """The middleware of an application."""

    def __init__(
        self, app: ASGIApp, guard: Guard, settings: ServingSettings, metrics: Metrics
    ) -> None:
        self.app, self.metrics, self._guard = app, metrics, guard
        self._bodies, self._answers = BodyLimit(settings.max_body_bytes), Room(ANSWERS)
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
        sent_id = headers.get(REQUEST_ID, "")
        request_id = sent_id if _GOOD_ID.fullmatch(sent_id) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        inner, is_head = scope, scope["method"] == "HEAD"
        if is_head:  # answered as GET; the server leaves the body out
            inner = {**scope, "method": "GET"}
        state["route"], state["methods"] = find_route(inner)
        if is_head and "GET" not in state["methods"]:
            inner = scope
        status: int | None = None
        begin: Message | None = None  # it is sent with the first part of a body that has room

        async def send_marked(message: Message) -> None:
            nonlocal status, begin
            if message["type"] == "http.response.start":
                begin = message
                ours = [(_REQUEST_ID, request_id.encode()), *self._security]
                names = {name for name, _ in ours}
                theirs = [pair for pair in message.get("headers", ()) if pair[0] not in names]
                is_data = scope["path"].startswith(("/v1/", "/metrics"))
                if is_data and all(name != b"cache-control" for name, _ in theirs):
                    ours.append((b"cache-control", b"no-store"))  # unless its route says more
                message["headers"] = [*theirs, *ours]
                return
            body = message.get("body", b"")
            waiting = max(0, len(body) - PART)
            if not self._answers.take(waiting):
                detail = "Too many large answers are being sent; try again shortly."
                response = problem_response(Request(scope), ProblemError("queue_full", detail))
                await response(scope, receive, send_marked)
                return
            try:
                if begin is not None:
                    status = begin["status"]
                    await send(begin)
                    begin = None
                for start in range(0, len(body) or 1, PART):
                    if start:  # else a client that reads fast gets all parts in one turn
                        await asyncio.sleep(0)
                    part, end = body[start : start + PART], start + PART
                    more = end < len(body) or message.get("more_body", False)
                    await send({**message, "body": part, "more_body": more})
            finally:
                self._answers.give(waiting)

        self.metrics.in_flight.inc()
        caller = CALLER.set(Caller())
        with logs.of_request(request_id):
            try:
                self._guard.check(scope, headers)
                deadline = arrived + self._deadline_s
                CALLER.set(Caller(deadline, state.get("charge", Caller.charge)))
                endpoint = getattr(state["route"], "endpoint", None)
                is_unhurried = getattr(endpoint, "unhurried", False)
                with self._bodies.counted(headers, receive) as receive_counted:
                    # What a batch has by the deadline is still sent.
                    async with until(None if is_unhurried else deadline + ANSWER_S):
                        await self.app(inner, receive_counted, send_marked)
            except ClientDisconnect:
                pass
            except Exception as error:
                if not isinstance(error, DeadlineExceededError | ProblemError):
                    failures.exception("unhandled", extra={"fields": {"request_id": request_id}})
                if status is None:  # else the server closes the connection, as nothing more comes
                    response = problem_response(Request(scope), problem_of(error))
                    await response(scope, receive, send_marked)
            finally:
                CALLER.reset(caller)
                answered = CLIENT_CLOSED if status is None else status
                self._record(scope, answered, time.perf_counter() - start)

    def _record(self, scope: AsgiScope, status: int, seconds: float) -> None:
        """Log and count a request."""
        state, method = scope["state"], scope["method"]
        # Paths, also unknown ones, hold user ids and are unlimited in number; templates are few.
        route = state["route"]
        template = "unmatched" if route is None else route.path_format
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


def check_framing(version: str | None, headers: Headers) -> None:
    """Refuse a body whose end two programs may see at different places (request smuggling).

    Implementations of HTTP differ in what they refuse themselves. A version that is not known is
    1.1.
    """
    lengths, codings = headers.getlist("content-length"), headers.getlist("transfer-encoding")
    is_chunked = [coding.strip().lower() for coding in codings] == ["chunked"]
    if (
        (lengths and codings)
        or len(lengths) > 1
        or not all(length.isdecimal() for length in lengths)
        or (codings and not (is_chunked and version in (None, "1.1")))
    ):
        raise ProblemError(
            "ambiguous_length",
            "Send one Content-Length, or 'Transfer-Encoding: chunked' with HTTP/1.1, not both.",
            headers={"Connection": "close"},
        )


def _check_origin(method: str, headers: Headers) -> None:
    """Refuse changes from pages of other origins (cross-site request forgery).

    Browsers send the header `Sec-Fetch-Site`; older ones, and all over plain HTTP, send only
    `Origin`. Other programs send neither and are accepted.
    """
    if method in ("GET", "HEAD"):
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is not None:
        foreign = site not in ("same-origin", "none")
    else:
        host = headers.get("host", "").lower()
        foreign = origin is not None and origin.lower().partition("://")[2] != host
    if foreign:
        raise ProblemError("cross_origin", "A page of another origin may not send this.")


def _unauthenticated(detail: str) -> ProblemError:
    return ProblemError("unauthenticated", detail, headers={"WWW-Authenticate": "Bearer"})


def _check_encoding(scope: AsgiScope) -> None:
    """Refuse bytes that are not UTF-8: they would be replaced, and make different ids equal."""
    target = scope.get("raw_path") or b"", scope["query_string"]
    for part, written in zip(("path", "query"), target, strict=True):
        try:
            unquote_to_bytes(written).decode()
        except UnicodeDecodeError as error:
            bytes_in_hex = error.object[error.start : error.end].hex("%").upper()
            raise ProblemError(
                "malformed_target",
                f"The {part} has %{bytes_in_hex}, which is not UTF-8; write ü as %C3%BC, for "
                "example.",
            ) from None


def _address(scope: AsgiScope) -> str:
    """The client's address without a zone; `unknown` where `X-Forwarded-For` says none."""
    host, _ = scope.get("client") or ("", 0)
    with suppress(ValueError):
        return str(ipaddress.ip_address(host.partition("%")[0]))
    return "unknown"
