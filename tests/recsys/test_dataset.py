from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import interactions_of

from recsys.artifacts import write_artifact
from recsys.dataset import DISLIKED_COLUMNS, Dataset, Disliked
from recsys.errors import DataError
from recsys.interactions import Behaviour
from recsys.splits import TEST, TRAIN, VALID

ITEMS = pa.table(
    {
        "item_id": ["a", "b", "c"],
        "title": ["A", "B", "C"],
        "text": ["", "x", ""],
        "tags": [["p", "q"], [], None],
        "price": [1.5, None, 2.0],
    }
)
# u: a b | c | a        v: c | | b a
ROWS = [
    ("u", "a", TRAIN), ("u", "b", TRAIN), ("u", "c", VALID), ("u", "a", TEST),
    ("v", "c", TRAIN), ("v", "b", TEST), ("v", "a", TEST),
]  # fmt: skip


def dataset(rows: list[tuple[str, str, int]] = ROWS, **changes: Any) -> Dataset:
    interactions = interactions_of(
        [u for u, _, _ in rows],
        [i for _, i, _ in rows],
        item_ids=np.array(ITEMS["item_id"].to_pylist()),
    )
    parts = {
        "interactions": interactions,
        "split": np.array([label for *_, label in rows], np.uint8),
        "items": ITEMS,
        "codes": np.array([[0, 1], [0, 2], [1, 0]], np.int32),
    }
    return Dataset(**(parts | changes))


def lists(histories: Any) -> list[list[int]]:
    return [h.tolist() for h in histories]


def test_examples_have_all_that_came_before_the_split() -> None:
    data = dataset()
    assert lists(data.train_histories) == [[0, 1], [2]]
    valid, test = data.examples("valid"), data.examples("test")
    assert valid.users.tolist() == [0]
    assert lists(valid.histories) == [[0, 1]]
    assert lists(valid.targets) == [[2]]
    assert test.users.tolist() == [0, 1]
    assert lists(test.histories) == [[0, 1, 2], [2]]
    assert lists(test.targets) == [[0], [1]]
    assert lists(data.examples("test", "all").targets) == [[0], [1, 0]]


@given(
    st.lists(
        st.tuples(st.sampled_from("uvw"), st.sampled_from("abc"), st.sampled_from([0, 1, 2])),
        max_size=30,
    )
)
def test_no_example_sees_its_own_future(rows: list[tuple[str, str, int]]) -> None:
    order = list(dict.fromkeys(u for u, *_ in rows))
    rows = sorted(rows, key=lambda row: (order.index(row[0]), row[2]))
    data = dataset(rows)
    for name, label in (("valid", VALID), ("test", TEST)):
        examples = data.examples(name, "all")  # type: ignore[arg-type]
        for user, history, targets in zip(
            examples.users, examples.histories, examples.targets, strict=True
        ):
            mine = [("abc".index(i), split) for u, i, split in rows if u == order[user]]
            assert history.tolist() == [i for i, split in mine if split < label]
            assert targets.tolist() == [i for i, split in mine if split == label] != []


def save(data: Dataset, path: Path) -> Path:
    with write_artifact(path, "dataset") as folder:
        data.save(folder)
    return path


@pytest.mark.parametrize("baskets", [True, False])
def test_what_is_saved_is_loaded(tmp_path: Path, baskets: bool) -> None:
    interactions = interactions_of(["u", "u"], ["a", "b"], [2**40, 5], [4.5, np.nan],
                                   item_ids=np.array(["a", "b", "c"]))  # fmt: skip
    timed = Dataset(interactions, np.zeros(2, np.uint8), ITEMS, baskets=baskets)
    for number, before in enumerate((dataset(), timed, typed())):
        after = Dataset.load(save(before, tmp_path / str(number)))
        for name in ("user", "item", "timestamp", "rating", "user_ids", "item_ids", "behaviour"):
            one, other = getattr(before.interactions, name), getattr(after.interactions, name)
            np.testing.assert_array_equal(one, other)
        assert after.interactions.user.dtype == np.int32
        assert after.interactions.has_time == before.interactions.has_time
        assert after.split.tolist() == before.split.tolist()
        assert after.items.to_pylist() == ITEMS.to_pylist()
        assert after.attributes == ["tags", "price"]
        assert (after.codes is None) == (before.codes is None)
        assert before.codes is None or after.codes.tolist() == before.codes.tolist()  # type: ignore[union-attr]
        assert (after.behaviours, after.baskets) == (before.behaviours, before.baskets)
        assert Dataset.manifest(tmp_path / str(number)).kind == "dataset"
    behaviour = Dataset.load(tmp_path / "2").events.behaviour
    assert behaviour is not None
    assert behaviour.tolist() == [0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": np.zeros(3, np.uint8)}, "3 labels for 7 events"),
        ({"split": np.full(7, 3, np.uint8)}, "labels must be among"),
        ({"split": np.array([0, 0, 2, 1, 0, 2, 2], np.uint8)}, "must come after the training"),
        ({"items": ITEMS.drop_columns(["title"])}, "items lack the columns"),
        ({"items": ITEMS.take([1, 0, 2])}, "in the same order"),
        ({"codes": np.zeros((2, 2), np.int32)}, "codes: 2 rows for 3 items"),
    ],
)
def test_a_data_set_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        dataset(**changes)


def break_parquet(folder: Path) -> None:
    (folder / "items.parquet").write_bytes(b"PAR1")


def lose_a_file(folder: Path) -> None:
    (folder / "users.parquet").unlink()


def lose_a_column(folder: Path) -> None:
    events = pq.read_table(folder / "interactions.parquet")
    pq.write_table(events.drop_columns(["split"]), folder / "interactions.parquet")


def hide_a_pickle(folder: Path) -> None:
    np.save(folder / "codes.npy", np.array([{"a": 1}], object), allow_pickle=True)


@pytest.mark.parametrize("damage", [break_parquet, lose_a_file, lose_a_column, hide_a_pickle])
def test_a_damaged_data_set_is_refused(tmp_path: Path, damage: Any) -> None:
    path = save(dataset(), tmp_path / "d")
    damage(path)
    with pytest.raises(DataError, match="prepare the data set again"):
        Dataset.load(path)


TYPES = (Behaviour("view", "context", 0.2), Behaviour("purchase", "target", 1.0))


def typed() -> Dataset:
    """The data set of ROWS with types; u: view view | purchase | view; v: view | view purchase."""
    data = dataset()
    types = np.array([0, 0, 1, 0, 0, 0, 1], np.uint8)
    interactions = replace(data.interactions, behaviour=types)
    return replace(data, interactions=interactions, behaviours=TYPES)


def test_the_target_is_the_first_event_of_a_target_type() -> None:
    data = typed()
    valid, test = data.examples("valid"), data.examples("test")
    assert valid.users.tolist() == [0]
    assert lists(valid.targets) == [[2]]
    assert test.users.tolist() == [1]  # the test event of u is a view
    assert lists(test.histories) == [[2, 1]]  # also the view in the test period
    assert lists(test.targets) == [[0]]
    assert test.histories.behaviours is not None
    assert test.histories.behaviours.tolist() == [0, 0]
    assert test.targets.behaviours is not None
    assert test.targets.behaviours.tolist() == [1]
    assert lists(data.examples("test", "all").targets) == [[0]]
    assert data.train_histories.behaviours is not None
    assert data.train_histories.behaviours.tolist() == [0, 0, 0]


def test_types_and_their_names_must_agree() -> None:
    data = typed()
    with pytest.raises(DataError, match="if and only if"):
        replace(data, behaviours=())
    with pytest.raises(DataError, match="type 1 is not among the 1 behaviours"):
        replace(data, behaviours=TYPES[:1])


def test_availability_is_no_attribute() -> None:
    items = ITEMS.append_column("available", pa.array([True, False, True]))
    assert dataset(items=items).attributes == ["tags", "price"]


def disliked(*rows: tuple[str, str, int, bool]) -> Disliked:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return Disliked(pa.table(columns, schema=DISLIKED_COLUMNS))


def test_items_disliked_before_the_target_are_hidden(tmp_path: Path) -> None:
    events = interactions_of(
        list("uuuvvv"), list("abcabc"), [0, 10, 30, 0, 10, 30], item_ids=np.array(list("abcdef"))
    )
    items = pa.table({name: list("abcdef") for name in ("item_id", "title", "text")})
    found = disliked(
        ("u", "d", 20, True), ("u", "e", 30, True),  # as late as the target
        ("u", "b", 5, False),  # chosen again before the target
        ("v", "gone", 1, True), ("v", "f", 1, True), ("v", "c", 2, False),  # chosen again later
        ("w", "a", 1, True),
    )  # fmt: skip
    labels = np.array([TRAIN, VALID, TEST] * 2, np.uint8)
    with write_artifact(tmp_path / "d", "dataset") as folder:
        Dataset(events, labels, items, disliked=found).save(folder)
    data = Dataset.load(tmp_path / "d")
    test = data.examples("test").histories
    assert test.hidden is not None
    assert lists(test.hidden) == [[3], [5, 2]]
    assert lists(test.take([1]).left_out(True)) == [[0, 1, 5, 2]]
    assert lists(test.left_out(False)) == [[3], [5, 2]]
    assert data.disliked is not None
    assert data.disliked.of(["v", "nobody", "w", "u"]) == [["gone", "f"], [], ["a"], ["d", "e"]]


def test_validation_has_one_target_of_the_basket_for_each_user() -> None:
    rows = [(f"u{n:03d}", item, label) for n in range(300) for item, label in
            (("c", TRAIN), ("a", VALID), ("b", VALID))]  # fmt: skip
    data = dataset(rows)
    assert lists(data.validation().targets) == [[0]] * 300
    data = replace(data, baskets=True)
    examples = data.validation()
    drawn = [target for (target,) in lists(examples.targets)]
    assert set(drawn) == {0, 1}
    assert 100 < sum(drawn) < 200  # each item of the basket is as likely
    assert lists(examples.histories) == [[2]] * 300
    assert lists(data.validation().targets) == lists(examples.targets)
