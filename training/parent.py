"""The parent of a run: the bundle whose codes, vocabulary and weights the run continues."""

from __future__ import annotations

from typing import Any

import numpy as np

from recsys.bundle import Bundle
from recsys.errors import ConfigError
from recsys.models.checkpoint import load_model
from recsys.pipeline import Context
from recsys.training.pretrained import load_tokenizer
from recsys.training.supervised import Material


def open_parent(context: Context) -> Bundle | None:
    """Load the bundle of the run's parent and verify its files; None for a run without parent.

    Raises:
        ArtifactError: no bundle, or a damaged one.
    """
    return None if context.parent is None else Bundle.load(context.parent.bundle)


def load_target(parent: Bundle, material: Material) -> tuple[Any, Any]:
    """Load the parent's target with any adapter merged, and its tokenizer or None.

    Raises:
        ConfigError: the items' codes are not those of the parent.
    """
    import torch

    check_codes(parent, material)
    model = load_model(parent.target, dtype=torch.float32)
    has_tokenizer = (parent.target / "tokenizer_config.json").is_file()
    return model, load_tokenizer(parent.target) if has_tokenizer else None


def check_codes(parent: Bundle, material: Material) -> None:
    """Check that common items have equal codes in both, and that all codes fit the vocabulary.

    Raises:
        ConfigError: they do not, or there are no common items.
    """
    remedy = "; make its IDs again (recsys ids train), or train a new target"
    try:
        parent.vocabulary.encode(material.codes)
    except ValueError as error:
        raise ConfigError(f"parent: {parent.path} has other levels: {error}{remedy}") from error
    ids = material.dataset.item_ids
    known = parent.catalog.index(ids.tolist())
    shared = np.flatnonzero(known >= 0)
    if not len(shared):
        raise ConfigError(f"parent: no item of the data set is in {parent.path}")
    there, here = parent.catalog.codes[known[shared]], material.codes[shared]
    differ = np.flatnonzero((there != here).any(axis=1))
    if len(differ):
        raise ConfigError(
            f"parent: {len(differ)} of {len(shared)} items have other codes than in {parent.path}, "
            f"such as {str(ids[shared[differ[0]]])!r}{remedy}"
        )
