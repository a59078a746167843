"""Stage `bundle`: all parts of a run in the one directory that is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from recsys.artifacts import MANIFEST, Manifest, read_manifest, up_to_date, write_artifact
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
)
from recsys.catalog import Catalog
from recsys.dataset import Dataset
from recsys.errors import ArtifactError
from recsys.pipeline import Context
from recsys.prompts import PromptConfig
from recsys.retrieval.sasrec import FILE as SASREC
from recsys.training import sasrec
from recsys.training.target import MODEL
from recsys.vocabulary import Vocabulary


def stage(context: Context) -> Path:
    """Write the `bundle` artifact of a run (`recsys.bundle` says what is in it).

    Raises:
        ArtifactError: a part is missing, or was made from other parts than those at hand.
    """
    workspace = context.workspace
    parts: dict[str, Manifest] = {"dataset": Dataset.manifest(workspace.dataset)}
    for kind in ("ids", "target", "draft"):
        parts[kind] = read_manifest(workspace.run(kind), kind)
    if workspace.run(RETRIEVAL).is_dir():
        parts[RETRIEVAL] = read_manifest(workspace.run(RETRIEVAL), RETRIEVAL)
    if any(sasrec.KIND in manifest.parents for manifest in parts.values()):
        parts[sasrec.KIND] = read_manifest(workspace.run(sasrec.KIND), sasrec.KIND)
    parents = {kind: manifest.digest for kind, manifest in parts.items()}
    for kind, manifest in parts.items():
        for parent, digest in manifest.parents.items():
            if parents.get(parent, digest) != digest:  # a data set's parents are raw files
                raise ArtifactError(
                    f"{workspace.run(kind)} was made from another {parent} than "
                    f"{parents[parent]}; run `recsys run --name {workspace.name}` again"
                )
    path = workspace.bundle
    if not context.force and up_to_date(path, KIND, {}, parents):
        return path
    dataset = Dataset.load(workspace.dataset)
    ids, target, draft = (workspace.run(kind) for kind in ("ids", "target", "draft"))
    codes = np.load(ids / "codes.npy", allow_pickle=False)
    vocabulary = Vocabulary.load(target)
    if vocabulary != Vocabulary.load(draft):
        raise ArtifactError(f"{draft} has another vocabulary than {target}; train it again")
    prompt = PromptConfig(**parts["target"].config["prompt"])
    info: dict[str, Any] = {
        "items": len(codes),
        "levels": int(codes.shape[1]),
        "validation": parts["target"].info["validation"],
    }
    if "fitted_on" in parts["ids"].info:
        info["ids_fitted_on"] = parts["ids"].info["fitted_on"]
    if sasrec.KIND in parts:
        info["sasrec_fitted_on"] = parts[sasrec.KIND].info["fitted_on"]
    if KIND in parts["target"].parents:
        info["refreshes"] = parts["target"].parents[KIND]
    with write_artifact(path, KIND, parents=parents, info=info) as folder:
        shutil.copytree(target / MODEL, folder / TARGET)
        shutil.copytree(draft / MODEL, folder / DRAFT)
        (folder / CATALOG).mkdir()
        Catalog(dataset.items, codes).save(folder / CATALOG)
        for part in (QUANTIZER, ITEM_ENCODER):
            if (ids / part).is_dir():
                shutil.copytree(ids / part, folder / CATALOG / part)
        if RETRIEVAL in parts:
            shutil.copytree(
                workspace.run(RETRIEVAL),
                folder / RETRIEVAL,
                ignore=shutil.ignore_patterns(MANIFEST),
            )
        vocabulary.save(folder)
        _write_json(folder / PROMPTS, prompt.as_dict())
        (folder / EVAL).mkdir()
        if sasrec.KIND in parts:
            shutil.copyfile(workspace.run(sasrec.KIND) / SASREC, folder / EVAL / SASREC)
        _write_json(
            folder / EVAL / "validation.json",
            {
                kind: parts[kind].info["validation"]
                for kind in (sasrec.KIND, "target", "draft", RETRIEVAL)
                if kind in parts and "validation" in parts[kind].info
            },
        )
    return path


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
