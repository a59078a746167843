"""Answers: a body becomes a request of the library, and its result a response."""

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recsys.decoding.output import Trace
from recsys.live_catalog import EpochCatalog
from recsys.recommender import (
    Recommendation,
    Recommender,
    RecommendRequest,
    RecommendResult,
    Source,
)
from recsys.serving.batcher import Answer
from recsys.serving.catalog_changes import metadata
from recsys.serving.models import Model
from recsys.serving.schemas.common import made
from recsys.serving.schemas.items import RankBody, RankResponse, ScoredItem
from recsys.serving.schemas.recommendations import (
    DecodedNode,
    DecodedTree,
    Note,
    NoteCode,
    RecommendationsRequest,
    RecommendationsResponse,
    RecommendedItem,
    Timing,
)
from recsys.serving.stores.records import TypedHistory
from recsys.serving.worker import Done

BARE_PROMPT = "the model answered from the bare prompt, as for any new user"
FALLBACK = "retrieval and popularity answered"
FILLED_UP = "retrieval and popularity answered, and the model where they had no more"
_NOTHING = Note(
    code="nothing_eligible",
    detail="No item passes the filter, the rules and the availability. Values are compared "
    "exactly; `eligible_items` of /v1/recommendations counts the items of a filter.",
)
_NOTES: dict[NoteCode, str] = {
    "unknown_user": "There is no history of the user",
    "empty_history": "The history is empty",
    "unknown_history": "The model knows none of the history's items",
}
# Fields that only the model can serve, with the values that need no model.
_OF_THE_MODEL: dict[str, Any] = {"guarantee": "beam", "seed": None, "boosts": []}


@dataclass(frozen=True)
class Asked:
    """A request with all that it refers to.

    Attributes:
        body: as it was sent.
        alias: of the model; the arm of an experiment.
        model: that answers.
        request: the library's.
        rules: names of the rules that are applied.
        unusual: what is unusual about the history.
        deadline: on the event loop's clock.
        start: monotonic time.
        read_s: seconds that reading the history took.
    """

    body: RecommendationsRequest
    alias: str
    model: Model
    request: RecommendRequest
    rules: tuple[str, ...]
    unusual: NoteCode | None
    deadline: float
    start: float
    read_s: float


@dataclass(frozen=True)
class Answered:
    """The result of a request; without `decoded`, no model was used."""

    result: RecommendResult
    decoded: Answer[Done] | None = None
    is_fallback: bool = False

    def times(self, read_s: float, total_s: float) -> dict[str, float]:
        """Seconds of each stage, in the order of `Timing`."""
        return {
            "total": total_s,
            "history": read_s,
            "queue": 0.0 if self.decoded is None else self.decoded.queue_s,
            "compute": 0.0 if self.decoded is None else self.decoded.compute_s,
        }


def to_request(
    body: RecommendationsRequest,
    history: TypedHistory,
    recommender: Recommender,
) -> RecommendRequest:
    """The library's request; a `ValueError` names fields that exclude each other.

    Items that the user dislikes are excluded. Unless the request wants items that were seen, those
    of `history.earlier` that count as seen are excluded, too.
    """
    excluded = [*body.exclude_items, *history.disliked]
    if body.exclude_seen:
        excluded.extend(recommender.seen(history.earlier))
    return RecommendRequest(
        history.items,
        body.k,
        body.exclude_seen,
        excluded,
        guarantee=body.guarantee,
        seed=body.seed,
        temperature=body.temperature,
        mode=body.mode,
        trace="trace" in body.include,
        history_types=history.types,
        filter=body.filter,
        boosts=[boost.model_dump() for boost in body.boosts],
        blend=body.blend,
    )


def for_the_model(body: RecommendationsRequest) -> bool:
    """Whether the request needs the model: a fallback cannot serve it, or is not wanted."""
    special = any(getattr(body, name) != usual for name, usual in _OF_THE_MODEL.items())
    return special or body.blend is False or "trace" in body.include or not body.fallback


def note_code(catalog: EpochCatalog, history: Sequence[str] | None) -> NoteCode | None:
    """What is unusual about a history; None stands for that of an unknown user."""
    if history is None:
        return "unknown_user"
    if not history:
        return "empty_history"
    return None if catalog.knows_any(history) else "unknown_history"


def note(code: NoteCode | None, *, fallback: bool = False, filled_up: bool = False) -> Note | None:
    """A remark on an answer, for its caller."""
    if code is None:
        return None
    how = FILLED_UP if filled_up else FALLBACK if fallback else BARE_PROMPT
    return Note.model_construct(code=code, detail=f"{_NOTES[code]}; {how}.")


def items_of(
    recommendations: Iterable[Recommendation], catalog: EpochCatalog, include: Sequence[str]
) -> list[RecommendedItem]:
    """Recommendations in the wire form, ranked in their order."""
    answer = []
    for rank, item in enumerate(recommendations, start=1):
        values: dict[str, Any] = {
            "item_id": item.item_id,
            "score": item.score,
            "title": item.title,
            "rank": rank,
            "source": item.source,
            "semantic_id": list(item.semantic_id),
        }
        if "explanation" in include:
            values["because"] = item.because
        if "metadata" in include:
            values["metadata"] = metadata(catalog, catalog.find(item.item_id))
        answer.append(made(RecommendedItem, values))
    return answer


def response(asked: Asked, answered: Answered) -> RecommendationsResponse:
    """The answer on the wire, without its times."""
    body, result = asked.body, answered.result
    remark = note(
        asked.unusual,
        fallback=answered.is_fallback,
        filled_up=answered.is_fallback and answered.decoded is not None,
    )
    values: dict[str, Any] = {
        "recommendation_id": uuid.uuid4().hex,
        "model": asked.model.ref(asked.alias, result.epoch_number),
        "items": items_of(result.recommendations, result.epoch.catalog, body.include),
        "certificate": result.certificate,
        "history_items": len(asked.request.history) - len(result.unknown_items),
        "unknown_items": result.unknown_items,
        "eligible_items": result.eligible_items,
        "note": _NOTHING if remark is None and result.eligible_items == 0 else remark,
    }
    if asked.rules:
        values["rules"] = list(asked.rules)
    if result.trace is not None:
        first_tokens = asked.model.recommender.bundle.vocabulary.level_offsets
        values["trace"] = trace_of(result.trace, first_tokens)
    return made(RecommendationsResponse, values)


def ranking(
    body: RankBody,
    model: Model,
    history: Sequence[str],
    known: Sequence[str],
    scores: Sequence[float],
) -> RankResponse:
    """The answer to `rank`: the items that the catalog knows, best first."""
    catalog = model.recommender.catalog
    order = sorted(zip(scores, known, strict=True), key=lambda pair: -pair[0])
    there = set(known)
    return RankResponse.model_construct(
        model=model.ref(body.model),
        items=[
            scored(catalog, name, score, rank, "model")
            for rank, (score, name) in enumerate(order, start=1)
        ],
        unknown_items=[name for name in dict.fromkeys(body.items) if name not in there],
        history_items=int((catalog.known(history) >= 0).sum()),
    )


def scored(
    catalog: EpochCatalog, item_id: str, score: float, rank: int, source: Source
) -> ScoredItem:
    """An item of a ranked list, on the wire."""
    row = catalog.find(item_id)
    return ScoredItem.model_construct(
        item_id=item_id,
        score=score,
        title="" if row < 0 else catalog.title(row),  # removed meanwhile
        rank=rank,
        source=source,
    )


def timing(answered: Answered, times: Mapping[str, float]) -> Timing:
    """The times of one request, given in seconds."""
    stages: dict[str, Any] = {
        f"{stage}_ms": round(seconds * 1000, 3) for stage, seconds in times.items()
    }
    return Timing.model_construct(
        **stages,
        batch_size=0 if answered.decoded is None else answered.decoded.batch_size,
        decode={key: float(value) for key, value in answered.result.stats.items()},
    )


def trace_of(decoded: Trace, first_tokens: Sequence[int]) -> DecodedTree:
    """What a page draws, given the token of code 0 at each level."""
    nodes = [
        DecodedNode.model_construct(
            id=i,
            parent=node.parent,
            depth=node.depth,
            code=node.token - first_tokens[node.depth - 1],
            pass_=node.target_pass,
            draft_log_prob=node.draft_log_prob,
            target_log_prob=node.target_log_prob,
            fate=node.fate,
            items=node.items or 0,
        )
        for i, node in enumerate(decoded.nodes)
    ]
    return DecodedTree.model_construct(
        levels=len(first_tokens),
        passes=max((node.target_pass for node in decoded.nodes), default=0),
        nodes=nodes,
        blocked={str(level): count for level, count in decoded.blocked.items()},
    )
