"""Items of the catalog: found, changed, compared and ranked."""

# Annotations stay live here: FastAPI reads them.
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from recsys.serving.api.routing import (
    BODY,
    RECOMMEND,
    JsonRoute,
    PathId,
    Ready,
    json_response,
    while_connected,
)
from recsys.serving.auth import Scope, requires
from recsys.serving.errors import documented
from recsys.serving.schemas.common import CHAMPION, Alias
from recsys.serving.schemas.items import (
    Item,
    ItemBody,
    ItemChange,
    ItemPage,
    ItemQuery,
    NewItemBody,
    RankBody,
    RankResponse,
    SimilarQuery,
    SimilarResponse,
    UpsertBody,
    UpsertResponse,
)

router = APIRouter(prefix="/v1", route_class=JsonRoute)
CHANGE = ("invalid_item", "store_unavailable", "not_ready")


@router.get(
    "/items",
    response_model=ItemPage,
    responses=documented("invalid_request", *RECOMMEND),
)
@requires(Scope.READ)
async def browse_items(
    query: Annotated[ItemQuery, Query()], request: Request, service: Ready
) -> Response:
    """The catalog, page by page: by the first codes of the semantic ID, and by words."""
    return json_response(await while_connected(request, service.catalog_changes.browse(query)))


@router.post("/items", response_model=UpsertResponse, responses=documented(*BODY, *CHANGE))
@requires(Scope.WRITE)
async def upsert_items(body: UpsertBody, service: Ready) -> Response:
    """Put items into the catalog, all or none; they can be recommended when this answers."""
    epoch, items = await service.catalog_changes.upsert(body.items)
    return json_response(UpsertResponse.model_construct(epoch=epoch, items=items))


@router.get(
    "/items/{item_id:id}/similar",
    response_model=SimilarResponse,
    responses=documented("unknown_item", "unsupported_by_model", "invalid_request", *RECOMMEND),
)
@requires(Scope.READ)
async def similar_items(
    item_id: PathId, query: Annotated[SimilarQuery, Query()], request: Request, service: Ready
) -> Response:
    """Items that go with one item, by what users did with both.

    An id that itself ends with `/similar` is written with `%2F`.
    """
    answer = service.similar(item_id, query.k, query.model)
    return json_response(await while_connected(request, answer))


@router.get(
    "/items/{item_id:id}",
    response_model=Item,
    responses=documented("unknown_item", "unknown_model", "invalid_request", "not_ready"),
)
@requires(Scope.READ)
async def get_item(item_id: PathId, service: Ready, model: Alias = CHAMPION) -> Response:
    """An item of the catalog: title, semantic ID, attributes."""
    return json_response(service.item(item_id, model))


@router.put("/items/{item_id:id}", response_model=ItemChange, responses=documented(*BODY, *CHANGE))
@requires(Scope.WRITE)
async def put_item(item_id: PathId, body: ItemBody, service: Ready) -> Response:
    """Put one item into the catalog, or another in its place."""
    item = NewItemBody.model_construct(item_id=item_id, **dict(body))
    epoch, (found,) = await service.catalog_changes.upsert([item])
    return json_response(ItemChange.model_construct(epoch=epoch, item=found))


@router.delete(
    "/items/{item_id:id}",
    status_code=204,
    responses=documented("unknown_item", "invalid_request", "store_unavailable", "not_ready"),
)
@requires(Scope.WRITE)
async def delete_item(item_id: PathId, service: Ready) -> Response:
    """Take an item away: nothing that is asked afterwards is answered with it."""
    await service.catalog_changes.remove(item_id)
    return Response(status_code=204)


@router.post(
    "/rank",
    response_model=RankResponse,
    responses=documented(*BODY, "unknown_user", "store_unavailable", *RECOMMEND),
)
@requires(Scope.READ)
async def rank(body: RankBody, request: Request, service: Ready) -> Response:
    """Given items in the order in which the model would choose them, with exact scores."""
    return json_response(await while_connected(request, service.rank(body)))
