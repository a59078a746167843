"""Reranker: the score of an item for a history, from the values of several sources.

A source gives an item a number: co-occurrence evidence, a cosine, a logit, or the model's
log-probability. Each feature is a function of such a number and of the history. No feature depends
on the other candidates, so an item has one score, whatever else a request allows. The score is
linear in the features, plus the output of a small network of those of retrieval where validation
shows a gain. Over all items of a catalog, the softmax of the scores estimates the probability of
the next item (the conditional logit of McFadden, 1974); its normaliser is left out.
`recsys.training.reranking` fits it on validation users.

An item without training events has no co-occurrence and no popularity. It has further weights: one
for being new, and one for its value by each source that knows something of it. An item of the
history has weights of its own instead: those of buying again (`recsys.retrieval.again`), and one
for its value by each source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys import arguments
from recsys.arguments import MOST_NODES

MODEL, POPULARITY = "model", "popularity"
LEAST_USERS = 8  # of validation; with fewer, no source is served in place of the reranker
SHARES = ("item_item", "to_targets")
"""Evidence of pairs with the history, and of those that end in an event of a target type."""
COSINES = ("vectors", "content")
"""Cosines with the history by item vectors, and by content."""
SASREC = "sasrec"
"""Logits of SASRec."""
TARGET_POPULARITY = "target_popularity"
RECENT = "recent"
"""Popularity in the last part of the time that the training events span."""
NEW = "new"
"""Whether an item has no training events."""
AGAIN = "again"
"""Whether the history has an item; with types of events, one that counts as seen."""
AGAIN_VALUES = (AGAIN, *(f"{AGAIN}.{name}" for name in ("count", "age", "rate", "late", "overdue")))
"""Of an item of the history: log(events), log(1 + later events), log-odds that an event repeats an
item, how much longer than usual ago the last event is, as a difference of logarithms, and what of
that is above 0."""
SEEN = "seen:"
"""Begins the source of a type of events: how recently the history has such events on the item."""
SOURCES = (*SHARES, *COSINES, SASREC, POPULARITY, RECENT, TARGET_POPULARITY, MODEL)
RANKED = (*SHARES, SASREC)
"""Sources with a further feature: log(1 + rank) among all items that are not in the history."""
MOST_RANK = 50
"""Ranks from here on count as this one."""
KNEES = (0.3, 0.6)
"""Cosines have a further feature for each of these: how far they are above it."""
FLOOR = 1e-3
"""The feature of the model is log(1 + probability / FLOOR): smaller probabilities differ little."""
OF_NEW = (*COSINES, SASREC, MODEL)
"""Sources that know something of items without events."""
ADDED = {NEW: ((NEW,), OF_NEW), AGAIN: (AGAIN_VALUES, SOURCES)}
"""Sources for some items alone: their values, and the sources whose first features have another
weight for these items: a further one for new items, and instead of all others for those of the
history."""


def rank_of(source: str) -> str:
    """The name of the ranks by a source, among values and among features."""
    return f"{source}.rank"


RANKS = frozenset(map(rank_of, RANKED))
FURTHER = RANKS | {*AGAIN_VALUES[1:]}
"""Values that a source has besides the one of its own name."""


def names_of(source: str) -> list[str]:
    """Names of the features of a source."""
    if source in ADDED:
        values, others = ADDED[source]
        return [*values, *(f"{source}.{other}" for other in others)]
    if source in RANKED:
        return [source, rank_of(source)]
    return [source, *(f"{source}.above_{knee}" for knee in KNEES * (source in COSINES))]


def source_of(feature: str) -> str:
    """The source of a feature."""
    first, _, rest = feature.partition(".")
    if first in ADDED and rest and feature not in AGAIN_VALUES:
        return rest
    return feature if feature.startswith(SEEN) else first


FEATURES = frozenset(name for source in (*SOURCES, *ADDED) for name in names_of(source))
MOST_UNITS = 256  # of a network; native.h has the same bound
CANDIDATES_AT_A_TIME = 2048  # bounds memory and stays in the cache


@dataclass(frozen=True, eq=False)
class Network:
    """One hidden layer of ReLU units over the features of a candidate.

    Attributes:
        features: their names, in the order of the columns; not those of items without events, and
            not the model's, in whose probability the score is then monotone.
        units: (U, F + 2) float64: each unit's weights of the features, its bias, and its weight in
            the output.
    """

    features: tuple[str, ...]
    units: NDArray[np.float64]

    def __post_init__(self) -> None:
        unknown = sorted(n for n in self.features if not _may_be_input(n))
        if unknown:
            raise ValueError(f"network: unknown feature {unknown[0]!r}")
        if self.units.ndim != 2 or self.units.shape[1] != len(self.features) + 2:
            raise ValueError(
                f"network: units of {self.units.shape} do not fit {len(self.features)} features"
            )
        if not 0 < len(self.units) <= MOST_UNITS:
            raise ValueError(f"network: expected 1 to {MOST_UNITS} units, got {len(self.units)}")
        if not np.isfinite(self.units).all():
            raise ValueError("network: every weight must be finite")

    def outputs(self, features: Mapping[str, NDArray[np.floating[Any]]]) -> NDArray[np.float64]:
        """The sum over the units of output weight * max(0, weights . features + bias).

        Sums run in the order of features and units, so that a candidate gets the same bits in any
        batch.

        Args:
            features: name -> (n, w), with all of `self.features`.
        """
        columns = [features[name].ravel() for name in self.features]
        weights, bias, out = self.units[:, :-2], self.units[:, -2:-1], self.units[:, -1]
        shape = next(iter(features.values())).shape
        total = np.zeros(shape).ravel()
        for start in range(0, len(total), CANDIDATES_AT_A_TIME):
            part = slice(start, start + CANDIDATES_AT_A_TIME)
            hidden = np.repeat(bias, len(total[part]), axis=1)
            for weight, column in zip(weights.T, columns, strict=True):
                hidden += weight[:, None] * column[part]
            np.maximum(hidden, 0, out=hidden)
            for weight, unit in zip(out, hidden, strict=True):
                total[part] += weight * unit
        return total.reshape(shape)


def _may_be_input(name: str) -> bool:
    is_other = name == MODEL or name.split(".")[0] in ADDED
    return (name in FEATURES and not is_other) or name.startswith(SEEN)


@dataclass(frozen=True)
class Reranker:
    """Weights of the features, and how many candidates there are.

    Attributes:
        weights: feature -> weight; a feature without an entry has weight 0. Empty: the model's
            list is served unchanged.
        candidates: items that the model of pairs proposes; each further source
            proposes half as many, and popularity a quarter (`Retrieval.propose`).
        nodes: most nodes of the target's tree for these items, best first by retrieval alone, for a
            list of at most 20 items; items that do not fit are not listed.
        network: what is added to the linear score, or None.
        lists_seen: whether lists have items of the history, unless a request says otherwise.
    """

    weights: Mapping[str, float]
    candidates: int = 40
    nodes: int = 32
    network: Network | None = None
    lists_seen: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise ValueError(f"weights must map features to numbers, got {self.weights!r}")
        unknown = sorted(
            n for n in set(self.weights) - FEATURES if not source_of(n).startswith(SEEN)
        )
        if unknown:
            raise ValueError(f"weights: unknown feature {unknown[0]!r}")
        if not all(np.isfinite(weight) for weight in self.weights.values()):
            raise ValueError("weights: every weight must be finite")
        for name in ("candidates", "nodes"):
            arguments.whole_number(name, getattr(self, name), least=0, most=MOST_NODES)

    @cached_property
    def sources(self) -> list[str]:
        """The sources whose features have weight, or are an input of the network."""
        inputs = () if self.network is None else self.network.features
        used = sorted({name for name, weight in self.weights.items() if weight} | {*inputs})
        names = [source_of(name) for name in used]
        return list(
            dict.fromkeys(names + [n.split(".")[0] for n in used if n.split(".")[0] in ADDED])
        )

    @cached_property
    def without_model(self) -> Reranker:
        """The same without the features of the model, to choose what the model scores."""
        weights = {name: w for name, w in self.weights.items() if source_of(name) != MODEL}
        return replace(self, weights=weights)

    @property
    def most_of_model(self) -> float:
        """The largest weight of the model's feature in the score of any item, at least 0."""
        usual, new, again = (
            self.weights.get(n, 0.0) for n in (MODEL, *(f"{a}.{MODEL}" for a in ADDED))
        )
        return max(0.0, usual, usual + new, again)

    def score(
        self, values: Mapping[str, NDArray[np.floating[Any]]], there: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """The score of each candidate.

        Args:
            values: source -> (n, w) values, for all of `sources`, and those in `FURTHER`; NaN where
                there is none.
            there: (n, w) which places hold a candidate.

        Returns:
            (n, w), -inf where there is no candidate.
        """
        total, again = np.zeros(there.shape), np.zeros(there.shape)
        features = features_of(values, there, self.sources)
        for name, feature in features.items():
            if weight := self.weights.get(name, 0.0):
                part = again if name.split(".")[0] == AGAIN else total
                part += weight * feature
        if self.network is not None:
            total += self.network.outputs(features)
        if AGAIN in features:
            total = np.where(features[AGAIN] > 0, again, total)
        return np.where(there, total, -np.inf)


def feature_matrix(
    values: Mapping[str, NDArray[np.floating[Any]]],
    there: NDArray[np.bool_],
    sources: Sequence[str],
) -> tuple[list[str], NDArray[np.float32]]:
    """Names and (n, w, F) values of the features of some sources."""
    features = features_of(values, there, sources)
    return list(features), np.stack(list(features.values()), axis=-1).astype(np.float32)


def features_of(
    values: Mapping[str, NDArray[np.floating[Any]]],
    there: NDArray[np.bool_],
    sources: Sequence[str],
) -> dict[str, NDArray[np.float64]]:
    """The features of some sources; 0 where there is no candidate, and where a value is unknown.

    Args:
        values: source -> (n, w), and the values in `FURTHER`; NaN where a source knows nothing of
            a candidate. Without those of a source of `ADDED`, it says nothing of any.
        there: (n, w) which places hold a candidate.
        sources: of `SOURCES`, of types of events, and of `ADDED`.

    Returns:
        feature -> (n, w), in the order in which scores add them up.
    """
    features: dict[str, NDArray[np.float64]] = {}
    for source in (name for name in sources if name not in ADDED):
        known = there & ~np.isnan(values[source])
        value = np.where(known, values[source], 0).astype(np.float64)
        features[source] = value
        if source == MODEL:
            features[source] = np.where(known, of_log_probs(value), 0)
        if source in RANKED:
            features[rank_of(source)] = np.where(known, np.log1p(values[rank_of(source)]), 0)
        if source in COSINES:
            for knee in KNEES:
                features[f"{source}.above_{knee}"] = np.maximum(value - knee, 0)
    for added in (name for name in ADDED if name in sources and name in values):
        own, others = ADDED[added]
        among = there & (values[added] > 0)
        features |= {name: np.where(among, values[name], 0.0) for name in own}
        for source in sources:
            if source in others or (added == AGAIN and source.startswith(SEEN)):
                features[f"{added}.{source}"] = np.where(among, features[source], 0)
    return features


def of_log_probs(log_probs: NDArray[np.float64]) -> NDArray[np.float64]:
    """The feature of the model's log-probabilities."""
    return np.asarray(np.log1p(np.exp(log_probs) / FLOOR))
