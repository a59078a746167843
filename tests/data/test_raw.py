from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from recsys.data.raw import RawData, events_table, items_table
from recsys.errors import DataError

EVENTS = events_table(["u", "u"], ["a", "b"])
ITEMS = items_table(["a", "b"], {"a": "A"}, {}, {})


def test_an_item_without_a_title_is_called_by_its_id() -> None:
    assert ITEMS.to_pylist() == [
        {"item_id": "a", "title": "A", "text": ""},
        {"item_id": "b", "title": "b", "text": ""},
    ]


@pytest.mark.parametrize("name", ["title", "semantic_id"])
def test_an_attribute_may_not_take_a_reserved_name(name: str) -> None:
    with pytest.raises(DataError, match=f"attribute '{name}' has a reserved name"):
        items_table(["a"], {}, {}, {name: pa.array([1])})


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="items lack the columns"):
        RawData(EVENTS, ITEMS.select(["item_id"]))
    with pytest.raises(DataError, match="item 'a' is described twice"):
        RawData(EVENTS, items_table(["b", "a", "a"], {}, {}, {}))
    with pytest.raises(DataError, match="item 'b' occurs in events but"):
        RawData(EVENTS, items_table(["a"], {}, {}, {}))
    with pytest.raises(DataError, match="codes: 1 rows for 2 items"):
        RawData(EVENTS, ITEMS, np.zeros((1, 2), np.int32))
