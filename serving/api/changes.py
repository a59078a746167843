"""Changes of items, as lines that other programs follow by a cursor."""

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from recsys.serving.api.routing import QUEUE, OnceRoute, Ready, in_time, pay_for, while_connected
from recsys.serving.auth import Scope, requires
from recsys.serving.changes import CursorError, wait_for_any
from recsys.serving.errors import ProblemError, documented
from recsys.serving.schemas.common import InvalidField
from recsys.serving.schemas.items import ItemChangesQuery

LINES = "application/x-ndjson"

router = APIRouter(prefix="/v1", route_class=OnceRoute)


@router.get(
    "/item-changes",
    response_class=Response,
    responses={
        200: {
            "description": "One `ItemRecord` in each line, oldest first; none if there is no more.",
            "content": {LINES: {"schema": {"type": "string"}}},
        },
        **documented("invalid_request", "store_unavailable", *QUEUE, "not_ready"),
    },
)
@requires(Scope.READ)
async def list_item_changes(
    query: Annotated[ItemChangesQuery, Query()], request: Request, service: Ready
) -> Response:
    """Changes of items, in lines, oldest first; read on after the last `cursor`.

    With `wait`, the answer comes when there is a line.
    """
    pay_for(query.limit)
    changes = service.catalog_changes
    reading = in_time(
        service, wait_for_any(lambda: changes.since(query.after, query.limit), query.wait)
    )
    try:
        records = await while_connected(request, reading)
        if query.wait and "check_again" in request.scope["state"]:
            request.scope["state"]["check_again"]()
    except CursorError as error:
        field = InvalidField(location="query", pointer="/after", detail=str(error))
        raise ProblemError("invalid_request", f"query /after: {error}", errors=[field]) from None

    def lines() -> bytes:
        return b"".join(
            record.model_dump_json(exclude_unset=True).encode() + b"\n" for record in records
        )

    return Response(await service.reads(lines), media_type=LINES)
