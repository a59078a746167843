"""Recommendations on the wire; a request has the fields of `recsys.requests`, too."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from recsys.constraint.filters import MOST_BOOSTS
from recsys.modes import Trace
from recsys.requests import Recommendation, RecommendRequest, RequestOptions, Source
from recsys.serving.schemas.common import (
    CHAMPION,
    MAX_HISTORY,
    AliasName,
    Body,
    Certificate,
    FailFast,
    ItemId,
    K,
    ModelRef,
    Note,
    NoteCode,
    Problem,
    UserId,
    made,
    metadata,
    optional_list,
)
from recsys.serving.schemas.experiments import ExperimentRef
from recsys.serving.schemas.rules import FILTER_EXAMPLE, Boost, Filter, RuleNames
from recsys.serving.stores.records import TypedHistory

if TYPE_CHECKING:
    from recsys.live_catalog import EpochCatalog
    from recsys.recommender import Recommender

MAX_BATCH = 100

Include = Literal["metadata", "timing", "trace", "explanation"]


# Not the pattern of posted events: a data set may have names such as "Add to cart".
TypeName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Subject(Body):
    """A user of the store, or a history given inline: exactly one of the two."""

    user: UserId | None = Field(None, description="A user whose history the service has.")
    history: Annotated[list[ItemId], Field(max_length=MAX_HISTORY), FailFast] | None = Field(
        None, description="Item ids, oldest first. Ids that the model does not know are ignored."
    )

    history_types: Annotated[list[TypeName | None], Field(max_length=MAX_HISTORY), FailFast] = (
        optional_list(
            description="The type of the event of each item of `history`, such as `view` or "
            "`purchase`; null for an unknown one. Models that were trained with types use them: "
            "what was only viewed can be recommended. Of a `user`, the store knows the types.",
        )
    )

    @model_validator(mode="after")
    def _has_one_subject(self) -> Self:
        if (self.user is None) == (self.history is None):
            raise ValueError("give exactly one of 'user' and 'history'")
        if self.history_types and len(self.history_types) != len(self.history or ()):
            raise ValueError("'history_types' must have one type for each item of 'history'")
        return self


ONE_SUBJECT: dict[str, Any] = {"oneOf": [{"required": ["user"]}, {"required": ["history"]}]}


class RecommendationsRequest(RequestOptions, Subject):
    """Top-k for a user of the store, or for a history given inline: exactly one of the two."""

    model_config = ConfigDict(
        json_schema_extra={
            **ONE_SUBJECT,
            "examples": [
                {"history": ["B0012", "B0034"], "k": 5},
                {"user": "A1", "k": 10, "exclude_items": ["B0099"], "include": ["metadata"]},
                {"history": ["B0012"], "guarantee": "global", "include": ["timing", "trace"]},
                {"history": ["B0012"], "seed": 7, "temperature": 1.5},
            ],
        }
    )

    k: K = 10
    exclude_items: Annotated[list[ItemId], FailFast] = optional_list(
        max_length=MAX_HISTORY, description="Leave out these items."
    )
    filter: Filter | None = Field(
        None, description="Recommend only items that match.", examples=[FILTER_EXAMPLE]
    )
    boosts: Annotated[list[Boost], FailFast] = optional_list(
        max_length=MOST_BOOSTS,
        description="Weights added to the scores of the items that match a filter.",
    )
    fallback: bool = Field(
        True,
        description="Answer an unknown user or history from retrieval and popularity, labelled by "
        "each item's `source`. If false, an unknown user is a problem, and a history without known "
        "items is answered by the model, with a prompt without a history.",
    )
    rules: RuleNames = optional_list(
        description="Business rules to apply, by name: their filters, boosts, pins and caps. Those "
        "of the alias always apply."
    )
    model: AliasName = Field(
        CHAMPION, description="Alias of the model that answers, or name of an experiment."
    )
    include: list[Include] = optional_list(
        max_length=8,
        description="`metadata` adds each item's attributes, `timing` the times of the request, "
        "`trace` how the list was found, `explanation` the item of the history with the most "
        "evidence for each.",
    )

    @property
    def needs_model(self) -> bool:
        """Whether a fallback cannot serve it, or is not wanted."""
        is_special = self.guarantee != "beam" or self.seed is not None or bool(self.boosts)
        return is_special or self.blend is False or "trace" in self.include or not self.fallback

    def request(self, history: TypedHistory, recommender: "Recommender") -> RecommendRequest:
        """The library's request, whose fields are validated already.

        Items that the user dislikes are excluded. Unless the request wants items that were seen,
        those of `history.earlier` that count as seen are excluded, too.

        Raises:
            ValueError, FilterError: as of `RecommendRequest.check`.
        """
        excluded = [*self.exclude_items, *history.disliked]
        if recommender.exclude_seen if self.exclude_seen is None else self.exclude_seen:
            types, earlier = recommender.types, history.earlier
            excluded.extend(types.seen(earlier) if types else [item for item, _ in earlier])
        values = {name: getattr(self, name) for name in RequestOptions.model_fields}
        request = made(
            RecommendRequest,
            {
                **values,
                "history": history.items,
                "k": self.k,
                "exclude_items": excluded,
                "filter": self.filter,
                "boosts": [boost.model_dump() for boost in self.boosts],
                "trace": "trace" in self.include,
                "history_types": history.types,
                "pin": [],
                "max_per": {},
            },
        )
        request.check()
        return request


class BatchRequest(Body):
    """Several requests at once."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"requests": [{"history": ["B0012"]}, {"user": "A1", "k": 5}]}]
        }
    )

    requests: Annotated[list[RecommendationsRequest], FailFast] = Field(
        min_length=1, max_length=MAX_BATCH
    )


class RecommendedItem(BaseModel):
    """An item of an answer, with its score, its source and what else was asked for."""

    item_id: str
    score: float = Field(
        description="The higher the better, within one answer. Of a list by the model alone: "
        "log-probability of the semantic ID given the history. Of a blended list: a difference of "
        "two is the logarithm of the estimated ratio of probabilities, whatever else was asked. "
        "Boosts are added. A pinned item has 0."
    )
    title: str
    rank: int = Field(ge=1)
    source: Source = Field("model", description="What proposed it; `pinned`: a rule.")
    semantic_id: list[int] = Field([], description="Codes, coarse to fine, 0-based.")
    because: str | None = Field(
        None, description="The item of the history with the most evidence for it, if asked for."
    )
    metadata: dict[str, Any] | None = Field(None, description="Attributes, if asked for.")

    @classmethod
    def listed(
        cls,
        recommendations: Iterable[Recommendation],
        catalog: "EpochCatalog",
        include: Sequence[str],
    ) -> "Iterator[RecommendedItem]":
        """Recommendations on the wire in their order, with the parts that `include` names."""
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
            yield made(cls, values)


_NOTES: dict[NoteCode, str] = {
    "unknown_user": "There is no history of the user",
    "empty_history": "The history is empty",
    "unknown_history": "The model knows none of the history's items",
}


def note_of(code: NoteCode | None, *, fallback: bool, model: bool) -> Note | None:
    """What is unusual about a history, and whether fallback or model answered, or both."""
    if code is None:
        return None
    how = "the model answered from the bare prompt, as for any new user"
    if fallback:
        how = "retrieval and popularity answered"
        how += ", and the model where they had no more" if model else ""
    return Note.model_construct(code=code, detail=f"{_NOTES[code]}; {how}.")


NOTHING = Note(
    code="nothing_eligible",
    detail="No item passes the filter, the rules and the availability. Values are compared "
    "exactly; `eligible_items` of /v1/recommendations counts the items of a filter.",
)


def note_code(catalog: "EpochCatalog", history: Sequence[str] | None) -> NoteCode | None:
    """What is unusual about a history; None stands for that of an unknown user."""
    if history is None:
        return "unknown_user"
    if not history:
        return "empty_history"
    return None if catalog.knows_any(history) else "unknown_history"


class Timing(BaseModel):
    """The times of a request in milliseconds, and the counters of the decoder."""

    total_ms: float
    history_ms: float = Field(description="Reading the user's history.")
    queue_ms: float = Field(description="Waiting for the worker.")
    compute_ms: float = Field(description="The whole batch's computation.")
    batch_size: int = Field(description="Requests computed together; 0 if no model was used.")
    decode: dict[str, float] = Field(
        description="Counters of the decoder for this request: target passes, accepted levels, ..."
    )

    @classmethod
    def of(
        cls, seconds: Mapping[str, float], batch_size: int, stats: Mapping[str, int]
    ) -> "Timing":
        """The times of the stages `total`, `history`, `queue` and `compute`."""
        stages: dict[str, Any] = {
            f"{stage}_ms": round(duration * 1000, 3) for stage, duration in seconds.items()
        }
        decode = {name: float(value) for name, value in stats.items()}
        return cls.model_construct(**stages, batch_size=batch_size, decode=decode)


class RecommendationsResponse(BaseModel):
    """An answer, best item first; shorter than k where the catalog has no more."""

    recommendation_id: str = Field(description="Names this answer, for feedback.")
    model: ModelRef
    items: list[RecommendedItem]
    certificate: Certificate = Field(
        description="`global-exact`: the items with the best scores of all. `beam-exact`: the list "
        "of beam search by the model alone, or the sample of the seed. `approximate`: neither. "
        "Pinned items are not meant."
    )
    history_items: int = Field(description="Items of the history that the model knows.")
    unknown_items: list[str] = Field(description="Items of the history that it does not.")
    eligible_items: int = Field(description="Items that could have been recommended.")
    note: Note | None
    rules: list[str] | None = Field(None, description="Rules that were applied, if any were.")
    experiment: ExperimentRef | None = Field(
        None, description="If `model` was an experiment: its name and the arm."
    )
    timing: Timing | None = Field(None, description="If asked for.")
    trace: Trace | None = Field(None, description="If asked for.")


class BatchResult(BaseModel):
    """The result of one request: an answer or a problem."""

    status: int = Field(description="The status of the request if it were sent alone.")
    answer: RecommendationsResponse | None = None
    problem: Problem | None = None


class BatchResponse(BaseModel):
    """Results in the order of the requests."""

    results: list[BatchResult]
