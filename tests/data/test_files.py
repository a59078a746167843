from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from recsys.data.delimited import first_line, read_delimited
from recsys.data.files import read_integer_lines
from recsys.data.item_texts import read_item_texts
from recsys.data.semantic_index import aligned, read_index
from recsys.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf1 2\n")
    assert read_integer_lines(path) == [[1, 2]]
    assert first_line(path) == "1 2"


def test_integer_lines_leave_out_empty_ones_and_take_any_blanks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "1 2\t3\r\n\n 4 \n")
    assert read_integer_lines(path) == [[1, 2, 3], [4]]


def test_an_index_takes_any_letters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"1": ["<x_0>", "<lvl_255>"], "0": ["<a_3>", "<b_4>"]}')
    assert read_index(path) == {1: (0, 255), 0: (3, 4)}


def test_codes_are_in_the_order_of_the_items(tmp_path: Path) -> None:
    codes = {0: (1,), 1: (2,), 2: (3,)}
    assert aligned(codes, np.array([2, 0, 1]), tmp_path).tolist() == [[3], [1], [2]]


def test_item_texts_lose_markup_and_written_out_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.json",
        """{"0": {"title": "A &amp; B", "description": "['One. ', '', '<b>Two</b>']",
                  "brand": "", "categories": "Tools, Home, Tools"},
            "1": {"title": "C", "description": "['cut', 'o"}, "2": {}}""",
    )
    first, second, third = read_item_texts(path).values()
    assert (first.title, first.description) == ("A & B", "One. , Two")
    assert first.brand is None
    assert first.categories == ["Tools", "Home"]
    assert second.description == "cut', 'o"
    assert (third.title, third.categories) == ("", [])


TYPES = {"user": pa.string(), "rating": pa.float32()}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_no_column_may_hold_bytes_that_are_no_text(
    tmp_path: Path, pack: Callable[..., bytes]
) -> None:
    path = write(tmp_path / "a.csv.gz", pack(b"user,rating,note\nu,1,fine\nv,2,\xe9t\xe9\n"))
    path = path if pack is gzip.compress else path.rename(tmp_path / "a.csv")
    with pytest.raises(DataError, match=r":3: byte 0xe9 is not UTF-8"):
        read_delimited(path, ",", types=TYPES)


def test_a_header_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        first_line(write(tmp_path / "a.csv", "\n1,2\n"))
    with pytest.raises(DataError, match="cannot be read"):
        first_line(tmp_path / "gone.csv")
    with pytest.raises(DataError, match=r"b\.csv:1: byte 0xe9 is not UTF-8"):
        first_line(write(tmp_path / "b.csv", b"\xe9t\xe9\n"))
