"""The evaluation protocol: users, histories, targets, and whether seen items are masked.

Every user of a split gets a list over the whole catalog, once with the history's items masked and
once without. The next event and all events of the split are measured on the same lists. Any object
with a `rank` method can be evaluated.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt

from recsys.config import internal, section
from recsys.dataset import Dataset, Examples, Targets
from recsys.devices import AUTO
from recsys.errors import DataError
from recsys.evaluation.metrics import (
    Hits,
    coverage_at_k,
    diversity_at_k,
    gini_at_k,
    interval,
    mrr_at_k,
    ndcg_at_k,
    novelty_at_k,
    recall_at_k,
    resampled_means,
    short_share_at_k,
)
from recsys.interactions import Histories
from recsys.progress import track
from recsys.splits import LABELS, TRAIN

Seen = Literal["masked", "unmasked"]
Lists = tuple[NDArray[np.int32], NDArray[np.float32]]
"""(n, k) items and scores, as `Ranker.rank` returns them."""
METRICS = {"recall": recall_at_k, "ndcg": ndcg_at_k, "mrr": mrr_at_k}
# Lowest value and name of each segment. The values are training events of the target, the same, and
# events of the history.
SEGMENTS = {
    "target": ((0, "cold"), (1, "warm")),
    "target_popularity": ((0, "0 (cold)"), (1, "1–4"), (5, "5–19"), (20, "20–49"), (50, "50+")),
    "history_length": (
        (0, "0"),
        (1, "1–2"),
        (3, "3–4"),
        (5, "5–9"),
        (10, "10–19"),
        (20, "20+"),
    ),
}
COLD = {
    "items without training events": ("target_popularity", "0 (cold)"),
    "items with 1–4 training events": ("target_popularity", "1–4"),
    "users without events": ("history_length", "0"),
    "users with one or two events": ("history_length", "1–2"),
}
"""Groups of users of whose target or history little is known: the segment of each."""


class Ranker(Protocol):
    """A recommender that can be evaluated."""

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool, /
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Rank the catalog for each history.

        Hidden items of the histories are always left out.

        Returns:
            (n, k) int32 dense items, best first, without repetition, padded with -1, and their
            (n, k) float32 scores.
        """


@section
class EvaluationConfig:
    """Section `evaluate`."""

    split: Literal["test", "valid"] = "test"
    """`test`, or `valid` for choosing between models. Do not report validation figures: under
    leave-one-out, validation is easier."""
    ks: tuple[PositiveInt, ...] = (1, 5, 10, 20, 50)
    """Lengths K at which lists are measured."""
    beams: PositiveInt | None = None
    """Beam width of the model's search; by default the model's own for lists of max(ks)."""
    seen: Literal["both", "masked", "unmasked"] = "both"
    """Whether the items of the history may be recommended: `masked` (no), `unmasked` (yes), or
    `both`, one after the other."""
    targets: Literal["next", "all"] | None = None
    """Targets of the headline figures: the user's `next` event, or `all` events of the split. Both
    are measured. By default `all` where events come in baskets (`Dataset.baskets`), else `next`."""
    users: PositiveInt | None = None
    """Size of a random sample of users; by default all users."""
    batch_size: PositiveInt = internal(default=32)
    """Users per batch of the search."""
    threads: PositiveInt | None = None
    """Threads that rank in parallel and share the model; results do not depend on it. By default
    those of torch, or one on a GPU."""
    device: str = AUTO
    """Torch device of the model, or `auto`: a GPU, where there is one and it ranks a batch sooner
    than the CPU. Scores differ by rounding."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the model, `float32` or `bfloat16`. The latter is faster on a GPU, and changes the
    order of some lists."""
    resamples: PositiveInt = internal(default=1000)
    """Draws of the bootstrap."""
    headline: Seen = internal("the bundle's own treatment of seen items", default="masked")
    """The first of `both` modes: how the bundle treats seen items."""
    examples: NonNegativeInt = internal(default=6)
    """Users whose lists the report shows."""
    seed: NonNegativeInt = internal(default=0)
    """Seed of the sample, the bootstrap and the choice of examples."""

    def __post_init__(self) -> None:
        if not self.ks or list(self.ks) != sorted(set(self.ks)):
            raise ValueError(f"ks: want ascending positive numbers, found {list(self.ks)}")

    @property
    def headline_k(self) -> int:
        """The K of headlines, segments and examples: 10, or the nearest to it."""
        return min(self.ks, key=lambda k: abs(k - 10))

    @property
    def seen_modes(self) -> tuple[Seen, ...]:
        """Modes of treating seen items, headline first."""
        if self.seen != "both":
            return (self.seen,)
        return ("masked", "unmasked") if self.headline == "masked" else ("unmasked", "masked")


@dataclass(frozen=True)
class Ranking:
    """Lists of one ranker in one mode.

    Attributes:
        items: (n, max(ks)) int32, padded with -1.
        scores: (n, max(ks)) float32.
        hits: hits for `next` and for `all` targets.
        seconds: wall time.
    """

    items: NDArray[np.int32]
    scores: NDArray[np.float32]
    hits: dict[Targets, Hits]
    seconds: float


Rankings = dict[str, dict[Seen, Ranking]]
"""Ranker -> mode -> lists."""


@dataclass(frozen=True)
class Result:
    """Result of an evaluation.

    Attributes:
        config: the protocol.
        users: (n,) int32 dense users that were evaluated.
        histories: histories of the users.
        targets: distinct target items of the users: `next` (one each) and `all`.
        popularity: (items,) int64 training events of each item.
        rankings: ranker -> mode -> lists. The first ranker is the one under test.
        facts: statistics of the data and the targets.
        metrics: one row per ranker, mode, kind of targets, metric and K: `mean`, `low`, `high`.
        comparisons: the first ranker minus each other one, paired: `mean`, `low`, `high`.
        coverage: one row per ranker, mode and K: `coverage`, `gini`, `novelty`, `diversity`
            (None if items have no vectors), `short_share`.
        segments: `metrics` for `next` targets within each segment of `by`, and the first ranker
            minus the row's one, paired: `gap`, `gap_low`, `gap_high`.
    """

    config: EvaluationConfig
    users: NDArray[np.int32]
    histories: Histories
    targets: dict[Targets, Histories]
    popularity: NDArray[np.int64]
    rankings: Rankings
    facts: dict[str, Any]
    metrics: list[dict[str, Any]]
    comparisons: list[dict[str, Any]]
    coverage: list[dict[str, Any]]
    segments: list[dict[str, Any]]


def evaluate(
    rankers: Mapping[str, Ranker],
    dataset: Dataset,
    config: EvaluationConfig,
    vectors: NDArray[np.floating[Any]] | None = None,
    available: NDArray[np.bool_] | None = None,
    ranked: Mapping[str, Mapping[Seen, Lists]] | None = None,
) -> Result:
    """Evaluate rankers on one split of a data set.

    Args:
        rankers: name -> ranker; the first is the one under test.
        dataset: canonical data; rankers must be fitted on its training events only.
        config: the protocol.
        vectors: (items, D) of length 1, or 0, for the diversity of lists.
        available: (items,) the items that the rankers may list; None for all. Users whose next
            event is on another item are left out.
        ranked: name -> mode -> lists of `select`'s users that are there already, before those of
            the rankers.

    Raises:
        DataError: the split has no events.
        ValueError: a ranker returned a malformed list.
    """
    by_default: Literal["next", "all"] = "all" if dataset.baskets else "next"
    config = replace(config, targets=config.targets or by_default)
    next_examples = select(dataset, config, available)
    if not len(next_examples):
        raise DataError(
            f"the data set has no {config.split} events; prepare it with a split that has some"
        )
    all_examples = select(dataset, config, available, "all")
    targets: dict[Targets, Histories] = {
        "next": next_examples.targets,
        "all": _distinct(all_examples.targets),
    }
    histories = next_examples.histories
    popularity = np.bincount(dataset.train_histories.items, minlength=len(dataset.item_ids))
    rankings: Rankings = {name: {} for name in (*(ranked or {}), *rankers)}
    for name, modes in rankings.items():
        for mode in config.seen_modes:
            start = time.perf_counter()
            if ranked is not None and name in ranked:
                items, scores = ranked[name][mode]
            else:
                items, scores = _rank(name, rankers[name], histories, mode, config)
            seconds = time.perf_counter() - start
            _check(name, items, histories.left_out(mode == "masked"), len(dataset.item_ids))
            hits = {kind: Hits.of(items, of_kind) for kind, of_kind in targets.items()}
            modes[mode] = Ranking(items, scores, hits, seconds)
    if available is not None:
        _check_available(rankings, available)
    metrics, comparisons = _measure(rankings, config)
    return Result(
        config,
        next_examples.users,
        histories,
        targets,
        popularity,
        rankings,
        _facts(dataset, next_examples, all_examples, popularity, config, available),
        metrics,
        comparisons,
        _coverage(rankings, popularity, vectors, config),
        _segments(
            rankings,
            {
                "target": popularity[targets["next"].items],
                "target_popularity": popularity[targets["next"].items],
                "history_length": histories.lengths,
            },
            config,
        ),
    )


def select(
    dataset: Dataset,
    config: EvaluationConfig,
    available: NDArray[np.bool_] | None,
    targets: Targets = "next",
) -> Examples:
    """The examples that are evaluated; the users are the same for every kind of targets.

    Users are left out whose next event is on an item that is unavailable now: no list can have it,
    so it says nothing of the lists. If that is every user, none is left out.
    """
    examples = dataset.examples(config.split, targets).servable(available)
    if config.users is None or config.users >= len(examples):
        return examples
    rng = np.random.default_rng(config.seed)
    return examples.take(np.sort(rng.choice(len(examples), config.users, replace=False)))


def _distinct(targets: Histories) -> Histories:
    """Each target of a user once, at its first position."""
    keys = targets.rows * (1 + int(targets.items.max(initial=0))) + targets.items
    keep = np.zeros(len(keys), np.bool_)
    keep[np.unique(keys, return_index=True)[1]] = True
    return targets.where(keep)


def _rank(
    name: str,
    ranker: Ranker,
    histories: Histories,
    mode: Seen,
    config: EvaluationConfig,
) -> Lists:
    k = max(config.ks)
    items = np.full((len(histories), k), -1, np.int32)
    scores = np.full((len(histories), k), -np.inf, np.float32)
    order = np.argsort(histories.lengths, kind="stable")  # similar lengths share a batch
    with track(f"{name}, seen {mode}", len(histories)) as bar:
        for batch in range(0, len(order), config.batch_size):
            rows = order[batch : batch + config.batch_size]
            items[rows], scores[rows] = ranker.rank(histories.take(rows), k, mode == "masked")
            bar.advance(len(rows))
    return items, scores


def _check(name: str, items: NDArray[np.int32], masked: Histories, num_items: int) -> None:
    """Check a ranker's lists: the metrics of a malformed list would be too high."""
    if items.min(initial=-1) < -1 or items.max(initial=-1) >= num_items:
        raise ValueError(f"{name}: items must lie in [0, {num_items}), or be -1 after the end")
    if ((items[:, :-1] < 0) & (items[:, 1:] >= 0)).any():
        raise ValueError(f"{name}: an item comes after the end of a list (-1)")
    ordered = np.sort(items, axis=1)
    if ((ordered[:, :-1] == ordered[:, 1:]) & (ordered[:, 1:] >= 0)).any():
        raise ValueError(f"{name}: a list contains an item twice")
    hidden = np.unique(masked.rows * num_items + masked.items)
    shown = np.arange(len(items))[:, None] * num_items + items
    if np.isin(shown[items >= 0], hidden).any():
        raise ValueError(f"{name}: recommends a masked item of the history, or a disliked one")


def _check_available(rankings: Rankings, available: NDArray[np.bool_]) -> None:
    for name, modes in rankings.items():
        for ranking in modes.values():
            listed = ranking.items[ranking.items >= 0]
            if not available[listed].all():
                raise ValueError(f"{name}: recommends an item that is not available")


def _values(
    rankings: Rankings, kinds: Sequence[Targets], ks: tuple[int, ...]
) -> tuple[list[dict[str, Any]], NDArray[np.float64]]:
    """What each column of the second result is, and (n, columns) a number per user."""
    about, columns = [], []
    for ranker, modes in rankings.items():
        for mode, ranking in modes.items():
            for kind in kinds:
                for metric, function in METRICS.items():
                    for k in ks:
                        row = {"seen": mode, "targets": kind, "metric": metric, "k": k}
                        about.append({"ranker": ranker, **row})
                        columns.append(function(ranking.hits[kind], k))
    return about, np.stack(columns, axis=1)


def _measure(
    rankings: Rankings, config: EvaluationConfig
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Metrics over all users, and the first ranker minus each other one from the same draws."""
    about, values = _values(rankings, ("next", "all"), config.ks)
    means = values.mean(axis=0)
    drawn = resampled_means(values, resamples=config.resamples, seed=config.seed)
    metrics = [
        {**row, **vars(interval(mean, draws))}
        for row, mean, draws in zip(about, means, drawn.T, strict=True)
    ]
    first, size = next(iter(rankings)), len(about) // len(rankings)  # columns of a ranker
    comparisons = []
    for i, row in enumerate(about[size:], start=size):
        j = i % size  # the same column of the first ranker
        gap = interval(means[j] - means[i], drawn[:, j] - drawn[:, i])
        comparisons.append({**row, "ranker": first, "against": row["ranker"], **vars(gap)})
    return metrics, comparisons


def _coverage(
    rankings: Rankings,
    popularity: NDArray[np.int64],
    vectors: NDArray[np.floating[Any]] | None,
    config: EvaluationConfig,
) -> list[dict[str, Any]]:
    num_items, rows = len(popularity), []
    for name, modes in rankings.items():
        for mode, ranking in modes.items():
            for k in config.ks:
                shares = {
                    "coverage": coverage_at_k(ranking.items, k, num_items),
                    "gini": gini_at_k(ranking.items, k, num_items),
                    "novelty": novelty_at_k(ranking.items, k, popularity),
                    "short_share": short_share_at_k(ranking.items, k),
                }
                if vectors is not None:
                    shares["diversity"] = diversity_at_k(ranking.items, k, vectors)
                rounded = {key: round(value, 6) for key, value in shares.items()}
                about = {"ranker": name, "seen": mode, "k": k, "diversity": None}
                rows.append({**about, **rounded})
    return rows


def _segments(
    rankings: Rankings, of_users: dict[str, NDArray[np.int64]], config: EvaluationConfig
) -> list[dict[str, Any]]:
    """Metrics of the next event within each segment of users; empty segments give no rows."""
    about, values = _values(rankings, ("next",), config.ks)
    rows = []
    for by, column in of_users.items():
        bounds = SEGMENTS[by]
        segment = np.searchsorted([low for low, _ in bounds], column, side="right") - 1
        for number, (_, name) in enumerate(bounds):
            inside = values[segment == number]
            if len(inside) == 0:
                continue
            drawn = resampled_means(inside, resamples=config.resamples, seed=config.seed)
            means, first = inside.mean(axis=0), len(about) // len(rankings)
            for i, row in enumerate(about):
                row_of_segment = {"by": by, "segment": name, "users": len(inside), **row}
                del row_of_segment["targets"]
                j = i % first  # the same column of the first ranker
                gap = interval(means[j] - means[i], drawn[:, j] - drawn[:, i])
                paired = {"gap": gap.mean, "gap_low": gap.low, "gap_high": gap.high}
                rows.append({**row_of_segment, **vars(interval(means[i], drawn[:, i])), **paired})
    return rows


def _facts(
    dataset: Dataset,
    next_examples: Examples,
    all_examples: Examples,
    popularity: NDArray[np.int64],
    config: EvaluationConfig,
    available: NDArray[np.bool_] | None,
) -> dict[str, Any]:
    events = dataset.interactions
    everything = dataset.examples(config.split, "next")
    next_items, histories = next_examples.targets.items, next_examples.histories
    pairs = 1 + max(len(dataset.item_ids), 1)
    repeated = np.isin(
        np.arange(len(next_items)) * pairs + next_items, histories.rows * pairs + histories.items
    )
    by_label = {name: int((dataset.split == label).sum()) for name, label in LABELS.items()}
    ordered: bool | None = None
    if events.has_time:
        trained = events.timestamp[dataset.split == TRAIN]
        tested = events.timestamp[dataset.split == LABELS[config.split]]
        ordered = bool(trained.max(initial=tested.min()) <= tested.min())
    away: dict[str, int] | None = None
    if available is not None:  # items that are so now, and the users of the split left out for that
        missed = ~available[everything.targets.items]
        away = {"items": int((~available).sum()), "users": int(missed.sum())}
    return {
        "items": len(dataset.item_ids),
        "users": len(events.user_ids),
        "events": by_label,
        "users_in_split": len(everything),
        "users_evaluated": len(next_examples),
        "targets": {"next": len(next_items), "all": len(all_examples.targets.items)},
        "cold_share": {
            "next": round(float((popularity[next_items] == 0).mean()), 6),
            "all": round(float((popularity[all_examples.targets.items] == 0).mean()), 6),
        },
        "seen_share": round(float(repeated.mean()), 6),
        "empty_history_share": round(float((histories.lengths == 0).mean()), 6),
        "train_before_split": ordered,
        "baskets": dataset.baskets,
        "unavailable": away,
    }


def find(rows: list[dict[str, Any]], **conditions: object) -> dict[str, Any]:
    """The only row of a result with these values; KeyError if no row or several have them."""
    matching = [row for row in rows if all(row[key] == value for key, value in conditions.items())]
    if len(matching) != 1:
        raise KeyError(f"{len(matching)} rows have {conditions}")
    return matching[0]
