"""The forms of ids in new files, against those of the data before."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from recsys.data.ids import refuse_lost_zeros
from recsys.errors import DataError


def test_ids_that_lost_their_zeros_are_refused() -> None:
    known = pa.array(["00001", "00001", "00010", "7", "ab01"])
    refuse_lost_zeros("item", pa.array(["00001", "7", "11", "b01"]), known, Path("night.csv"))
    with pytest.raises(DataError) as error:
        refuse_lost_zeros("item", pa.array(["10", "1", "1", "7"]), known, Path("night.csv"))
    for part in ("night.csv: 2 ids of items", "'10' and '00010'", "export the ids as text"):
        assert part in str(error.value)


def test_ids_that_the_data_tell_apart_are_known() -> None:
    known = pa.array(["1", "00001", "7"])
    refuse_lost_zeros("user", pa.array(["1", "00001", "7"]), known, Path("night.csv"))
    with pytest.raises(DataError, match="'007' and '7'"):
        refuse_lost_zeros("user", pa.array(["007"]), known, Path("night.csv"))
