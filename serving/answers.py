"""Answers: a body becomes a request of the library, and its result a response."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from recsys.decoding.output import Trace
from recsys.live_catalog import EpochCatalog
from recsys.recommender import Recommendation, Recommender, RecommendRequest, RecommendResult
from recsys.serving import diversity
from recsys.serving.batcher import Answer
from recsys.serving.catalog_changes import metadata
from recsys.serving.models import Model
from recsys.serving.schemas.common import made
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
    "exactly; POST /v1/filters/validate counts the items of a filter.",
)
_NOTES: dict[NoteCode, str] = {
    "unknown_user": "There is no history of the user",
    "empty_history": "The history is empty",
    "unknown_history": "The model knows none of the history's items",
}
# Fields that only the model can serve, with the values that need no model.
_OF_THE_MODEL: dict[str, Any] = {
    "mode": "auto", "guarantee": "beam", "seed": None, "boosts": [], "diversity": 0.0,
}  # fmt: skip


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
    given: dict[str, Any] = {}
    if body.filter is not None:
        given["filter"] = body.filter
    if body.boosts:
        given["boosts"] = [boost.model_dump() for boost in body.boosts]
    if body.blend is not None:
        given["blend"] = body.blend
    return RecommendRequest(
        history.items,
        diversity.pool(body.k) if body.diversity else body.k,
        body.exclude_seen,
        excluded,
        guarantee=body.guarantee,
        seed=body.seed,
        temperature=body.temperature,
        mode=body.mode,
        trace="trace" in body.include,
        history_types=history.types,
        **given,
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


def chosen(result: RecommendResult, body: RecommendationsRequest) -> list[Recommendation]:
    """The recommendations of an answer: all of them, or a diverse choice behind the pinned ones."""
    found = result.recommendations
    if not body.diversity:
        return found
    first = [one for one in found if one.source == "pinned"][: body.k]
    rest = [one for one in found if one.source != "pinned"]
    scores, codes = [one.score for one in rest], [one.semantic_id for one in rest]
    places = diversity.diversify(scores, codes, body.diversity, body.k - len(first))
    return [*first, *(rest[i] for i in places)]


def note(code: NoteCode | None, *, fallback: bool = False, filled_up: bool = False) -> Note | None:
    """A remark on an answer, for its caller."""
    if code is None:
        return None
    how = FILLED_UP if filled_up else FALLBACK if fallback else BARE_PROMPT
    return Note.model_construct(code=code, detail=f"{_NOTES[code]}; {how}.")


def items_of(
    found: Iterable[Recommendation], catalog: EpochCatalog, include: Sequence[str]
) -> list[RecommendedItem]:
    """Recommendations in the wire form, ranked in their order."""
    answer = []
    for rank, one in enumerate(found, start=1):
        values: dict[str, Any] = {
            "item_id": one.item_id,
            "score": one.score,
            "title": one.title,
            "rank": rank,
            "source": one.source,
            "semantic_id": list(one.semantic_id),
        }
        if "explanation" in include:
            values["because"] = one.because
        if "metadata" in include:
            values["metadata"] = metadata(catalog, catalog.find(one.item_id))
        answer.append(made(RecommendedItem, values))
    return answer


def response(
    body: RecommendationsRequest,
    request: RecommendRequest,
    result: RecommendResult,
    model: Model,
    remark: Note | None,
) -> RecommendationsResponse:
    """The answer of a model or of a fallback."""
    values: dict[str, Any] = {
        "recommendation_id": uuid.uuid4().hex,
        "model": model.ref(body.model, result.epoch_number),
        "items": items_of(chosen(result, body), result.epoch.catalog, body.include),
        "certificate": "approximate" if body.diversity else result.certificate,
        "history_items": len(request.history) - len(result.unknown_items),
        "unknown_items": result.unknown_items,
        "eligible_items": result.eligible_items,
        "note": _NOTHING if remark is None and result.eligible_items == 0 else remark,
    }
    if result.trace is not None:
        first_tokens = model.recommender.bundle.vocabulary.level_offsets
        values["trace"] = trace_of(result.trace, first_tokens)
    return made(RecommendationsResponse, values)


def timing(
    answer: Answer[Done] | None, stats: dict[str, int], history_s: float, total_s: float
) -> Timing:
    """The times of one request."""
    return Timing.model_construct(
        total_ms=round(total_s * 1000, 3),
        history_ms=round(history_s * 1000, 3),
        queue_ms=0.0 if answer is None else round(answer.queue_s * 1000, 3),
        compute_ms=0.0 if answer is None else round(answer.compute_s * 1000, 3),
        batch_size=0 if answer is None else answer.batch_size,
        decode={key: float(value) for key, value in stats.items()},
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
