from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from recsys.data.delimited import first_line, read_delimited
from recsys.data.files import is_cut, number, read_integer_lines, read_json, read_text
from recsys.data.item_texts import names, read_item_texts
from recsys.data.semantic_index import aligned, read_index
from recsys.errors import DataError


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        read_text(tmp_path / "gone.txt")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=r"a\.txt: the file is empty"):
        read_text(write(tmp_path / "a.txt", content))


def test_text_that_is_not_utf8_is_refused_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo\nCit\xe9\n")
    with pytest.raises(DataError, match=r"a\.txt:3: byte 0xe9 is not UTF-8"):
        read_text(path)
    assert read_text(path, "latin-1").endswith("Cité\n")


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf1 2\n")
    assert read_integer_lines(path) == [[1, 2]]
    assert first_line(path) == "1 2"


def test_json_that_was_cut_off_says_so_and_where(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"0": [1, 2],\n "1": [3')
    with pytest.raises(DataError, match=r"a\.json:2: not valid JSON: .*looks cut off"):
        read_json(path)


def test_broken_json_that_is_whole_is_not_called_cut(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.json:1: not valid JSON") as error:
        read_json(write(tmp_path / "a.json", "{'0': [1]}"))
    assert "cut" not in str(error.value)


def test_a_repeated_json_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="key '7' occurs twice"):
        read_json(write(tmp_path / "a.json", '{"1": 0, "7": 1, "7": 2}'))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("9" * 5000, "not valid JSON: Exceeds the limit"),
        ("[" * 100_000, "not valid JSON: maximum recursion depth"),
        ('{"a":' * 50_000, "not valid JSON: maximum recursion depth"),
        (r'["\ud800"]', r"a string contains \\ud800, half of a surrogate pair"),
    ],
)
def test_json_that_cannot_be_parsed_is_refused(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json.*: {message}"):
        read_json(write(tmp_path / "a.json", f'{{"0":\n {value}}}'))


def test_pairs_of_halves_are_characters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", r'{"1": "\ud83d\ude00"}')
    assert read_json(path) == {"1": "\U0001f600"}


def test_a_json_list_is_not_an_object(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="expected a JSON object, found list"):
        read_json(write(tmp_path / "a.json", "[1]"))


@pytest.mark.parametrize("key", ["a", "-1", "1.5", "007", "", " 1", "²", "9" * 19])
def test_keys_that_are_no_plain_numbers_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="expected a number as key"):
        number(key, tmp_path)


def test_integer_lines_leave_out_empty_ones_and_take_any_blanks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "1 2\t3\r\n\n 4 \n")
    assert read_integer_lines(path) == [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("2,5,6", "2,5,6"),
        ("2 x", "x"),
        ("2 -1", "-1"),
        ("2 1.5", "1.5"),
        ("2 1_000", "1_000"),
        ("2\u00a03", r"2\\xa03"),
        ("2 " + "9" * 19, "9999"),
    ],
)
def test_a_line_with_anything_but_integers_is_named(tmp_path: Path, line: str, found: str) -> None:
    path = write(tmp_path / "a.txt", f"1 2\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.txt:2: expected integers .* found '{found}"):
        read_integer_lines(path)


def test_a_last_line_without_an_end_is_noticed(tmp_path: Path) -> None:
    assert is_cut(write(tmp_path / "a.txt", "1 2\n3 4"))
    assert not is_cut(write(tmp_path / "b.txt", "1 2\n3 4\n"))


def test_an_index_takes_any_letters(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", '{"1": ["<x_0>", "<lvl_255>"], "0": ["<a_3>", "<b_4>"]}')
    assert read_index(path) == {1: (0, 255), 0: (3, 4)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"0": ["<a_1>", "<b_2>"], "1": ["<a_1>"]}', "item '1' has 1 codes, earlier items have 2"),
        ('{"0": ["<a_1>", "b2"]}', "item '0': 'b2' is not a code"),
        ('{"0": ["<a_1>", 2]}', "item '0': 2 is not a code"),
        ('{"0": ["<a_-1>"]}', "is not a code"),
        ('{"0": "<a_1>"}', "expected a list of codes"),
        ('{"0": []}', "expected a list of codes"),
        ('{"zero": ["<a_1>"]}', "expected a number as key"),
        ("{}", "no items in it"),
    ],
)
def test_a_malformed_index_is_refused(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=rf"a\.json: .*{message}"):
        read_index(write(tmp_path / "a.json", content))


def test_an_index_must_have_each_item_and_no_other(tmp_path: Path) -> None:
    import numpy as np

    codes = {0: (1,), 1: (2,), 2: (3,)}
    path = tmp_path / "index.json"
    assert aligned(codes, np.array([2, 0, 1]), path).tolist() == [[3], [1], [2]]
    with pytest.raises(DataError, match=r"index\.json: no codes for item '3'.*1 such"):
        aligned(codes, np.array([0, 1, 2, 3]), path)
    with pytest.raises(DataError, match=r"index\.json: item '1' is out of range.*2 such"):
        aligned(codes, np.array([0]), path)


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


@pytest.mark.parametrize("entry", ['["title"]', '{"title": 5}', '{"title": {"a": 1}}'])
def test_an_item_that_is_no_mapping_of_texts_is_refused(tmp_path: Path, entry: str) -> None:
    with pytest.raises(DataError, match=r"a\.json: item '0': expected"):
        read_item_texts(write(tmp_path / "a.json", f'{{"0": {entry}}}'))


def test_names_are_split_at_commas_once_each() -> None:
    assert names("Diners, Greek, , Diners") == ["Diners", "Greek"]
    assert names("") == []


TYPES = {"user": pa.string(), "rating": pa.float32()}


def test_ids_stay_as_they_are_written(tmp_path: Path) -> None:
    table = read_delimited(write(tmp_path / "a.csv", "user,rating\n007,1\n"), ",", types=TYPES)
    assert table.to_pylist() == [{"user": "007", "rating": 1.0}]


def test_a_compressed_table_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv.gz", gzip.compress(b"user,rating\nu,1\n"))
    assert first_line(path) == "user,rating"
    assert read_delimited(path, ",", types=TYPES).num_rows == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"user,rating\nu,1\nv,bad\n", r"a\.csv:3: column 'rating': .*'bad'"),
        (b"user,rating\nu,1\nv\n", r"a\.csv:3: Expected 2 columns, got 1"),
        (b"user,rating\nu,1\nv,2,3\n", r"a\.csv:3: Expected 2 columns, got 3"),
        (b"user,rating\nu,1\n\xff\xfe,2\n", r"a\.csv:3: byte 0xff is not UTF-8"),
        (b"user,rating\n", r"a\.csv: no rows"),
        (b"", r"a\.csv: .*[Ee]mpty"),
    ],
)
def test_a_malformed_table_is_refused_by_its_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read_delimited(write(tmp_path / "a.csv", content), ",", types=TYPES)


def test_a_required_value_must_be_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "user,rating\nu,1\nv,\n")
    read_delimited(path, ",", types=TYPES, required=["user"])
    with pytest.raises(DataError, match=r"a\.csv: column 'rating' is empty in data row 2"):
        read_delimited(path, ",", types=TYPES, required=["user", "rating"])
    with pytest.raises(DataError, match="column 'user' is empty in data row 1"):
        read_delimited(write(path, "user,rating\n,1\n"), ",", types=TYPES, required=["user"])


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
