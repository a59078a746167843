"""Events of users, in batches that are durable before they are acknowledged."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from recsys.serving.api.routing import AnyPhase, content_type, document, validated
from recsys.serving.auth import Scope, requires
from recsys.serving.bodies import MalformedError, parse, read
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.events import MAX_EVENTS, EventIn, EventsBody, EventsResponse
from recsys.serving.stores.records import Event, EventConflictError, now_ms

JSON = "application/json"
LINES = ("application/x-ndjson", "application/ndjson", "application/jsonl")

router = APIRouter(prefix="/v1")


def _schema() -> dict[str, Any]:
    """JSON schema of the body, which the route parses itself."""
    schema = EventsBody.model_json_schema()
    schema.pop("$defs")
    schema["properties"]["events"]["items"] = EventIn.model_json_schema()
    return schema


@router.post(
    "/events",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": _schema()},
                LINES[0]: {
                    "schema": {
                        "type": "string",
                        "description": "One event per line, as in `events` of the JSON form.",
                    },
                    "example": '{"event_id": "7d1f3c", "user": "A1", "item": "B0012"}\n',
                },
            },
        }
    },
)  # fmt: skip
@requires(Scope.WRITE)
async def post_events(request: Request, service: AnyPhase) -> EventsResponse:
    """Store a batch of events: all of it or nothing. A batch of events with ids can be repeated."""
    media_type = content_type(request)
    if media_type != JSON and media_type not in LINES:
        detail = f"The content type is {media_type or 'missing'}; send {JSON} or {LINES[0]}."
        raise ProblemError("unsupported_media_type", detail)
    body = await request.body()
    is_lines = media_type in LINES
    now = now_ms()

    def parse_events(body: bytes) -> tuple[EventsBody, list[Event]]:
        batch = validated(_lines(body), EventsBody) if is_lines else document(body, EventsBody)
        return batch, [event.to_event(now) for event in batch.events]

    batch, events = await read(parse_events, body)
    try:
        done = await service.store.history.append(events)
    except EventConflictError as error:
        raise _conflict(batch, error) from error
    service.metrics.events(done.accepted, done.duplicates)
    return EventsResponse(**asdict(done))


def _lines(body: bytes) -> Any:
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
    return {"events": rows}


def _conflict(batch: EventsBody, error: EventConflictError) -> ProblemError:
    ids = set(error.event_ids)
    fields = [
        InvalidField(
            location="body",
            pointer=f"/events/{number}/event_id",
            detail="another event with this id, in the store or in this batch, has other content",
        )
        for number, event in enumerate(batch.events)
        if event.event_id in ids
    ]
    detail = "Nothing of the batch was stored. A new event needs a new event_id."
    return ProblemError("event_conflict", detail, errors=fields[:20])
