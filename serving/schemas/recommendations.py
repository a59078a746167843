"""Wire schemas of recommendations."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from recsys.serving.schemas.common import (
    CHAMPION,
    MAX_HISTORY,
    AliasName,
    Body,
    Certificate,
    First,
    ItemId,
    K,
    ModelRef,
    Problem,
    Source,
    UserId,
    optional_list,
)
from recsys.serving.schemas.experiments import ExperimentRef
from recsys.serving.schemas.filters import EXAMPLE, MAX_BOOSTS, Boost, Filter
from recsys.serving.schemas.rules import RuleNames

MAX_BATCH = 100
MAX_SEED = 2**63 - 1

Include = Literal["metadata", "timing", "trace", "explanation"]


# Not the pattern of posted events: a data set may have names such as "Add to cart".
TypeName = Annotated[str, StringConstraints(min_length=1, max_length=64)]


class Subject(Body):
    """A user of the store, or a history given inline: exactly one of the two."""

    user: UserId | None = Field(None, description="A user whose history the service has.")
    history: Annotated[list[ItemId], Field(max_length=MAX_HISTORY), First] | None = Field(
        None, description="Item ids, oldest first. Ids that the model does not know are ignored."
    )

    history_types: Annotated[list[TypeName | None], Field(max_length=MAX_HISTORY), First] = (
        optional_list(
            description="The type of the event of each item of `history`, such as `view` or "
            "`purchase`; null for an unknown one. Models that were trained with types use them: "
            "what was only viewed can be recommended. Of a `user`, the store knows the types.",
        )
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.user is None) == (self.history is None):
            raise ValueError("give exactly one of 'user' and 'history'")
        if self.history_types and len(self.history_types) != len(self.history or ()):
            raise ValueError("'history_types' must have one type for each item of 'history'")
        return self


ONE_SUBJECT: dict[str, Any] = {"oneOf": [{"required": ["user"]}, {"required": ["history"]}]}


class RecommendationsRequest(Subject):
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
    exclude_seen: bool = Field(True, description="Leave out the items of the history.")
    exclude_items: Annotated[list[ItemId], First] = optional_list(
        max_length=MAX_HISTORY, description="Leave out these items."
    )
    filter: Filter | None = Field(
        None, description="Recommend only items that match.", examples=[EXAMPLE]
    )
    boosts: Annotated[list[Boost], First] = optional_list(
        max_length=MAX_BOOSTS,
        description="Weights added to the scores of the items that match a filter.",
    )
    mode: Literal["auto", "strict", "relaxed", "beam"] = Field(
        "auto",
        description="How to compute: `beam` is beam search; `strict` verifies a drafted tree, or "
        "without a draft all first codes, and returns the same list, blended or not; `relaxed` "
        "samples approximately with the draft, and needs a seed; `auto` leaves it to the service.",
    )
    guarantee: Literal["beam", "global"] = Field(
        "beam",
        description="`beam`: the list of beam search. `global`: continue until no item outside the "
        "list can score more than its last item; the certificate tells if that was reached.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=MAX_SEED,
        description="Draw items by their probability instead of searching for the best; the same "
        "seed draws the same.",
    )
    temperature: float = Field(
        1.0, ge=0.01, le=100, description="Flattens (above 1) or sharpens what a seed draws from."
    )
    blend: bool | None = Field(
        None,
        description="Whether retrieval may add to the model's list and reorder it, in any exact "
        "mode; null leaves it to the bundle, false uses the model alone. Samples (a seed) and "
        "lists with the guarantee `global` are the model's.",
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


class BatchRequest(Body):
    """Several requests at once."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"requests": [{"history": ["B0012"]}, {"user": "A1", "k": 5}]}]
        }
    )

    requests: Annotated[list[RecommendationsRequest], First] = Field(
        min_length=1, max_length=MAX_BATCH
    )


class RecommendedItem(BaseModel):
    """One recommended item."""

    item_id: str
    score: float = Field(
        description="The higher the better, within one answer. Of a list by the model alone: "
        "log-probability of the semantic ID given the history, plus boosts. Of a blended list: "
        "log-probability among the candidates of this request, so it changes with `k` and with the "
        "filter, and between the searches of a list with caps: `rank` is the order. A pinned item "
        "has 0."
    )
    title: str
    rank: int = Field(ge=1)
    source: Source = Field("model", description="What proposed it; `pinned`: a rule.")
    semantic_id: list[int] = Field([], description="Codes, coarse to fine, 0-based.")
    because: str | None = Field(
        None, description="The item of the history with the most evidence for it, if asked for."
    )
    metadata: dict[str, Any] | None = Field(None, description="Attributes, if asked for.")


NoteCode = Literal["unknown_user", "empty_history", "unknown_history", "nothing_eligible"]


class Note(BaseModel):
    """A remark on the answer."""

    code: NoteCode
    detail: str


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


class DecodedNode(BaseModel):
    """One node of the tree that was decoded."""

    id: int
    parent: int = Field(description="Its parent's id; -1 for the prompt.")
    depth: int = Field(description="1 for the first code.")
    code: int = Field(description="At this level, 0-based.")
    pass_: int = Field(alias="pass", description="The target's pass that it was run in, from 1.")
    draft_log_prob: float | None = Field(description="The draft's score; null if not drafted.")
    target_log_prob: float = Field(description="The target's, from the first code to this one.")
    fate: Literal["accepted", "rejected", "patched"]
    items: int = Field(description="Items below it.")


class DecodedTree(BaseModel):
    """The decode as a tree, parents before children."""

    levels: int
    passes: int = Field(description="Of the target.")
    nodes: list[DecodedNode]
    blocked: dict[str, int] = Field(
        description="By level: codes under the beams that lead to no item, or to none that fits."
    )


class RecommendationsResponse(BaseModel):
    """An answer, best item first; shorter than k where the catalog has no more."""

    recommendation_id: str = Field(description="Names this answer, for feedback.")
    model: ModelRef
    items: list[RecommendedItem]
    certificate: Certificate = Field(
        description="`global-exact`: the model's best items of all. `beam-exact`: the list of beam "
        "search, or the sample of the seed. `approximate`: neither. Pinned items are not meant."
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
    trace: DecodedTree | None = Field(None, description="If asked for.")


class BatchResult(BaseModel):
    """The result of one request: an answer or a problem."""

    status: int = Field(description="The status of the request if it were sent alone.")
    answer: RecommendationsResponse | None = None
    problem: Problem | None = None


class BatchResponse(BaseModel):
    """Results in the order of the requests."""

    results: list[BatchResult]
