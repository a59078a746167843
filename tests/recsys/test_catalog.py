"""Catalog: ids, semantic IDs and attributes, in memory and on disk."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.catalog import CODE_COLUMN, FILE, Catalog
from recsys.errors import DataError

ITEMS = pa.table(
    {
        "item_id": ["a", "7", "ü/☃"],
        "title": ["Tea", "Pot", "Snow"],
        "text": ["", "hot", ""],
        "price": [1.5, None, 2.0],
        "tags": [["x", "y"], [], None],
    }
)
CODES = np.array([[0, 1], [3, 2], [0, 1]], np.int32)  # the first and the last share a leaf


def test_items_are_found_by_their_ids():
    catalog = Catalog(ITEMS, CODES)
    assert len(catalog) == 3
    assert catalog.item_ids == ["a", "7", "ü/☃"]
    assert catalog.titles == ["Tea", "Pot", "Snow"]
    found = catalog.index(["ü/☃", "gone", "a", "a", ""])
    assert found.tolist() == [2, -1, 0, 0, -1]
    assert found.dtype == np.int32
    assert catalog.index([]).tolist() == []


def test_what_is_saved_is_loaded(tmp_path):
    Catalog(ITEMS, CODES).save(tmp_path)
    loaded = Catalog.load(tmp_path)
    assert loaded.items.equals(ITEMS)
    assert loaded.codes.tolist() == CODES.tolist()
    assert loaded.codes.dtype == np.int32


@pytest.mark.parametrize("codes", [np.zeros((2, 2)), np.zeros((4, 2)), np.zeros(3)])
def test_codes_for_other_items_are_refused(codes):
    with pytest.raises(DataError, match=r"codes of shape \(.*\) for 3 items"):
        Catalog(ITEMS, codes.astype(np.int32))


def test_a_negative_code_is_refused_by_its_item():
    with pytest.raises(DataError, match="item '7' has a negative code"):
        Catalog(ITEMS, np.array([[0, 1], [3, -1], [0, -2]], np.int32))


@pytest.mark.parametrize(
    "codes",
    [
        [[0, 1], [0], [1, 2]],
        [[0, 1], [0, None], [1, 2]],
        [[0, 1], None, [1, 2]],
        [["x"], ["y"], ["z"]],
    ],
    ids=["ragged", "null code", "null row", "text"],
)
def test_a_file_with_codes_that_are_no_matrix_is_refused_by_name(tmp_path, codes):
    pq.write_table(ITEMS.append_column(CODE_COLUMN, pa.array(codes)), tmp_path / FILE)
    with pytest.raises(DataError, match=r"items\.parquet"):
        Catalog.load(tmp_path)


def test_a_file_without_codes_is_refused_by_name(tmp_path):
    pq.write_table(ITEMS, tmp_path / FILE)
    with pytest.raises(DataError, match=r"items\.parquet: no column 'semantic_id'"):
        Catalog.load(tmp_path)
