"""Whatever happens to a file, a reader either reads it or says what is wrong with it."""

from __future__ import annotations

import re
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.prepare import DataConfig, build
from recsys.errors import RecsysError

FLAGS = "|".join(["0"] * 19)
SOURCES: dict[str, tuple[str, dict[str, str]]] = {
    "s3rec": ("X.txt", {
        "X.txt": "1 1 2 3\n2 3 1\n",
        "X_item2attributes.json": '{"1": [5, 6], "2": [6], "3": []}',
    }),
    "atspeed": (".", {
        "sequential_train.txt": "1 1 2\n2 2\n",
        "sequential_valid.txt": "1 \n2 1\n",
        "sequential_test.txt": "1 2\n2\n",
        "index.json": '{"0": ["<a_1>", "<b_2>"], "1": ["<a_1>", "<b_3>"]}',
    }),
    "lcrec": ("X.inter.json", {
        "X.inter.json": '{"0": [0, 1], "1": [1]}',
        "X.item.json": '{"0": {"title": "A", "description": "[\'x\']"}, "1": {"title": "B"}}',
        "X.index.json": '{"0": ["<a_1>"], "1": ["<a_2>"]}',
    }),
    "movielens": (".", {
        "u.data": "1\t1\t5\t100\n2\t2\t4\t90\n",
        "u.item": f"1|A (1995)|x||y|{FLAGS}\n2|B (1996)|x||y|{FLAGS}\n",
    }),
    "minionerec": (".", {
        "train/X.csv": 'user_id,history_item_id,item_id\nu,"[0, 1]",2\nv,[1],0\n',
        "test/X.csv": 'user_id,history_item_id,item_id\nu,"[0, 1, 2]",1\n',
        "index/X.item.json": '{"0": {"title": "A"}, "1": {"title": "B"}, "2": {"title": "C"}}',
    }),
    "amazon": ("X_5.json", {
        "X_5.json": '{"reviewerID": "u", "asin": "a", "overall": 5.0, "unixReviewTime": 9,'
        ' "reviewText": "Good"}\n{"reviewerID": "v", "asin": "b", "unixReviewTime": 7}\n',
        "meta_X.json": "{'asin': 'a', 'title': 'A', 'categories': [['x', 'y']], 'price': 1.5}\n",
    }),
    "recbole": ("X.inter", {
        "X.inter": "user_id:token\titem_id:token\ttimestamp:float\nu\ta\t1\nv\tb\t2.5\n",
        "X.item": "item_id:token\ttitle:token_seq\tyear:float\tv:float_seq\na\tA B\t1\t1 2\n",
        "X.user": "user_id:token\tage:float\nu\t3\n",
    }),
    "table": ("e.csv", {
        "e.csv": "user,item,timestamp,rating\nu,a,1500000001,5\nv,\"b,c\",1500000002,4\n",
        "i.csv": "item,title,price,tags\na,A,1.5,x|y\n\"b,c\",B,2,z\n",
    }),
}  # fmt: skip
# What parsers of numbers, JSON and tables stumble over.
ODD = [
    b"", b" ", b",", b"-1", b"1.5", b"1e400", b"NaN", b"null", b"true", b"9" * 19, b"9" * 400,
    b"9" * 5000, b"[" * 5000, b"[]", b"{}", b'"', b"'", b'"\\ud800"', b"'\\ud800'", b'"\\u0000"',
    b"\0", b"\xff", b"\n", b"\r", b"\t", b"|", "²".encode(),
]  # fmt: skip
TOKENS = re.compile(rb"[A-Za-z0-9_.<>]+|\"[^\"]*\"|'[^']*'|\[[^\[\]]*\]|\s|[,:|]")
damage = st.tuples(st.floats(0, 1), st.integers(0, 3), st.binary(max_size=3))


def read(source: str, broken: str, content: bytes) -> None:
    """Read a source of which one file has another content."""
    main, contents = SOURCES[source]
    with tempfile.TemporaryDirectory() as folder:
        for name, text in contents.items():
            Path(folder, name).parent.mkdir(exist_ok=True)
            Path(folder, name).write_bytes(content if name == broken else text.encode())
        items = str(Path(folder, "i.csv")) if source == "table" else None
        config = DataConfig(source=source, path=str(Path(folder, main)), items=items)
        with suppress(RecsysError):
            build(config)


@pytest.mark.parametrize("source", SOURCES)
@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_damaged_files_are_read_or_refused_with_words(source: str, data: st.DataObject) -> None:
    contents = SOURCES[source][1]
    broken = data.draw(st.sampled_from(sorted(contents)))
    content = contents[broken].encode()
    for place, cut, filling in data.draw(st.lists(damage, min_size=1, max_size=3)):
        at = int(place * len(content))
        content = content[:at] + filling + content[at + cut :]
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content)))]
    read(source, broken, content)


@pytest.mark.parametrize("source", SOURCES)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_odd_values_are_read_or_refused_with_words(source: str, data: st.DataObject) -> None:
    contents = SOURCES[source][1]
    broken = data.draw(st.sampled_from(sorted(contents)))
    content = contents[broken].encode()
    for _ in range(data.draw(st.integers(1, 2))):
        tokens = [match.span() for match in TOKENS.finditer(content)]
        start, end = data.draw(st.sampled_from(tokens or [(0, 0)]))
        content = content[:start] + data.draw(st.sampled_from(ODD)) + content[end:]
    read(source, broken, content)


@pytest.mark.parametrize("source", SOURCES)
def test_files_cut_off_anywhere_are_read_or_refused_with_words(source: str) -> None:
    for broken, text in SOURCES[source][1].items():
        for end in range(len(text)):
            read(source, broken, text[:end].encode())


def test_columns_without_names_are_read_or_refused_with_words() -> None:
    """Found by `make fuzz`: two columns had no name, and one of them was the users'."""
    content = SOURCES["table"][1]["e.csv"].encode()
    for start, end in ((5, 9), (16, 22)):
        content = content[:start] + content[end:]
    read("table", "e.csv", content)
