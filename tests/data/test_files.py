from __future__ import annotations

from pathlib import Path

import numpy as np

from recsys.data.files import read_integer_lines, read_lines
from recsys.data.item_texts import aligned, read_index, read_item_texts


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf1 2\n")
    assert read_integer_lines(path) == [[1, 2]]
    assert next(read_lines(path)) == (1, "1 2")


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
