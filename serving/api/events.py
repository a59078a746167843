"""Events: what users do, in batches, durable before they are acknowledged."""

# Annotations stay live here: FastAPI reads them.
import asyncio
import threading
import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from recsys.serving.api.routing import AnyPhase
from recsys.serving.auth import Scope, requires
from recsys.serving.batcher import DeadlineExceededError
from recsys.serving.bodies import MalformedError, parse
from recsys.serving.errors import ProblemError, documented
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.events import MAX_EVENTS, EventIn, EventsBody, EventsResponse
from recsys.serving.stores import EventConflictError

JSON = "application/json"
LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl")
SMOOTHED_MS = 60_000
LARGE = 32 * 1024

router = APIRouter(prefix="/v1")


class ArrivalClock:
    """The wall clock, which does not go back for small corrections.

    So what arrives later is later, even where NTP steps the clock between. A step of more than
    `SMOOTHED_MS` is believed: standing still for an hour would be worse.
    """

    def __init__(self) -> None:
        """Start at now."""
        self._last = 0
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Unix milliseconds."""
        now = time.time_ns() // 1_000_000
        with self._lock:
            if now < self._last <= now + SMOOTHED_MS:
                now = self._last
            self._last = now
        return now


clock = ArrivalClock()


def _schema() -> dict[str, Any]:
    """JSON schema of the body, which the route reads by itself."""
    schema = EventsBody.model_json_schema()
    schema.pop("$defs")
    schema["properties"]["events"]["items"] = EventIn.model_json_schema()
    return schema


@router.post(
    "/events",
    responses=documented(
        "malformed_body", "event_conflict", "unsupported_media_type", "invalid_request",
        "store_unavailable", "not_ready", "deadline_exceeded",
    ),
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": _schema()},
                LINES[0]: {
                    "schema": {
                        "type": "string",
                        "description": "One event a line, as in `events` of the JSON form.",
                    },
                    "example": '{"event_id": "7d1f3c", "user": "A1", "item": "B0012"}\n',
                },
            },
        }
    },
)  # fmt: skip
@requires(Scope.WRITE)
async def post_events(request: Request, service: AnyPhase) -> EventsResponse:
    """Keep a batch of events: all of it or nothing. Repeat it when in doubt: ids count once."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != JSON and given not in LINES:
        detail = f"The content type is {given or 'missing'}; send {JSON} or {LINES[0]}."
        raise ProblemError("unsupported_media_type", detail)
    body = await request.body()
    read = _lines if given in LINES else _document
    # A large batch takes tens of milliseconds, in which others want to be answered.
    batch = read(body) if len(body) < LARGE else await asyncio.to_thread(read, body)
    now = clock.now_ms()
    events = [event.to_event(now) for event in batch.events]
    try:
        async with asyncio.timeout(service.settings.deadline_ms / 1000):
            done = await service.store.append(events)
    except TimeoutError:
        raise DeadlineExceededError from None
    except EventConflictError as error:
        raise _conflict(batch, error) from error
    service.metrics.events(done.accepted, done.duplicates)
    return EventsResponse(
        accepted=done.accepted,
        duplicates=done.duplicates,
        ignored=done.ignored,
        unlinked=done.unlinked,
    )


def _document(body: bytes) -> EventsBody:
    try:
        return EventsBody.model_validate(parse(body))
    except MalformedError as error:
        raise ProblemError("malformed_body", f"The body is not valid JSON: {error}.") from None
    except ValidationError as error:
        raise _invalid(error) from error


def _lines(body: bytes) -> EventsBody:
    rows: list[Any] = []
    for number, line in enumerate(body.split(b"\n"), start=1):
        if not line.strip():
            continue
        if len(rows) == MAX_EVENTS:
            detail = f"There are more than {MAX_EVENTS} events; send them in several batches."
            field = InvalidField(location="body", pointer=f"/{number}", detail=detail)
            raise ProblemError("invalid_request", detail, errors=[field])
        try:
            rows.append(parse(line))
        except MalformedError as error:
            detail = f"Line {number} is not valid JSON: {error}."
            raise ProblemError("malformed_body", detail) from None
    try:
        return EventsBody.model_validate({"events": rows})
    except ValidationError as error:
        raise _invalid(error) from error


def _invalid(error: ValidationError) -> RequestValidationError:
    """The same error as one of FastAPI's, about the body."""
    return RequestValidationError(
        [
            {**entry, "loc": ("body", *entry["loc"])}
            for entry in error.errors(include_url=False, include_context=False)
        ]
    )


def _conflict(batch: EventsBody, error: EventConflictError) -> ProblemError:
    ids = set(error.event_ids)
    fields = [
        InvalidField(
            location="body",
            pointer=f"/events/{place}/event_id",
            detail="an event of this id is there already and says something else",
        )
        for place, event in enumerate(batch.events)
        if event.event_id in ids
    ]
    detail = "Nothing of the batch was kept. A new event needs an event_id of its own."
    return ProblemError("event_conflict", detail, errors=fields[:20])
