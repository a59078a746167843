"""Users: their histories, and their erasure."""

from typing import Annotated

from fastapi import APIRouter, Query, Response

from recsys.serving.api.routing import AnyPhase, PathId, Route, json_response, pay_for
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import ProblemError
from recsys.serving.schemas.events import HistoryQuery, UserHistory, history_page
from recsys.serving.service import Phase, Service

router = APIRouter(prefix="/v1/users", route_class=Route)


@router.get("/{user_id:id}/history", response_model=UserHistory)
@requires(Scope.READ)
async def get_history(
    user_id: PathId, query: Annotated[HistoryQuery, Query()], service: AnyPhase
) -> Response:
    """Get a user's events of every type, newest first, page by page."""
    pay_for(query.limit)
    before = None
    if query.before is not None:
        time_ms, _, event_id = query.before.partition("-")
        before = (int(time_ms), int(event_id))
    events = await service.store.history.events(user_id, query.limit, before)
    if not events and before is None:
        raise ProblemError("unknown_user", f"There are no events of user {user_id!r}.")

    def written() -> Response:
        titles = _titles(service, {event.item for event in events})
        return json_response(history_page(user_id, events, query.limit, titles))

    return await service.off_loop(written)


@router.delete("/{user_id:id}", status_code=204, response_class=Response)
@requires(Scope.WRITE)
async def erase_user(user_id: PathId, service: AnyPhase) -> Response:
    """Erase a user: events and remembered recommendations.

    It can be repeated, and goes on after 504. Earlier events do not return with a late delivery or
    a data set.
    """
    await service.store.history.erase(user_id)
    service.metrics.erasures.inc()
    return Response(status_code=204)


def _titles(service: Service, item_ids: set[str]) -> dict[str, str]:
    """Titles of the items that the model knows; empty while the model is being loaded."""
    if service.phase is not Phase.READY:
        return {}
    catalog, ids = service.state.models.get().recommender.catalog, list(item_ids)
    rows = catalog.index(ids).tolist()
    return {item: catalog.titles[row] for item, row in zip(ids, rows, strict=True) if row >= 0}
