"""Stage `evaluate`: a bundle beside the baselines on one split, as an `evaluation` artifact.

Joins what the rest of the package keeps apart: the bundle, the protocol and the report.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from recsys.artifacts import read_manifest, up_to_date, write_artifact
from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.errors import ArtifactError
from recsys.evaluation import report
from recsys.evaluation.baselines import fit_baselines
from recsys.evaluation.protocol import EvaluationConfig, evaluate
from recsys.progress import console, say
from recsys.semantic_ids.report import health

if TYPE_CHECKING:
    from typing import Any

    import numpy as np
    from numpy.typing import NDArray

    from recsys.catalog import Catalog
    from recsys.interactions import Histories
    from recsys.pipeline import Context
    from recsys.recommender import Recommender

KIND = "evaluation"
MODEL = "model"  # the name of the ranker under test
JSON, HTML, USERS = "report.json", "report.html", "users.parquet"


def stage(
    context: Context,
    *,
    bundle: Path | None = None,
    dataset: Path | None = None,
    out: Path | None = None,
) -> Path:
    """Write the report of the run, unless it is there already, and print its tables.

    Args:
        context: settings (section `evaluate`) and workspace.
        bundle: evaluate this one instead of the workspace's.
        dataset: on this one instead of the workspace's.
        out: write here instead of the workspace's report.
    """
    settings, workspace = context.settings, context.workspace
    config = settings.section("evaluate", EvaluationConfig)
    if "seed" not in (settings.values.get("evaluate") or {}):
        config = replace(config, seed=settings.seed)
    return evaluate_bundle(
        bundle or workspace.bundle,
        dataset or workspace.dataset,
        config,
        out or workspace.report,
        force=context.force,
    )


def evaluate_bundle(
    bundle_path: Path,
    dataset_path: Path,
    config: EvaluationConfig,
    out_path: Path,
    *,
    force: bool = False,
) -> Path:
    """Evaluate a bundle beside the baselines and print the tables.

    Writes `report.json`, `report.html` and `users.parquet` to `out_path`, unless a report of the
    same bundle, data and configuration is there.

    Returns:
        `out_path`.

    Raises:
        ArtifactError: a missing or damaged artifact, or a bundle of another catalogue.
        DataError: the split has no events, or training reaches into it.
    """
    parents = {
        "bundle": read_manifest(bundle_path, "bundle").digest,
        "dataset": Dataset.manifest(dataset_path).digest,
    }
    settings = as_dict(config)
    if force or not up_to_date(out_path, KIND, settings, parents):
        _write(Path(bundle_path), Path(dataset_path), config, Path(out_path), parents)
    _show(json.loads((Path(out_path) / JSON).read_text(encoding="utf-8")))
    return Path(out_path)


@dataclass(frozen=True)
class _Model:
    """A recommender as a ranker: it searches as wide and decodes as many at once as configured."""

    recommender: Recommender
    config: EvaluationConfig

    def rank(
        self, histories: Histories, k: int, exclude_seen: bool
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return self.recommender.rank(
            histories,
            k,
            exclude_seen,
            beams=self.config.beams,
            batch_size=self.config.batch_size,
        )


def _write(
    bundle_path: Path,
    dataset_path: Path,
    config: EvaluationConfig,
    out_path: Path,
    parents: dict[str, str],
) -> None:
    from recsys.recommender import Recommender

    dataset = Dataset.load(dataset_path)
    recommender = Recommender.load(bundle_path)
    _check_catalog(recommender.catalog, dataset)
    rankers = {
        MODEL: _Model(recommender, config),
        **fit_baselines(dataset.train_histories, len(dataset.item_ids)),
    }
    info: dict[str, Any] = {}
    start = time.perf_counter()
    settings = as_dict(config)
    with write_artifact(out_path, KIND, config=settings, parents=parents, info=info) as folder:
        result = evaluate(rankers, dataset, config)
        document = report.document(
            result,
            dataset,
            name=bundle_path.name,
            made_from=parents,
            semantic_ids=health(recommender.catalog.codes),
            warnings=_warnings(recommender.manifest.parents, parents["dataset"]),
        )
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (folder / JSON).write_text(text + "\n", encoding="utf-8")
        (folder / HTML).write_text(report.render(document), encoding="utf-8")
        pq.write_table(report.per_user(result, dataset), folder / USERS)
        info["split"] = config.split
        info["seconds"] = round(time.perf_counter() - start, 1)
        info["ranking_seconds"] = {
            name: {mode: round(ranking.seconds, 2) for mode, ranking in modes.items()}
            for name, modes in result.rankings.items()
        }


def _check_catalog(catalog: Catalog, dataset: Dataset) -> None:
    if catalog.item_ids == [str(item_id) for item_id in dataset.item_ids]:
        return
    raise ArtifactError(
        f"the bundle's catalogue ({len(catalog)} items) is not that of the data set "
        f"({len(dataset.item_ids)} items); evaluate a bundle on the data it was made from, or make "
        "the bundle again"
    )


def _warnings(made_from: dict[str, str], dataset: str) -> list[str]:
    """What may make the figures too good: a model that has learned from another split."""
    learned = made_from.get("dataset")
    if learned in (None, dataset):
        return []
    return [
        f"The bundle was made from data set {learned}, this is {dataset}. If they were split "
        "differently, the model may have learned from events that it is asked about here."
    ]


def _show(document: dict[str, Any]) -> None:
    """Tables and headline for the person at the terminal."""
    for warning in document["warnings"]:
        say(f"[bold yellow]warning[/bold yellow]: {warning}")
    for table in report.tables(document):
        console.print(table)
    for sentence in report.headline(document):
        say(sentence)
    if document["split"] == "valid":
        say("These are validation figures: choose with them, quote the test split.")
