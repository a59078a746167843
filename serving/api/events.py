"""Events of users, in batches that are durable before they are acknowledged."""

import asyncio
from dataclasses import asdict

from fastapi import APIRouter

from recsys.serving.api.routing import AnyPhase, Route
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.events import EventsBody, EventsResponse
from recsys.serving.stores.records import Event, EventConflictError, now_ms

MANY = 100  # events that take a millisecond
router = APIRouter(prefix="/v1", route_class=Route)


@router.post("/events")
@requires(Scope.WRITE)
async def post_events(body: EventsBody, service: AnyPhase) -> EventsResponse:
    """Store a batch of events: all of it or nothing. A batch of events with ids can be repeated."""
    now = now_ms()

    def convert() -> list[Event]:
        return [event.to_event(now) for event in body.events]

    # Many digests would hold up the event loop.
    events = await asyncio.to_thread(convert) if len(body.events) > MANY else convert()
    try:
        done = await service.store.history.append(events)
    except EventConflictError as error:
        raise _conflict(body, error) from error
    service.metrics.events.labels("accepted").inc(done.accepted)
    service.metrics.events.labels("duplicate").inc(done.duplicates)
    return EventsResponse(**asdict(done))


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
