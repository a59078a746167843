"""Client: the service from Python, typed, with retries that respect `Retry-After`.

    with Client("http://127.0.0.1:8000") as client:
        answer = client.recommend(history=["B0012", "B0034"], k=5)
        print([item.item_id for item in answer.items])

A refused call raises `ServiceError` with the code of the problem. Calls that the service did not
accept (429, 503) or did not receive are repeated. That is safe: events have ids, and other calls
read or set. A rollback is not idempotent, so it is repeated only if it was not accepted. The client
is as thread-safe as `httpx.Client`.
"""

import json
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from recsys.serving.schemas.changes import EventRecord
from recsys.serving.schemas.common import CHAMPION, Problem
from recsys.serving.schemas.events import EventsResponse, UserHistory, UserList
from recsys.serving.schemas.experiments import ExperimentInfo, ExperimentList, ExperimentResults
from recsys.serving.schemas.explanations import ExplanationsResponse
from recsys.serving.schemas.filters import FilterReport
from recsys.serving.schemas.items import (
    DescribedItem,
    Item,
    ItemChange,
    ItemPage,
    ItemRecord,
    RankResponse,
    SimilarResponse,
    UpsertResponse,
)
from recsys.serving.schemas.lists import ListResponse
from recsys.serving.schemas.models import AliasInfo, AliasList, Evaluation, ModelList
from recsys.serving.schemas.operations import Stats
from recsys.serving.schemas.recommendations import BatchResponse, RecommendationsResponse
from recsys.serving.schemas.rules import RuleChange, RuleChanges, RuleInfo, RuleList
from recsys.serving.schemas.texts import TextsResponse
from recsys.serving.schemas.today import Today

AnswerT = TypeVar("AnswerT", bound=BaseModel)
RecordT = TypeVar("RecordT", ItemRecord, EventRecord)
NOT_TAKEN = (429, 503)
RETRIED = (*NOT_TAKEN, 502)
BACKOFF_S = 0.1
MAX_WAIT_S = 30.0


class ServiceError(Exception):
    """The service refused a call, or failed.

    Attributes:
        problem: its problem; None if the response was not from the service.
        status: HTTP status.
        retry_after_s: after how many seconds the service wants the call again; None if it does not
            say.
    """

    def __init__(
        self, status: int, problem: Problem | None, retry_after_s: float | None = None
    ) -> None:
        """Create the error of a response."""
        super().__init__(
            f"status {status}" if problem is None else f"{problem.code}: {problem.detail}"
        )
        self.status, self.problem, self.retry_after_s = status, problem, retry_after_s

    @property
    def code(self) -> str | None:
        """The stable code of the problem."""
        return None if self.problem is None else self.problem.code


class Client:
    """A client of one service."""

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
            url: URL of the service.
            key: API key.
            timeout_s: timeout of each attempt.
            retries: number of attempts after the first.
            transport: transport of httpx, instead of sockets.
        """
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=timeout_s, transport=transport
        )
        self._retries = retries
        self._wait_s = min(MAX_WAIT_S, timeout_s / 2)  # for a change that is followed

    def __enter__(self) -> Self:
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the client."""
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def live(self) -> bool:
        """Whether the process is running."""
        return self._is_healthy("live")

    def ready(self) -> bool:
        """Whether recommendations are answered now."""
        return self._is_healthy("ready")

    def recommend(
        self,
        *,
        user: str | None = None,
        history: Sequence[str] | None = None,
        k: int = 10,
        **options: Any,
    ) -> RecommendationsResponse:
        """Top-k for a user, or for a history (item ids, oldest first): give one of the two.

        `options` are other fields of `RecommendationsRequest` (`filter`, `mode`, `include`, ...).
        """
        body = _subject(user, history) | {"k": k} | options
        return self._ask(RecommendationsResponse, "POST", "/v1/recommendations", json=body)

    def recommend_for(self, user: str, k: int = 10, **options: Any) -> RecommendationsResponse:
        """Top-k for a user, by GET; `options` are other fields of `UserQuery`."""
        query = {"k": k} | options
        return self._ask(
            RecommendationsResponse, "GET", _path("users", user, "recommendations"), params=query
        )

    def get_recommendations(
        self,
        *,
        user: str | None = None,
        history: Sequence[str] = (),
        k: int = 10,
        **options: Any,
    ) -> RecommendationsResponse:
        """As `recommend`, by GET; `options` are other fields of `RecommendationsQuery`."""
        query = _query(options) | {"k": k, "history": list(history)}
        query |= {} if user is None else {"user": user}
        return self._ask(RecommendationsResponse, "GET", "/v1/recommendations", params=query)

    def trending(self, k: int = 10, **options: Any) -> ListResponse:
        """Trending items; `options` are other fields of `TrendingQuery` (`filter`, ...)."""
        return self._list("trending", k, options)

    def latest(self, k: int = 10, **options: Any) -> ListResponse:
        """The newest items; `options` are other fields of `ListQuery`."""
        return self._list("latest", k, options)

    def together(self, items: Sequence[str], k: int = 10, **options: Any) -> ListResponse:
        """Items bought together with some; `options` are other fields of `ListQuery`."""
        return self._list("together", k, options | {"item": list(items)})

    def because_viewed(self, user: str, k: int = 10, **options: Any) -> ListResponse:
        """Items like one that a user viewed; `options` are other fields of `ListQuery`."""
        return self._list("because-viewed", k, options | {"user": user})

    def left_off(self, user: str, k: int = 10, **options: Any) -> ListResponse:
        """Items that a user viewed and did not buy; `options` are other fields of `ListQuery`."""
        return self._list("continue", k, options | {"user": user})

    def recommend_batch(self, requests: Sequence[Mapping[str, Any]]) -> BatchResponse:
        """Several requests at once, each with the arguments of `recommend`."""
        body = {"requests": [dict(request) for request in requests]}
        return self._ask(BatchResponse, "POST", "/v1/recommendations/batch", json=body)

    def rank(
        self,
        items: Sequence[str],
        *,
        user: str | None = None,
        history: Sequence[str] | None = None,
        **options: Any,
    ) -> RankResponse:
        """Rank given items by their probability."""
        body = _subject(user, history) | {"items": list(items)} | options
        return self._ask(RankResponse, "POST", "/v1/rank", json=body)

    def explain(
        self,
        items: Sequence[str],
        *,
        user: str | None = None,
        history: Sequence[str] | None = None,
        **options: Any,
    ) -> ExplanationsResponse:
        """Reasons in words for items, if the service has a text model."""
        body = _subject(user, history) | {"items": list(items)} | options
        return self._ask(ExplanationsResponse, "POST", "/v1/explanations", json=body)

    def write(self, prompt: str, format: Mapping[str, Any], **options: Any) -> TextsResponse:
        """A text, or titles, that may follow a prompt, if the service has a text model.

        `format` and `options` are fields of `TextsRequest`.
        """
        body = {"prompt": prompt, "format": dict(format)} | options
        return self._ask(TextsResponse, "POST", "/v1/texts", json=body)

    def similar(self, item_id: str, k: int = 10, *, model: str = CHAMPION) -> SimilarResponse:
        """Items similar to one item."""
        query = {"k": k, "model": model}
        return self._ask(SimilarResponse, "GET", _path("items", item_id, "similar"), params=query)

    def item(self, item_id: str, *, model: str = CHAMPION) -> DescribedItem:
        """An item of the catalog."""
        return self._ask(DescribedItem, "GET", _path("items", item_id), params={"model": model})

    def items(
        self, *, prefix: str = "", q: str = "", page: int = 200, model: str = CHAMPION
    ) -> Iterator[Item]:
        """Iterate over the catalog in the order of semantic IDs, page by page."""
        cursor: str | None = ""
        while cursor is not None:
            query = {"prefix": prefix, "q": q, "limit": page, "cursor": cursor, "model": model}
            found = self._ask(ItemPage, "GET", "/v1/items", params=query)
            yield from found.items
            cursor = found.next

    def item_changes(
        self, after: str = "", page: int = 200, *, follow: bool = False
    ) -> Iterator[ItemRecord]:
        """Iterate over the changes of items after a `cursor`, up to now, or for ever (`follow`)."""
        return self._changes(ItemRecord, "/v1/item-changes", after, page, follow)

    def event_changes(
        self, after: str = "", page: int = 1_000, *, follow: bool = False
    ) -> Iterator[EventRecord]:
        """Iterate over stored events and erasures of users after a `cursor`, as `item_changes`."""
        for record in self._changes(EventRecord, "/v1/event-changes", after, page, follow):
            if record.op != "skip":
                yield record

    def put_item(self, item_id: str, **fields: Any) -> Item:
        """Add or replace an item; `fields` are those of `ItemBody`."""
        return self._ask(ItemChange, "PUT", _path("items", item_id), json=fields).item

    def patch_item(self, item_id: str, **fields: Any) -> Item:
        """Change a part of an item; `fields` are those of `ItemPatch`."""
        return self._ask(ItemChange, "PATCH", _path("items", item_id), json=fields).item

    def put_items(self, items: Sequence[Mapping[str, Any]]) -> UpsertResponse:
        """Add or replace items, all or none, each with its `item_id`."""
        body = {"items": [dict(item) for item in items]}
        return self._ask(UpsertResponse, "POST", "/v1/items", json=body)

    def delete_item(self, item_id: str) -> bool:
        """Remove an item; returns whether it existed."""
        return self._delete(_path("items", item_id), "unknown_item")

    def send_events(self, events: Sequence[Mapping[str, Any]]) -> EventsResponse:
        """Store events durably; events without an `event_id` get one, so that retries are safe."""
        body = {"events": [{"event_id": uuid.uuid4().hex} | dict(event) for event in events]}
        return self._ask(EventsResponse, "POST", "/v1/events", json=body)

    def users(self, prefix: str = "", limit: int = 20) -> list[str]:
        """Some users with events, by id."""
        query = {"prefix": prefix, "limit": limit}
        return self._ask(UserList, "GET", "/v1/users", params=query).users

    def history(self, user: str, limit: int = 100, *, before: str | None = None) -> UserHistory:
        """A user's latest events; `before` is `next` of the previous page."""
        query = {"limit": limit} | ({} if before is None else {"before": before})
        return self._ask(UserHistory, "GET", _path("users", user, "history"), params=query)

    def forget(self, user: str) -> None:
        """Erase a user."""
        self._send("DELETE", _path("users", user))

    def check_filter(self, expression: Mapping[str, Any], **options: Any) -> FilterReport:
        """Check a filter; `options` are other fields of `FilterCheck`."""
        body = {"filter": dict(expression)} | options
        return self._ask(FilterReport, "POST", "/v1/filters/validate", json=body)

    def rules(self) -> list[RuleInfo]:
        """All business rules."""
        rules: list[RuleInfo] = []
        cursor: str | None = ""
        while cursor is not None:
            found = self._ask(RuleList, "GET", "/v1/rules", params={"cursor": cursor})
            rules += found.rules
            cursor = found.next
        return rules

    def rule(self, name: str) -> RuleInfo:
        """A business rule."""
        return self._ask(RuleInfo, "GET", _path("rules", name))

    def put_rule(self, name: str, **fields: Any) -> RuleInfo:
        """Add or replace a rule; `fields` are those of `RuleBody` (`filter`, `boosts`, ...)."""
        return self._ask(RuleInfo, "PUT", _path("rules", name), json=fields)

    def delete_rule(self, name: str) -> bool:
        """Delete a rule that no alias has; returns whether it existed."""
        return self._delete(_path("rules", name), "unknown_rule")

    def rule_changes(self, name: str | None = None, limit: int = 100) -> list[RuleChange]:
        """Who changed which rule when, newest first."""
        query = {"limit": limit} | ({} if name is None else {"name": name})
        return self._ask(RuleChanges, "GET", "/v1/rule-changes", params=query).changes

    def models(self) -> ModelList:
        """The loaded models."""
        return self._ask(ModelList, "GET", "/v1/models")

    def aliases(self) -> list[AliasInfo]:
        """All aliases and their bundles."""
        return self._ask(AliasList, "GET", "/v1/aliases").aliases

    def alias(self, name: str) -> AliasInfo:
        """An alias, with the outcome of a change in the background."""
        return self._ask(AliasInfo, "GET", _path("aliases", name))

    def set_alias(
        self,
        name: str,
        bundle: str | None = None,
        *,
        rules: Sequence[str] | None = None,
        wait: bool = True,
        timeout_s: float = 600.0,
    ) -> AliasInfo:
        """Let an alias stand for a bundle, have standing rules, or both; None keeps what it has.

        With `wait`, returns when the model of the bundle answers.
        """
        body = {"bundle": bundle, "wait": wait, "rules": None if rules is None else list(rules)}
        return self._ask(AliasInfo, "PUT", _path("aliases", name), json=body, timeout=timeout_s)

    def rollback(self, name: str, *, timeout_s: float = 600.0) -> AliasInfo:
        """Let an alias stand for its previous bundle."""
        path = _path("aliases", name, "rollback")
        return self._ask(AliasInfo, "POST", path, repeatable=False, timeout=timeout_s)

    def drop_alias(self, name: str) -> bool:
        """Remove an alias; returns whether it existed."""
        return self._delete(_path("aliases", name), "unknown_model")

    def experiments(self) -> list[ExperimentInfo]:
        """All experiments."""
        return self._ask(ExperimentList, "GET", "/v1/experiments").experiments

    def experiment(self, name: str) -> ExperimentInfo:
        """An experiment and the state of its arms."""
        return self._ask(ExperimentInfo, "GET", _path("experiments", name))

    def put_experiment(self, name: str, arms: Mapping[str, float], **fields: Any) -> ExperimentInfo:
        """Start an experiment; `arms` are weights by alias, the first one to compare with.

        `fields` are the others of `ExperimentBody` (`event`, `window_s`, ...).
        """
        given = [{"alias": alias, "weight": weight} for alias, weight in arms.items()]
        body = {"arms": given} | fields
        return self._ask(ExperimentInfo, "PUT", _path("experiments", name), json=body)

    def delete_experiment(self, name: str) -> bool:
        """Delete an experiment and its results; returns whether it existed."""
        return self._delete(_path("experiments", name), "unknown_experiment")

    def experiment_results(self, name: str) -> ExperimentResults:
        """The arms of an experiment, compared with the first one."""
        return self._ask(ExperimentResults, "GET", _path("experiments", name, "results"))

    def evaluation(self, model: str = CHAMPION) -> Evaluation:
        """The measured quality of a model."""
        return self._ask(Evaluation, "GET", "/v1/evaluation", params={"model": model})

    def stats(self) -> Stats:
        """The state of the service and its last ten minutes."""
        return self._ask(Stats, "GET", "/v1/stats")

    def today(self, days: int = 1) -> Today:
        """What was recommended in the last days, and what came of it."""
        return self._ask(Today, "GET", "/v1/today", params={"days": days})

    def metrics(self) -> str:
        """All metrics in Prometheus' text format."""
        return self._send("GET", "/metrics").text

    def _list(self, name: str, k: int, options: Mapping[str, Any]) -> ListResponse:
        query = _query(options) | {"k": k}
        return self._ask(ListResponse, "GET", _path("lists", name), params=query)

    def _changes(
        self, kind: type[RecordT], path: str, after: str, page: int, follow: bool
    ) -> Iterator[RecordT]:
        query: dict[str, Any] = {"limit": page} | ({"wait": self._wait_s} if follow else {})
        while True:
            lines = self._send("GET", path, params=query | {"after": after}).content
            for line in lines.splitlines():
                record = kind.model_validate_json(line)
                after = record.cursor
                yield record
            if not (lines or follow):
                return

    def _is_healthy(self, check: str) -> bool:
        try:
            return self._http.get(f"/health/{check}").is_success
        except httpx.TransportError:
            return False

    def _delete(self, path: str, unknown: str) -> bool:
        try:
            self._send("DELETE", path)
        except ServiceError as error:
            if error.code != unknown:
                raise
            return False
        return True

    def _ask(self, kind: type[AnswerT], method: str, path: str, **options: Any) -> AnswerT:
        return kind.model_validate_json(self._send(method, path, **options).content)

    def _send(
        self, method: str, path: str, *, repeatable: bool = True, **options: Any
    ) -> httpx.Response:
        retried = RETRIED if repeatable else NOT_TAKEN
        for attempt in range(self._retries + 1):
            last = attempt == self._retries
            try:
                response = self._http.request(method, path, **options)
            except httpx.TransportError:
                if last or not repeatable:
                    raise
                time.sleep(_backoff(attempt))
                continue
            if response.is_success:
                return response
            if last or response.status_code not in retried:
                problem, wait_s = _problem(response), _retry_after(response)
                raise ServiceError(response.status_code, problem, wait_s)
            time.sleep(_wait(response, attempt))
        raise AssertionError  # the last attempt returns or raises


def _subject(user: str | None, history: Sequence[str] | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if user is not None:
        given["user"] = user
    if history is not None:
        given["history"] = list(history)
    return given


def _query(options: Mapping[str, Any]) -> dict[str, Any]:
    """Query parameters; a filter may be given as an object."""
    given = dict(options)
    if isinstance(given.get("filter"), Mapping):
        given["filter"] = json.dumps(given["filter"])
    return given


def _path(*parts: str) -> str:
    return "/v1/" + "/".join(quote(part, safe="") for part in parts)


def _problem(response: httpx.Response) -> Problem | None:
    try:
        return Problem.model_validate_json(response.content)
    except ValueError:  # a proxy's page
        return None


def _wait(response: httpx.Response, attempt: int) -> float:
    """Seconds of `Retry-After` with jitter, so that clients do not return at the same time."""
    seconds = _retry_after(response)
    if seconds is None:
        return _backoff(attempt)
    return seconds * random.uniform(1.0, 1.25)  # noqa: S311


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds of `Retry-After`, at most `MAX_WAIT_S`; None without a number."""
    seconds = response.headers.get("retry-after", "")
    return min(float(seconds), MAX_WAIT_S) if seconds.isdecimal() else None


def _backoff(attempt: int) -> float:
    return float(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311
