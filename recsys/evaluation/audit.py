"""Audit: what a data set's benchmark is worth, finding by finding.

A finding has figures, a verdict, and sentences that say what it means and what to do. All of them
are computed from the prepared data in time linear in the events, up to sorting. The report of the
data set, if there is one, gives the best known recommender, and the users that it was measured on.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from recsys.artifacts import read_manifest
from recsys.availability import available_items, this_minute
from recsys.config import build
from recsys.dataset import Dataset, Examples
from recsys.errors import ArtifactError, DataError
from recsys.evaluation.baselines import TRIVIAL, fit_heuristics, of_available
from recsys.evaluation.metrics import bootstrap, recall_at_k
from recsys.evaluation.protocol import EvaluationConfig, Result, evaluate, find, select
from recsys.interactions import Histories
from recsys.retrieval.popularity import DAY
from recsys.splits import LABELS, TRAIN

Verdict = Literal["good", "mind", "bad", "unknown"]
MOST_USERS = 20_000  # whose lists are made, if the report does not name its users
LONG = 5  # events from which two equal histories are hardly chance
QUARTERS = 4
FEWEST = 100  # users of a benchmark that may be called good
CHANCE = 0.01  # share of random orders with quarters as far apart, below which an order is real
SHUFFLES = 1000
# Values from which a finding is worth minding, and from which it is bad.
LEVELS = {
    "size": (0.1, 0.3),  # half of the 95 % interval, relative to Recall
    "shortcuts": (0.7, 0.9),  # of the best known Recall
    "masked targets": (0.1, 0.5),  # share of the targets
    "unseen targets": (0.05, 0.2),
    "equal users": (0.01, 0.1),  # share of the users
    "equal items": (0.05, 0.2),  # share of the users with a twin of their target
    "file order": (1.5, math.inf),  # the best quarter's Recall over the worst one's
    "id order": (1.5, math.inf),
    "same times": (0.1, 0.5),  # share of the targets at the time of the last event before
    "future": (0.01, math.inf),  # share of the training events
}


@dataclass(frozen=True)
class Finding:
    """One finding of an audit.

    Attributes:
        name: a key of `LEVELS`.
        verdict: `unknown` if it cannot be computed for this data set.
        figures: what was measured, as JSON values.
        meaning: what the figures say, in sentences.
        advice: what to do; empty if nothing is to be done.
    """

    name: str
    verdict: Verdict
    figures: dict[str, Any]
    meaning: str
    advice: str = ""

    @classmethod
    def of(
        cls, name: str, value: float, figures: dict[str, Any], meaning: str, advice: str
    ) -> Finding:
        """A finding whose verdict and advice follow from `value` and `LEVELS`."""
        mind, bad = LEVELS[name]
        verdict: Verdict = "bad" if value >= bad else "mind" if value >= mind else "good"
        rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in figures.items()}
        return cls(name, verdict, rounded, meaning, "" if verdict == "good" else advice)


def audit(
    dataset: Dataset,
    config: EvaluationConfig,
    report: Mapping[str, Any] | None = None,
    further: Sequence[Finding] = (),
) -> dict[str, Any]:
    """Audit one split of a data set.

    Args:
        dataset: canonical data.
        config: the split, the users and the headline; those of `report`, if there is one.
        report: `report.json` of the same data and split, or None.
        further: findings that were made before, such as that of the canary.

    Returns:
        `split`, `k`, `seen`, `users`, `summary` and `findings`, as JSON values.

    Raises:
        DataError: the split has no targets, or training events lie in it.
    """
    if config.users is None and report is None:
        config = replace(config, users=MOST_USERS)
    config = replace(config, ks=(config.headline_k,))
    available = available_items(dataset.items, this_minute())  # as the report's lists
    examples = select(dataset, config, available)
    if not len(examples):
        raise DataError(
            f"no user has a target in the {config.split} split. data.split=leave-one-out holds "
            "out an event of users with three events or more that are not only views, say; "
            "data.split=global-temporal asks users with events in its last part"
        )
    trained, items = dataset.train_histories, len(dataset.item_ids)
    heuristics = fit_heuristics(trained, items, dataset.train_times)
    heuristics = of_available(heuristics, available)
    result = evaluate(heuristics, dataset, config, available=available)
    best = _best_known(report, config)
    findings = [
        _size(result, best),
        _shortcuts(result, best),
        _masked(examples),
        _unseen(examples, result.popularity),
        _equal_users(dataset, examples),
        _equal_items(dataset, examples),
        *_orders(dataset, result),
        *_times(dataset, config, examples),
        *further,
    ]
    return {
        "split": config.split,
        "k": config.headline_k,
        "seen": config.seen_modes[0],
        "users": len(examples),
        "summary": _summary(findings),
        "findings": [asdict(finding) for finding in findings],
    }


def read_report(
    path: Path, dataset: str, config: EvaluationConfig, available: str | None = None
) -> tuple[Mapping[str, Any] | None, EvaluationConfig]:
    """The report at `path`, and the protocol by which its users were measured.

    None and `config` if there is no report of this data set (a digest), of the split of `config`
    and of the items that are `available` now (`digest_of_available`).
    """
    try:
        manifest = read_manifest(path, "evaluation")
    except ArtifactError:
        return None, config
    if manifest.config.get("available") != available:
        return None, config
    report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    if (report["made_from"].get("dataset"), report["split"]) != (dataset, config.split):
        return None, config
    return report, build(EvaluationConfig, report["protocol"], "evaluate")


def _summary(findings: Sequence[Finding]) -> str:
    bad, mind = (
        ", ".join(f.name for f in findings if f.verdict == verdict) for verdict in ("bad", "mind")
    )
    if bad:
        also = f" Mind also: {mind}." if mind else ""
        return f"A comparison on this benchmark says little before this is dealt with: {bad}.{also}"
    if mind:
        return f"The benchmark can be used. Mind when you read its figures: {mind}."
    return "Nothing was found that speaks against this benchmark."


def _best_known(
    report: Mapping[str, Any] | None, config: EvaluationConfig
) -> dict[str, Mapping[str, Any]]:
    """Mode -> the row of the ranker with the highest Recall, the trivial ones left out."""
    if report is None:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for seen in config.seen_modes:
        about = {"seen": seen, "targets": "next", "metric": "recall", "k": config.headline_k}
        rows = [find(report["metrics"], ranker=r, **about) for r in report["rankers"]]
        found[seen] = max(
            (row for row in rows if row["ranker"] not in TRIVIAL), key=lambda row: row["mean"]
        )
    return found


def _recalls(result: Result, seen: str) -> list[Mapping[str, Any]]:
    about = {"seen": seen, "targets": "next", "metric": "recall", "k": result.config.headline_k}
    return [find(result.metrics, ranker=name, **about) for name in result.rankings]


def _size(result: Result, best: Mapping[str, Mapping[str, Any]]) -> Finding:
    """How wide the interval of the best figure is."""
    k, seen = result.config.headline_k, result.config.seen_modes[0]
    row = best.get(seen) or max(_recalls(result, seen), key=lambda row: row["mean"])
    half, users = (row["high"] - row["low"]) / 2, len(result.users)
    share = half / row["mean"] if row["mean"] else 1.0
    if users < FEWEST:  # where all or none are hit, the interval has no width
        share = max(share, LEVELS["size"][1])
    return Finding.of(
        "size",
        share,
        {"users": users, "half_interval": half, "of_recall": share},
        f"{users:,} user{'s are' if users > 1 else ' is'} asked. Recall@{k} of {row['ranker']} is "
        f"{row['mean']:.4f} ± {half:.4f} (95 %).",
        f"Recommenders whose Recall@{k} differs by less than {2 * share:.0%} cannot be told apart "
        "by their intervals. Compare them in pairs (recsys compare), or take more users: below "
        f"{FEWEST}, no interval can be relied on.",
    )


def _shortcuts(result: Result, best: Mapping[str, Mapping[str, Any]]) -> Finding:
    """How far the trivial heuristics go, relative to the best that is known."""
    k, recalls, shares = result.config.headline_k, {}, {}
    for seen in result.config.seen_modes:
        recalls[seen] = {row["ranker"]: row["mean"] for row in _recalls(result, seen)}
        if seen in best and best[seen]["mean"]:
            name = max(recalls[seen], key=recalls[seen].__getitem__)
            shares[seen] = (recalls[seen][name] / best[seen]["mean"], name)
    figures: dict[str, Any] = {"recall": recalls}
    if not shares:
        listed = ", ".join(f"{n} {v:.4f}" for n, v in recalls[result.config.seen_modes[0]].items())
        return Finding(
            "shortcuts",
            "unknown",
            figures,
            f"Recall@{k} of the trivial heuristics: {listed}.",
            "There is no report of this data set, this split and the items available now to "
            "compare them with, or all its lists miss: run recsys evaluate first.",
        )
    figures["best_known"] = {m: [row["ranker"], row["mean"]] for m, row in best.items()}
    figures["share"] = {mode: round(share, 6) for mode, (share, _) in shares.items()}
    sentences = [
        f"Seen items {mode}: {name} reaches Recall@{k} {recalls[mode][name]:.4f}, {share:.0%} of "
        f"{best[mode]['ranker']} ({best[mode]['mean']:.4f})."
        for mode, (share, name) in shares.items()
    ]
    return Finding.of(
        "shortcuts",
        max(share for share, _ in shares.values()),
        figures,
        " ".join(sentences),
        "A heuristic without learning goes most of the way in at least one mode. Report it beside "
        "every model, and claim only what a model has above it.",
    )


def _among(targets: NDArray[np.int32], histories: Histories) -> NDArray[np.bool_]:
    """(n,) whether each row's target is among the items of its sequence."""
    found = np.zeros(len(targets), np.bool_)
    rows = histories.rows
    found[rows[histories.items == targets[rows]]] = True
    return found


def _masked(examples: Examples) -> Finding:
    """Targets that stand in the history, and those that a masked list cannot contain."""
    targets = examples.targets.items
    repeated = float(_among(targets, examples.histories).mean())
    masked = float(_among(targets, examples.histories.left_out(True)).mean())
    return Finding.of(
        "masked targets",
        masked,
        {"repeated": repeated, "masked": masked},
        f"{repeated:.1%} of the targets are already in the user's history; lists without seen "
        f"items cannot contain {masked:.1%} of the targets.",
        "Say whether seen items are masked. Show the heuristic 'repeats' beside unmasked figures; "
        "masked figures are of the other targets, and cannot exceed their share.",
    )


def _unseen(examples: Examples, popularity: NDArray[np.int64]) -> Finding:
    """Targets without training events, and with few."""
    counts = popularity[examples.targets.items]
    none, few = float((counts == 0).mean()), float(((counts > 0) & (counts < 5)).mean())
    return Finding.of(
        "unseen targets",
        none,
        {"none": none, "one_to_four": few},
        f"{none:.1%} of the targets have no training event, and {few:.1%} have one to four.",
        "A model that knows items by their events alone cannot find the first. Describe the items "
        "(titles, attributes), and read the report's groups of cold targets.",
    )


def _equal_users(dataset: Dataset, examples: Examples) -> Finding:
    """Users whose whole sequence another user has, too, and targets that such a twin trains on."""
    everything = dataset.interactions.histories
    keys = [sequence.tobytes() for sequence in everything]
    trained: dict[bytes, int] = {}  # most training events of a user with the sequence
    for key, length in zip(keys, dataset.train_histories.lengths.tolist(), strict=True):
        trained[key] = max(trained.get(key, 0), length)
    asked, times = [keys[user] for user in examples.users], Counter(keys)
    twins = np.array([times[key] > 1 for key in asked], np.bool_)
    known = np.array([trained[key] for key in asked]) > examples.histories.lengths
    long = everything.lengths[examples.users] >= LONG
    share, answered = float(twins.mean()), float(known.mean())
    of_long = float(twins[long].mean()) if long.any() else 0.0
    return Finding.of(
        "equal users",
        of_long,
        {"share": share, "share_long": of_long, "users_long": int(long.sum()), "trained": answered},
        f"{share:.1%} of the users have exactly the events of another user; of the "
        f"{int(long.sum()):,} users with at least {LONG} events it is {of_long:.1%}. "
        f"{answered:.1%} of the targets are training events of such a twin.",
        "Equal long histories are rarely chance: copies of accounts, of rows, or reviews that were "
        "posted to several products at once. Keep one user of each group, or say how many there "
        "are.",
    )


def _equal_items(dataset: Dataset, examples: Examples) -> Finding:
    """Items with equal words, and targets that have such a twin."""
    groups = _groups_of_items(dataset)
    twins = np.bincount(groups, minlength=len(groups))[groups] > 1
    targets, histories = examples.targets.items, examples.histories
    rows = histories.rows
    near = (groups[histories.items] == groups[targets[rows]]) & (histories.items != targets[rows])
    after_twin = np.zeros(len(targets), np.bool_)
    after_twin[rows[near]] = True
    of_items, of_targets = float(twins.mean()) if len(twins) else 0.0, float(twins[targets].mean())
    return Finding.of(
        "equal items",
        max(float(after_twin.mean()), min(of_targets, LEVELS["equal items"][0])),
        {"items": of_items, "targets": of_targets, "after_twin": float(after_twin.mean())},
        f"{of_items:.1%} of the items have the title and text of another item, and "
        f"{of_targets:.1%} of the targets do; {after_twin.mean():.1%} of the users had such a twin "
        "of their target before.",
        "Items with one name may be variants of one product, or shops of one chain. Variants make "
        "hits cheap where users have them all, and misses unfair where any of them would do: merge "
        "them (one item id), or name the share.",
    )


def _groups_of_items(dataset: Dataset) -> NDArray[np.int64]:
    """(items,) number of the group with equal title and text; without words, one of its own."""
    numbers: dict[tuple[str, str], int] = {}
    columns = (dataset.items[name].to_pylist() for name in ("item_id", "title", "text"))
    groups = []
    for place, (item_id, title, text) in enumerate(zip(*columns, strict=True)):
        words = ("" if title == item_id else title or "", text or "")
        groups.append(numbers.setdefault(words, place) if any(words) else place)
    return np.array(groups, np.int64)


def _orders(dataset: Dataset, result: Result) -> list[Finding]:
    """Whether the order of users, in the file and by id, predicts how easy they are."""
    ids = dataset.interactions.user_ids[result.users]
    numbers = ids.astype(np.float64) if np.char.isdecimal(ids).all() else ids
    by_id = np.argsort(numbers, kind="stable")
    in_file = np.arange(len(ids))  # users are numbered by their first event in the file
    found = [_order("file order", "in the file", in_file, result)]
    if not np.array_equal(by_id, in_file):
        found.append(_order("id order", "by user id", by_id, result))
    return found


def _order(name: str, where: str, order: NDArray[np.int64], result: Result) -> Finding:
    """Recall of the best heuristic in each quarter of an order of users."""
    k, seen = result.config.headline_k, result.config.seen_modes[0]
    best = max(_recalls(result, seen), key=lambda row: row["mean"])["ranker"]
    values = recall_at_k(result.rankings[best][seen].hits["next"], k)
    options = {"resamples": result.config.resamples, "seed": result.config.seed}
    parts = [part for part in np.array_split(order, QUARTERS) if len(part)]
    rows = [
        {
            **vars(bootstrap(values[part], **options)),
            "events": round(float(result.histories.lengths[part].mean()), 2),
        }
        for part in parts
    ]
    high, low = (choose(rows, key=lambda row: row["mean"]) for choose in (max, min))
    ratio = high["mean"] / low["mean"] if low["mean"] else float(len(rows))
    real = is_beyond_chance(values[order], high["mean"] - low["mean"], result.config.seed)
    shown = ", ".join(f"{row['mean']:.4f}" for row in rows)
    return Finding.of(
        name,
        ratio if real else 0.0,
        {"heuristic": best, "quarters": rows, "beyond_chance": real},
        f"Recall@{k} of {best} in the quarters of the users {where}: {shown}. The highest and the "
        f"lowest are {'further' if real else 'not further'} apart than by chance (at 1 %).",
        "The place of a user predicts how easy the user is. Never evaluate on the first users of "
        "the file; draw them at random (evaluate.users does), and let no model see the place.",
    )


def is_beyond_chance(values: NDArray[np.float64], gap: float, seed: int) -> bool:
    """Whether the means of quarters of (users,) values in random orders are rarely `gap` apart.

    A permutation test: the intervals of single quarters would be apart by chance far more often,
    because it is the highest and the lowest of four that are compared.
    """
    rng, as_far = np.random.default_rng(seed), 0
    for _ in range(SHUFFLES):
        parts = np.array_split(rng.permutation(values), QUARTERS)
        means = [part.mean() for part in parts if len(part)]
        as_far += max(means) - min(means) >= gap - 1e-12
    return bool((1 + as_far) / (1 + SHUFFLES) <= CHANCE)


def _times(dataset: Dataset, config: EvaluationConfig, examples: Examples) -> list[Finding]:
    """Events at the same time, and training events after the targets."""
    events, label = dataset.interactions, LABELS[config.split]
    if not events.has_time:
        nothing = "The data have no times that can be compared between users, only an order."
        return [
            Finding(
                "same times",
                "unknown",
                {},
                nothing,
                "A split by time is not possible, and nobody can tell whether training knows the "
                "future of the targets. Prepare the data with times if the source has them.",
            )
        ]
    same = (np.diff(events.user) == 0) & (np.diff(events.timestamp) == 0)
    if events.nanosecond is not None:
        same &= np.diff(events.nanosecond) == 0
    with_next, with_last = np.append(same, False), np.append(False, same)
    asked = np.flatnonzero((dataset.split == label) & dataset.is_asked)
    first = asked[np.diff(events.user[asked], prepend=-1) != 0]
    first = first[np.isin(events.user[first], examples.users)]
    ties = float((with_last | with_next).mean())
    last = float(with_last[first].mean())
    either = float((with_last | with_next)[first].mean())
    days = bool((events.timestamp % DAY == 0).all())
    trained = np.sort(events.timestamp[dataset.split == TRAIN])
    later = len(trained) - np.searchsorted(trained, events.timestamp[first], side="right")
    future = float(later.mean() / len(trained)) if len(trained) else 0.0
    return [
        Finding.of(
            "same times",
            max(last, min(either, LEVELS["same times"][0])),
            {"ties": ties, "targets_with_last": last, "targets": either, "whole_days": days},
            f"{ties:.1%} of the events share their time with another event of the user"
            f"{' (times are whole days)' if days else ''}. {either:.1%} of the targets do, and "
            f"{last:.1%} share it with the last event of the history.",
            "Which event of a basket comes next is an accident of the file: read the figures of "
            "all events of the split. Where the history has a part of the target's basket, split "
            "by time (--set data.split=global-temporal keeps equal times together).",
        ),
        Finding.of(
            "future",
            future,
            {"later_training_events": future},
            f"On average, {future:.1%} of the training events are later than a user's target.",
            "Training knows what became popular after the question was asked. A shop does not: "
            "--set data.split=global-temporal measures what it will see.",
        ),
    ]
