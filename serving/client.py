"""Client: the calls of a program to the service, typed, with retries that respect `Retry-After`.

    with Client("http://127.0.0.1:8000") as client:
        answer = client.recommend(history=["B0012", "B0034"], k=5)
        print([item.item_id for item in answer.items])

A refused call raises `ServiceError` with the code of the problem. Calls that the service did not
accept (429, 503) or did not receive are repeated. That is safe: events have ids, and other calls
read or set. A rollback is not idempotent, so it is repeated only if it was not accepted. Routes
without a method of their own are called by `ask`, with a class of `recsys.serving.schemas`.
"""

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from recsys.serving.schemas.common import Problem
from recsys.serving.schemas.events import EventsResponse
from recsys.serving.schemas.models import AliasInfo, ModelList
from recsys.serving.schemas.recommendations import RecommendationsResponse

AnswerT = TypeVar("AnswerT", bound=BaseModel)
NOT_TAKEN = (429, 503)
RETRIED = (*NOT_TAKEN, 502)
BACKOFF_S, MAX_WAIT_S = 0.1, 30.0


class ServiceError(Exception):
    """The service refused a call, or failed.

    Attributes:
        status: of HTTP.
        problem: its problem; None if the response was not from the service.
        code: the stable code of the problem, or None.
        retry_after_s: after how many seconds the service wants the call again, or None.
    """

    def __init__(
        self, status: int, problem: Problem | None, retry_after_s: float | None = None
    ) -> None:
        """Create the error of a response."""
        super().__init__(
            f"status {status}" if problem is None else f"{problem.code}: {problem.detail}"
        )
        self.status, self.problem, self.retry_after_s = status, problem, retry_after_s
        self.code = None if problem is None else problem.code


class Client:
    """A client of one service, as thread-safe as `httpx.Client`."""

    def __init__(
        self,
        url: str = "http://127.0.0.1:8000",
        *,
        key: str | None = None,
        timeout_s: float = 10.0,
        retries: int = 4,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Create a client, which connects with its first call.

        Args:
            url: of the service.
            key: API key.
            timeout_s: of each attempt.
            retries: number of attempts after the first.
            transport: of httpx, instead of sockets.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_s, transport=transport
        )
        self._retries = retries

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def recommend(self, *, k: int = 10, **options: Any) -> RecommendationsResponse:
        """Top-k for a `user`, or for a `history` (item ids, oldest first): give one of the two.

        `options` are these and other fields of `RecommendationsRequest` (`filter`, `mode`, ...).
        """
        return self.ask(
            RecommendationsResponse, "POST", "/v1/recommendations", json={"k": k, **options}
        )

    def send_events(self, events: Sequence[Mapping[str, Any]]) -> EventsResponse:
        """Store events durably; events without an `event_id` get one, so that retries are safe."""
        body = {"events": [{"event_id": uuid.uuid4().hex} | dict(event) for event in events]}
        return self.ask(EventsResponse, "POST", "/v1/events", json=body)

    def forget(self, user: str) -> None:
        """Erase a user."""
        self._send("DELETE", _path("users", user))

    def models(self) -> ModelList:
        """The loaded models, the aliases and the experiments."""
        return self.ask(ModelList, "GET", "/v1/models")

    def alias(self, name: str) -> AliasInfo:
        """An alias; `KeyError` if there is none."""
        return {alias.name: alias for alias in self.models().aliases}[name]

    def set_alias(self, name: str, bundle: str, *, timeout_s: float = 600.0) -> AliasInfo:
        """Let an alias stand for a bundle; returns when the model of the bundle answers."""
        body = {"bundle": bundle}
        return self.ask(AliasInfo, "PUT", _path("aliases", name), json=body, timeout=timeout_s)

    def rollback(self, name: str, *, timeout_s: float = 600.0) -> AliasInfo:
        """Let an alias stand for its previous bundle."""
        path = _path("aliases", name, "rollback")
        return self.ask(AliasInfo, "POST", path, repeatable=False, timeout=timeout_s)

    def ask(self, kind: type[AnswerT], method: str, path: str, **options: Any) -> AnswerT:
        """Call any route; `options` are those of `httpx.Client.request` (`json`, `params`, ...)."""
        return kind.model_validate_json(self._send(method, path, **options).content)

    def _send(
        self, method: str, path: str, *, repeatable: bool = True, **options: Any
    ) -> httpx.Response:
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            wait_s = BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5)  # noqa: S311
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError:
                if last or not repeatable:
                    raise
            else:
                if response.is_success:
                    return response
                seconds = response.headers.get("retry-after", "")
                after = min(float(seconds), MAX_WAIT_S) if seconds.isdecimal() else None
                if last or response.status_code not in (RETRIED if repeatable else NOT_TAKEN):
                    raise ServiceError(response.status_code, _problem(response), after)
                if after is not None:  # jitter, so that clients do not return at the same time
                    wait_s = after * random.uniform(1.0, 1.25)  # noqa: S311
            time.sleep(wait_s)
        raise AssertionError  # the last attempt returns or raises


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:  # a proxy's page
        return None
