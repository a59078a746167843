"""Stage `ids`: makes the semantic IDs of a data set, their quantiser and their health report."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from recsys.bundle import ITEM_ENCODER, QUANTIZER
from recsys.config import as_dict
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.pipeline import Context
from recsys.progress import say
from recsys.retrieval import digest
from recsys.semantic_ids.assign import assign_unique
from recsys.semantic_ids.encoder import PLACED
from recsys.semantic_ids.encoder import save as save_encoder
from recsys.semantic_ids.features import Features, build_features
from recsys.semantic_ids.quantizer import Quantizer, centroid_tensors
from recsys.semantic_ids.report import agreement, compare, health
from recsys.semantic_ids.rqkmeans import RQKMeans
from recsys.semantic_ids.rqvae import RQVAE
from recsys.training import sasrec
from recsys.training.parent import open_parent
from recsys.training.placing import place
from recsys.training.settings import LEARNED, IdsConfig, check_sasrec

KIND = "ids"
SUMMARY = ("items", "levels", "used_codes", "colliding_items")  # of the report, for the manifest
BY_LEVEL = {  # printed name -> key of the report
    "codes": "codebook_size", "used": "used_codes", "perplexity": "perplexity",
    "prefixes": "prefixes", "branching": "branching",
}  # fmt: skip


def stage(context: Context) -> Path:
    """Write the `ids` artifact of a run.

    It has `codes.npy` ((items, L) int32, dense order) and `report.json`. Learned IDs also have
    `centroids.safetensors` (`centroids.0`, `centroids.1`, ...: (V_l, D) of each level),
    `features.npy` ((items, F) float32, without predicted ones), `quantizer/` and `item_encoder/`,
    which computes codes of new items. With it are the codes that each item would get if it were
    new. A run with a parent keeps the codes, the quantiser and the encoder of its bundle, and
    places new items (`recsys.training.placing`).

    Raises:
        ConfigError: the data set has no codes for its items, a new item cannot be placed, or the
            sizes do not fit the data set.
        ArtifactError: the data set, the parent's bundle or the SASRec model for the features is
            missing.
    """
    config = context.settings.section(KIND, IdsConfig)
    end = context.deadline(KIND)
    settings = as_dict(config) | {"seed": context.settings.seed}
    if context.minutes is not None:
        settings["minutes"] = context.minutes
    parents = context.workspace.digests("dataset")
    vectors = None
    if config.method in LEARNED and config.features.collaborative == "sasrec":
        check_sasrec(context.settings, "ids.features.collaborative")
        model, parents[sasrec.KIND] = sasrec.load(context)
        vectors = model.vectors
    parent = open_parent(context)
    if parent is not None:
        parents["bundle"] = parent.manifest.digest
    output = context.output(KIND, settings, parents)
    if output.is_current():
        return output.path
    dataset = Dataset.load(context.workspace.dataset)
    info: dict[str, Any] = {}
    start = time.perf_counter()
    with output.write(info) as folder:
        if parent is not None:
            codes, report = place(dataset, parent, folder)
            info["placed"] = report["placed"]
            if config.method in LEARNED:  # vectors for retrieval
                _features(dataset, config, context.settings.seed, vectors, folder)
        elif config.method == "imported":
            codes, report = _imported(dataset)
        else:
            codes, report = _learned(dataset, config, context.settings.seed, vectors, folder, end)
            info["fitted_on"] = digest(dataset.train_histories)
        report = {"method": config.method, **report}
        np.save(folder / "codes.npy", codes, allow_pickle=False)
        text = json.dumps(report, indent=2)
        (folder / "report.json").write_text(text + "\n", encoding="utf-8")
        info.update(
            seconds=round(time.perf_counter() - start, 1), **{key: report[key] for key in SUMMARY}
        )
    if report["colliding_items"]:
        say(f"{report['colliding_items']} items share their semantic ID with another")
    for sentence in report.get("drift", {}).get("advice", ()):
        say(f"ids: {sentence}")
    return output.path


def print_report(path: Path, as_json: bool = False) -> None:
    """Print the health report of the `ids` artifact at `path`, in lines or as one JSON document."""
    import typer

    report = json.loads((path / "report.json").read_text(encoding="utf-8"))
    if as_json:
        typer.echo(json.dumps(report))
        return
    typer.echo(f"Semantic IDs of {report['items']} items ({report['method']}), level by level:")
    for name, key in BY_LEVEL.items():
        typer.echo(f"  {name:12}" + "".join(f"{value:>10g}" for value in report[key]))
    before = report.get("before_assignment")
    was = f" ({before['colliding_items']} before assignment)" if before else ""
    typer.echo(f"items that share their ID: {report['colliding_items']}{was}")
    if before:
        typer.echo(
            f"unexplained variance: {report['reconstruction_error']:.4f} "
            f"({before['reconstruction_error']:.4f} before assignment)"
        )
    if as_new := report.get("as_new"):
        typer.echo(
            f"items whose first code would be right if they were new: {as_new['first_code']:.1%} "
            f"({as_new['by_chance']:.1%} by chance)"
        )


def _imported(dataset: Dataset) -> tuple[np.ndarray[Any, np.dtype[np.int32]], dict[str, Any]]:
    if dataset.codes is None:
        raise ConfigError(
            "ids.method: 'imported' needs a data set with codes (data.index); this one has none: "
            "use rq-vae or rq-kmeans"
        )
    return dataset.codes.astype(np.int32), health(dataset.codes)


def level_sizes(config: IdsConfig, items: int) -> tuple[int, ...]:
    """Codes of each level for a number of items.

    >>> level_sizes(IdsConfig(levels=2, codebook_size=(4096, 64)), 12_000)
    (4096, 64)
    >>> [level_sizes(IdsConfig(levels=1, codebook_size=None), n)[0] for n in (5, 50, 1_200, 12_000)]
    [5, 8, 64, 256]
    """
    # Without a number, about 16 items for each code of the first level.
    size = config.codebook_size or min(max(1 << (items // 16).bit_length() >> 1, 8), 256, items)
    return size if isinstance(size, tuple) else (size,) * config.levels


def _learned(
    dataset: Dataset,
    config: IdsConfig,
    seed: int,
    vectors: np.ndarray[Any, np.dtype[np.float32]] | None,
    folder: Path,
    end: float,
) -> tuple[np.ndarray[Any, np.dtype[np.int32]], dict[str, Any]]:
    from safetensors.numpy import save_file

    features = _features(dataset, config, seed, vectors, folder)
    sizes = level_sizes(config, len(dataset.item_ids))
    seconds = None if math.isinf(end) else max(end - time.monotonic(), 0.0)
    quantizer: Quantizer
    try:
        if config.method == "rq-vae":
            quantizer = RQVAE.fit(features.matrix, sizes, config.rqvae, seed, seconds=seconds)
        else:
            quantizer = RQKMeans.fit(features.matrix, sizes, config.rqkmeans, seed, seconds=seconds)
    except ValueError as error:
        raise ConfigError(f"ids: {error}") from error
    before = quantizer.encode(features.matrix)
    codes = assign_unique(before, quantizer.latents(features.matrix), quantizer.centroids)
    save_file(centroid_tensors(quantizer.centroids), folder / "centroids.safetensors")
    quantizer.save(folder / QUANTIZER)
    save_encoder(features.encoder, folder / ITEM_ENCODER)
    report = {
        "feature_blocks": features.blocks,
        **compare(before, codes, quantizer, features.matrix),
    }
    if (as_new := features.as_new()) is not None:
        placed = quantizer.encode(as_new)
        np.save(folder / ITEM_ENCODER / PLACED, placed, allow_pickle=False)
        report["as_new"] = agreement(placed, codes)
    return codes, report


def _features(
    dataset: Dataset,
    config: IdsConfig,
    seed: int,
    vectors: np.ndarray[Any, np.dtype[np.float32]] | None,
    folder: Path,
) -> Features:
    """The features of the items; writes those that are known, and not predicted, for retrieval."""
    histories = dataset.train_histories
    features = build_features(dataset.items, histories, config.features, seed, vectors)
    known = features.matrix.shape[1] - features.blocks.get("predicted", 0)
    np.save(folder / "features.npy", features.matrix[:, :known], allow_pickle=False)
    return features
