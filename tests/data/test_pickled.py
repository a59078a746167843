"""Pickled arrays are read without running them, and nothing but arrays of numbers is."""

from __future__ import annotations

import os
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.data.pickled import read_pickled_dict
from recsys.data.prepare import DataConfig, build
from recsys.errors import DataError, RecsysError

HISTORIES = {0: [1, 2, 70_000], 1: [], 2: [5]}
LONG = list(range(1000))
REPEATED = {key: LONG for key in range(100)}  # noqa: C420 - one list on purpose


def stored(path: Path, value: Any) -> Path:
    np.save(path, np.array(value, object), allow_pickle=True)
    return path


def with_program(path: Path, program: bytes) -> Path:
    stored(path, HISTORIES)
    raw = path.read_bytes()
    path.write_bytes(raw[: raw.index(b"\n") + 1] + program)
    return path


class Evil:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL"],)


@pytest.mark.parametrize("protocol", range(3, 6))
def test_what_numpy_stores_is_read(tmp_path: Path, protocol: int) -> None:
    program = pickle.dumps(np.array(HISTORIES, object), protocol)
    assert read_pickled_dict(with_program(tmp_path / "a.npy", program)) == HISTORIES


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("where", ["alone", "value", "inside"])
def test_a_pickle_that_would_call_something_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int, where: str
) -> None:
    target = tmp_path / "made"
    monkeypatch.setenv("EVIL", str(target))
    evil = {"alone": Evil(), "value": {0: Evil()}, "inside": {0: [1, Evil()]}}[where]
    value = evil if where == "alone" else np.array(evil, object)
    program = pickle.dumps(value, protocol)
    with pytest.raises(DataError, match=r"byte \d+: .* refused and nothing of it was run"):
        read_pickled_dict(with_program(tmp_path / "a.npy", program))
    assert not target.exists()
    pickle.loads(program)  # it is evil indeed
    assert target.exists()


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (b"cposix\nsystem\n(S'true'\ntR.", "GLOBAL .*'posix system'"),
        (b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.", "STACK_GLOBAL .*'builtins eval'"),
        (b"(i__main__\nX\n.", "instruction INST"),
        (b"(cos\nsystem\no.", "GLOBAL"),
        (b"\x80\x02\x82\x01.", "instruction EXT1"),
        (b"Pid\n.", "instruction PERSID"),
        (b"\x80\x02]K\x01\x81.", "instruction NEWOBJ"),
        (b"\x80\x02cnumpy\nndarray\n(tR.", "REDUCE .*it calls something"),
        (b"\x80\x02]}b.", "BUILD .*it changes something"),
        (b"\x80\x02K\x01K\x02a.", "APPEND .*no list"),
        (b"\x80\x02e.", "APPENDS"),
        (b"\x80\x02h\x07.", "BINGET"),
        (b"\x80\x02.", "STOP"),
        (b"\x80\x02]", "pickle ends|exhausted"),
        (b"\x80\x02\x8b\xff\xff\xff\x7f", "LONG4|PROTO"),
        (b"", "exhausted|ends"),
        (b"\x80\x02c\\y\nx\n.", "invalid escape"),
    ],
)
def test_other_instructions_are_named(tmp_path: Path, program: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickled_dict(with_program(tmp_path / "a.npy", program))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2], "holds object of shape"),
        ({"a": [1]}, "entry 'a'"),
        ({1: "text"}, "entry '1'"),
        ({1: [[2]]}, "entry '1'"),
        ({1: [True]}, "entry '1'"),
        ({1: [1 << 70]}, "more than 64 bits"),
        ({1: [0.5]}, "BINFLOAT"),
        (REPEATED, "lists are repeated"),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_pickled_dict(stored(tmp_path / "a.npy", value))


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "n.npy", np.arange(3))
    with pytest.raises(DataError, match="holds int64 of shape"):
        read_pickled_dict(tmp_path / "n.npy")
    (tmp_path / "t.npy").write_text("text")
    with pytest.raises(DataError, match=r"not a \.npy file"):
        read_pickled_dict(tmp_path / "t.npy")
    with pytest.raises(DataError, match="No such file"):
        read_pickled_dict(tmp_path / "none.npy")


@given(st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=4), st.integers(0, 4)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_damage_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[float, bytes, int]]
) -> None:
    program = pickle.dumps(np.array(HISTORIES, object), 3)
    for place, filling, cut in damage:
        at = int(place * len(program))
        program = program[:at] + filling + program[at + cut :]
    path = with_program(tmp_path_factory.getbasetemp() / "damaged.npy", program)
    try:
        found = read_pickled_dict(path)
    except RecsysError:
        return
    assert all(type(i) is int for items in found.values() for i in items)


def test_the_dicts_of_atspeed_are_its_texts(datasets: Path, tmp_path: Path) -> None:
    folder = datasets / "atspeed-beauty"
    if not (folder / "training_dict.npy").is_file():
        pytest.skip(f"no {folder}")
    for name in ("training", "validation", "testing"):
        (tmp_path / f"{name}_dict.npy").symlink_to(folder / f"{name}_dict.npy")
    (tmp_path / "index.json").symlink_to(folder / "beauty.LCRec-1e-3lr.json")
    made, expected = (
        build(DataConfig(source="atspeed", path=str(path))) for path in (tmp_path, folder)
    )
    for name, column in expected.dataset.events._asdict().items():
        np.testing.assert_array_equal(getattr(made.dataset.events, name), column)
    assert made.dataset.interactions.user_ids.tolist() == (
        expected.dataset.interactions.user_ids.tolist()
    )
    assert made.dataset.items.equals(expected.dataset.items)
    used = {o.name for o, *_ in pickletools.genops(pickle.dumps(np.array(HISTORIES, object), 3))}
    assert "REDUCE" in used  # the instruction that runs things is interpreted, not done
