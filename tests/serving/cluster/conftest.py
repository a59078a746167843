"""Two small bundles of one catalog, which answer differently."""

import numpy as np
import pytest

ITEMS = 300


@pytest.fixture(scope="session")
def bundles(tmp_path_factory, random_bundle):
    folder = tmp_path_factory.mktemp("home") / "bundles"
    for seed, name in enumerate(("one", "two")):
        random_bundle(folder / name, ITEMS, seed=seed, price=np.arange(ITEMS) / 2)
    return folder
