import json

import pytest

from recsys.errors import DataError
from recsys.serving import transfer
from recsys.serving.transfer import Imported, export_events, import_events

NAME = "events.ndjson"


@pytest.fixture
async def full(store, event, write_dataset):
    """A store with a seed and events of every shape."""
    store.history.seed(write_dataset([("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5)]))
    await store.history.append(
        [
            event("1", item="é\u2028", time_ms=1_500_000_000_123),
            event("2", item="w", type="rating", value=4.5, recommendation_id="r"),
            event("3", user="bob", type="impression"),
        ]
    )
    return store


def facts(store):
    return [
        (e.user, e.item, e.type, e.time_ms, e.value, e.recommendation_id, e.seed)
        for e in store.history.export()
    ]


async def test_an_export_imported_elsewhere_is_the_same_store(
    full, tmp_path, opened, write_dataset
):
    file = tmp_path / "out" / NAME
    assert export_events(full, file) == 6
    assert [path.name for path in file.parent.iterdir()] == [NAME]
    other = opened(tmp_path / "other.db")
    assert await import_events(other, file) == Imported(accepted=6, unlinked=1)
    assert facts(other) == facts(full)
    assert (await other.history.read("ada", 9)).items == (await full.history.read("ada", 9)).items
    again = await import_events(other, file)  # it has its seed now
    assert again == Imported(duplicates=3, seeded=3)
    assert (
        other.history.seed(write_dataset([("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5)]))
        == 0
    )
    once_more = tmp_path / "again.ndjson"
    export_events(other, once_more)
    third = opened(tmp_path / "third.db")
    await import_events(third, once_more)
    assert facts(third) == facts(full)


async def test_an_export_carries_erasures(full, tmp_path, opened, event):
    for user in ("bob", "eve"):
        await full.history.erase(user)
    assert export_events(full, tmp_path / NAME) == 4
    other = opened(tmp_path / "other.db")
    await other.history.append([event("4", user="eve"), event("5", user="guy")])
    assert await import_events(other, tmp_path / NAME) == Imported(
        accepted=4, unlinked=1, erasures=2
    )
    assert other.history.erased(["bob", "eve", "guy"]) == full.history.erased(["bob", "eve"])
    assert {user for user, *_ in facts(other)} == {"ada", "guy"}
    assert (await other.history.append([event("late", user="bob")])).ignored == 1
    again = await import_events(other, tmp_path / NAME)
    assert (again.erasures, again.accepted) == (0, 0)


async def test_an_interrupted_import_is_finished_by_running_it_again(
    full, tmp_path, opened, monkeypatch
):
    export_events(full, tmp_path / NAME)
    monkeypatch.setattr(transfer, "CHUNK", 2)
    other = opened(tmp_path / "other.db")
    append, calls = other.history.append, []

    async def failing(events):
        calls.append(len(events))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return await append(events)

    monkeypatch.setattr(other.history, "append", failing)
    with pytest.raises(KeyboardInterrupt):
        await import_events(other, tmp_path / NAME)
    assert other.history.count() == 4
    assert await import_events(other, tmp_path / NAME) == Imported(
        accepted=2, duplicates=4, unlinked=1
    )
    assert facts(other) == facts(full)


async def test_erased_users_are_not_brought_back(full, tmp_path):
    export_events(full, tmp_path / "events.ndjson")
    await full.history.erase("bob")
    done = await import_events(full, tmp_path / "events.ndjson")
    assert done == Imported(duplicates=2, ignored=1, seeded=3)
    assert {row.user for row in full.history.export()} == {"ada"}


async def test_lines_of_the_wire_format_are_imported(store, tmp_path):
    file = tmp_path / "mine.jsonl"
    lines = [
        {"event_id": "1", "user": "ada", "item": "x", "timestamp": "2026-01-01T00:00:00Z"},
        {"event_id": "2", "user": "ada", "item": "y", "type": "purchase", "timestamp": 1.5},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert await import_events(store, file) == Imported(accepted=2)
    assert [found.time_ms for found in await store.history.events("ada", 2)] == [
        1_767_225_600_000,
        1500,
    ]


async def test_a_bad_row_is_reported_and_earlier_rows_are_stored(
    store, tmp_path, event, monkeypatch
):
    monkeypatch.setattr(transfer, "CHUNK", 1)
    file = tmp_path / "bad.ndjson"
    good = '{"event_id": "1", "user": "ada", "item": "x", "timestamp": 1}\n'
    for line, text in (
        ('{"user": "ada"}', "line 2, item: Field required"),
        ("{", "line 2: at character 1: Expecting"),
        ('{"user": "ada", "item": "y", "timestamp": 1700000000000}', "line 2, timestamp"),
        ('{"user": "ada", "item": "y", "colour": 1}', "line 2, colour: Extra inputs"),
        ('{"event_id": "1", "user": "eve", "item": "y"}', "event '1' has other content"),
    ):
        file.write_text(good + line)
        with pytest.raises(DataError) as caught:
            await import_events(store, file)
        assert str(file) in str(caught.value)
        assert text in str(caught.value)
    assert (await store.history.read("ada", 9)).items == ["x"]


def test_a_failed_export_leaves_no_file(store, tmp_path, monkeypatch):
    def failing():
        raise KeyboardInterrupt

    monkeypatch.setattr(store.history, "dump", failing)
    with pytest.raises(KeyboardInterrupt):
        export_events(store, tmp_path / "out" / "events.ndjson")
    assert list((tmp_path / "out").iterdir()) == []


def test_the_commands_carry_events_from_one_store_to_another(tmp_path):
    from typer.testing import CliRunner

    from recsys.serving.store_commands import app

    file = tmp_path / "in.ndjson"
    file.write_text('{"event_id": "1", "user": "ada", "item": "x"}\n')
    run, here = CliRunner(), str(tmp_path / "a.db")
    done = run.invoke(app, ["import", str(file), "--store", here])
    assert (done.exit_code, done.stdout) == (
        0, "1 events imported, 0 were there, 0 of erased users left out\n",
    )  # fmt: skip
    done = run.invoke(app, ["import", str(file), "--store", f"sqlite:///{here}"])
    assert "0 events imported, 1 were there" in done.stdout
    done = run.invoke(app, ["export", str(tmp_path / "out.ndjson"), "--store", here])
    assert done.stdout.startswith("1 events exported to ")
    done = run.invoke(app, ["import", str(tmp_path / "no.ndjson"), "--store", here])
    assert isinstance(done.exception, DataError)
