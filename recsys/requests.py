"""Requests and results of a recommender; no models, no search.

`RequestOptions` are the fields that requests in Python and over REST have in common, with their
limits and descriptions. This module does not import torch: the client of the service reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from recsys import arguments
from recsys.config import explain
from recsys.constraint.filters import ItemBoosts, ItemFilter
from recsys.modes import Mode, Trace

if TYPE_CHECKING:
    from recsys.decoding.output import Certificate
    from recsys.live import Epoch

MIN_BEAMS = 20
POOLS = (MIN_BEAMS, 50, 100)
"""Beams of blended lists: the least of these that is at least k, or else k. Lists with the same
beams begin with the same items."""
Guarantee = Literal["beam", "global"]
Source = Literal["model", "retrieval", "popular", "pinned"]
SOURCES: tuple[Source, ...] = get_args(Source)  # by `recsys.listing`'s numbers


@dataclass(frozen=True)
class Recommendation:
    """One recommended item.

    Attributes:
        item_id: outside id.
        score: log-probability of its semantic ID given the history, over the whole vocabulary, plus
            the request's boosts; in a blended list the score of `Reranker`; 0 for a pinned item.
        title: from the catalog.
        semantic_id: its codes, 0-based.
        source: what proposed it.
        because: the item of the history with the most evidence for it, if known.
    """

    item_id: str
    score: float
    title: str
    semantic_id: tuple[int, ...]
    source: Source = "model"
    because: str | None = None


class RequestOptions(BaseModel):
    """What a request asks of its list, in Python and over REST."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    exclude_seen: bool | None = Field(
        None,
        description="Leave out the items of the history; null leaves it to the bundle, which lists "
        "them where validation users chose items again.",
    )
    mode: Literal["auto", "strict", "relaxed", "beam"] = Field(
        "auto",
        description="How to compute: `beam` is beam search; `strict` verifies a drafted tree, or "
        "without a draft all first codes, and returns the same list, blended or not; `relaxed` "
        "samples approximately with the draft, and needs a seed; `auto` leaves it to the service.",
    )
    guarantee: Guarantee = Field(
        "beam",
        description="`beam`: the best of what a search finds. `global`: continue until no item "
        "outside the list can score more than its last item; the certificate tells if that was "
        "reached.",
    )
    seed: int | None = Field(
        None,
        ge=0,
        le=2**63 - 1,
        description="Draw items by their probability instead of searching for the best, without "
        "the boosts of rules; the same seed draws the same.",
    )
    temperature: float = Field(
        1.0, ge=0.01, le=100, description="Flattens (above 1) or sharpens what a seed draws from."
    )
    blend: bool | None = Field(
        None,
        description="Whether retrieval may add to the model's list and reorder it, in any exact "
        "mode; null leaves it to the bundle, false uses the model alone. Samples (a seed) are the "
        "model's.",
    )


class RecommendRequest(RequestOptions):
    """A request for recommendations to one user.

    >>> RecommendRequest(["B0012", "B0034"], k=5, exclude_items=["B0056"]).mode
    'auto'

    `RequestOptions` has its other fields: `mode`, `guarantee`, `seed`, `temperature` and `blend`.

    Attributes:
        history: outside item ids, oldest first; unknown ones are ignored.
        k: items wanted.
        exclude_seen: leave out the items of the history; with types, those that count as seen.
            None leaves it to the bundle (`Recommender.exclude_seen`).
        exclude_items: leave out these as well.
        filter: recommend only items that match (`recsys.constraint.filters`); the search is
            constrained to them. It may be parsed already.
        boosts: filters with weights that are added to the scores of matching items. The search
            stays exact; where items share a leaf, the certificate tells if it is not. They may be
            parsed already.
        trace: also return how the answer was found; beam search is then replaced by `strict`.
        history_types: the type of the event of each item of the history, such as `view`; None for
            an unknown one. Empty if no types are known.
        pin: outside ids of items that take the first places, in this order, if they may be
            recommended: exclusions, the filter, availability and caps come first.
        max_per: attribute -> how many items of the list may have the same value of it, at least 1
            (`recsys.capped`). The certificate is `global-exact` where that is proven, and else
            `approximate`.

    Raises:
        ValueError: a field out of its range, a seed together with `global` or boosts, `relaxed`
            without a seed or with a trace, or a blend where there can be none.
        FilterError: a malformed filter or boost.
    """

    model_config = ConfigDict(strict=False, arbitrary_types_allowed=True)

    history: SkipValidation[Sequence[str]]
    k: SkipValidation[int] = 10
    exclude_items: SkipValidation[Sequence[str]] = ()
    filter: SkipValidation[Mapping[str, Any] | ItemFilter | None] = None
    boosts: SkipValidation[Sequence[Mapping[str, Any]] | ItemBoosts] = ()
    trace: bool = False
    history_types: SkipValidation[Sequence[str | None]] = ()
    pin: SkipValidation[Sequence[str]] = ()
    max_per: SkipValidation[Mapping[str, int]] = Field(default_factory=dict)

    def __init__(
        self,
        history: Sequence[str],
        k: int = 10,
        exclude_seen: bool | None = None,
        exclude_items: Sequence[str] = (),
        **options: Any,
    ) -> None:
        ids = {"history": history, "exclude_items": exclude_items, "pin": options.get("pin", ())}
        options |= {name: arguments.strings(name, values) for name, values in ids.items()}
        try:
            super().__init__(**options | {"k": k, "exclude_seen": exclude_seen})
        except ValidationError as error:
            raise ValueError(explain(error, RecommendRequest, "request")) from None
        arguments.whole_number("k", k)
        arguments.counts("max_per", self.max_per)
        types = self.history_types
        known = types if isinstance(types, str) else [name for name in types if name is not None]
        arguments.strings("history_types", known)
        if len(types) not in (0, len(history)):
            raise ValueError(
                f"history_types: {len(types)} types for {len(history)} items of the history"
            )
        self.check()

    def check(self) -> None:
        """Check what pydantic does not: fields that exclude each other, filter and boosts.

        Raises:
            ValueError, FilterError: as of the class.
        """
        if self.seed is not None and self.guarantee == "global":
            raise ValueError("guarantee 'global' is for the best items, a seed asks for a sample")
        if self.seed is not None and self.boosts:
            raise ValueError("boosts are for the best items, a seed asks for a sample")
        if self.mode == "relaxed" and self.seed is None:
            raise ValueError("mode 'relaxed' samples: give it a seed, or ask for mode 'strict'")
        if self.mode == "relaxed" and self.trace:
            raise ValueError("trace: only a strict decode can be traced, not mode 'relaxed'")
        if self.blend and self.seed is not None:
            raise ValueError("blend: a seed draws from the model alone; leave out seed or blend")
        # parse filter and boosts, so that malformed ones fail here
        if self.filter is not None:
            _ = self.item_filter
        if self.boosts:
            _ = self.item_boosts

    def changed(self, **fields: Any) -> RecommendRequest:
        """The request with other values of these fields, which are checked."""
        return RecommendRequest(
            **{name: getattr(self, name) for name in type(self).model_fields} | fields
        )

    @cached_property
    def item_filter(self) -> ItemFilter:
        """The parsed filter; without one, a filter that allows everything."""
        if isinstance(self.filter, ItemFilter):
            return self.filter
        return ItemFilter.parse(self.filter or {})

    @cached_property
    def item_boosts(self) -> ItemBoosts:
        """The boosts, parsed."""
        return self.boosts if isinstance(self.boosts, ItemBoosts) else ItemBoosts.parse(self.boosts)

    def after(self, result: RecommendResult) -> RecommendRequest:
        """The request for a list that begins with the items of another, by the model alone.

        They are pinned, so that caps count them, and those that the catalog or the filter no longer
        allows when the answer comes are left out.
        """
        return self.changed(pin=[item.item_id for item in result.recommendations], blend=False)


@dataclass(frozen=True)
class Kind:
    """The properties that requests must share to be decoded together."""

    beams: int
    guarantee: str = "beam"
    sampled: bool = False
    temperature: float = 1.0
    mode: str = Mode.AUTO
    trace: bool = False
    blend: bool = False
    capped: bool = False

    @classmethod
    def of(cls, request: RecommendRequest, blend: bool) -> Kind:
        """The kind of a request that is blended or not."""
        sampled = request.seed is not None
        temperature = request.temperature if sampled else 1.0
        sizes = (*POOLS, request.k) if blend else (MIN_BEAMS, request.k)
        return cls(
            next(size for size in sizes if size >= request.k),
            request.guarantee,
            sampled,
            temperature,
            request.mode,
            request.trace,
            blend,
            bool(request.max_per),
        )


@dataclass(frozen=True, kw_only=True)
class RecommendResult:
    """The answer to one request, all of it from one epoch of the catalog.

    Attributes:
        recommendations: best first; fewer than k where the catalog has no more.
        unknown_items: ids of the history that the model does not know.
        epoch: the catalog that the answer is from, to look at its items as they were.
        eligible_items: number of items that could have been recommended: those that the filter
            allows, without the excluded ones.
        stats: counters of the decode (`recsys.decoding.DecodeStats`) and its beam width.
        certificate: `global-exact`, `beam-exact` or `approximate` (`recsys.decoding.Beams`).
        trace: how it was found, if asked for.
        blended: whether retrieval took part in the list.
    """

    recommendations: list[Recommendation]
    unknown_items: list[str]
    epoch: Epoch = field(compare=False, repr=False)
    eligible_items: int
    stats: dict[str, int] = field(default_factory=dict)
    certificate: Certificate = "beam-exact"
    trace: Trace | None = None
    blended: bool = False

    @property
    def epoch_number(self) -> int:
        """Number of the epoch; every change of the catalog makes the next one."""
        return self.epoch.number

    def is_short(self, k: int) -> bool:
        """Whether the list has fewer than k items although more could be recommended."""
        return len(self.recommendations) < min(k, self.eligible_items)

    def followed_by(self, more: RecommendResult) -> RecommendResult:
        """The answer to the request `after` this list, with the scores and sources of this list.

        The answer is of the epoch of `more`. Items that were removed since, or that no longer match
        the filter, are left out; titles and codes are those of that epoch.
        """
        own = {item.item_id: item for item in self.recommendations}
        items = [
            item
            if (first := own.get(item.item_id)) is None
            else replace(item, score=first.score, source=first.source, because=first.because)
            for item in more.recommendations
        ]
        return replace(
            self,
            recommendations=items,
            epoch=more.epoch,
            eligible_items=more.eligible_items,
            stats=more.stats,
        )
