"""Fits the reranker on validation users, and compares it with each of its parts.

The weights maximise the probability of each user's next item among the candidates, with an L2
penalty on their distance to `PRIOR`. Users whose next item is no candidate are left out of the fit.
A network (`recsys.training.reranker_network`) is added where it gains. The reranker is measured by
cross-fitting: the users of each fold are ranked with what was fitted on the other folds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from recsys.retrieval.reranker import (
    AGAIN,
    FURTHER,
    LEAST_USERS,
    MODEL,
    NEW,
    Reranker,
    feature_matrix,
    features_of,
)
from recsys.training.reranker_network import fit_network
from recsys.training.validation import TOP, ranking_metrics

RERANKER, LINEAR = "reranker", "linear"
FOLDS = 3
MOST_STEPS = 200  # of the maximisation
PENALTY = 16.0  # of a squared distance to the prior, against the log-likelihood of all users
PENALTY_ADDED = 1.0  # the same for the weights of items without events or of the history; prior 0
MISSED = np.iinfo(np.int32).max  # rank of a next item that is not in the list
COST = 0.02  # share of NDCG@10 that users of known items may lose to new items
RAISE, MOST_RAISES = 0.1, 30  # steps of the weight of being new
LEAST_HITS = 100  # of next items among the candidates; with fewer, no network is tried
NETWORK_TIMES = 3  # that a network may take longer than what was fitted before it
LEAST_ADDED = 30  # whose next item is a new candidate, or one of the history; else no weights
LEAST_SPREAD = 1e-4  # standard deviation of a feature at least, unless it is constant
ERRORS = 2.0  # standard errors by which the best of all sources must exceed the reranker

PRIOR = {
    "item_item": 0.16, "item_item.rank": -0.41,
    "vectors": 0.25, "vectors.above_0.3": -0.05, "vectors.above_0.6": -0.15,
    "content": 0.25, "content.above_0.3": 0.04, "content.above_0.6": 0.01,
    "sasrec": 0.27, "sasrec.rank": 0.0,
    "popularity": 0.11,
    "model": 0.08,
}  # fmt: skip
"""Weights of features with variance 1. They are the mean of fits with up to 1,500 validation users
each: Beauty, Sports, MovieLens-small, and the example shop."""


@dataclass(frozen=True)
class Candidates:
    """Candidates of validation users, and which of them came next.

    Attributes:
        items: (n, w) int32, -1 for padding.
        values: source -> (n, w), as for `Reranker.score`.
        targets: (n,) the next items.
    """

    items: NDArray[np.int32]
    values: Mapping[str, NDArray[np.float64]]
    targets: NDArray[np.int32]

    @property
    def sources(self) -> list[str]:
        """The sources of the values."""
        return [name for name in self.values if name not in FURTHER]

    @property
    def there(self) -> NDArray[np.bool_]:
        """(n, w) places that hold a candidate."""
        return self.items >= 0

    @property
    def hits(self) -> NDArray[np.bool_]:
        """(n, w) places that hold the next item."""
        hits: NDArray[np.bool_] = (self.items == self.targets[:, None]) & self.there
        return hits

    def is_next(self, source: str) -> NDArray[np.bool_]:
        """(n,) whether the next item is a candidate to which a source gives a value above 0."""
        return np.asarray((self.hits & (self.values[source] > 0)).any(axis=1))

    def take(self, rows: NDArray[np.int64]) -> Candidates:
        """The same for the users at `rows`, (m,)."""
        values = {source: part[rows] for source, part in self.values.items()}
        return Candidates(self.items[rows], values, self.targets[rows])


def fit(candidates: Candidates, shape: Reranker, *, network: bool = False) -> Reranker:
    """Weights for the features of the sources; those of the prior where no user has a hit.

    Args:
        candidates: validation users.
        shape: its numbers of candidates and nodes are kept.
        network: also train a network, if any user has a hit.
    """
    there = candidates.there
    names, features = feature_matrix(candidates.values, there, candidates.sources)
    prior = np.array([PRIOR.get(name, 0.0) for name in names])
    weights = _weights(candidates, features, np.zeros(candidates.items.shape), PENALTY, prior)
    linear = replace(shape, weights=dict(zip(names, weights, strict=True)), network=None)
    hit = candidates.hits
    rows = np.flatnonzero(hit.any(axis=1))
    if not network or not len(rows):
        return linear
    base = features[rows] @ np.array(weights)
    column = hit[rows].argmax(axis=1)
    read = [place for place, name in enumerate(names) if name != MODEL]
    network_names, inputs = [names[place] for place in read], features[rows][..., read]
    return replace(linear, network=fit_network(network_names, inputs, there[rows], column, base))


def fit_new(candidates: Candidates, reranker: Reranker) -> Reranker:
    """Add weights for items without events; those of other items do not change.

    The fit gives new items the chance that they had in the sample, where most lists then have none.
    A shop wants them seen, so the weight of being new is raised as long as the other users lose at
    most `COST` of their NDCG@10.

    Args:
        candidates: validation users, some of whose next items count as new; with the source `new`.
        reranker: how to rank items with events.

    Returns:
        The same reranker if too few of the next items are new candidates.
    """
    is_new = candidates.is_next(NEW)
    if np.count_nonzero(is_new) < LEAST_ADDED:
        return reranker
    fitted = _fit_added(candidates, reranker, NEW)
    scores = fitted.score(candidates.values, candidates.there)
    rows = np.flatnonzero(~is_new)
    known, scores, new = candidates.take(rows), scores[rows], candidates.values[NEW][rows] > 0
    base = reranker.score(known.values, known.there)
    least = (1 - COST) * gains(ranks_by(known, base)).mean()
    weight = fitted.weights[NEW]
    for _ in range(MOST_RAISES):
        scores = scores + RAISE * new
        if gains(ranks_by(known, scores)).mean() < least:
            break
        weight += RAISE
    return replace(fitted, weights={**fitted.weights, NEW: weight})


def fit_again(candidates: Candidates, reranker: Reranker) -> Choice:
    """Fit the weights of items of the history; those of other items do not change.

    Lists have such items by default if their NDCG@10, cross-fitted, is then higher by more than two
    standard errors.

    Args:
        candidates: validation users, with the items of their histories and the source `again`.
        reranker: how to rank other items.

    Returns:
        The same reranker if too few of the next items are candidates from the history. As
        `info.share` the next items that are such candidates, and the metrics of lists without
        (`never`) and with them (`always`).
    """
    is_again = candidates.is_next(AGAIN)
    info: dict[str, Any] = {"share": round(float(is_again.mean()), 6)}
    if np.count_nonzero(is_again) < LEAST_ADDED:
        return Choice(reranker, info)
    scores = reranker.score(candidates.values, candidates.there)
    ranks = {"never": ranks_by(candidates, np.where(candidates.values[AGAIN] > 0, -np.inf, scores))}
    refit = partial(_fit_added, reranker=reranker, source=AGAIN)
    ranks["always"] = cross_fit(candidates, refit)
    info |= {name: _metrics(own) for name, own in ranks.items()}
    is_better = _exceeds(ranks["always"], ranks["never"], ERRORS)
    return Choice(replace(refit(candidates), lists_seen=is_better), info)


def _fit_added(candidates: Candidates, reranker: Reranker, source: str) -> Reranker:
    """Add the weights of a source of `recsys.retrieval.reranker.ADDED`."""
    features = features_of(candidates.values, candidates.there, candidates.sources)
    names = [name for name in features if name.split(".")[0] == source]
    base = reranker.score(candidates.values, candidates.there)
    if source == AGAIN:
        base = np.where(candidates.values[AGAIN] > 0, 0, base)
    stacked = np.stack([features[name] for name in names], axis=-1)
    weights = _weights(candidates, stacked, base, PENALTY_ADDED, np.zeros(len(names)))
    return replace(reranker, weights={**reranker.weights, **dict(zip(names, weights, strict=True))})


def _weights(
    candidates: Candidates,
    features: NDArray[np.floating[Any]],
    base: NDArray[np.float64],
    penalty: float,
    prior: NDArray[np.float64],
) -> list[float]:
    """Weights of (n, w, F) features that are added to (n, w) scores.

    The penalty and the (F,) prior refer to features with mean 0 and variance 1 over all candidates.
    A feature that hardly varies there, such as that of a model that has learned little, may vary
    more in serving: its standard deviation counts as `LEAST_SPREAD`.
    """
    there, hit = candidates.there, candidates.hits
    scale = features[there].astype(np.float64).std(axis=0) if there.any() else np.zeros(len(prior))
    scale = np.where(scale > 0, np.maximum(scale, LEAST_SPREAD), 0)
    rows = np.flatnonzero(hit.any(axis=1))
    fitted = prior
    if len(rows):
        hit, there = hit[rows], there[rows]
        real = features[rows][there].astype(np.float64)
        real = np.divide(real, scale, out=np.zeros_like(real), where=scale > 0)
        real -= real.mean(axis=0)
        starts = np.append(0, np.cumsum(there.sum(axis=1))[:-1])
        earlier = (np.cumsum(there, axis=1) - 1)[np.arange(len(rows)), hit.argmax(axis=1)]
        known = base[rows][there] + real @ prior
        fitted = prior + _maximise(real, starts, starts + earlier, known, penalty)
    weights = np.divide(fitted, scale, out=np.zeros_like(fitted), where=scale > 0)
    return [float(weight) for weight in weights]


def _maximise(
    features: NDArray[np.float64],
    starts: NDArray[np.int64],
    chosen: NDArray[np.int64],
    base: NDArray[np.float64],
    penalty: float,
) -> NDArray[np.float64]:
    """The weights of the greatest penalised likelihood.

    Args:
        features: (N, F) standardised features of the candidates of all users, one after another.
        starts: (n,) the first candidate of each user.
        chosen: (n,) the candidate that came next.
        base: (N,) scores to which those of the features are added.
        penalty: of a squared weight.

    Returns:
        (F,) weights.
    """
    width = np.diff(np.append(starts, len(features)))
    target_sums = features[chosen].sum(axis=0)

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        scores = base + features @ weights
        scores -= np.repeat(np.maximum.reduceat(scores, starts), width)
        odds = np.exp(scores)
        total = np.add.reduceat(odds, starts)
        likelihood = (scores[chosen] - np.log(total)).sum()
        expected = (odds / np.repeat(total, width)) @ features
        slope = target_sums - expected - 2 * penalty * weights
        return penalty * weights @ weights - likelihood, -slope

    start = np.zeros(features.shape[1])
    options = {"ftol": 1e-10, "maxiter": MOST_STEPS}
    best = optimize.minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return np.asarray(best.x)


def cross_fit(
    candidates: Candidates, fit_to: Callable[[Candidates], Reranker]
) -> NDArray[np.int64]:
    """(n,) rank of each user's next item by a reranker that was fitted to the other folds."""
    scores = np.zeros(candidates.items.shape)
    fold = np.random.default_rng(0).permutation(len(scores)) % FOLDS
    for number in range(FOLDS):
        rows = np.flatnonzero(fold == number)
        reranker = fit_to(candidates.take(np.flatnonzero(fold != number)))
        own = candidates.take(rows)
        scores[rows] = reranker.score(own.values, own.there)
    return ranks_by(candidates, scores)


def ranks_by(candidates: Candidates, scores: NDArray[np.float64]) -> NDArray[np.int64]:
    """(n,) candidates before the next item by (n, w) scores; `MISSED` if it is none of them."""
    hit = candidates.hits
    column = hit.argmax(axis=1)
    own = scores[np.arange(len(column)), column][:, None]
    earlier = np.arange(scores.shape[1]) < column[:, None]
    before = ((scores > own) | ((scores == own) & earlier)).sum(axis=1)
    return np.asarray(np.where(hit.any(axis=1), before, MISSED), np.int64)


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Attributes:
        reranker: what to serve, fitted on all users.
        info: for the manifest: `users`, and what is `served`; as `parts` the metrics of the
            reranker (cross-fitted) and of each part (with a network, `linear` is the reranker
            without it).
    """

    reranker: Reranker
    info: dict[str, Any]


def choose(
    candidates: Candidates,
    shape: Reranker,
    alone: Mapping[str, NDArray[np.int64]],
    *,
    end: float = math.inf,
) -> Choice:
    """The fitted reranker, unless a source alone is better by NDCG@10.

    Differences within two standard errors count as none: the reranker is then served, because the
    best of a dozen sources owes some of its lead to chance. With fewer than `LEAST_USERS` users,
    the reranker is served, whose weights are then close to the prior. It has a network only if that
    gains more than one standard error.

    Args:
        candidates: validation users.
        shape: its numbers of candidates and nodes are kept.
        alone: name -> (n,) ranks of the next items in the full lists of each part.
        end: when to end at the latest, by `time.monotonic`. Without time for it no network is
            fitted.
    """
    metrics = {name: _metrics(ranks) for name, ranks in alone.items()}
    servable = {source: replace(shape, weights={source: 1.0}) for source in candidates.sources}
    ranks = {
        name: ranks_by(candidates, reranker.score(candidates.values, candidates.there))
        for name, reranker in servable.items()
    }
    servable[MODEL], ranks[MODEL] = replace(shape, weights={}), alone[MODEL]
    best = max(servable, key=lambda name: gains(ranks[name]).mean())
    begun = time.monotonic()
    crossed = cross_fit(candidates, partial(fit, shape=shape))
    ready = time.monotonic() + NETWORK_TIMES * (time.monotonic() - begun)
    network = False
    hits = np.count_nonzero(candidates.hits.any(axis=1))
    if hits >= LEAST_HITS and ready < end:
        its_ranks = cross_fit(candidates, partial(fit, shape=shape, network=True))
        if network := _exceeds(its_ranks, crossed):
            metrics[LINEAR], crossed = _metrics(crossed), its_ranks
    servable[RERANKER], ranks[RERANKER] = fit(candidates, shape, network=network), crossed
    metrics[RERANKER] = _metrics(crossed)
    few = len(candidates.targets) < LEAST_USERS
    if few or not _exceeds(ranks[best], crossed, ERRORS):
        best = RERANKER
    metrics["served"] = _metrics(ranks[best])
    info = {"users": len(candidates.targets), "served": best, "parts": metrics}
    return Choice(servable[best], info)


def _exceeds(ranks: NDArray[np.int64], others: NDArray[np.int64], errors: float = 1.0) -> bool:
    """Whether NDCG@10 is higher by more than `errors` standard errors of the paired difference."""
    gap = gains(ranks) - gains(others)
    return bool(gap.mean() > errors * gap.std() / len(gap) ** 0.5)


def gains(ranks: NDArray[np.int64]) -> NDArray[np.float64]:
    """NDCG@10 of each user."""
    return np.where(ranks < TOP, 1 / np.log2(ranks + 2.0), 0.0)


def _metrics(ranks: NDArray[np.int64]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in ranking_metrics(gains(ranks)).items()}
