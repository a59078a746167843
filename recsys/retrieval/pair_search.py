"""The pair rules of a data set: a seeded random search on validation users."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recsys.dataset import Examples
from recsys.interactions import Histories
from recsys.retrieval.item_item import DIRECTIONAL, ItemItem, PairRules

USERS, LEAST_USERS = 3000, 30  # validation users whose next items are ranked
TRIALS, FIRST = 120, 20  # the first ones are independent; each later one varies the best so far
SECONDS = 120.0  # after which no trial begins
VARIED = 3  # values that a trial changes of the best rules, at most
LATEST = 50  # events of a history that trials use
USERS_AT_A_TIME = 512  # bounds memory
MOST_PAIRS = 1 << 24  # of one trial, unless the window of `DIRECTIONAL` has more
TOP = 10  # of NDCG
ERRORS = 2.0  # standard errors by which the best of all trials must exceed `DIRECTIONAL`


def search_rules(
    histories: Histories, num_items: int, examples: Examples, end: float = np.inf
) -> PairRules:
    """The best of `TRIALS` random rules by NDCG@10 without seen items.

    `DIRECTIONAL` is kept with few users, and unless the best gain more than two errors.

    Args:
        histories: training events only.
        num_items: items of the catalog.
        examples: validation users with one target each.
        end: when the search ends at the latest, by `time.monotonic`.
    """
    examples = examples.sample(USERS)
    if len(examples) < LEAST_USERS:
        return DIRECTIONAL
    whole = examples.histories
    age = np.repeat(whole.offsets[1:], whole.lengths) - 1 - np.arange(len(whole.items))
    latest = replace(whole.where(age < LATEST), hidden=whole.left_out(exclude_seen=True))
    examples = replace(examples, histories=latest)
    rng = np.random.default_rng(0)
    end = min(end, time.monotonic() + SECONDS)
    widest = max(DIRECTIONAL.window, MOST_PAIRS // max(1, len(histories.items)))
    best = DIRECTIONAL
    first = best_gains = _gains(ItemItem.count(histories, num_items, best), examples)
    for number in range(TRIALS):
        if time.monotonic() > end:
            break
        drawn = _draw(rng, widest)
        names = list(drawn)
        if number >= FIRST:
            names = rng.choice(names, rng.integers(1, VARIED + 1), replace=False).tolist()
        rules = replace(best, **{name: drawn[name] for name in names})
        gains = _gains(ItemItem.count(histories, num_items, rules), examples)
        if gains.mean() > best_gains.mean():
            best, best_gains = rules, gains
    gap = best_gains - first
    return best if gap.mean() > ERRORS * gap.std() / len(gap) ** 0.5 else DIRECTIONAL


def _draw(rng: np.random.Generator, widest: int) -> dict[str, Any]:
    """Values of all fields of `PairRules`; every pair counts in both directions, for `related`."""
    offsets = (0, 1, 3, 10, 30, 100)
    return {
        "window": min(widest, int(rng.choice((1, 2, 3, 5, 8, 12)))),
        "fading": float(rng.choice((0, 0.3, 0.5, 0.7, 1, 1.5))),
        "reverse": float(rng.choice((0.05, 0.1, 0.25, 0.5, 0.75, 1))),
        "source_damping": float(rng.uniform(0, 1)),
        "source_offset": float(rng.choice(offsets)),
        "target_damping": float(rng.uniform(0, 0.6)),
        "target_offset": float(rng.choice(offsets)),
        "decay": float(rng.uniform(0.2, 1)),
    }


def _gains(model: ItemItem, examples: Examples) -> NDArray[np.float64]:
    """NDCG@10 of each user without seen items; a rank is counted, without making a list."""
    ranks = []
    for start in range(0, len(examples), USERS_AT_A_TIME):
        some = examples.take(np.arange(start, min(start + USERS_AT_A_TIME, len(examples))))
        scores = model.score(some.histories, exclude_seen=True)
        row = np.repeat(np.arange(len(some)), np.diff(scores.indptr))
        targets = some.targets.items
        is_target = scores.indices == targets[row]
        own = np.zeros(len(some), np.float32)
        own[row[is_target]] = scores.data[is_target]
        equal = (scores.data == own[row]) & (scores.indices < targets[row])
        before = np.bincount(row[(scores.data > own[row]) | equal], minlength=len(some))
        ranks.append(np.where(own > 0, before, TOP))
    rank = np.concatenate(ranks)
    return np.where(rank < TOP, 1 / np.log2(rank + 2.0), 0.0)
