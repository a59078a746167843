"""Items of the catalog: browse, change, compare, rank, and list for a storefront."""

import asyncio
from collections.abc import Awaitable
from typing import Annotated

from fastapi import APIRouter, Query, Response

from recsys.serving.api.routing import PathId, Ready, Route, json_response, pay_for
from recsys.serving.auth import Scope, requires
from recsys.serving.catalog_changes import find
from recsys.serving.schemas.common import CHAMPION, Alias
from recsys.serving.schemas.items import (
    DescribedItem,
    ItemChange,
    ItemPage,
    ItemPatch,
    ItemQuery,
    RankBody,
    RankResponse,
    SimilarQuery,
    SimilarResponse,
    UpsertBody,
    UpsertResponse,
)
from recsys.serving.schemas.lists import ListQuery, ListResponse, TogetherQuery

router = APIRouter(prefix="/v1", route_class=Route)
CACHE_CONTROL = "public, max-age=60"  # these lists are the same for everybody


@router.get("/items", response_model=ItemPage)
@requires(Scope.READ)
async def browse_items(query: Annotated[ItemQuery, Query()], service: Ready) -> Response:
    """Browse the catalog page by page, by the first codes of the semantic ID and by words."""
    pay_for(query.limit)
    return json_response(await service.state.catalog_changes.browse(query))


@router.post("/items", response_model=UpsertResponse)
@requires(Scope.WRITE)
async def upsert_items(body: UpsertBody, service: Ready) -> Response:
    """Add or replace items, all or none; from the response on they can be recommended."""
    epoch, items = await service.state.catalog_changes.upsert(body.items)
    answer = UpsertResponse.model_construct(epoch=epoch, items=[*items])
    return await asyncio.to_thread(json_response, answer)


@router.get("/items/{item_id:id}/similar", response_model=SimilarResponse)
@requires(Scope.READ)
async def similar_items(
    item_id: PathId, query: Annotated[SimilarQuery, Query()], service: Ready
) -> Response:
    """Items similar to one item, by the users that both have in common.

    An id that itself ends with `/similar` is written with `%2F`.
    """
    answer = service.state.lists.similar(item_id, query.k, query.model)
    return json_response(await answer)


@router.get("/items/{item_id:id}", response_model=DescribedItem)
@requires(Scope.READ)
async def get_item(item_id: PathId, service: Ready, model: Alias = CHAMPION) -> Response:
    """Get an item of the catalog: title, text, semantic ID, attributes."""
    catalog = service.state.models.get(model).recommender.catalog
    return json_response(DescribedItem.of(catalog, find(catalog, item_id)))


@router.patch("/items/{item_id:id}", response_model=ItemChange)
@requires(Scope.WRITE)
async def patch_item(item_id: PathId, body: ItemPatch, service: Ready) -> Response:
    """Change a part of an item, such as whether it is available."""
    epoch, item = await service.state.catalog_changes.patch(item_id, body)
    return json_response(ItemChange.model_construct(epoch=epoch, item=item))


@router.delete("/items/{item_id:id}", status_code=204)
@requires(Scope.WRITE)
async def delete_item(item_id: PathId, service: Ready) -> Response:
    """Remove an item; from the response on it is not recommended."""
    await service.state.catalog_changes.remove(item_id)
    return Response(status_code=204)


@router.post("/rank", response_model=RankResponse)
@requires(Scope.READ)
async def rank(body: RankBody, service: Ready) -> Response:
    """Rank given items as the list of the history would, with its scores."""
    return json_response(await service.rank(body))


@router.get("/lists/trending", response_model=ListResponse)
@requires(Scope.READ)
async def trending_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """Items by the events of the last days, of which newer ones count more."""
    return await _cached(service.state.lists.trending(query))


@router.get("/lists/latest", response_model=ListResponse)
@requires(Scope.READ)
async def latest_items(query: Annotated[ListQuery, Query()], service: Ready) -> Response:
    """The newest items: those added last, then by the attribute `available_from`."""
    return await _cached(service.state.lists.latest(query))


@router.get("/lists/together", response_model=ListResponse)
@requires(Scope.READ)
async def items_bought_together(
    query: Annotated[TogetherQuery, Query()], service: Ready
) -> Response:
    """Items that are bought together with an item, or with those of a basket."""
    return await _cached(service.state.lists.together(query))


async def _cached(answer: Awaitable[bytes]) -> Response:
    response = json_response(await answer)
    # Also allowed if the request had a key, so a cache that ignores `Vary` gives it to anyone.
    response.headers.update({"Cache-Control": CACHE_CONTROL, "Vary": "Authorization"})
    return response
