"""Door: takes requests in, finds the replica that should answer, and tries again if it is lost.

An ASGI application without models, and without Ray: it is given what reaches the replicas. Keys,
hosts and rates are checked behind it, by the application in each replica; it bounds bodies.

A user's requests go to one replica, whose memory has what was computed of the user's history. What
changes catalog or aliases goes to all replicas, in one order. A request whose replica is lost is
sent to another, unless doing it twice would be wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from recsys.serving.api.routes import find_route
from recsys.serving.cluster.exchange import Call, Reply
from recsys.serving.errors import ProblemError, problem_response

SESSION = b"x-session-id"
REQUEST_ID = b"x-request-id"
PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
GRACE_S = 5.0
TO_ALL = {
    ("POST", "/v1/items"),
    ("PUT", "/v1/items/{item_id}"),
    ("DELETE", "/v1/items/{item_id}"),
    ("PUT", "/v1/aliases/{name}"),
    ("DELETE", "/v1/aliases/{name}"),
    ("POST", "/v1/aliases/{name}/rollback"),
}
# Replicas that share a store may have heard of it from one another before they are asked.
DELETIONS = {route for route in TO_ALL if route[0] == "DELETE"}
TWICE_IS_WRONG = {("POST", "/v1/events")}  # one without an id counts as often as it is sent
# A replica that says so has not begun; another may be further.
NOT_BEGUN = (b'"code": "not_ready"', b'"code": "shutting_down"')
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?( .*)$")


class ReplicaLostError(Exception):
    """The replica ended before its answer was there."""


class OverloadedError(Exception):
    """As many requests wait for replicas as may."""


class Replicas(Protocol):
    """What reaches the replicas."""

    async def ask(self, call: Call, session: str) -> Reply:
        """Let the replica of a session answer, or one beside it if that is busy.

        Raises:
            ReplicaLostError: it ended before its answer was there.
            OverloadedError: no place to wait.
        """

    async def ask_all(self, call: Call) -> list[Reply]:
        """Let every replica answer; those that are lost meanwhile are left out."""


class Door:
    """The application that listens."""

    def __init__(self, replicas: Replicas, *, deadline_ms: float, max_body_bytes: int) -> None:
        """Make a door.

        Args:
            replicas: behind it.
            deadline_ms: how long a lost request is sent again. A replica's own deadline begins
                when it gets the request.
            max_body_bytes: larger request bodies are answered 413.
        """
        self._replicas, self._max_body = replicas, max_body_bytes
        self._deadline_s = deadline_ms / 1000
        self._changing = asyncio.Lock()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise ValueError(f"only HTTP is spoken here, not {scope['type']}")
        body = await self._body(receive)
        if body is None:
            return  # whoever asked has gone
        given = dict(scope["headers"]).get(REQUEST_ID, b"").decode("latin-1")
        scope.setdefault("state", {})["request_id"] = given or uuid.uuid4().hex
        try:
            if len(body) > self._max_body:
                raise ProblemError("body_too_large", f"The limit is {self._max_body} bytes.")
            reply = await self._answer(self._call(scope, body))
            response = Response(reply.body, reply.status)
            response.raw_headers = reply.headers
        except ProblemError as error:
            response = problem_response(Request(scope), error)
        await response(scope, receive, send)

    def _call(self, scope: AsgiScope, body: bytes) -> Call:
        """The request, under one id for all replicas that it may be sent to."""
        call = Call.of(scope, body)
        if call.header(REQUEST_ID) is None:
            request_id = scope["state"]["request_id"].encode()
            call.scope["headers"].append((REQUEST_ID, request_id))
        return call

    async def _answer(self, call: Call) -> Reply:
        found, _ = find_route(call.scope)
        route = (call.method, "" if found is None else found.path_format)
        if route in TO_ALL:
            async with self._changing:  # a bundle takes its time to load
                replies = await self._replicas.ask_all(call)
            return _deleted(replies) if route in DELETIONS else _worst(replies)
        try:
            async with asyncio.timeout(2 * self._deadline_s + GRACE_S):
                if route == ("GET", "/metrics"):
                    return _together(await self._replicas.ask_all(call))
                return await self._one(call, again=route not in TWICE_IS_WRONG)
        except TimeoutError:
            raise ProblemError(
                "deadline_exceeded", "The request waited too long and was dropped."
            ) from None

    async def _one(self, call: Call, *, again: bool) -> Reply:
        clock = asyncio.get_running_loop().time
        until, pause, session = clock() + self._deadline_s, PAUSE_S, session_of(call)
        while True:
            try:
                reply = await self._replicas.ask(call, session)
            except OverloadedError:
                raise ProblemError("queue_full", "The queue is full; try again shortly.") from None
            except ReplicaLostError:
                if not again:
                    raise ProblemError(
                        "not_ready",
                        "The replica was lost before it answered; it is not known whether it kept "
                        "the events. Events with an event_id may be sent again.",
                    ) from None
                if clock() >= until:
                    raise ProblemError("not_ready", "No replica answered; try again.") from None
            else:
                waits = reply.status == HTTPStatus.SERVICE_UNAVAILABLE and clock() < until
                if not waits or not any(code in reply.body for code in NOT_BEGUN):
                    return reply
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    async def _body(self, receive: Receive) -> bytes | None:
        """The body, or as much of it as shows that it is too large; None if nobody is there."""
        pieces, size = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            pieces.append(message.get("body", b""))
            size += len(pieces[-1])
            if size > self._max_body or not message.get("more_body", False):
                return b"".join(pieces)


def session_of(call: Call) -> str:
    """What requests of one user have in common; random where they have nothing.

    The header `X-Session-ID`, else the user, else the first item of an inline history, which stays
    while the history grows.
    """
    named = call.header(SESSION)
    if named:
        return named.decode("latin-1")
    found: Any = None
    if call.path.startswith("/v1/users/"):
        found = call.path.split("/")[3]
    elif call.method == "POST" and call.path in ("/v1/recommendations", "/v1/rank"):
        try:
            body = json.loads(call.body)
            found = body.get("user") or (body.get("history") or [None])[0]
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            pass  # the replica says what is wrong with it
    return found if isinstance(found, str) and found else uuid.uuid4().hex


def _worst(replies: Sequence[Reply]) -> Reply:
    """What to tell of a change: one replica that refused it matters more than those that did it."""
    if not replies:
        raise ProblemError("not_ready", "No replica answered; try again.")
    return max(replies, key=lambda reply: reply.status)


def _deleted(replies: Sequence[Reply]) -> Reply:
    """What to tell of a deletion: that nothing was there only if all say so."""
    return _worst([r for r in replies if r.status != HTTPStatus.NOT_FOUND] or replies)


def _together(replies: Sequence[Reply]) -> Reply:
    """Metrics of all replicas, told apart by the label `replica`."""
    worst = _worst(replies)
    if worst.status != HTTPStatus.OK:
        return worst
    families: dict[bytes, list[bytes]] = {}
    for reply in sorted(replies, key=lambda reply: reply.replica):
        family = b""
        for line in reply.body.splitlines():
            if line.startswith(b"# HELP "):
                family = line.split(b" ", 3)[2]
                first = family not in families
                families.setdefault(family, [])
            if not line.startswith(b"#"):
                families[family].append(_SAMPLE.sub(_labelled(reply.replica), line))
            elif first:
                families[family].append(line)
    headers = [(name, value) for name, value in worst.headers if name != b"content-length"]
    body = b"".join(line + b"\n" for lines in families.values() for line in lines)
    return Reply(worst.status, [*headers, (b"content-length", b"%d" % len(body))], body)


def _labelled(replica: str) -> Any:
    def put(sample: re.Match[bytes]) -> bytes:
        labels = b",".join(filter(None, (sample[2], f'replica="{replica}"'.encode())))
        return sample[1] + b"{" + labels + b"}" + sample[3]

    return put


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
