"""What happens around every request: its id, one access line, the last catch, the body limit."""

from __future__ import annotations

import logging
import re
import time
import uuid
from typing import TYPE_CHECKING

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request

from serving.errors import ProblemError, problem_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = "x-request-id"
_GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
CLIENT_CLOSED = 499  # nginx's number for an answer that found nobody

access = logging.getLogger("serving.access")
failures = logging.getLogger("serving.failures")


class RequestContext:
    """Outermost: gives each request an id, logs one line, and lets no exception pass unanswered."""

    def __init__(self, app: ASGIApp) -> None:
        """Wrap `app`."""
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        given = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = given if _GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        status: int | None = None

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except ClientDisconnect:
            pass
        except Exception:
            failures.exception("unhandled", extra={"fields": {"request_id": request_id}})
            if status is not None:
                raise  # half an answer is out: only closing the connection can say so
            detail = "The failure is in the service's log under this request_id."
            error = ProblemError("internal_error", detail)
            await problem_response(Request(scope), error)(scope, receive, send_marked)
        finally:
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                # The template where there is one: paths hold user ids.
                "route": getattr(scope.get("route"), "path", None) or scope["path"],
                "status": CLIENT_CLOSED if status is None else status,
                "ms": round((time.perf_counter() - start) * 1000, 2),
            }
            if "problem" in state:
                fields["problem"] = state["problem"]
            access.info("request", extra={"fields": fields})


class BodyLimit:
    """Refuses bodies over a size: by their Content-Length at once, otherwise while they stream."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        """Wrap `app`."""
        self.app, self.max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = ProblemError("body_too_large", f"The limit is {self.max_bytes} bytes.")
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_bytes:
            await problem_response(Request(scope), too_large)(scope, receive, send)
            return
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise too_large
            return message

        await self.app(scope, receive_counted, send)
