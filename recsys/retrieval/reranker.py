"""Reranker: one score for each candidate of a request, from the values of several sources.

A source gives each candidate a number: co-occurrence evidence, a cosine, a logit, or the model's
log-probability. Each number becomes two features: itself, and log(1 + rank) among the
candidates. The score is linear in the features, plus the output of a
small network of them where validation shows a gain. The softmax of the scores is the estimated
probability that a candidate is the next item (the conditional logit of McFadden, 1974).
`recsys.training.reranking` fits it on validation users.

An item without training events has no co-occurrence and no popularity. It has further weights: one
for being new, and one for its rank by each source that knows something of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
SEEN = "seen:"
"""Begins the source of a type of events: how recently the history has such events on the item."""
SOURCES = (*SHARES, *COSINES, SASREC, POPULARITY, RECENT, TARGET_POPULARITY, MODEL)
FORMS = ("value", "rank")
OF_NEW = (*COSINES, SASREC, MODEL)
"""Sources that know something of items without events."""


def names_of(source: str) -> list[str]:
    """Names of the features of a source."""
    if source == NEW:
        return [NEW, *(f"{NEW}.{other}" for other in OF_NEW)]
    if _is_plain(source):
        return [source]
    return [f"{source}.{form}" for form in FORMS] + ([f"{source}.missing"] * (source == MODEL))


def _is_plain(source: str) -> bool:
    """Whether the value of a source is its only feature."""
    return source in (POPULARITY, RECENT, TARGET_POPULARITY) or source.startswith(SEEN)


FEATURES = frozenset(name for source in (*SOURCES, NEW) for name in names_of(source))
MOST_UNITS = 256  # of a network; native.h has the same bound
CANDIDATES_AT_A_TIME = 2048  # bounds memory and stays in the cache


@dataclass(frozen=True, eq=False)
class Network:
    """One hidden layer of ReLU units over the features of a candidate.

    Attributes:
        features: their names, in the order of the columns; not those of items without events.
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
    is_of_new = name == NEW or name.startswith(f"{NEW}.")
    return (name in FEATURES and not is_of_new) or name.startswith(SEEN)


@dataclass(frozen=True)
class Reranker:
    """Weights of the features, and how many candidates there are.

    Attributes:
        weights: feature -> weight; a feature without an entry has weight 0. Empty: the model's
            list is served unchanged.
        candidates: items that the model of pairs proposes; each further source
            proposes half as many, and popularity a quarter (`Retrieval.propose`).
        nodes: most nodes of the target's tree for these items; the model's probability of items
            that do not fit is unknown (`model.missing`).
        network: what is added to the linear score, or None.
    """

    weights: Mapping[str, float]
    candidates: int = 40
    nodes: int = 32
    network: Network | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Mapping):
            raise ValueError(f"weights must map features to numbers, got {self.weights!r}")
        unknown = sorted(n for n in set(self.weights) - FEATURES if not n.startswith(SEEN))
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
        sources = dict.fromkeys(n if n.startswith(SEEN) else n.split(".")[0] for n in used)
        sources |= dict.fromkeys(n.removeprefix(f"{NEW}.") for n in used if n.startswith(f"{NEW}."))
        return list(sources)

    @classmethod
    def of_source(cls, source: str, candidates: int, nodes: int) -> Reranker:
        """Rank by the value of one source alone.

        Example:
            >>> Reranker.of_source("popularity", 40, 32).weights
            {'popularity': 1.0}
        """
        weights = {names_of(source)[0]: 1.0}
        if source == MODEL:
            weights[f"{MODEL}.missing"] = -1.0  # after every item that the model has scored
        return cls(weights, candidates, nodes)

    def score(
        self, values: Mapping[str, NDArray[np.floating[Any]]], there: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """Log-probabilities of the candidates among each other.

        Args:
            values: source -> (n, w) values, for all of `sources`; NaN where there is none.
            there: (n, w) which places hold a candidate.

        Returns:
            (n, w), -inf where there is no candidate.
        """
        total = np.where(there, self._weighted(values, there), -np.inf)
        most = total.max(axis=1, keepdims=True, initial=-np.inf)
        shifted = total - np.where(np.isfinite(most), most, 0)
        # Summed in order, so that padding does not change the last bits.
        norm = np.exp(shifted).cumsum(axis=1)[:, -1:]
        return np.asarray(shifted - np.log(np.where(norm > 0, norm, 1)))

    def _weighted(
        self, values: Mapping[str, NDArray[np.floating[Any]]], there: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """(n, w) sum of the weighted features, and the output of the network."""
        total = np.zeros(there.shape)
        features = features_of(values, there, self.sources)
        for name, feature in features.items():
            if weight := self.weights.get(name, 0.0):
                total += weight * feature
        return total if self.network is None else total + self.network.outputs(features)


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
    """The features of some sources; 0 where there is no candidate.

    Args:
        values: source -> (n, w); NaN where the model has not scored a candidate.
        there: (n, w) which places hold a candidate.
        sources: of `SOURCES`, of types of events, and `NEW`.

    Returns:
        feature -> (n, w), in the order in which scores add them up. An unscored candidate has the
        least value that the request has.
    """
    formed = [source for source in sources if source != NEW and not _is_plain(source)]
    features: dict[str, NDArray[np.float64]] = {}
    for source in filter(_is_plain, sources):
        known = there & ~np.isnan(values[source])
        features[source] = np.where(known, values[source], 0).astype(np.float64)
    if formed:
        stacked = np.stack([values[source] for source in formed]).astype(np.float64)
        for form, columns in zip(FORMS, _forms(stacked, there), strict=True):
            features |= {f"{name}.{form}": c for name, c in zip(formed, columns, strict=True)}
    if MODEL in formed:
        features[f"{MODEL}.missing"] = (there & np.isnan(values[MODEL])).astype(np.float64)
    if NEW in sources:
        new = there & (values[NEW] > 0)
        features[NEW] = new.astype(np.float64)
        for source in (name for name in formed if name in OF_NEW):
            features[f"{NEW}.{source}"] = np.where(new, features[f"{source}.rank"], 0)
    return features


def _forms(
    values: NDArray[np.float64], there: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The `FORMS` of (S, n, w) values of several sources, each (S, n, w)."""
    known = there & ~np.isnan(values)
    low = np.where(known, values, np.inf).min(axis=2, keepdims=True, initial=np.inf)
    filled = np.where(known, values, np.where(np.isfinite(low), low, 0.0))
    ranks = _ranks(values.reshape(-1, there.shape[1]), known.reshape(-1, there.shape[1]))
    logs = np.log1p(np.arange(there.shape[1] + 1))
    rank = logs[ranks].reshape(values.shape)
    return np.where(there, filled, 0), np.where(there, rank, 0)


def _ranks(values: NDArray[np.floating[Any]], known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """(n, w) number of known candidates with a larger value; all of them for an unknown one."""
    falling = np.where(known, -values, np.inf)
    order = np.argsort(falling, axis=1)  # equal values get one rank, in any order
    ordered = np.take_along_axis(falling, order, axis=1)
    column = np.broadcast_to(np.arange(values.shape[1]), values.shape)
    new = np.ones(values.shape, np.bool_)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    ranks = np.empty(values.shape, np.int64)
    first = np.maximum.accumulate(np.where(new, column, 0), axis=1)
    np.put_along_axis(ranks, order, first, axis=1)
    return ranks
