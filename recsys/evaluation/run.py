"""Stage `evaluate`: evaluate a bundle and the baselines on one split; write the report."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from recsys.artifacts import Output, read_manifest
from recsys.bundle import CATALOG, EVAL, QUANTIZER, RETRIEVAL, TARGET, VALIDATION, load_sasrec
from recsys.catalog import Catalog
from recsys.config import as_dict
from recsys.dataset import Dataset, Examples
from recsys.devices import CPU, choose_device, is_large, typical_seconds
from recsys.errors import ArtifactError, DataError
from recsys.evaluation import report
from recsys.evaluation.baselines import PAIR_RULES, fit_baselines, of_available
from recsys.evaluation.compare import KIND
from recsys.evaluation.protocol import (
    COLD,
    EvaluationConfig,
    Lists,
    Ranker,
    Result,
    Seen,
    evaluate,
    find,
    select,
)
from recsys.evaluation.rankings import CHUNK, rank_histories, rank_users
from recsys.interactions import Histories
from recsys.pipeline import Context
from recsys.progress import console, say
from recsys.recommender import Recommender
from recsys.retrieval import ItemItem, digest, search_rules
from recsys.retrieval.reranker import LEAST_USERS
from recsys.semantic_ids.report import health

# The ranker under test is `blended` if the bundle blends; the model alone is then second.
MODEL, BLENDED = "model", "blended"
EVERYONE = 1 << 40  # more users than any split has
MEASURED = 8  # users of a batch that says how fast the CPU is
TIMED = 64  # users whose lists say how long a list takes
RANKED = 0.35  # of the time that is left then; the rest is for metrics and intervals
LEAST_EVALUATED = 100  # users who are evaluated even if the time is spent


def stage(
    context: Context,
    *,
    bundle: Path | None = None,
    dataset: Path | None = None,
    out: Path | None = None,
) -> Path | None:
    """Write the report of the run, unless it is up to date, and print its tables.

    `bundle`, `dataset` and `out` replace the workspace's. Returns None, with a reason on the
    terminal, if no user has enough events to hold one out.
    """
    settings, workspace = context.settings, context.workspace
    end = context.deadline("evaluate")
    config = settings.section("evaluate", EvaluationConfig)
    stats = Dataset.manifest(dataset or workspace.dataset).info.get("stats")
    if stats is not None and not stats["splits"][config.split]["interactions"]:
        say(
            f"evaluate: no report, since the data set has no {config.split} events: a user needs "
            "three events so that one can be held out for validation and one for the test"
        )
        return None
    if "seed" not in (settings.values.get("evaluate") or {}):
        config = replace(config, seed=settings.seed)
    if config.users is None and context.minutes is not None:
        config = replace(config, users=context.sample("evaluate", EVERYONE))
    return evaluate_bundle(
        bundle or workspace.bundle,
        dataset or workspace.dataset,
        config,
        out or workspace.report,
        force=context.force,
        end=end if "users" not in (settings.values.get("evaluate") or {}) else math.inf,
    )


def evaluate_bundle(
    bundle_path: Path,
    dataset_path: Path,
    config: EvaluationConfig,
    out_path: Path,
    *,
    force: bool = False,
    end: float = math.inf,
) -> Path:
    """Evaluate a bundle and the baselines, and print the tables; returns `out_path`.

    Writes `report.json`, `report.html` and `users.parquet` there, unless a report of the same
    bundle, data and configuration exists. The number of users is lowered to those
    for whom there is time until `end`, by `time.monotonic`.

    Raises:
        ArtifactError: a missing or damaged artifact, or a bundle of another catalog.
        DataError: the split has no events, or a part of the bundle was fitted on it.
    """
    parents = {
        "bundle": read_manifest(bundle_path, "bundle").digest,
        "dataset": Dataset.manifest(dataset_path).digest,
    }
    output = Output(Path(out_path), KIND, _settings(config), parents, force)
    if not output.is_current():
        _write(Path(bundle_path), Path(dataset_path), config, output, end)
    _show(report.read(Path(out_path)))
    return Path(out_path)


def _lists(
    recommender: Recommender, histories: Histories, config: EvaluationConfig
) -> dict[str, dict[Seen, Lists]]:
    """The recommender's lists by name and mode, all from one search per user."""
    modes = config.seen_modes
    ranked = rank_users(recommender, histories, tuple(mode == "masked" for mode in modes), config)
    first, alone = (
        {mode: both[which] for mode, both in zip(modes, ranked, strict=True)} for which in range(2)
    )
    reranker = recommender.retrieval and recommender.retrieval.reranker
    return {BLENDED: first, MODEL: alone} if reranker and reranker.weights else {MODEL: alone}


def _in_time(
    config: EvaluationConfig,
    recommender: Recommender,
    baselines: Mapping[str, Ranker],
    examples: Examples,
    end: float,
) -> EvaluationConfig:
    """The configuration with the users for whom there is time, by the time that some take."""
    if math.isinf(end) or len(examples) <= LEAST_EVALUATED:
        return config
    some = examples.sample(TIMED).histories
    modes = tuple(mode == "masked" for mode in config.seen_modes)
    for part in (some.take([0]), some):  # what is done once does not grow with the users
        start = time.monotonic()
        rank_histories(recommender, part, max(config.ks), modes, beams=config.beams)
        for ranker in baselines.values():
            for exclude_seen in modes:
                ranker.rank(part, max(config.ks), exclude_seen)
    now = time.monotonic()
    users = int(RANKED * (end - now) * len(some) / max(now - start, 1e-6))
    if users >= len(examples):
        return config
    return replace(config, users=max(users, LEAST_EVALUATED))


def _write(
    bundle_path: Path, dataset_path: Path, config: EvaluationConfig, output: Output, end: float
) -> None:
    dataset = Dataset.load(dataset_path)
    recommender = _load(bundle_path, config)
    headline: Seen = "masked" if recommender.exclude_seen else "unmasked"
    config = replace(config, device=recommender.device.type, headline=headline)
    _check_catalog(recommender.bundle.catalog, dataset)
    info: dict[str, Any] = {}
    start = time.perf_counter()
    parents = dict(output.parents)
    with output.write(info) as folder:
        warnings = _warnings(recommender.manifest.parents, parents["dataset"])
        known, facts = recommender.retrieval, recommender.manifest.info
        ids, sasrec = facts.get("ids_fitted_on"), facts.get("sasrec_fitted_on")
        if ids is not None or (bundle_path / CATALOG / QUANTIZER).is_dir():  # else imported
            warnings += _check_fitted("semantic IDs", ids, dataset, "from the stage 'ids' on")
        if sasrec is not None:
            _check_fitted("SASRec", sasrec, dataset, "from the stage 'sasrec' on")
        if known is not None:
            stages = "the stages 'retrieval' and 'bundle'"
            warnings += _check_fitted("retrieval", known.fitted_on, dataset, stages)
        alive = recommender.epoch.alive
        available = None if alive.all() else alive
        warnings += _few_users(bundle_path, known is not None)
        trained, times = dataset.train_histories, dataset.train_times
        size = len(dataset.item_ids)
        if known is None:
            rules = search_rules(trained, size, dataset.validation(), end)
            pairs = ItemItem.count(trained, size, rules)
        else:
            pairs = known.item_item
        others = fit_baselines(trained, size, times)
        others[PAIR_RULES] = pairs
        if (taught_by := load_sasrec(bundle_path, size, trained=True)) is not None:
            others["SASRec"] = taught_by
        others = of_available(others, available)
        everyone = select(dataset, config, available)
        config = _in_time(config, recommender, others, everyone, end)
        examples = select(dataset, config, available)
        if len(examples) < len(everyone):
            warnings.append(
                f"{len(examples):,} of {len(everyone):,} users, drawn at random, were evaluated: "
                "those for whom the budget had time. --minutes gives more."
            )
        ours = _lists(recommender, examples.histories, config)
        info["decoding_seconds"] = round(time.perf_counter() - start, 1)
        near = known.vectors if known is not None else None
        together = replace(config, batch_size=CHUNK)  # only baselines are left
        vectors = None if near is None else near.vectors
        result = evaluate(others, dataset, together, vectors, available, ours)
        result = replace(result, config=replace(config, targets=result.config.targets))
        document = report.document(
            result,
            dataset,
            name=bundle_path.name,
            made_from=parents,
            semantic_ids=health(recommender.bundle.catalog.codes),
            warnings=warnings,
            weaknesses=_weaknesses(result),
            served_has_seen_all=known is not None,
        )
        report.write(folder, document, report.per_user(result, dataset))
        info["split"] = config.split
        info["seconds"] = round(time.perf_counter() - start, 1)
        info["ranking_seconds"] = {
            name: {mode: round(ranking.seconds, 2) for mode, ranking in modes.items()}
            for name, modes in result.rankings.items()
            if name not in ours  # their lists were computed before
        }


def _load(bundle: Path, config: EvaluationConfig) -> Recommender:
    """The bundle's recommender, on the device that ranks a batch of its users soonest."""
    from recsys.recommender import Recommender

    load = cache(partial(Recommender.load, bundle, dtype=config.dtype, trained=True))

    def seconds(device: str) -> float:
        """Time of a batch; on a CPU, which takes each user about as long, by that of a few."""
        loaded = load(device=device)
        few = min(config.batch_size, MEASURED) if device == CPU else config.batch_size
        items = np.random.default_rng(0).integers(
            0, len(loaded.catalog), (few, loaded.epoch.encoder.config.max_items)
        )
        k, users = max(config.ks), Histories.of(items.tolist())
        measured_s = typical_seconds(
            lambda: rank_histories(loaded, users, k, beams=config.beams, batch_size=few)
        )
        return measured_s * config.batch_size / few

    if is_large(bundle / TARGET):
        return load(device=config.device)  # which measures nothing, either
    chosen = choose_device(
        config.device, f"evaluation of {bundle}", seconds, large=False,
        show=lambda times: say(f"evaluation: a batch of {config.batch_size} users takes {times}"),
    )  # fmt: skip
    return load(device=chosen)


def _settings(config: EvaluationConfig) -> dict[str, Any]:
    """The settings that the figures depend on, but for rounding."""
    settings = as_dict(config)
    del settings["threads"], settings["device"]
    return settings


def _check_catalog(catalog: Catalog, dataset: Dataset) -> None:
    if catalog.item_ids == [str(item_id) for item_id in dataset.item_ids]:
        return
    raise ArtifactError(
        f"the bundle's catalog ({len(catalog)} items) is not that of the data set "
        f"({len(dataset.item_ids)} items); evaluate a bundle on the data it was made from, or make "
        "a new bundle"
    )


def _warnings(made_from: dict[str, str], dataset: str) -> list[str]:
    """Warn if the model may have been trained on events of this split."""
    learned = made_from.get("dataset")
    if learned in (None, dataset):
        return []
    return [
        f"The bundle was made from data set {learned}, this is {dataset}. If they were split "
        "differently, the model may have learned from events that it is evaluated on."
    ]


def _check_fitted(part: str, fitted_on: str | None, dataset: Dataset, again: str) -> list[str]:
    """DataError unless a part of a bundle was fitted on the training events and on nothing else.

    `fitted_on` is the `digest` of the histories that it was fitted on. If it is None, the result is
    a warning for the reader of the report, which names the stages to run `again`.
    """
    if fitted_on is None:
        return [
            f"The bundle does not say which events its {part} learned from. Run {again} again to "
            "have that checked."
        ]
    if fitted_on != digest(dataset.train_histories):
        raise DataError(
            f"leak: the bundle's {part} learned from other events than the data set's training "
            f"events; run {again} again before measuring"
        )
    return []


def _weaknesses(result: Result) -> list[str]:
    """Name what is worse than a simpler ranker: the served list, and the model alone."""
    k = result.config.headline_k
    about: dict[str, Any] = {"metric": "ndcg", "k": k}
    served, weaknesses = next(iter(result.rankings)), []
    kinds = {"next": "the next event", "all": "all events of the split"}
    fitted = "all events of a later time" if result.facts["baskets"] else "the next event"
    for seen in result.config.seen_modes:
        for targets, meaning in kinds.items():
            for name in result.rankings:
                worse = _worst(result, served, name, {"seen": seen, "targets": targets})
                if worse is not None:
                    weaknesses.append(
                        f"The served list is worse than {name} for {meaning}, seen items {seen}: "
                        f"{worse}. It is fitted to {fitted} without seen items; more time "
                        "(--minutes) may help it."
                    )
    weaknesses += _cold_weaknesses(result)
    about |= {"seen": result.config.seen_modes[0], "targets": result.config.targets}
    if MODEL not in result.rankings:
        return weaknesses
    own = find(result.metrics, ranker=MODEL, **about)["mean"]
    for name in ("popularity", "item-kNN"):
        if name in result.rankings:
            theirs = find(result.metrics, ranker=name, **about)["mean"]
            if own < theirs:
                weaknesses.append(
                    f"The model alone is below {name}: NDCG@{k} {own:.4f} against {theirs:.4f}. "
                    "More events, more epochs or a SASRec teacher (sasrec.epochs) may help it; the "
                    "served list does not depend on it alone."
                )
    return weaknesses


def _few_users(bundle: Path, has_retrieval: bool) -> list[str]:
    """Warn if too few validation users chose what is served."""
    file = bundle / EVAL / VALIDATION
    if not has_retrieval or not file.is_file():
        return []
    users = json.loads(file.read_text(encoding="utf-8")).get(RETRIEVAL, {}).get("users", 0)
    if users >= LEAST_USERS:
        return []
    return [
        f"{users} validation users are too few to choose what is served (fewer than "
        f"{LEAST_USERS}), so it may be below popularity by chance. More users with three events "
        "or more help."
    ]


def _cold_weaknesses(result: Result) -> list[str]:
    """Where little is known, name the simple baselines that are surely better."""
    k, seen = result.config.headline_k, result.config.seen_modes[0]
    weaknesses = []
    for group, (by, segment) in COLD.items():
        conditions = {"by": by, "segment": segment, "seen": seen, "metric": "recall", "k": k}
        for row in result.segments:
            about = all(row[key] == value for key, value in conditions.items())
            if about and row["ranker"] in report.SIMPLE and row["gap_high"] < 0:
                weaknesses.append(
                    f"For {group} ({row['users']:,} users), the served list is worse than "
                    f"{row['ranker']}: Recall@{k} {row['gap']:+.4f} ({row['gap_low']:+.4f} to "
                    f"{row['gap_high']:+.4f})."
                )
    return weaknesses


def _worst(result: Result, served: str, other: str, where: dict[str, Any]) -> str | None:
    """The first metric, those of the headline first, by which another ranker is surely better."""
    first = result.config.headline_k
    for k in sorted(result.config.ks, key=lambda k: (k != first, k)):
        for metric, shown in (("ndcg", "NDCG"), ("recall", "Recall")):
            if other != served:
                about = {"metric": metric, "k": k, **where}
                gap = find(result.comparisons, ranker=served, against=other, **about)
                if gap["high"] < 0:
                    interval = f"{gap['low']:+.4f} to {gap['high']:+.4f}"
                    return f"{shown}@{k} {gap['mean']:+.4f} ({interval})"
    return None


def _show(document: dict[str, Any]) -> None:
    """Print warnings, tables and headline."""
    for warning in document["warnings"]:
        say(f"[bold yellow]warning[/bold yellow]: {warning}")
    for weakness in document["weaknesses"]:
        say(f"[bold yellow]weakness[/bold yellow]: {weakness}")
    for table in report.tables(document):
        console.print(table)
    for sentence in report.headline(document):
        say(sentence)
    say(f"The model ranked on {document['protocol']['device']}.")
    if document["split"] == "valid":
        say("These are validation figures: use them to choose a model, and report the test split.")
