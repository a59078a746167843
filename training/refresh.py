"""Refreshes a deployed target on newer interactions, with the same codes and vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from recsys.artifacts import Workspace
from recsys.bundle import Bundle
from recsys.errors import ConfigError
from recsys.models.checkpoint import load_model
from recsys.training.pretrained import load_tokenizer
from recsys.training.supervised import Material


def open_bundle(path: Path, workspace: Workspace) -> Bundle:
    """Load the bundle that a run refreshes, and verify its files.

    Raises:
        ArtifactError: no bundle, or a damaged one.
        ConfigError: the run's own bundle, which the run would replace.
    """
    if path.resolve() == workspace.bundle.resolve():
        raise ConfigError(
            f"refresh: {path} is the bundle that run {workspace.name!r} writes; a refresh is a "
            "separate run, so give it another --name, with a data set and IDs of that name"
        )
    return Bundle.load(path)


def load_deployed(bundle: Bundle, material: Material) -> tuple[Any, Any]:
    """Load the bundle's target with any adapter merged, and its tokenizer or None.

    Raises:
        ConfigError: the items' codes are not those of the bundle.
    """
    import torch

    check_codes(bundle, material)
    model = load_model(bundle.target, dtype=torch.float32)
    has_tokenizer = (bundle.target / "tokenizer_config.json").is_file()
    return model, load_tokenizer(bundle.target) if has_tokenizer else None


def check_codes(bundle: Bundle, material: Material) -> None:
    """Check that common items have equal codes in both, and that all codes fit the vocabulary.

    Raises:
        ConfigError: they do not, or there are no common items.
    """
    remedy = "; use its codes (ids.method: bundle), or train a new target"
    try:
        bundle.vocabulary.encode(material.codes)
    except ValueError as error:
        raise ConfigError(f"refresh: {bundle.path} has other levels: {error}{remedy}") from error
    ids = material.dataset.item_ids
    known = bundle.catalog.index(ids.tolist())
    shared = np.flatnonzero(known >= 0)
    if not len(shared):
        raise ConfigError(f"refresh: no item of the data set is in {bundle.path}")
    there, here = bundle.catalog.codes[known[shared]], material.codes[shared]
    differ = np.flatnonzero((there != here).any(axis=1))
    if len(differ):
        one = differ[0]
        raise ConfigError(
            f"refresh: {len(differ)} of {len(shared)} items have other codes than in "
            f"{bundle.path}, for one {str(ids[shared[one]])!r}: {tuple(there[one].tolist())} "
            f"there, {tuple(here[one].tolist())} here{remedy}"
        )
