"""Two small bundles of one catalogue, which answer differently."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, PROMPTS, TARGET
from recsys.catalog import Catalog
from recsys.models.checkpoint import build, save_model
from recsys.vocabulary import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path

ITEMS = 300


def write_bundle(path: Path, seed: int) -> Path:
    import torch

    rng = np.random.default_rng(0)
    flat = rng.choice(16**3, ITEMS, replace=False)
    codes = np.stack(np.unravel_index(flat, (16, 16, 16)), axis=1).astype(np.int32)
    items = pa.table(
        {
            "item_id": [f"B{i:04d}" for i in range(ITEMS)],
            "title": [f"Thing no. {i}" for i in range(ITEMS)],
            "text": [""] * ITEMS,
            "price": np.arange(ITEMS) / 2,
        }
    )
    vocabulary = Vocabulary.from_levels([16, 16, 16])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build({"hidden_size": 32, "intermediate_size": 64}, vocabulary)
        for weight in model.parameters():
            weight.data.mul_(3)  # peaked enough that scores rarely tie
    with write_artifact(path, "bundle") as folder:
        (folder / CATALOG).mkdir()
        Catalog(items, codes).save(folder / CATALOG)
        vocabulary.save(folder)
        (folder / PROMPTS).write_text(json.dumps({"max_items": 8, "block": 4}))
        save_model(model, folder / TARGET)
    return path


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of bundles `one` and `two`."""
    folder = tmp_path_factory.mktemp("home") / "bundles"
    for seed, name in enumerate(("one", "two")):
        write_bundle(folder / name, seed)
    return folder
