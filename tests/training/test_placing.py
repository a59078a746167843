"""Drift of a code book, measured with a scripted encoder."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from recsys.training.placing import measure_drift

ITEMS = pa.table({"item_id": [f"i{n}" for n in range(6)], "x": [0.0, 1.0, 2.0, 3.0, 4.4, 5.4]})


@pytest.fixture
def coder():
    """Features are the column x; the quantiser rounds them."""
    return SimpleNamespace(
        features=SimpleNamespace(encode=lambda items: items["x"].to_numpy()[:, None]),
        quantizer=SimpleNamespace(
            encode=lambda features: np.round(features).astype(np.int32),
            reconstruct=lambda codes: codes.astype(float),
        ),
    )


def test_moved_shared_and_worse_described_items_are_counted(coder):
    codes = np.array([[0], [1], [2], [3], [9], [3]], np.int32)
    meant = np.array([[4], [3]], np.int32)
    drift = measure_drift(ITEMS, np.array([4, 5]), codes, meant, 3, coder)
    assert drift["moved"] == 0.5, "the first one wanted 4"
    assert drift["shared"] == 1, "the second one shares 3"
    assert drift["error_old"] == 0
    assert drift["error_new"] == pytest.approx(0.16)
    assert drift["placed_share"] == 0.5
    first, second, last = drift["advice"]
    assert first.startswith("50% of the items were placed")
    assert "worse than old ones" in second
    assert "full rebuild" in last


def test_a_code_book_that_fits_needs_no_rebuild(coder):
    items = ITEMS.set_column(1, "x", pa.array([0.1, 1.1, 2.1, 3.1, 4.1, 5.1]))
    codes = np.arange(6, dtype=np.int32)[:, None]
    assert measure_drift(items, np.array([5]), codes, codes[5:], 1, coder)["advice"] == []
