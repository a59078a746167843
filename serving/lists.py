"""Lists without a search: what is trending, new, bought together or similar; given items ranked.

Each is JSON, made on a helper thread, of the store's events, of the catalog's dates, of the
bundle's retrieval and of the model's scores. Availability and filters hold as for recommendations,
and so do filters and caps of the alias's standing rules; boosts and pins are for recommendations.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from recsys.availability import FROM
from recsys.errors import FilterError, RequestError
from recsys.listing import Batch
from recsys.live import Epoch
from recsys.live_catalog import EpochCatalog
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval.related import together
from recsys.rules import Rule, apply_rules
from recsys.serving.catalog_changes import find
from recsys.serving.limits import CALLER
from recsys.serving.models import Model, Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.rules import Rules
from recsys.serving.schemas.common import Note, NoteCode, as_json, made, metadata
from recsys.serving.schemas.items import RankBody, RankResponse, SimilarResponse
from recsys.serving.schemas.lists import (
    ListedItem,
    ListName,
    ListQuery,
    ListResponse,
    TogetherQuery,
)
from recsys.serving.stores.records import TypedHistory
from recsys.serving.stores.store import Store
from recsys.serving.trending import Trending, Trends
from recsys.serving.worker import ScoreRequest

Dates = tuple[NDArray[np.intp], Sequence[float | None]]
_NOTES: dict[NoteCode, str] = {
    "no_events": "No stored event has a type and a time that this list counts.",
    "no_dates": "No item has a date (attribute available_from), and none was added to the bundle.",
    "no_evidence": "The bundle has no evidence about the items.",
    "nothing_eligible": "None of the items passes the filter, the rules and the availability.",
}


@dataclass(frozen=True)
class Ranking:
    """Items of an epoch, best first, before filters.

    Attributes:
        items: dense items.
        empty: why there are none, if there are none.
        fields: what else is told of the item at a place.
        more: fields of the answer.
    """

    items: NDArray[np.integer]
    empty: NoteCode
    fields: Callable[[int], dict[str, Any]] = lambda place: {}
    more: Mapping[str, Any] = field(default_factory=dict)


class Lists:
    """Makes the lists of a service."""

    def __init__(
        self,
        store: Store,
        models: Models,
        rules: Rules,
        off_loop: OffLoop,
        not_history: Collection[str],
    ) -> None:
        """Events of the types `not_history` are no sign of interest."""
        self._store = store
        self._models, self._rules, self._off_loop = models, rules, off_loop
        self._trending = Trending(models, off_loop, not_history)
        # By recommender, with the trends and the number of the epoch that they were computed from:
        self._rows: WeakKeyDictionary[Recommender, tuple[Trends, int, NDArray[np.int32]]]
        self._dates: WeakKeyDictionary[Recommender, tuple[int, Dates]]
        self._rows, self._dates = WeakKeyDictionary(), WeakKeyDictionary()

    async def close(self) -> None:
        """End what runs in the background."""
        await self._trending.cached.close()

    async def trending(self, query: ListQuery) -> bytes:
        """Items by the decayed events of all users."""
        trends = await self._trending(self._store)

        def rank(batch: Batch, model: Model) -> Ranking:
            rows = self._rows_of(model.recommender, batch.epoch, trends)
            places = np.flatnonzero(rows >= 0)
            return Ranking(
                rows[places],
                "no_events",
                lambda number: {"score": trends.scores[places[number]]},
                {"since": trends.since_ms / 1000},
            )

        return await self._list("trending", query, rank)

    async def latest(self, query: ListQuery) -> bytes:
        """Items by the time since which they are available, the newest first."""

        def rank(batch: Batch, model: Model) -> Ranking:
            number, dated = self._dates.get(model.recommender, (-1, None))
            if number != batch.epoch.number or dated is None:
                dated = dates(batch.epoch)
                self._dates[model.recommender] = batch.epoch.number, dated
            items, times = dated
            return Ranking(items, "no_dates", lambda place: {"time": times[place]})

        return await self._list("latest", query, rank)

    async def together(self, query: TogetherQuery) -> bytes:
        """Items that are chosen together with those of a basket."""

        def rank(batch: Batch, model: Model) -> Ranking:
            catalog = batch.epoch.catalog
            rows = catalog.known(query.item)
            items = together(model.retrieval, rows)
            unknown = [name for name, row in zip(query.item, rows, strict=True) if row < 0]

            def fields(number: int) -> dict[str, Any]:
                because = catalog.item_id(int(items.because[number]))
                return {"score": float(items.shares[number]), "because": because}

            return Ranking(items.items, "no_evidence", fields, {"unknown_items": unknown})

        return await self._list("together", query, rank, [*dict.fromkeys(query.item)])

    async def similar(self, item_id: str, k: int, alias: str) -> bytes:
        """The items most similar to one item.

        Raises:
            ProblemError: there is no item of this id, or the bundle has no part `retrieval`.
        """
        with self._models.lease(alias) as model:
            recommender = model.recommender
            find(recommender.catalog, item_id)
            _ = model.retrieval  # fail if there is none

            def make() -> bytes:
                scored = recommender.similar(item_id, k)
                ref = model.ref(alias)
                answer = SimilarResponse.model_construct(model=ref, item_id=item_id, items=[])
                return as_json(answer, _scored(recommender.catalog, scored))

            try:
                return await self._off_loop(make)
            except RequestError:
                find(recommender.catalog, item_id)  # raises if it was removed meanwhile
                raise

    async def rank(self, body: RankBody, history: TypedHistory, deadline: float) -> bytes:
        """Given items by their score after a history; errors are those of a batcher."""
        item_ids = list(dict.fromkeys(body.items))
        with self._models.lease(body.model) as model:
            known, scores = await self._rated(model, history, item_ids, deadline)

            def make() -> bytes:
                catalog, there = model.recommender.catalog, set(known)
                order = sorted(zip(known, scores, strict=True), key=lambda pair: -pair[1])
                answer = RankResponse.model_construct(
                    model=model.ref(body.model),
                    items=[],
                    unknown_items=[name for name in item_ids if name not in there],
                    history_items=int((catalog.known(history.items) >= 0).sum()),
                )
                return as_json(answer, _scored(catalog, order))

            return await self._off_loop(make)

    # Internals

    async def _rated(
        self, model: Model, history: TypedHistory, item_ids: Sequence[str], deadline: float
    ) -> tuple[list[str], list[float]]:
        """The items that the catalog has, and their scores.

        If an item is removed between the look-up and the scoring, both are repeated.
        """
        while True:
            rows = model.recommender.catalog.index(item_ids)
            known = [name for name, row in zip(item_ids, rows, strict=True) if row >= 0]
            if not known:
                return [], []
            try:
                request = RecommendRequest(history.items, history_types=history.types)
                scored = ScoreRequest(request, known)
                work = 1 + len(known) / 100
                CALLER.get().charge(work - 1)
                answer = await model.queue(work).submit(scored, deadline=deadline, work=work)
            except RequestError:
                if (model.recommender.catalog.index(known) >= 0).all():
                    raise
                continue
            scores: Any = answer.result
            return known, scores

    async def _list(
        self,
        name: ListName,
        query: ListQuery,
        rank: Callable[[Batch, Model], Ranking],
        left_out: Sequence[str] = (),
    ) -> bytes:
        """Rank on a helper thread, and list the first items that may be listed."""
        rules = self._rules.of(query.model, ())
        with self._models.lease(query.model) as model:

            def make() -> bytes:
                batch = self._batch(model, query, rules, left_out)
                ranking = rank(batch, model)
                return _response(name, query, model, batch, ranking, list(rules))

            return await self._off_loop(make)

    def _batch(
        self, model: Model, query: ListQuery, rules: Mapping[str, Rule], left_out: Sequence[str]
    ) -> Batch:
        request = RecommendRequest([], query.k, filter=query.filter, exclude_items=left_out)
        standing = [replace(rule, boosts=(), pin=()) for rule in rules.values()]
        recommender = model.recommender
        types = None if recommender.retrieval is None else recommender.retrieval.types
        try:
            return Batch.of(recommender.epoch, [apply_rules(request, standing)], types)
        except FilterError:  # it has its own problem, unless a rule is the reason
            self._rules.check(rules, model)
            raise

    def _rows_of(self, recommender: Recommender, epoch: Epoch, trends: Trends) -> NDArray[np.int32]:
        """Dense items of those that trend; -1 where one cannot be recommended."""
        cached = self._rows.get(recommender)
        if cached is None or cached[0] is not trends or cached[1] != epoch.number:
            rows = epoch.catalog.index(trends.items)
            cached = self._rows[recommender] = (trends, epoch.number, rows)
        return cached[2]


def dates(epoch: Epoch) -> Dates:
    """The items of an epoch by the time since which they are available, the newest first.

    The second value has the unix seconds of each, or None for those that were added since the
    bundle was made and have no date; they come first, the last one first. Other items without a
    date are left out.
    """
    catalog = epoch.catalog
    times = np.full(len(catalog), np.nan)
    try:
        column = epoch.filters.attributes.column(FROM)
    except FilterError:
        column = None
    if column is not None and column.kind == "number" and column.starts is None:
        times[epoch.trie.row_items] = np.where(column.known, column.values, np.nan)
    added = np.arange(len(catalog.added.base), len(catalog))[::-1]
    added = added[np.isnan(times[added])]
    known = np.flatnonzero(~np.isnan(times))[::-1]
    known = known[np.argsort(-times[known], kind="stable")]
    return np.concatenate([added, known]), [*[None] * len(added), *times[known].tolist()]


def _scored(catalog: EpochCatalog, scored: Iterable[tuple[str, float]]) -> Iterator[ListedItem]:
    """Items by their ids, with their scores, best first; removed ones have no title."""
    for rank, (item_id, score) in enumerate(scored, start=1):
        row = catalog.find(item_id)
        title = "" if row < 0 else catalog.title(row)
        yield made(ListedItem, {"item_id": item_id, "title": title, "rank": rank, "score": score})


def _response(
    name: ListName, query: ListQuery, model: Model, batch: Batch, ranking: Ranking, rules: list[str]
) -> bytes:
    epoch = batch.epoch
    positions = batch.first_of(ranking.items, 0, query.k).tolist()

    def listed() -> Iterator[ListedItem]:
        for rank, position in enumerate(positions, start=1):
            row = int(ranking.items[position])
            values = {
                "item_id": epoch.catalog.item_id(row),
                "title": epoch.catalog.title(row),
                "rank": rank,
                **ranking.fields(position),
            }
            if "metadata" in query.include:
                values["metadata"] = metadata(epoch.catalog, row)
            yield made(ListedItem, values)

    code: NoteCode = "nothing_eligible" if len(ranking.items) else ranking.empty
    more = {**ranking.more, **({"rules": rules} if rules else {})}
    answer = ListResponse.model_construct(
        name=name,
        model=model.ref(query.model, epoch.number),
        items=[],
        eligible_items=batch.count_eligible(0),
        note=None if positions else Note(code=code, detail=_NOTES[code]),
        **more,
    )
    return as_json(answer, listed())
