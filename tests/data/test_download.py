"""Downloads from a server on this machine that breaks and lies."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recsys.data import download as module
from recsys.data import prepare
from recsys.data.commands import app
from recsys.data.download import PublicSet, Remote, download, public_sets
from recsys.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """One file at any path.

    Attributes:
        content: what it serves.
        stop_after: bytes of the body after which the connection breaks.
        status: of its answers.
        requests: how many came.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.stop_after, self.status, self.requests = CONTENT, 1 << 30, 200, 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.requests += 1
        self.send_response(server.status)
        self.send_header("Content-Length", str(len(server.content)))
        self.end_headers()
        self.wfile.write(server.content[: server.stop_after])

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def toy(server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers a public set `toy` of one file on the server."""

    def register(path: str = "x.bin", digest: str | None = DIGEST) -> None:
        remote = Remote(f"http://127.0.0.1:{server.server_port}/f", path, digest)
        entry = PublicSet("toy", (remote,), "free", "Nobody", "--source table")
        monkeypatch.setattr(module, "public_sets", lambda: {"toy": entry})

    register()
    return register


def test_a_file_comes_whole_and_only_once(server: Server, toy: Any, tmp_path: Path) -> None:
    assert (download("toy", tmp_path) / "x.bin").read_bytes() == CONTENT
    assert [path.name for path in (tmp_path / "toy").iterdir()] == ["x.bin"]
    download("toy", tmp_path)
    assert server.requests == 1
    (tmp_path / "toy/x.bin").write_bytes(b"damaged")
    assert (download("toy", tmp_path) / "x.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"stop_after": 300_000}, "try again, or put the file at"),
        ({"status": 404}, "404"),
        ({"status": 503}, "503"),
        ({"content": CONTENT[::-1]}, f"not {DIGEST}; the file is damaged or has changed"),
    ],
    ids=str,
)
def test_a_failed_download_leaves_nothing(
    server: Server, toy: Any, tmp_path: Path, fault: dict[str, Any], message: str
) -> None:
    vars(server).update(fault)
    with pytest.raises(DataError, match=message):
        download("toy", tmp_path)
    assert not list((tmp_path / "toy").iterdir())


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return out.getvalue()


def tarred(name: str, kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.linkname = 1, kind, "/etc/passwd"
        file.addfile(info, io.BytesIO(b"x"))
    return out.getvalue()


def test_an_archive_is_unpacked_into_its_own_folder(
    server: Server, toy: Any, tmp_path: Path
) -> None:
    server.content = zipped({"a/b.csv": b"1", "c.csv": b"2", "../../evil": b"3"})
    toy("set.zip", None)
    folder = download("toy", tmp_path)
    assert (folder / "set/a/b.csv").read_bytes() == b"1"
    assert sorted(path.name for path in folder.iterdir()) == ["set", "set.zip"]
    assert not list(tmp_path.rglob("evil"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.zip", zipped({"x": b"1"})[:-10]),
        ("a.tar.gz", tarred("../evil")),
        ("a.tar.gz", tarred("link", tarfile.SYMTYPE)),
        ("a.tar.gz", tarred("device", tarfile.CHRTYPE)),
        ("a.tar.gz", tarred("x")[:60]),
    ],
    ids=["cut zip", "outside", "link", "device", "cut tar"],
)
def test_an_archive_that_is_not_safe_leaves_nothing(
    server: Server, toy: Any, tmp_path: Path, name: str, content: bytes
) -> None:
    server.content = content
    toy(name, None)
    with pytest.raises(DataError, match="cannot be unpacked"):
        download("toy", tmp_path)
    assert [path.name for path in (tmp_path / "toy").iterdir()] == [name]
    assert not list(tmp_path.rglob("evil"))


def test_public_sets_say_what_they_are(datasets: Path) -> None:
    for name, entry in public_sets().items():
        assert entry.licence
        assert entry.citation
        assert entry.prepare.startswith("--source ")
        for remote in entry.files:
            assert remote.url.startswith("https://")
            assert not {"..", ""} & set(remote.path.split("/"))
            here = datasets / name / remote.path
            if remote.sha256 and here.is_file():
                assert module.sha256(here) == remote.sha256, here


def test_what_the_command_downloads_is_found_without_being_told_where(
    toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    monkeypatch.delenv("RECSYS_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    run = CliRunner().invoke(app, ["download", "toy"])
    assert run.exit_code == 0, run.output
    found = prepare._find("path", "toy/x.bin")
    assert found is not None
    assert found.samefile("var/raw/toy/x.bin")
    listed = CliRunner().invoke(app, ["download", "--list"])
    assert listed.stdout == "toy: free. Nobody\n"
    with pytest.raises(ConfigError, match="'toyy' is not one of toy"):
        download("toyy", tmp_path)
