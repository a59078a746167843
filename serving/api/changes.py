"""Changes of items and events, as lines that other programs follow by a cursor."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel

from recsys.serving.api.routing import (
    QUEUE,
    AnyPhase,
    OnceRoute,
    Ready,
    in_time,
    pay_for,
    while_connected,
)
from recsys.serving.auth import Scope, requires
from recsys.serving.changes import CursorError, event_record, events_since, wait_for_any
from recsys.serving.errors import ProblemError, documented
from recsys.serving.schemas.changes import EventChangesQuery, ItemChangesQuery
from recsys.serving.schemas.common import InvalidField
from recsys.serving.service import Service

FoundT = TypeVar("FoundT")
LINES = "application/x-ndjson"

router = APIRouter(prefix="/v1", route_class=OnceRoute)


def _documented(record: str) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": f"One `{record}` in each line, oldest first; none if there is no more.",
            "content": {LINES: {"schema": {"type": "string"}}},
        },
        **documented("invalid_request", "store_unavailable", *QUEUE, "not_ready"),
    }


@router.get("/item-changes", response_class=Response, responses=_documented("ItemRecord"))
@requires(Scope.READ)
async def list_item_changes(
    query: Annotated[ItemChangesQuery, Query()], request: Request, service: Ready
) -> Response:
    """Changes of items, in lines, oldest first; read on after the last `cursor`."""
    return await _lines(
        query,
        request,
        service,
        lambda: service.catalog_changes.since(query.after, query.limit),
        lambda record: record,
    )


@router.get("/event-changes", response_class=Response, responses=_documented("EventRecord"))
@requires(Scope.READ)
async def list_event_changes(
    query: Annotated[EventChangesQuery, Query()], request: Request, service: AnyPhase
) -> Response:
    """Stored events and erasures of users, in lines, oldest first; read on after the last `cursor`.

    Events of a data set are left out. With `wait`, the answer comes when there is a line.
    """
    store = service.store
    return await _lines(
        query,
        request,
        service,
        lambda: events_since(store, query.after, query.limit),
        lambda change: event_record(store, change),
    )


async def _lines(
    query: ItemChangesQuery | EventChangesQuery,
    request: Request,
    service: Service,
    read: Callable[[], Awaitable[Sequence[FoundT]]],
    record: Callable[[FoundT], BaseModel],
) -> Response:
    pay_for(query.limit)
    reading = in_time(service, wait_for_any(read, query.wait))
    try:
        found = await while_connected(request, reading)
        if query.wait and "check_again" in request.scope["state"]:
            request.scope["state"]["check_again"]()
    except CursorError as error:
        field = InvalidField(location="query", pointer="/after", detail=str(error))
        raise ProblemError("invalid_request", f"query /after: {error}", errors=[field]) from None

    def written() -> bytes:
        return b"".join(
            record(one).model_dump_json(exclude_unset=True).encode() + b"\n" for one in found
        )

    return Response(await service.reads(written), media_type=LINES)
