"""Artifacts: whole or not at all, whatever happens while one is written or after."""

import json
import os
import signal
from pathlib import Path

import pytest

from recsys import artifacts
from recsys.artifacts import (
    MANIFEST,
    Manifest,
    Output,
    Workspace,
    read_manifest,
    read_whole,
    sha256,
    verify,
    write_artifact,
)
from recsys.errors import ArtifactError, LockedError

CONFIG = {"epochs": 3, "path": Path("raw/file"), "ks": (1, 10)}
PARENTS = {"dataset": "abc"}


def write(path, text="old", kind="ids", **options):
    with write_artifact(path, kind, **options) as folder:
        (folder / "report.json").write_text(text)
        (folder / "model").mkdir()
        (folder / "model" / "notes.txt").write_text("n")
    return path


def edit(path, **values):
    """Change the manifest as an attacker or an editor would."""
    file = path / MANIFEST
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_an_artifact_says_what_it_is_and_holds(tmp_path):
    info = {"items": 3}
    with write_artifact(
        tmp_path / "a" / "b", "ids", config=CONFIG, parents=PARENTS, info=info
    ) as folder:
        (folder / "report.json").write_text("{}")
        assert folder.parent == tmp_path / "a", "beside its place, so that a rename is enough"
        info["seconds"] = 1.5
    manifest = verify(tmp_path / "a" / "b", "ids")
    assert manifest == Manifest(
        "ids",
        {"epochs": 3, "path": "raw/file", "ks": [1, 10]},
        {"dataset": "abc"},
        # echo -n '{}' | sha256sum
        {"report.json": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"},
        {"items": 3, "seconds": 1.5},
    )
    assert names(tmp_path / "a") == ["b"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o755, "others read it"


def test_the_digest_tells_content_and_kind_and_nothing_else(tmp_path):
    digest = read_manifest(write(tmp_path / "a")).digest
    assert read_manifest(write(tmp_path / "b", info={"seconds": 2})).digest == digest
    assert read_manifest(write(tmp_path / "b", "new")).digest != digest
    assert read_manifest(write(tmp_path / "b", kind="target")).digest != digest


def test_a_new_artifact_replaces_the_old_one_wholly(tmp_path):
    with write_artifact(tmp_path / "a", "ids") as folder:
        (folder / "left.txt").write_text("from before")
    write(tmp_path / "a", "new")
    assert names(tmp_path / "a") == ["manifest.json", "model", "report.json"]
    assert (tmp_path / "a" / "report.json").read_text() == "new"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_artifact_and_nothing_else(tmp_path, error):
    def fail(place):
        with write_artifact(place, "ids") as folder:
            (folder / "report.json").write_text("half")
            raise error

    write(tmp_path / "a")
    before = read_manifest(tmp_path / "a")
    for place in ("a", "never"):
        with pytest.raises(error):
            fail(tmp_path / place)
    assert verify(tmp_path / "a") == before
    assert names(tmp_path) == ["a"]


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def victim(place, where, exchange):
    """Dies by SIGKILL at a place in the writing.

    In the body, while files are hashed or flushed, or before or after a move of a folder, where
    `move 1` is the first one. Without `exchange`, the file system cannot exchange folders.
    """
    if where in ("sha256", "_sync"):
        setattr(artifacts, where, die)
    moves = {"rename": Path.rename, "exchange": artifacts._exchange}
    place_of_death = [part for part in where.split() if part != "move"]
    done = [0]

    def moving(name):
        def move(*arguments):
            done[0] += 1
            if place_of_death == ["before", str(done[0])]:
                die()
            result = moves[name](*arguments)
            if place_of_death == ["after", str(done[0])]:
                die()
            return result

        return move

    Path.rename = moving("rename")
    artifacts._exchange = moving("exchange") if exchange else lambda *_: False
    with artifacts.write_artifact(place, "ids") as folder:
        (folder / "report.json").write_text("half")
        if where == "body":
            die()
        (folder / "report.json").write_text("new")


DEATHS = ("body", "sha256", "_sync", "before move 1", "after move 1", "before move 2")


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
@pytest.mark.parametrize("old", [True, False], ids=["over an old one", "for the first time"])
@pytest.mark.parametrize("where", DEATHS)
def test_a_sigkill_leaves_the_old_or_the_new_one(tmp_path, forked, where, old, exchange):
    place = tmp_path / "a"
    if old:
        write(place)
    one_move = exchange or not old
    finished = where == "before move 2" and one_move
    assert forked(victim, place, where, exchange) == (0 if finished else -signal.SIGKILL)
    moved = finished or (where == "after move 1" and one_move)
    between = not one_move and where in ("after move 1", "before move 2")
    assert place.exists() == (moved or (old and not between))
    if old or moved:
        assert read_manifest(place), "reading puts back what was moved away"
        verify(place)
        assert (place / "report.json").read_text() == ("new" if moved else "old")
    write(place, "again")
    assert verify(place)
    assert names(tmp_path) == ["a"], "what the crash left is cleared away"


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_writer_puts_back_what_a_crash_moved_away(tmp_path, forked, exchange):
    write(tmp_path / "a")
    forked(victim, tmp_path / "a", "after move 1", exchange)
    with pytest.raises(ValueError, match="mine"), write_artifact(tmp_path / "a", "ids"):
        raise ValueError("mine")
    assert (tmp_path / "a" / "report.json").read_text() == ("new" if exchange else "old")
    assert names(tmp_path) == ["a"]


def test_a_second_writer_is_refused_and_deletes_nothing(tmp_path):
    with write_artifact(tmp_path / "a", "ids") as folder:
        (folder / "report.json").write_text("first")
        with (
            pytest.raises(LockedError, match="a is in use by another process; wait"),
            write_artifact(tmp_path / "a", "ids"),
        ):
            pytest.fail("the body must not run")
    assert verify(tmp_path / "a").files.keys() == {"report.json"}
    assert names(tmp_path) == ["a"]


def test_a_reader_gets_one_version_of_what_is_replaced(tmp_path):
    place = write(tmp_path / "a")
    news = iter(["new"])

    def read():
        manifest = read_manifest(place)
        for text in news:  # once, between the two files
            write(place, text)
        return manifest.files["report.json"], sha256(place / "report.json")

    described, found = read_whole(place, read)
    assert described == found
    with pytest.raises(ArtifactError, match="a is replaced again and again while it is read"):
        read_whole(place, lambda: write(place))
    with pytest.raises(KeyError):
        read_whole(place, lambda: {}["x"])


def test_a_link_to_an_artifact_is_replaced_by_the_new_one(tmp_path):
    write(tmp_path / "b")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    write(tmp_path / "a", "new")
    assert (tmp_path / "b" / "report.json").read_text() == "old"
    assert (tmp_path / "a" / "report.json").read_text() == "new"
    assert not (tmp_path / "a").is_symlink()
    assert names(tmp_path) == ["a", "b"]


def test_clearing_up_spares_the_work_of_a_neighbour(tmp_path):
    with write_artifact(tmp_path / "a.b", "ids") as folder:
        write(tmp_path / "a")
        (folder / "report.json").write_text("still here")
    assert verify(tmp_path / "a.b").files.keys() == {"report.json"}


@pytest.mark.parametrize("file", ["photos/cat.jpg", "photos"])
def test_what_is_not_an_artifact_is_not_touched(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("cat")
    with (
        pytest.raises(ArtifactError, match="photos exists and is not an artifact; name another"),
        write_artifact(tmp_path / "photos", "ids"),
    ):
        pytest.fail("the body must not run")
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()] == [file]
    assert (tmp_path / file).read_text() == "cat"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: (a / "model/notes.txt").unlink(), "'model/notes.txt' is missing"),
        (lambda a: (a / "report.json").write_text("odd"), "'report.json' does not match its check"),
        (lambda a: (a / "report.json").write_text(""), "'report.json' does not match its checksum"),
        (lambda a: (a / "added.json").write_text("{}"), "'added.json' is not in its manifest"),
        (lambda a: (a / "model/w.pkl").write_text(""), "'model/w.pkl' is not in its manifest"),
        (lambda a: (a / "draft").symlink_to(a / "model"), "'draft' is not in its manifest"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    damage(write(tmp_path / "a"))
    with pytest.raises(ArtifactError, match=message):
        verify(tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["w.pkl", "w.pt", "w.bin", "w.ckpt", "w.PKL", "code.py", "w.joblib", "w.npz", "w"]
)
def test_a_file_that_could_contain_code_is_refused_by_name(tmp_path, name):
    with write_artifact(tmp_path / "a", "bundle") as folder:
        (folder / "target").mkdir()
        (folder / "target" / name).write_bytes(b"\x80\x04N.")
    with pytest.raises(ArtifactError, match=f"'target/{name}' is of a kind that is never loaded"):
        verify(tmp_path / "a")


@pytest.mark.parametrize(
    "name", ["../b/report.json", "model/../../b/report.json", "{}/report.json"]
)
def test_a_path_that_leaves_the_folder_is_refused(tmp_path, name):
    write(tmp_path / "a")
    outside = write(tmp_path / "b")
    name = name.format(outside)
    edit(tmp_path / "a", files={name: sha256(outside / "report.json")})
    with pytest.raises(ArtifactError, match="leaves the artifact's folder"):
        verify(tmp_path / "a")


def test_a_link_that_leaves_the_folder_is_refused(tmp_path):
    write(tmp_path / "a")
    (tmp_path / "secret.json").write_text("old")  # the same content, so the same checksum
    (tmp_path / "a" / "report.json").unlink()
    (tmp_path / "a" / "report.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(ArtifactError, match=r"'report\.json' leaves the artifact's folder"):
        verify(tmp_path / "a")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "unreadable manifest"),
        ("[]", "unreadable manifest"),
        pytest.param("[" * 200_000, "unreadable manifest", id="deep"),
        ("{}", "unreadable manifest"),
        ('{"kind": "ids", "colour": 1}', "unreadable manifest.*colour"),
        ('{"kind": "ids", "files": []}', "unreadable manifest"),
        ('{"kind": "ids", "info": null}', "unreadable manifest"),
        ('{"kind": "ids", "format_version": "1"}', "unreadable manifest"),
        (
            '{"kind": "ids", "format_version": 2}',
            "format 2 is newer than this program's 1; upgrade",
        ),
        ('{"kind": "ids", "format_version": 2, "colour": 1}', "format 2 is newer"),
        ('{"kind": "target"}', "is a target, expected a ids"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(tmp_path, text, message):
    write(tmp_path / "a")
    (tmp_path / "a" / MANIFEST).write_text(text)
    with pytest.raises(ArtifactError, match=message):
        read_manifest(tmp_path / "a", "ids")
    assert not is_current(tmp_path / "a", config={}, parents={})


def is_current(place, kind="ids", config=CONFIG, parents=PARENTS, *, force=False):
    return Output(place, kind, config, parents, force).is_current()


def test_an_output_is_current_with_equal_settings_and_parents(tmp_path):
    place = tmp_path / "a"
    output = Output(place, "ids", CONFIG, PARENTS)
    assert not output.is_current()
    with output.write({"items": 3}):
        pass
    assert read_manifest(place).info == {"items": 3}
    assert output.is_current()
    assert is_current(place, config=dict(reversed(CONFIG.items())))
    assert not is_current(place, force=True)
    assert not is_current(place, config=CONFIG | {"epochs": 4})
    assert not is_current(place, config=CONFIG | {"more": 1})
    assert not is_current(place, parents={"dataset": "abd"})
    assert not is_current(place, parents={})
    assert not is_current(place, kind="target")
    assert not is_current(tmp_path / "gone")


def test_a_workspace_lies_under_recsys_home(monkeypatch, tmp_path):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    workspace = Workspace.of("beauty")
    assert workspace.dataset == tmp_path / "datasets" / "beauty"
    assert workspace.run("ids") == tmp_path / "runs" / "beauty" / "ids"
    assert workspace.bundle == tmp_path / "bundles" / "beauty"
    assert workspace.report == tmp_path / "reports" / "beauty"
    monkeypatch.delenv("RECSYS_HOME")
    assert Workspace.of("beauty").bundle == Path("var/bundles/beauty")
