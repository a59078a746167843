"""Door: sends each request to a replica, and sends it again if the replica is lost.

It has no models, and reaches the replicas by a `Handle`. It limits the size of bodies; keys, hosts
and rates are checked by the replicas.

The requests of a user go to one replica, whose prefix cache holds the user's history. Changes of
the catalog or of aliases go to all replicas, in the same order. If a replica is lost, its requests
are sent to another one, unless a repetition would be wrong.
"""

import asyncio
import json
import uuid
from collections.abc import Sequence
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from recsys.serving.api.routes import find_route
from recsys.serving.batcher import DeadlineExceededError, QueueFullError, until
from recsys.serving.cluster.replica import Call, Reply
from recsys.serving.errors import ProblemError, problem_of, problem_response
from recsys.serving.middleware import CLIENT_CLOSED, REQUEST_ID, BodyLimit, check_framing

SESSION = "x-session-id"
PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
GRACE_S = 5.0
TO_ALL = {
    ("POST", "/v1/items"),
    ("PATCH", "/v1/items/{item_id}"),
    ("DELETE", "/v1/items/{item_id}"),
    ("PUT", "/v1/rules/{name}"),
    ("DELETE", "/v1/rules/{name}"),
    ("PUT", "/v1/aliases/{name}"),
    ("DELETE", "/v1/aliases/{name}"),
    ("POST", "/v1/aliases/{name}/rollback"),
}
# A replica may have learned of a deletion from the shared store already, and answer 404.
DELETIONS = {route for route in TO_ALL if route[0] == "DELETE"}
OF_A_USER = {"/v1/recommendations", "/v1/rank"}  # which the body names
TWICE_IS_WRONG = {("POST", "/v1/events")}  # an event without an id is stored each time
# Codes of a replica that did not start on the request; another one may be ready.
NOT_BEGUN = (b'"code": "not_ready"', b'"code": "shutting_down"')


class ReplicaLostError(Exception):
    """The replica ended before it answered."""


class Handle:
    """Sends calls to the replicas of a deployment, by the handle that Ray Serve returns for it."""

    def __init__(self, handle: Any) -> None:
        from ray import exceptions
        from ray.serve.exceptions import BackPressureError

        self._handle = handle
        self._lost = (
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
        )
        self._overloaded = BackPressureError

    async def ask(self, call: Call, session: str) -> Reply:
        """Send a call to the replica of a session, or to another one if it is busy.

        Raises:
            ReplicaLostError: the replica ended before it answered.
            QueueFullError: the queue for the replicas is full.
        """
        try:
            reply: Reply = await self._handle.options(session_id=session).answer.remote(call)
        except self._lost as error:
            raise ReplicaLostError from error
        except self._overloaded as error:
            raise QueueFullError from error
        return reply

    async def ask_all(self, call: Call) -> list[Reply]:
        """Send a call to every replica; replies of lost replicas are left out."""
        calls = self._handle.broadcast("answer", call)
        replies = await calls.results_async(return_exceptions=True)
        for reply in replies:
            if isinstance(reply, Exception) and not isinstance(reply, self._lost):
                raise reply
        return [reply for reply in replies if not isinstance(reply, Exception)]


class Door:
    """What answers in front of the replicas."""

    def __init__(self, replicas: Handle, *, deadline_ms: float, max_body_bytes: int) -> None:
        """Start a door.

        A lost request is sent again for `deadline_ms`; the deadline of a replica begins when it
        receives the request. Larger bodies than `max_body_bytes` are refused with 413.
        """
        self._replicas, self._bodies = replicas, BodyLimit(max_body_bytes)
        self._deadline_s = deadline_ms / 1000
        self._changing = asyncio.Lock()

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        scope = request.scope
        headers = MutableHeaders(scope=scope)
        if not headers.get(REQUEST_ID):  # the same one for every replica that receives the request
            headers[REQUEST_ID] = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = headers[REQUEST_ID]
        try:
            check_framing(scope.get("http_version"), headers)
            with self._bodies.counted(headers, request.receive) as receive:
                body = await Request(scope, receive).body()
                reply = await self._answer(Call.of(scope, body))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED)
        except (ProblemError, DeadlineExceededError, QueueFullError) as error:
            return problem_response(request, problem_of(error))
        response = Response(reply.body, reply.status)
        response.raw_headers = reply.headers
        return response

    async def _answer(self, call: Call) -> Reply:
        matched, _ = find_route(call.scope)
        route = (call.scope["method"], "" if matched is None else matched.path_format)
        if route in TO_ALL:
            async with self._changing:  # without a deadline: loading a bundle takes long
                replies = await self._replicas.ask_all(call)
            if route in DELETIONS:  # 404 only if every replica replied with 404
                done = [reply for reply in replies if reply.status != HTTPStatus.NOT_FOUND]
                replies = done or replies
            return _worst(replies)
        async with until(asyncio.get_running_loop().time() + 2 * self._deadline_s + GRACE_S):
            if route == ("GET", "/metrics"):
                return _merge_metrics(await self._replicas.ask_all(call))
            return await self._ask_until_answered(call, again=route not in TWICE_IS_WRONG)

    async def _ask_until_answered(self, call: Call, *, again: bool) -> Reply:
        clock = asyncio.get_running_loop().time
        end, pause, session = clock() + self._deadline_s, PAUSE_S, session_of(call)
        while True:
            try:
                reply = await self._replicas.ask(call, session)
            except ReplicaLostError:
                if not again:
                    raise ProblemError(
                        "not_ready",
                        "The replica was lost before it answered; the events may or may not be "
                        "stored. Events with an event_id may be sent again.",
                    ) from None
                if clock() >= end:
                    raise ProblemError("not_ready", "No replica answered; try again.") from None
            else:
                waits = reply.status == HTTPStatus.SERVICE_UNAVAILABLE and clock() < end
                if not waits or not any(code in reply.body for code in NOT_BEGUN):
                    return reply
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)


def session_of(call: Call) -> str:
    """The key by which requests of one user go to one replica.

    It is the header `X-Session-ID`, or else the user, or else the first item of an inline history,
    which does not change while the history grows, or else random.
    """
    if session := Headers(scope=call.scope).get(SESSION):
        return session
    user: Any = None
    if call.scope["method"] == "POST" and call.scope["path"] in OF_A_USER:
        try:
            body = json.loads(call.body)
            user = body.get("user") or (body.get("history") or [None])[0]
        except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
            pass  # the replica reports the error
    return user if isinstance(user, str) and user else uuid.uuid4().hex


def _worst(replies: Sequence[Reply]) -> Reply:
    """The reply to a change: one refusal outweighs any number of successes."""
    if not replies:
        raise ProblemError("not_ready", "No replica answered; try again.")
    return max(replies, key=lambda reply: reply.status)


def _merge_metrics(replies: Sequence[Reply]) -> Reply:
    """Merge the metrics of all replicas, with the label `replica`."""
    worst = _worst(replies)
    if worst.status != HTTPStatus.OK:
        return worst
    families: dict[str, Metric] = {}
    for reply in sorted(replies, key=lambda reply: reply.replica):
        for family in text_string_to_metric_families(reply.body.decode()):
            merged = Metric(family.name, family.documentation, family.type)
            merged = families.setdefault(family.name, merged)
            for sample in family.samples:
                labels = {**sample.labels, "replica": reply.replica}
                merged.add_sample(sample.name, labels, sample.value)
    headers = [(name, value) for name, value in worst.headers if name != b"content-length"]
    body = generate_latest(SimpleNamespace(collect=families.values))
    return Reply(worst.status, [*headers, (b"content-length", b"%d" % len(body))], body)
