"""Errors over HTTP: every failure becomes an RFC 9457 problem with a stable code.

`KINDS` lists the codes.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from recsys.errors import FilterError, ItemError, NonFiniteError, RuleError
from recsys.serving.batcher import ClosedError, DeadlineExceededError, QueueFullError
from recsys.serving.schemas.common import PATTERNS, InvalidField
from recsys.serving.stores.records import StoreError

MEDIA_TYPE = "application/problem+json"
MAX_ERRORS = 20


@dataclass(frozen=True)
class Kind:
    """A kind of problem: HTTP status, title, and seconds after which to try again."""

    status: int
    title: str
    retry_after_s: int | None = None


KINDS = {
    "malformed_body": Kind(400, "The body is not valid JSON"),
    "ambiguous_length": Kind(400, "The length of the body is ambiguous"),
    "unknown_host": Kind(400, "The host name is not one of this service"),
    "malformed_target": Kind(400, "The path or the query is not UTF-8"),
    "unauthenticated": Kind(401, "A key is required"),
    "cross_origin": Kind(403, "Pages of other origins may only read"),
    "forbidden": Kind(403, "The scope of the key is not sufficient"),
    "not_found": Kind(404, "There is no resource at this path"),
    "unknown_user": Kind(404, "The user has no history"),
    "unknown_item": Kind(404, "The model does not know the item"),
    "unknown_model": Kind(404, "No model has this alias"),
    "unknown_bundle": Kind(404, "There is no bundle of this name"),
    "unknown_rule": Kind(404, "There is no rule of this name"),
    "unknown_experiment": Kind(404, "There is no experiment of this name"),
    "method_not_allowed": Kind(405, "The path does not support this method"),
    "alias_conflict": Kind(409, "The alias cannot be changed in this way"),
    "bundle_refused": Kind(409, "The bundle cannot be served"),
    "unsupported_by_model": Kind(409, "The model does not support this"),
    "event_conflict": Kind(409, "An event with this id has other content"),
    "rule_in_use": Kind(409, "An alias has the rule"),
    "experiment_conflict": Kind(409, "The experiment cannot be put in this way"),
    "body_too_large": Kind(413, "The body is too large"),
    "target_too_long": Kind(414, "The path and query are too long"),
    "unsupported_media_type": Kind(415, "The body must be application/json"),
    "invalid_request": Kind(422, "The request is not valid"),
    "invalid_filter": Kind(422, "The filter is not valid"),
    "invalid_item": Kind(422, "The item cannot be added to the catalog"),
    "invalid_rule": Kind(422, "The rule is not valid"),
    "queue_full": Kind(429, "Too many requests are waiting", 1),
    "rate_limited": Kind(429, "This client sends too many requests", 1),
    "headers_too_large": Kind(431, "The headers are too large"),
    "internal_error": Kind(500, "The service failed"),
    "non_finite_scores": Kind(500, "The model returned scores that are not finite"),
    "not_ready": Kind(503, "The model is not ready", 1),
    "shutting_down": Kind(503, "The service is shutting down", 5),
    "store_unavailable": Kind(503, "The store is unreachable", 5),
    "deadline_exceeded": Kind(504, "The answer was not ready in time", 1),
}
_OF_STATUS = {404: "not_found", 405: "method_not_allowed"}
# The code of an exception, and the text that the client gets: None for the exception's own. The
# texts of the others are only logged, since they may name files.
_OF_EXCEPTION: dict[type[Exception], tuple[str, str | None]] = {
    QueueFullError: ("queue_full", "The queue is full; try again shortly."),
    DeadlineExceededError: (
        "deadline_exceeded",
        "The request took longer than its deadline. If it was a change, it may have been made.",
    ),
    ClosedError: ("shutting_down", "No new requests are accepted; use another instance."),
    NonFiniteError: (
        "non_finite_scores",
        "The model has no answer for this request: its logits are not finite. Other requests are "
        "not affected. Check the checkpoint of the bundle.",
    ),
    StoreError: (
        "store_unavailable",
        "The store cannot be read or written now; it is safe to repeat the request. "
        "Recommendations for an inline history do not need the store.",
    ),
    RuleError: ("invalid_rule", None),
    ItemError: ("invalid_item", None),
    FilterError: ("invalid_filter", None),
}
_PATH = re.compile(r"^((?:filter|boosts|pin|max_per|rules|arms|format)[\w.\[\]]*): ")
_WITH_PATH = (FilterError, RuleError)
_RANGES = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


class ProblemError(HTTPException):
    """Raised to respond with a problem; `code` is a key of `KINDS`."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        errors: Sequence[InvalidField] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(KINDS[code].status, detail, headers)
        self.code, self.errors = code, errors

    @classmethod
    def at(cls, code: str, text: str) -> Self:
        """The problem of the part of the body whose path `text` begins with, if it does."""
        return cls(code, text, errors=invalid_part(text))

    def __str__(self) -> str:
        return self.detail


def problem_body(error: ProblemError, request_id: str | None) -> dict[str, Any]:
    """Convert a problem to a JSON object."""
    kind = KINDS[error.code]
    body: dict[str, Any] = {
        "type": f"urn:recsys:problem:{error.code}",
        "title": kind.title,
        "status": kind.status,
        "code": error.code,
        "detail": error.detail,
        "request_id": request_id,
    }
    if error.errors:
        body["errors"] = [field.model_dump() for field in error.errors]
    return body


def problem_response(request: Request, error: ProblemError) -> Response:
    """Convert a problem to an HTTP response."""
    kind = KINDS[error.code]
    state = request.scope.setdefault("state", {})
    state["problem"] = error.code  # for the access log
    body = problem_body(error, state.get("request_id"))
    headers = dict(error.headers or {})
    if kind.retry_after_s is not None:
        headers.setdefault("Retry-After", str(kind.retry_after_s))
    # ASCII: a refused field may hold characters that UTF-8 cannot.
    return Response(json.dumps(body), kind.status, headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Respond to every exception that reaches the router with a problem."""
    for kind in (HTTPException, RequestValidationError, *_OF_EXCEPTION):
        app.add_exception_handler(kind, _respond)


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return problem_response(request, _from_http(request, error))
    if isinstance(error, RequestValidationError):
        return problem_response(request, _from_validation(error))
    problem = problem_of(error)
    if request.method == "GET":
        problem.errors = [
            field.model_copy(update={"location": "query"}) for field in problem.errors
        ]
    return problem_response(request, problem)


def problem_of(error: Exception) -> ProblemError:
    """Convert an exception to a problem: `internal_error` for an unexpected one."""
    if isinstance(error, ProblemError):
        return error
    for kind, (code, detail) in _OF_EXCEPTION.items():
        if isinstance(error, kind):
            fields = invalid_part(str(error)) if isinstance(error, _WITH_PATH) else ()
            return ProblemError(code, detail or str(error), errors=fields)
    detail = "The failure is in the service's log under this request_id."
    return ProblemError("internal_error", detail)


def invalid_part(text: str) -> list[InvalidField]:
    """The part of the body that the text of an error is about, if it begins with a path."""
    match = _PATH.match(text)
    if match is None:
        return []
    pointer = _pointer(re.findall(r"\w+", match[1]))
    return [InvalidField(location="body", pointer=pointer, detail=text[match.end() :])]


def _from_http(request: Request, error: HTTPException) -> ProblemError:
    if isinstance(error, ProblemError):
        return error
    code = _OF_STATUS.get(error.status_code, "internal_error")
    detail = {
        "not_found": f"No resource is at {request.url.path}; /openapi.json lists what there is.",
        "method_not_allowed": f"{request.method} is not among the methods of {request.url.path}.",
    }.get(code, KINDS[code].title)
    headers = error.headers
    if code == "method_not_allowed":  # the router names those of one route of the path only
        methods = set(request.scope["state"]["methods"])
        if "GET" in methods:
            methods.add("HEAD")
        headers = {"Allow": ", ".join(sorted(methods))}
    return ProblemError(code, detail, headers=headers)


def _from_validation(error: RequestValidationError) -> ProblemError:
    details = error.errors()
    fields = [
        InvalidField.model_construct(
            location=entry["loc"][0], pointer=_pointer(_path(entry)), detail=_sentence(entry)
        )
        for entry in details[:MAX_ERRORS]
    ]
    first = fields[0]
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return ProblemError(
        "invalid_request",
        f"{first.location} {first.pointer or '/'}: {first.detail}{more}",
        errors=fields,
    )


def _path(entry: Mapping[str, Any]) -> Sequence[Any]:
    """The names and places that lead to an invalid value, or to the entry of an invalid name."""
    parts: Sequence[Any] = entry["loc"][1:]
    is_name = entry["type"] != "extra_forbidden" and len(parts) > 1 and parts[-1] == "[key]"
    return parts[:-1] if is_name else parts


def _pointer(parts: Sequence[Any]) -> str:
    """A JSON pointer (RFC 6901)."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in parts)


def _sentence(entry: Mapping[str, Any]) -> str:
    if entry["type"] == "extra_forbidden":
        return "unknown field"
    if entry["type"] == "model_type":
        return "a JSON object is required"
    if entry["type"] in _RANGES:
        return f"{entry['msg']}, got {str(entry['input'])[:40]}"
    if entry["type"] == "string_pattern_mismatch":
        pattern = entry["msg"].partition("'")[2].removesuffix("'")
        return f"want {PATTERNS.get(pattern, 'the cursor of an earlier answer')}"
    return str(entry["msg"]).removeprefix("Value error, ")
