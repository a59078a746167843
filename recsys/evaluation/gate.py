"""Gate: is the bundle of a run (the challenger) at least as good as its parent's (the champion)?

Both rank the test users of the run's data set, whose test events are newer than everything that the
champion has seen. Both are as served: with retrieval and reranker, and the champion with the items
that are newer than it, which a shop adds to the running service. But the challenger has not counted
the test events, which it will have counted when it is served. Few users are asked for more of
their events (`replays`). The challenger is offered unless it is shown to be worse
(`recsys.evaluation.verdict`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from recsys.availability import available_items
from recsys.config import as_dict
from recsys.dataset import ITEM_COLUMNS, Dataset
from recsys.errors import ArtifactError, ConfigError
from recsys.evaluation import report
from recsys.evaluation.baselines import of_available
from recsys.evaluation.compare import KIND, compare_rankers
from recsys.evaluation.metrics import coverage_gap
from recsys.evaluation.protocol import EvaluationConfig, Result, evaluate
from recsys.evaluation.rankings import Ranked, rank_histories
from recsys.evaluation.verdict import CHALLENGER, CHAMPION, GateConfig, decide
from recsys.interactions import OTHER_TYPE, Histories
from recsys.live import NewItem
from recsys.pipeline import Context
from recsys.progress import console, say
from recsys.recommender import Recommender
from recsys.splits import TEST, VALID

SECTION, VERDICT = "gate", "gate.json"
ENOUGH = 300  # users with an event in the window; with fewer, the window of validation counts, too
REPLAYS = 5  # events that a user is asked for at most


def stage(context: Context) -> Path:
    """Write the report of a run with a parent: that of `recsys evaluate`, and `gate.json`.

    `gate.json` has `offered`, `reasons` (sentences, empty if it is offered), both bundles,
    `window`, `comparisons` (challenger minus champion, for `all`, `cold` and `warm` next items) and
    `coverage` (`compare_coverage`).

    Raises:
        ArtifactError: data set or a bundle is missing, or the champion is of other items.
        DataError: the window has no events.
    """
    config, parent = context.settings.section(SECTION, GateConfig), context.parent
    if parent is None:
        raise ConfigError("gate: a run without parent has nothing to be compared with")
    workspace = context.workspace
    parents = workspace.digests("bundle", "dataset")
    parents[CHAMPION] = parent.manifest("bundle").digest
    settings = as_dict(config) | {"split": "test", "seed": context.settings.seed}
    output = context.output(KIND, settings, parents)
    if not output.is_current():
        dataset = Dataset.load(workspace.dataset)
        challenger = Recommender.load(workspace.bundle, trained=True)
        load = partial(Recommender.load, parent.bundle, device=str(challenger.device))
        champion = with_new_items(load(), dataset)
        protocol = EvaluationConfig(
            ks=tuple(sorted({1, 5, config.k, 2 * config.k})),
            seen="masked" if challenger.exclude_seen and champion.exclude_seen else "unmasked",
            users=config.users,
            resamples=config.resamples,
            seed=context.settings.seed,
        )
        rankers = {CHALLENGER: Served(challenger), CHAMPION: Served(champion)}
        alive = [recommender.epoch.alive for recommender in (challenger, champion)]
        enough = with_enough_users(dataset, np.logical_and.reduce(alive))
        if enough is not dataset:  # which may have events that the champion counts as it is served
            champion = with_new_items(load(trained=True), dataset)
            rankers[CHAMPION], dataset = Served(champion), enough
        results, left = [], config.users
        for replay in replays(dataset) if left else [dataset]:
            results.append(evaluate_alike(rankers, replay, replace(protocol, users=left)))
            left = None if left is None else left - len(results[-1].users)
            if left is not None and left <= 0:
                break
        result = results[0]
        tables = [report.per_user(recommender, dataset) for recommender in results]
        findings = {
            CHALLENGER: {"bundle": workspace.name, "version": parents["bundle"]},
            CHAMPION: {"bundle": parent.name, "version": parents[CHAMPION]},
            "window": _window(dataset, len(result.users)),
            "comparisons": compare_rankers(
                pa.concat_tables(tables),
                CHALLENGER,
                CHAMPION,
                k=config.k,
                resamples=config.resamples,
            ),
            "coverage": compare_coverage(result, config),
            "k": config.k,
        }
        reasons = decide(findings, config)
        verdict = {"offered": not reasons, "reasons": reasons, **findings}
        document = report.document(
            result,
            dataset,
            name=workspace.name,
            made_from=parents,
            weaknesses=reasons,
            served_has_seen_all=challenger.retrieval is not None,
        )
        with output.write({"offered": not reasons}) as folder:
            report.write(folder, document, tables[0])
            text = json.dumps(verdict, indent=1, ensure_ascii=False)
            (folder / VERDICT).write_text(text + "\n", encoding="utf-8")
    show(output.path)
    return output.path


def with_enough_users(dataset: Dataset, available: NDArray[np.bool_]) -> Dataset:
    """The data set with the window of validation as a part of the test, if the test has few users.

    The champion has learned from neither. The challenger has been stopped by the events of
    validation, and has not learned from them.

    Args:
        dataset: of the run.
        available: (items,) those that both recommenders may list.
    """
    if _count(dataset, available) >= ENOUGH:
        return dataset
    return replace(
        dataset, split=np.where(dataset.split == VALID, TEST, dataset.split).astype(np.uint8)
    )


def replays(dataset: Dataset) -> Iterator[Dataset]:
    """The data set, and then the same with labels by which users are asked for a later event.

    In the n-th one, each user's first n events of the test that may be asked for are history.
    """
    user, test = dataset.interactions.user, dataset.split == TEST
    asked = np.flatnonzero(test & dataset.is_asked)
    starts = np.flatnonzero(np.diff(user[asked], prepend=-1))
    step = np.arange(len(asked)) - np.repeat(starts, np.diff(starts, append=len(asked)))
    yield dataset
    for number in range(1, REPLAYS):
        first = np.full(int(user.max(initial=-1)) + 1, len(user))
        mine = asked[step == number]
        if not len(mine):
            return
        first[user[mine]] = mine
        earlier = test & (np.arange(len(user)) < first[user])
        yield replace(dataset, split=np.where(earlier, VALID, dataset.split).astype(np.uint8))


def _count(dataset: Dataset, available: NDArray[np.bool_]) -> int:
    """The users of the test whose next item is available."""
    targets = dataset.examples("test").targets
    # not `servable`, which leaves nobody out where no target is available
    return int(np.count_nonzero(available[targets.items[targets.offsets[:-1]]]))


@dataclass(frozen=True)
class Served:
    """A recommender as the service answers, for `evaluate`."""

    recommender: Recommender

    def rank(self, histories: Histories, k: int, exclude_seen: bool) -> Ranked:
        """See `recsys.evaluation.protocol.Ranker`; the bundle does not know types of new events.

        With `exclude_seen` False, the recommender treats seen items as it does by default.
        """
        retrieval = self.recommender.retrieval
        if histories.behaviours is not None and retrieval and retrieval.types is not None:
            known = histories.behaviours < len(retrieval.types.behaviours)
            types = np.where(known, histories.behaviours, OTHER_TYPE).astype(np.uint8)
            histories = replace(histories, behaviours=types)
        without = exclude_seen or self.recommender.exclude_seen
        ((ranked, _),) = rank_histories(self.recommender, histories, k, (without,))
        return ranked


def evaluate_alike(
    rankers: Mapping[str, Served], dataset: Dataset, config: EvaluationConfig
) -> Result:
    """Evaluate recommenders on the items that are available for all of them.

    Stock changes between two bundles. A list must not win because it has what was sold out since.
    """
    available = np.logical_and.reduce(
        [ranker.recommender.epoch.alive for ranker in rankers.values()]
    )
    known = None if available.all() else available
    return evaluate(of_available(rankers, known), dataset, config, available=known)


def compare_coverage(result: Result, config: GateConfig) -> dict[str, Any]:
    """How many different items the lists of all users have together.

    Returns:
        `challenger` and `champion`: share of the items; `taken`: share that the users took next;
        `items`: of the catalog; `gap`: items of the challenger minus `config.coverage` of those of
        the champion, or of those that were taken if these are fewer, with a 95 % interval.
    """
    (mode,) = result.rankings[CHALLENGER]
    lists = {
        name: result.rankings[name][mode].items[:, : config.k] for name in (CHALLENGER, CHAMPION)
    }
    lists["taken"] = result.targets["next"].items[:, None]  # one item of each user
    size = len(result.popularity)
    counts = {name: len(np.unique(items[items >= 0])) for name, items in lists.items()}
    fewer = min((CHAMPION, "taken"), key=lambda name: counts[name])
    gap = coverage_gap(lists[CHALLENGER], lists[fewer], config.coverage)
    shares = {name: count / size for name, count in counts.items()}
    return {**shares, "items": size, "gap": vars(gap)}


def count_compared(dataset: Dataset, before: pa.Table, now: int) -> int:
    """The users whom the gate compares, before there is a challenger: those of `evaluate_alike`.

    Args:
        dataset: of the run.
        before: the items of the champion's bundle, with which the data set begins.
        now: unix seconds.
    """
    available = np.ones(len(dataset.item_ids), np.bool_)
    for items in (dataset.items, before):
        now_available = available_items(items, now)
        if now_available is not None:
            available[: len(now_available)] &= now_available
    return _count(with_enough_users(dataset, available), available)


def with_new_items(champion: Recommender, dataset: Dataset) -> Recommender:
    """The champion with the items of a data set that are newer than it, under the same numbers.

    Raises:
        ArtifactError: the data set does not begin with the champion's items.
    """
    size, ids = len(champion.bundle.catalog), dataset.item_ids.tolist()
    if champion.bundle.catalog.item_ids != ids[:size]:
        raise ArtifactError(
            f"the data set does not begin with the items of {champion.bundle.path}; it is not the "
            "parent of this run"
        )
    schema = champion.bundle.catalog.items.schema.names
    champion.upsert(
        [
            NewItem(
                row["item_id"],
                row["title"] or "",
                row["text"] or "",
                {
                    key: value
                    for key, value in row.items()
                    if key in schema and key not in ITEM_COLUMNS and value is not None
                },
            )
            for row in dataset.items.slice(size).to_pylist()
        ]
    )
    return champion


def read_verdict(report_path: Path) -> dict[str, Any]:
    """`gate.json` of a report."""
    verdict: dict[str, Any] = json.loads((report_path / VERDICT).read_text(encoding="utf-8"))
    return verdict


def show(path: Path) -> None:
    """Print the tables and the verdict of a report."""
    for table in report.tables(report.read(path)):
        console.print(table)
    verdict = read_verdict(path)
    for row in verdict["comparisons"]:
        say(
            f"{row['metric']}@{row['k']} of {row['target']} next items ({row['users']} users, "
            f"{row['events']} events): "
            f"{row['a']:.4f} against {row['b']:.4f}, {row['mean']:+.4f} "
            f"({row['low']:+.4f} to {row['high']:+.4f})"
        )
    for reason in verdict["reasons"]:
        say(f"[bold yellow]refused[/bold yellow]: {reason}")
    if verdict["offered"]:
        say("The challenger is not worse than the champion, and is offered.")


def _window(dataset: Dataset, users: int) -> dict[str, Any]:
    times: NDArray[np.int64] = dataset.interactions.timestamp[dataset.split == TEST]
    return {"from": int(times.min()), "to": int(times.max()), "events": len(times), "users": users}
