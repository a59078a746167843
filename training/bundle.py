"""Stage `bundle`: gathers the artifacts of a run in the directory that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from recsys.artifacts import MANIFEST, Manifest, Workspace
from recsys.bundle import (
    CATALOG,
    DRAFT,
    EVAL,
    ITEM_ENCODER,
    KIND,
    PROMPTS,
    QUANTIZER,
    RETRIEVAL,
    TARGET,
    VALIDATION,
)
from recsys.catalog import Catalog
from recsys.config import as_dict
from recsys.errors import ArtifactError
from recsys.pipeline import Context
from recsys.retrieval.retrieval import TRAINED
from recsys.retrieval.sasrec import FILE as SASREC
from recsys.splits import TRAIN
from recsys.training import sasrec
from recsys.training.refit import refit
from recsys.training.settings import BundleConfig
from recsys.training.supervised import Material
from recsys.training.target import MODEL, TrainedTarget

# Kind of a part, a key of its manifest's `info`, and the name of the same in the bundle's.
DESCRIBED = (
    ("ids", "fitted_on", "ids_fitted_on"),
    ("ids", "placed", "placed"),
    (sasrec.KIND, "fitted_on", "sasrec_fitted_on"),
)


def stage(context: Context) -> Path:
    """Write the `bundle` artifact of a run (`recsys.bundle` lists its parts).

    Raises:
        ArtifactError: a part is missing, or was made from other parts than the ones that are there.
    """
    workspace = context.workspace
    parts = _read_parts(workspace)
    parents = {kind: part.digest for kind, part in parts.items()}
    if KIND in parts["target"].parents:
        parents[KIND] = parts["target"].parents[KIND]
    config = context.settings.section(KIND, BundleConfig)
    output = context.output(KIND, as_dict(config), parents)
    if output.is_current():
        return output.path
    material, target = Material.load(workspace), TrainedTarget.load(workspace)
    ids, draft = workspace.run("ids"), workspace.run("draft")
    info: dict[str, Any] = {
        "items": len(material.codes),
        "levels": int(material.codes.shape[1]),
        "validation": parts["target"].info["validation"],
    }
    for kind, key, name in DESCRIBED:
        if kind in parts and key in parts[kind].info:
            info[name] = parts[kind].info[key]
    if context.parent is not None:
        info["parent"] = context.parent.name
    refitted = (
        config.refit and sasrec.KIND in parts and bool((material.dataset.split != TRAIN).any())
    )
    info["refitted"] = refitted
    with output.write(info) as folder:
        shutil.copytree(target.folder / MODEL, folder / TARGET)
        if "draft" in parts:
            shutil.copytree(draft / MODEL, folder / DRAFT)
        (folder / CATALOG).mkdir()
        Catalog(material.dataset.items, material.codes).save(folder / CATALOG)
        for part in (QUANTIZER, ITEM_ENCODER):
            if (ids / part).is_dir():
                shutil.copytree(ids / part, folder / CATALOG / part)
        if RETRIEVAL in parts:
            source = workspace.run(RETRIEVAL)
            shutil.copytree(source, folder / RETRIEVAL, ignore=shutil.ignore_patterns(MANIFEST))
        target.vocabulary.save(folder)
        _write_json(folder / PROMPTS, target.encoder.config.as_dict())
        (folder / EVAL).mkdir()
        if sasrec.KIND in parts:
            evaluated = folder / (TRAINED if refitted else EVAL)
            evaluated.mkdir(exist_ok=True)
            shutil.copyfile(workspace.run(sasrec.KIND) / SASREC, evaluated / SASREC)
        if refitted:
            refit(context, material.dataset).save(folder / EVAL)
        validation = {
            kind: parts[kind].info["validation"]
            for kind in (sasrec.KIND, "target", "draft", RETRIEVAL)
            if kind in parts and "validation" in parts[kind].info
        }
        _write_json(folder / EVAL / VALIDATION, validation)
    return output.path


def _read_parts(workspace: Workspace) -> dict[str, Manifest]:
    """Manifests of the artifacts that go into the bundle, by kind.

    Raises:
        ArtifactError: one is missing, or was made from another parent than the one that is there.
    """
    kinds = ["dataset", "ids", "target"]
    kinds += [kind for kind in ("draft", RETRIEVAL) if workspace.run(kind).is_dir()]
    parts = {kind: workspace.manifest(kind) for kind in kinds}
    if any(sasrec.KIND in manifest.parents for manifest in parts.values()):
        parts[sasrec.KIND] = workspace.manifest(sasrec.KIND)
    for kind, manifest in parts.items():
        for parent, digest in manifest.parents.items():
            # The parents of a data set are raw files, which are no parts.
            if parent in parts and parts[parent].digest != digest:
                raise ArtifactError(
                    f"{workspace.path(kind)} was made from another {parent} than "
                    f"{parts[parent].digest}; run `recsys run --name {workspace.name}` again"
                )
    return parts


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
