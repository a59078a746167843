import asyncio
import hashlib
import json
import threading
import zipfile

import pytest

from recsys.errors import ConfigError, DataError
from recsys.serving import auth, snapshots
from recsys.serving.snapshots import restore_snapshot, write_snapshot
from recsys.serving.stores.records import Appended, Exposure, Served, StoreError
from recsys.serving.stores.store import NOT_COPIED, TABLES


def content(store):
    """All rows of a store, without what belongs to one database."""
    rows = {table: [] for table in TABLES}
    for table, part in store.dump():
        rows[table] += [tuple(row) for row in part if row[0] not in NOT_COPIED]
    return rows


@pytest.fixture
async def full(store, event, write_dataset):
    """A store with rows in every table."""
    store.seed(write_dataset([("ada", "x", 30), ("ada", "y", 10), ("bob", "z", 5)]))
    shown = Exposure("e", "a", 1000)
    store.remember(Served("r", "ada", "m@1", ("w", "x"), 1_500_000_000_000, shown))
    await store.append([event("1", item="é\u2028"), event("2", value=4.5, recommendation_id="r")])
    await store.append([event("3", user="eve")])
    await store.erase("eve")
    await store.journal_append("catalogue", [{"op": "remove", "item_id": "i"}])
    await store.journal_append("rules", [{"op": "put", "name": "n", "value": {}}])
    await store.state_put("aliases", {"champion": "a"})
    return store


@pytest.fixture(params=["sqlite", "postgres"])
def target(request, tmp_path, opened):
    """An empty store, of another database than the first store."""
    if request.param == "sqlite":
        return opened(tmp_path / "target.db")
    server = request.getfixturevalue("postgres")
    server.run(
        "psql", "-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres",
        "-c", "DROP DATABASE IF EXISTS target", "-c", "CREATE DATABASE target",
    )  # fmt: skip
    return opened(server.url.removesuffix("/postgres") + "/target")


async def test_a_restored_store_has_every_row(full, target, tmp_path, event):
    assert write_snapshot(full, tmp_path / "s.zip") == 5
    assert (tmp_path / "s.zip").stat().st_mode & 0o777 == 0o600
    done = restore_snapshot(target, tmp_path / "s.zip")
    assert (done.events, done.left_out, done.keys) == (5, 0, False)
    assert content(target) == content(full)
    assert target.store_id != full.store_id
    assert target.salt == full.salt
    assert await target.append([event("3", user="eve")]) == Appended(ignored=1)
    assert await target.append([event("4", recommendation_id="r")]) == Appended(accepted=1)
    written = await target.journal_append("rules", [{"op": "delete", "name": "n"}])
    assert written.last > written.before > 0
    assert [path.name for path in tmp_path.glob("*s.zip*")] == ["s.zip"]


async def test_a_store_that_is_not_empty_is_replaced_on_demand(full, target, tmp_path, event):
    write_snapshot(full, tmp_path / "s.zip")
    await target.append([event("other")])
    before = content(target)
    with pytest.raises(StoreError, match="not empty; restore into an empty store, or add --repl"):
        restore_snapshot(target, tmp_path / "s.zip")
    assert content(target) == before
    restore_snapshot(target, tmp_path / "s.zip", replace=True)
    assert content(target) == content(full)


async def test_users_erased_after_the_snapshot_stay_erased(full, tmp_path, event):
    write_snapshot(full, tmp_path / "s.zip")
    expected = content(full)
    await full.erase("ada")
    done = restore_snapshot(full, tmp_path / "s.zip", replace=True)
    assert (done.events, done.left_out) == (1, 4)
    found = content(full)
    assert found["events"] == [row for row in expected["events"] if row[2] == "bob"]
    assert (found["recommendations"], found["exposures"]) == ([], [])
    assert len(found["erasures"]) == 2
    assert await full.append([event("1", item="é\u2028")]) == Appended(ignored=1)


async def test_erasures_of_another_store_are_not_mixed(full, target, tmp_path):
    write_snapshot(full, tmp_path / "s.zip")
    await target.erase("ada")
    before, salt = content(target), target.salt
    with pytest.raises(StoreError, match="erasures of its own"):
        restore_snapshot(target, tmp_path / "s.zip", replace=True)
    assert content(target) == before
    assert target.salt == salt


def test_a_damaged_snapshot_is_refused(tmp_path, opened):
    store, target = opened(tmp_path / "a.db"), opened(tmp_path / "b.db")
    asyncio.run(store.state_put("k", list(range(1000))))
    write_snapshot(store, tmp_path / "s.zip")
    whole = (tmp_path / "s.zip").read_bytes()
    empty, full = content(target), content(store)
    harmless = 0
    for cut in range(0, len(whole), 17):
        changed = whole[:cut] + bytes([whole[cut] ^ 0xFF]) + whole[cut + 1 :]
        for bad in (whole[:cut], changed):
            (tmp_path / "s.zip").write_bytes(bad)
            try:
                restore_snapshot(target, tmp_path / "s.zip", replace=harmless > 0)
            except DataError as error:
                assert "s.zip: not a whole snapshot of a store" in str(error)  # noqa: PT017
            else:  # a byte without meaning, such as a time in the archive
                harmless += 1
                assert content(target) == full
            assert content(target) == (full if harmless else empty)
    assert harmless < len(whole) / 17 / 3


def test_a_changed_row_or_version_is_refused(store, tmp_path, opened):
    write_snapshot(store, tmp_path / "s.zip")
    target = opened(tmp_path / "b.db")

    def rewrite(**changed):
        with (
            zipfile.ZipFile(tmp_path / "s.zip") as old,
            zipfile.ZipFile(tmp_path / "t.zip", "w") as new,
        ):
            for name in old.namelist():
                new.writestr(name, changed.get(name.partition(".")[0], old.read(name)))

    with zipfile.ZipFile(tmp_path / "s.zip") as archive:
        manifest = json.loads(archive.read("manifest.json"))
    rewrite(seeds='["0", 1]\n')
    with pytest.raises(DataError, match=r"seeds\.jsonl does not have its checksum"):
        restore_snapshot(target, tmp_path / "t.zip")
    rewrite(manifest=json.dumps(manifest | {"schema": 7}))
    with pytest.raises(DataError, match="schema 7, and this program has 1 and 6; restore it with"):
        restore_snapshot(target, tmp_path / "t.zip")
    rewrite(manifest=json.dumps(manifest | {"kind": "x"}))
    with pytest.raises(DataError, match="its kind is 'x'"):
        restore_snapshot(target, tmp_path / "t.zip")
    with pytest.raises(DataError, match=r"no\.zip: No such file"):
        restore_snapshot(target, tmp_path / "no.zip")


def forge(old, new, tables=None, **changed):
    """Write a changed snapshot with fitting checksums and numbers of lines."""
    with zipfile.ZipFile(old) as archive:
        content = {name: archive.read(name) for name in archive.namelist()} | (tables or {})
    manifest = json.loads(content.pop("manifest.json"))
    for name, entry in manifest["files"].items():
        entry["sha256"] = hashlib.sha256(content[name]).hexdigest()
        entry["lines"] = content[name].count(b"\n")
    for key, value in changed.items():
        if value is None:
            del manifest[key]
        elif key == "lines":
            manifest["files"]["events.jsonl"]["lines"] = value
        else:
            manifest[key] = value
    with zipfile.ZipFile(new, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in content.items():
            archive.writestr(name, data)
        archive.writestr("manifest.json", json.dumps(manifest))


def event_row(**changed):
    row = {
        "id": 1, "event_id": None, "user_id": "ada", "item_id": "x", "type": "view", "time_ms": 5,
        "value": None, "recommendation_id": None, "linked": None, "digest": None, "seed": None,
    } | changed  # fmt: skip
    assert tuple(row) == TABLES["events"]
    return json.dumps(list(row.values())).encode() + b"\n"


async def refused(full, target, path, reason, **changed):
    """Restore a changed snapshot, which fails with a reason and changes nothing."""
    secrets = path.with_name("keys.json")
    auth.create(secrets, "shop", "read")
    write_snapshot(full, path, secrets)
    bad, keys, before = path.with_name("bad.zip"), path.with_name("new.json"), content(target)
    forge(path, bad, **changed)
    with pytest.raises(DataError) as caught:
        restore_snapshot(target, bad, keys)
    text = str(caught.value)
    assert text.startswith(f"{bad}: ")
    assert reason in text
    assert text.endswith("; take another snapshot")
    assert "\n" not in text
    assert len(text) < 600
    assert content(target) == before
    assert not keys.exists()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (event_row(id=10**30), "line 2: id: "),
        (event_row(id=2**63 - 1), "line 2: id: "),
        (event_row(id="1"), "line 2: id: "),
        (event_row(id=True), "line 2: id: "),
        (event_row(time_ms=2**63), "line 2: time_ms: "),
        (event_row(time_ms="text"), "line 2: time_ms: "),
        (event_row(item_id=None), "line 2: item_id: "),
        (event_row(linked=2), "line 2: linked: "),
        (event_row(item_id="\ud800"), "line 2: Invalid JSON"),
        (b"[" * 100_000 + b"\n", "line 2: Invalid JSON"),
        (b"\xff\n", "line 2: Invalid JSON"),
        (b"\n", "line 2: Invalid JSON"),
        (b"[1, 2, 3]\n", "line 2: event_id: "),
        (b'{"a": 1}\n', "line 2: Input should be"),
        (b"null\n", "line 2: Input should be"),
        (event_row(id=3)[:-1], "line 2: its end is missing"),
        (event_row(id=2), "refuses rows of the table events"),  # the same id twice
    ],
)
async def test_a_row_that_no_table_holds_is_refused(full, target, tmp_path, line, reason):
    files = {"events.jsonl": event_row(id=2) + line}
    await refused(full, target, tmp_path / "s.zip", reason, tables=files)


async def test_a_line_without_end_is_refused(full, target, tmp_path, monkeypatch):
    monkeypatch.setattr(snapshots, "MAX_LINE", 4096)
    files = {"events.jsonl": b" " * 100_000 + b"\n"}
    reason = "events.jsonl, line 1: it has more than 4096 bytes"
    await refused(full, target, tmp_path / "s.zip", reason, tables=files)
    (tmp_path / "keys.json").unlink()
    files = {"keys.json": b" " * 100_000}
    reason = "keys.json has more than 4096 bytes"
    await refused(full, target, tmp_path / "s.zip", reason, tables=files)
    (tmp_path / "keys.json").unlink()
    reason = "manifest.json has more than 4096 bytes"
    await refused(full, target, tmp_path / "s.zip", reason, more="x" * 100_000)


@pytest.mark.parametrize(
    "record", ["not json", "[]", "5", "null", '{"a": ' * 1000 + "1" + "}" * 1000]
)
async def test_a_record_that_is_no_object_is_refused(full, target, tmp_path, record):
    files = {"journal.jsonl": json.dumps([1, "rules", None, record]).encode() + b"\n"}
    reason = "journal.jsonl, line 1: record: "
    await refused(full, target, tmp_path / "s.zip", reason, tables=files)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"", "state.jsonl has no line of erasure_salt"),
        (b'["erasure_tlas", "\\"00\\""]\n', "state.jsonl has no line of erasure_salt"),
        (b'["erasure_salt", "\\"xy\\""]\n', "state.jsonl, line 1: "),
        (b'["erasure_salt", "5"]\n', "state.jsonl, line 1: "),
        (b'["aliases", "not json"]\n', "state.jsonl, line 1: value: "),
    ],
)
async def test_state_without_its_salt_is_refused(full, target, tmp_path, state, reason):
    await refused(full, target, tmp_path / "s.zip", reason, tables={"state.jsonl": state})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"lines": "x"}, "manifest.json: files.events.jsonl.lines: "),
        ({"lines": -5}, "manifest.json: files.events.jsonl.lines: "),
        ({"lines": 10**30}, "manifest.json: files.events.jsonl.lines: "),
        ({"lines": 4}, "events.jsonl has 5 lines, and manifest.json says 4"),
        ({"created": None}, "manifest.json: created: "),
        ({"created": "yesterday"}, "manifest.json: created: "),
        ({"schema": "x"}, "manifest.json: schema: "),
        ({"schema": 99, "recsys": None}, "manifest.json: recsys: "),
        ({"files": []}, "manifest.json: files: "),
    ],
)
async def test_a_malformed_manifest_is_refused(full, target, tmp_path, changed, reason):
    await refused(full, target, tmp_path / "s.zip", reason, **changed)


@pytest.mark.parametrize("manifest", ["[" * 200_000, "[]", "", "\ufffe"])
def test_a_manifest_that_is_no_object_is_refused(tmp_path, opened, manifest):
    with zipfile.ZipFile(tmp_path / "s.zip", "w") as archive:
        archive.writestr("manifest.json", manifest)
    with pytest.raises(DataError, match=r"s\.zip: not a whole .* take another snapshot$"):
        restore_snapshot(opened(tmp_path / "b.db"), tmp_path / "s.zip")


@pytest.mark.parametrize("keys", [b"[" * 100_000, b"\xff\x00", b'{"keys": [{"name": "evil"}]}'])
def test_malformed_keys_restore_nothing(store, tmp_path, opened, keys):
    auth.create(tmp_path / "keys.json", "shop", "read")
    write_snapshot(store, tmp_path / "s.zip", tmp_path / "keys.json")
    forge(tmp_path / "s.zip", tmp_path / "bad.zip", {"keys.json": keys})
    target = opened(tmp_path / "b.db")
    before = content(target)
    with pytest.raises(ConfigError, match="not a file of `recsys keys`"):
        restore_snapshot(target, tmp_path / "bad.zip", tmp_path / "new.json")
    assert content(target) == before
    assert not (tmp_path / "new.json").exists()


async def test_an_interrupted_restore_leaves_the_store_as_it_was(
    full, target, tmp_path, event, monkeypatch
):
    await target.append([event("other", item=f"{n}") for n in range(1)])
    write_snapshot(full, tmp_path / "s.zip")
    before = content(target)
    real = snapshots._parts
    for stop in range(len(TABLES)):

        def failing(archive, path, stop=stop):
            for number, part in enumerate(real(archive, path)):
                if number == stop:
                    raise KeyboardInterrupt
                yield part

        monkeypatch.setattr(snapshots, "_parts", failing)
        with pytest.raises(KeyboardInterrupt):
            restore_snapshot(target, tmp_path / "s.zip", replace=True)
        assert content(target) == before
    assert await target.append([event("next")]) == Appended(accepted=1)


async def test_a_process_with_the_store_open_must_restart(full, tmp_path, opened, location, event):
    write_snapshot(full, tmp_path / "s.zip")
    service = opened(location)
    restore_snapshot(full, tmp_path / "s.zip", replace=True)
    service.remember(Served("late", "ada", "m@1", ("w",), 1_500_000_000_000))
    calls = [service.append([event("9")]), service.erase("ada"), service.state_put("k", 1)]
    calls += [service.changes((), 9), service.journal_page("catalogue", 0, 9)]  # with old cursors
    for call in calls:
        with pytest.raises(StoreError, match="was restored into it; restart this process"):
            await call
    assert await service.history("ada", 9) == await full.history("ada", 9)
    assert await opened(location).append([event("9")]) == Appended(accepted=1)


async def test_keys_are_restored_only_where_there_are_none(store, tmp_path, opened):
    secret = auth.create(tmp_path / "keys.json", "shop", "read")
    write_snapshot(store, tmp_path / "s.zip", tmp_path / "keys.json")
    new = tmp_path / "new" / "keys.json"
    assert restore_snapshot(opened(tmp_path / "b.db"), tmp_path / "s.zip", new).keys
    assert auth.Keyring(new).find(secret).name == "shop"
    assert auth.marker(new).exists()
    auth.create(new, "other", "read")
    auth.revoke(new, "shop")
    assert not restore_snapshot(opened(tmp_path / "c.db"), tmp_path / "s.zip", new).keys
    assert auth.Keyring(new).find(secret) is None


async def test_a_snapshot_under_load_is_one_state(store, target, tmp_path, event):
    """Batches are whole, and what was acknowledged before is there; the load goes on."""
    acknowledged, stop = [], threading.Event()

    async def write(writer):
        for n in range(10_000):
            if stop.is_set():
                return
            name = f"{writer}-{n}"
            await store.append([event(f"{name}-{i}", user=name) for i in range(7)])
            await store.journal_append("rules", [{"name": name}])
            acknowledged.append(name)

    async def move():
        while len(acknowledged) < 30:
            await asyncio.sleep(0)
        for round_ in range(3):
            before = list(acknowledged)
            await asyncio.to_thread(write_snapshot, store, tmp_path / "s.zip")
            await asyncio.to_thread(
                restore_snapshot, target, tmp_path / "s.zip", replace=round_ > 0
            )
            found = content(target)
            counts = {}
            for row in found["events"]:
                counts[row[2]] = counts.get(row[2], 0) + 1
            assert set(counts.values()) == {7}
            assert counts.keys() >= set(before)
            changed = {json.loads(row[3])["name"] for row in found["journal"]}
            assert set(before) <= changed <= counts.keys()  # a change comes after its events
        stop.set()

    await asyncio.gather(move(), *(write(number) for number in range(4)))


def test_the_commands_move_a_store_and_its_keys(tmp_path):
    from typer.testing import CliRunner

    from recsys.serving.store_commands import app

    run, file, keys = CliRunner(), str(tmp_path / "s.zip"), tmp_path / "keys.json"
    lines = tmp_path / "in.ndjson"
    lines.write_text('{"event_id": "1", "user": "ada", "item": "x"}\n')
    run.invoke(app, ["import", str(lines), "--store", str(tmp_path / "a.db")])
    auth.create(keys, "shop", "read")
    at = ["--store", str(tmp_path / "a.db"), "--keys", str(keys)]
    done = run.invoke(app, ["snapshot", file, *at])
    assert done.stdout.replace("\n", "") == f"1 events and the keys are in {file}"
    at = ["--store", str(tmp_path / "b.db"), "--keys", str(tmp_path / "new.json")]
    done = run.invoke(app, ["restore", file, *at])
    assert done.stdout.startswith("1 events of 20")
    assert "0 of erased users left out; keys are in " in done.stdout
    assert auth.read(tmp_path / "new.json") == auth.read(keys)
    done = run.invoke(app, ["restore", file, *at])
    assert isinstance(done.exception, StoreError)
    done = run.invoke(app, ["restore", file, *at, "--replace"])
    assert done.stdout.rstrip().endswith("keys were not written")


def test_nothing_but_a_snapshot_is_replaced(tmp_path, opened):
    place, keys = tmp_path / "own.db", tmp_path / "keys.json"
    store = opened(place)
    auth.create(keys, "shop", "read")
    other, folder = tmp_path / "other.zip", tmp_path / "folder"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "a")
    folder.mkdir()
    before = {file: file.read_bytes() for file in (place, keys, other)}
    for file in (*before, folder):
        with pytest.raises(DataError, match=r"is there and is no snapshot; name another file"):
            write_snapshot(store, file, keys)
    assert {file: file.read_bytes() for file in before} == before
    (tmp_path / "empty.zip").touch()
    assert [write_snapshot(store, tmp_path / "empty.zip", keys) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("command", [["snapshot", "s.zip"], ["export", "e.ndjson"], ["migrate"]])
@pytest.mark.parametrize("url", ["", "sqlite:///"])
def test_a_store_that_is_not_there_is_not_made_and_saved(tmp_path, command, url):
    from typer.testing import CliRunner

    from recsys.serving.store_commands import app

    place = tmp_path / "wrong" / "a.db"
    files = [str(tmp_path / name) if "." in name else name for name in command]
    done = CliRunner().invoke(app, [*files, "--store", f"{url}{place}"])
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception) == f"there is no store {place}; name one by --store"
    assert list(tmp_path.iterdir()) == []
