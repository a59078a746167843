"""A bundle as a folder that the Hugging Face Hub takes as it is.

README.md               model card, whose figures are those of the evaluation report
bundle/target, draft    stock checkpoints in safetensors; a separate adapter is merged into them
bundle/...              the other parts of the bundle (`recsys.bundle`)

`Recommender.from_pretrained` reads it. Nothing is written but known parts of a bundle: no ids of
users, no events, and none of the report's examples, which are histories of users.
"""

from __future__ import annotations

import json
import re
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from recsys.artifacts import Manifest, Workspace, read_manifest, write_artifact
from recsys.bundle import CATALOG, DRAFT, EVAL, KIND, PROMPTS, RETRIEVAL, TARGET, Bundle
from recsys.errors import ArtifactError, ConfigError
from recsys.evaluation import report as reports
from recsys.evaluation.protocol import find
from recsys.hub import BUNDLE, CARD
from recsys.models.checkpoint import ADAPTER, load_model, save_model
from recsys.vocabulary import FILE as VOCABULARY

PARTS = {TARGET, DRAFT, CATALOG, RETRIEVAL, EVAL, PROMPTS, VOCABULARY}
TEMPLATE = "model_card.md.jinja"
LICENCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+-]*")
FEW = 5  # events of an item below which its row of `retrieval/` is that of a few users
SETTINGS = (
    "objective", "learning_rate", "batch_tokens", "weight_decay", "label_smoothing",
    "soft_labels_from", "seed",
)  # fmt: skip


def export(bundle: Path, out: Path, *, report: Path | None = None, licence: str = "unknown") -> str:
    """Write the folder of a bundle; returns the digest of the bundle inside.

    It is the digest of the original unless an adapter is merged.

    Args:
        bundle: the bundle's directory, which is verified first.
        out: the folder, which does not exist or is empty, outside the bundle.
        report: `report.json` of `recsys evaluate`; None takes the one of the bundle's name beside
            it, if it is of this bundle, and otherwise writes a card without figures.
        licence: identifier of the licence, as the Hub lists them.

    Raises:
        ArtifactError: not a bundle, one with unknown parts, `out` is not empty, or `report` is not
            of this bundle.
        ConfigError: `licence` is no identifier.
    """
    if not LICENCE.fullmatch(licence):
        raise ConfigError(
            f"--license {licence!r} is not an identifier of a licence, such as apache-2.0"
        )
    found = Bundle.load(bundle)
    for name in found.manifest.files:
        if name.partition("/")[0] not in PARTS:
            raise ArtifactError(
                f"{bundle}: {name!r} is no known part of a bundle and may hold personal data; "
                "export the bundle that `recsys bundle` makes"
            )
    _require_new(out, bundle)
    place = Path(bundle).absolute()
    workspace = Workspace(place.parent.parent, place.name)
    document = _read_report(found, report, workspace)
    _make_folder(out)
    source = found.manifest
    with write_artifact(
        out / BUNDLE, KIND, config=source.config, parents=source.parents, info=source.info
    ) as folder:
        _copy(found, folder)
    digest = read_manifest(out / BUNDLE, KIND).digest
    card = _write_card(found, place.name, digest, document, _trained(source, workspace), licence)
    (out / CARD).write_text(card, encoding="utf-8")
    return digest


def _copy(bundle: Bundle, folder: Path) -> None:
    """Copy the files of the manifest, and merge adapters: stock loaders would leave them out."""
    for name in bundle.manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path / name, folder / name)
    for part in (TARGET, DRAFT):
        if (folder / part / ADAPTER).is_dir():
            model = load_model(folder / part)
            shutil.rmtree(folder / part / ADAPTER)
            for weights in (folder / part).glob("*.safetensors*"):  # and the index of shards
                weights.unlink()
            save_model(model, folder / part)


def _read_report(bundle: Bundle, file: Path | None, workspace: Workspace) -> dict[str, Any] | None:
    given = file is not None
    file = file or workspace.report / "report.json"
    if not given and not file.is_file():
        return None
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        schema, made_from = document["schema"], document["made_from"]["bundle"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"--report {file}: not a report of `recsys evaluate`: {error}"
        ) from error
    if schema != reports.SCHEMA:
        raise ArtifactError(
            f"--report {file} has schema {schema}, not {reports.SCHEMA}; run `recsys evaluate` "
            "again"
        )
    if made_from == bundle.manifest.digest:
        return document
    if given:
        raise ArtifactError(
            f"--report {file} is of bundle {made_from}, not of {bundle.manifest.digest}; run "
            "`recsys evaluate` again"
        )
    return None


def _trained(bundle: Manifest, workspace: Workspace) -> dict[str, dict[str, Any]]:
    """Settings and outcome of the training of target and draft, if the run is still there.

    Only names in `SETTINGS` are read: others hold paths of the machine.
    """
    found = {}
    for kind in (TARGET, DRAFT):
        try:
            manifest = workspace.manifest(kind)
        except ArtifactError:
            continue
        if manifest.digest == bundle.parents.get(kind):
            settings = {name: manifest.config[name] for name in SETTINGS if name in manifest.config}
            outcome = {name: manifest.info.get(name) for name in ("epochs", "steps", "seconds")}
            found[kind] = settings | outcome
    return found


def _write_card(
    bundle: Bundle,
    name: str,
    digest: str,
    document: dict[str, Any] | None,
    trained: dict[str, dict[str, Any]],
    licence: str,
) -> str:
    """The model card: metadata as YAML, then Markdown."""
    from huggingface_hub import ModelCardData
    from jinja2 import Environment, StrictUndefined

    figures = [] if document is None else _figures(document)
    about = {} if document is None else _results(name, document, figures)
    metadata = ModelCardData(
        license=licence,
        library_name="recbeam",
        tags=["recommendation", "generative-recommendation", "semantic-ids"],
        **about,
    )
    environment = Environment(  # noqa: S701 - Markdown, of our own words and numbers
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    text = files("recsys.exporting").joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(text).render(
        metadata=metadata.to_yaml(),
        name=name,
        digest=digest,
        bundle=bundle,
        folder=BUNDLE,
        models=_models(bundle),
        columns=[column for column in bundle.catalog.items.column_names if column != "item_id"],
        report=document,
        headline=[] if document is None else reports.headline(document),
        figures=figures,
        trained=trained,
        licence=licence,
        few=FEW,
        rare=_rare(bundle),
    )


def _figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the report's metrics at its headline: `recall` and `ndcg` of each ranker."""
    about = document["headline"]
    return [
        find(document["metrics"], ranker=ranker, metric=metric, **about)
        for ranker in document["rankers"]
        for metric in ("recall", "ndcg")
    ]


def _results(name: str, document: dict[str, Any], figures: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of the card's metadata: the figures of the served list."""
    from huggingface_hub import EvalResult

    served = [row for row in figures if row["ranker"] == document["rankers"][0]]
    results = [
        EvalResult(
            task_type="recommendation",
            task_name="next item",
            dataset_type=name,
            dataset_name=name,
            dataset_split=document["split"],
            metric_type=f"{row['metric']}_at_{row['k']}",
            metric_name=f"{reports.NAMES[row['metric']]}@{row['k']}, seen items {row['seen']}",
            metric_value=row["mean"],
            metric_args={"confidence": 0.95, "low": row["low"], "high": row["high"]},
        )
        for row in served
    ]
    return {"model_name": name, "eval_results": results}


def _models(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Of target and draft: the values of `config.json` that say what they are."""
    names = ("model_type", "num_hidden_layers", "hidden_size", "vocab_size", "dtype")
    found = {}
    for part, folder in ((TARGET, bundle.target), (DRAFT, bundle.draft)):
        if folder is not None:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            found[part] = {name: config.get(name) for name in names}
    return found


def _rare(bundle: Bundle) -> int | None:
    """How many items have some events, but fewer than `FEW`; None without retrieval."""
    retrieval = bundle.retrieval
    if retrieval is None:
        return None
    counts = np.asarray(retrieval.counts)
    return int(((counts > 0) & (counts < FEW)).sum())


def _require_new(out: Path, bundle: Path) -> None:
    """Refuse a folder in which something lies, or that would change the bundle.

    Raises:
        ArtifactError: `out` exists and is not an empty folder, or lies in `bundle`.
    """
    if out.resolve().is_relative_to(Path(bundle).resolve()):
        raise ArtifactError(f"--out {out} lies in the bundle {bundle}; name another folder")
    if out.is_symlink():
        raise ArtifactError(f"--out {out} is a link; name a folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArtifactError(f"--out {out} is not empty; name another folder or remove it")


def _make_folder(out: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        ArtifactError: the file system does not allow it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"--out {out} cannot be made: {error.strerror}; name another folder"
        raise ArtifactError(text) from error
