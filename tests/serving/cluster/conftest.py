"""Two small bundles of one catalog, which answer differently."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ITEMS = 300


@pytest.fixture(scope="session")
def bundles(tmp_path_factory: pytest.TempPathFactory, random_bundle: Callable[..., Path]) -> Path:
    """The folder of bundles `one` and `two`."""
    folder = tmp_path_factory.mktemp("home") / "bundles"
    for seed, name in enumerate(("one", "two")):
        random_bundle(folder / name, ITEMS, seed=seed, price=np.arange(ITEMS) / 2)
    return folder
