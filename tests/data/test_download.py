"""Downloads against a server on this machine that breaks, lies and forgets."""

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
from recsys.data.download import Remote, download, fetch, public_sets, unpack
from recsys.errors import ConfigError, DataError

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
LIMIT = 1 << 30


class Server(ThreadingHTTPServer):
    """One file at any path.

    Attributes:
        content: what it serves.
        tag: its version, or None.
        ranges: whether it knows Range.
        stop_after: bytes of a body before the connection breaks, one for each answer; then whole.
        status: what it answers instead, if not 200.
        asked: the Range header of each request.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag, self.ranges = CONTENT, '"v1"', True
        self.stop_after: list[int] = []
        self.status = 200
        self.asked: list[str | None] = []

    def url(self, name: str = "x.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server, wanted = self.server, self.headers.get("Range")
        server.asked.append(wanted)
        start, code = 0, server.status
        if wanted and server.ranges and self.headers.get("If-Range") == server.tag:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            code = 206 if start < len(server.content) else 416
        self.send_response(code)
        body = server.content[start:] if code in (200, 206) else b""
        if code == 206:
            total = len(server.content)
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        if code == 416:
            self.send_header("Content-Range", f"bytes */{len(server.content)}")
        if server.tag:
            self.send_header("ETag", server.tag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if server.stop_after:
            body = body[: server.stop_after.pop(0)]
        self.wfile.write(body)

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


def get(server: Server, folder: Path, digest: str | None = DIGEST, limit: int = LIMIT) -> Path:
    return fetch(Remote(server.url(), "x.bin", digest), folder, max_bytes=limit)


def test_a_file_comes_whole_and_only_once(server: Server, tmp_path: Path) -> None:
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["x.bin"]
    get(server, tmp_path)
    assert server.asked == [None]


def test_a_broken_connection_goes_on_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.stop_after = [300_000, 200_000]
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-", "bytes=500000-"]


def test_a_later_run_resumes_too(server: Server, tmp_path: Path) -> None:
    server.stop_after = [300_000] + [0] * module.TRIES
    with pytest.raises(DataError, match=r"failed 5 times after 300,000 bytes.* again to continue"):
        get(server, tmp_path)
    assert not (tmp_path / "x.bin").exists()
    assert get(server, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == "bytes=300000-"


def test_a_part_that_is_whole_already_is_taken(server: Server, tmp_path: Path) -> None:
    server.stop_after = [300_000] + [0] * module.TRIES
    with pytest.raises(DataError):
        get(server, tmp_path)
    (tmp_path / "x.bin.part").write_bytes(CONTENT)
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_another_version_on_the_server_starts_over(server: Server, tmp_path: Path) -> None:
    server.stop_after = [300_000] + [0] * module.TRIES
    with pytest.raises(DataError):
        get(server, tmp_path)
    server.content, server.tag = CONTENT[::-1], '"v2"'
    assert get(server, tmp_path, None).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_without_ranges_or_versions_starts_over(
    server: Server, tmp_path: Path, ranges: bool
) -> None:
    server.ranges, server.stop_after = ranges, [300_000]
    server.tag = None if ranges else server.tag
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_a_wrong_checksum_leaves_nothing(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"the SHA-256 is {DIGEST}, not {'0' * 64}"):
        get(server, tmp_path, "0" * 64)
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_fit_its_checksum_is_fetched_again(
    server: Server, tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(b"old")
    assert get(server, tmp_path).read_bytes() == CONTENT


def test_what_is_too_large_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"larger than .* GiB; allow more with --max-gb"):
        get(server, tmp_path, limit=1000)
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize(("status", "tries"), [(404, 1), (503, module.TRIES)])
def test_a_server_that_refuses_is_quoted(
    server: Server, tmp_path: Path, status: int, tries: int
) -> None:
    server.status = status
    with pytest.raises(DataError, match=str(status)):
        get(server, tmp_path)
    assert len(server.asked) == tries


@pytest.mark.parametrize(
    ("remote", "message"),
    [
        (Remote("file:///etc/passwd", "x"), "expected a URL that begins with https"),
        (Remote("http://localhost/", "../x"), r"'\.\./x' leaves"),
        (Remote("http://localhost/", "x", "abc"), "expected 64 digits"),
    ],
)
def test_impossible_downloads_are_refused(tmp_path: Path, remote: Remote, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch(remote, tmp_path, max_bytes=LIMIT)


# --- archives


def zipped(members: dict[str, bytes], mode: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            file.writestr(info, content)
    return out.getvalue()


def tarred(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as file:
        info = tarfile.TarInfo(name)
        info.size, info.type, info.linkname = len(content), kind, "/etc/passwd"
        file.addfile(info, io.BytesIO(content))
    return out.getvalue()


def test_an_archive_by_url_is_unpacked_into_its_own_folder(server: Server, tmp_path: Path) -> None:
    server.content = zipped({"a/b.csv": b"1", "c.csv": b"2"})
    folder = download(server.url("set.zip"), tmp_path)
    assert folder == tmp_path / "set"
    assert (folder / "a/b.csv").read_bytes() == b"1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["set", "set.zip"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.zip", zipped({"ok": b"1", "../evil": b"2"}), "would leave its folder"),
        ("a.zip", zipped({"/evil": b"2"}), "would leave its folder"),
        ("a.zip", zipped({"..\\evil": b"2"}), "would leave its folder"),
        ("a.zip", zipped({"C:evil": b"2"}), "would leave its folder"),
        ("a.zip", zipped({"link": b"/etc/passwd"}, 0o120777), "not a plain file"),
        ("a.zip", zipped({"bomb": bytes(3_000_000)}), "unpacks to more than"),
        ("a.zip", zipped({"x": b"1"})[:-10], "cannot be unpacked"),
        ("a.tar.gz", tarred("../evil"), "would leave its folder"),
        ("a.tar.gz", tarred("/evil"), "would leave its folder"),
        ("a.tar.gz", tarred("link", b"", tarfile.SYMTYPE), "not a plain file"),
        ("a.tar.gz", tarred("link", b"", tarfile.LNKTYPE), "not a plain file"),
        ("a.tar.gz", tarred("device", b"", tarfile.CHRTYPE), "not a plain file"),
        ("a.tar.gz", tarred("bomb", bytes(3_000_000)), "unpacks to more than"),
        ("a.tar.gz", tarred("x", bytes(10_000))[:60], "cannot be unpacked"),
    ],
    # An archive's bytes hold the time of its making, so they are no name for a test.
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_an_archive_that_is_not_safe_leaves_nothing(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        unpack(tmp_path / name, max_bytes=2_000_000)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert not (tmp_path.parent / "evil").exists()


def test_an_archive_of_too_many_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_FILES", 2)
    (tmp_path / "a.zip").write_bytes(zipped({str(i): b"" for i in range(3)}))
    with pytest.raises(DataError, match="more than 2 files"):
        unpack(tmp_path / "a.zip", max_bytes=LIMIT)


# --- the registry and the command


def test_public_sets_say_what_they_are(datasets: Path) -> None:
    for name, entry in public_sets().items():
        assert entry.licence
        assert entry.citation
        assert entry.prepare.startswith("--source ")
        for remote in entry.files:
            assert remote.url.startswith("https://")
            here = datasets / name / remote.path
            if remote.sha256 and here.is_file():
                assert module.sha256(here) == remote.sha256, here


def test_the_command_fetches_a_set_by_name(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = module.PublicSet(
        "toy",
        (Remote(server.url("t.csv"), "in/t.csv", DIGEST),),
        "free",
        "Nobody",
        "--source table",
    )
    monkeypatch.setattr(module, "public_sets", lambda: {"toy": entry})
    run = CliRunner().invoke(app, ["download", "toy", "--folder", str(tmp_path)])
    assert run.exit_code == 0, run.output
    assert (tmp_path / "toy/in/t.csv").read_bytes() == CONTENT
    listed = CliRunner().invoke(app, ["download", "--list"])
    assert listed.stdout == "toy: free. Nobody\n"
    with pytest.raises(ConfigError, match="'toyy' is neither a URL nor one of toy"):
        download("toyy", tmp_path)
    with pytest.raises(ConfigError, match="has its own checksums"):
        download("toy", tmp_path, digest=DIGEST)
    with pytest.raises(ConfigError, match="is not a file name"):
        download(f"http://127.0.0.1:{server.server_port}/", tmp_path)


def test_what_was_downloaded_is_found_without_being_told_where(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    monkeypatch.delenv("RECSYS_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    remote = Remote(server.url("t.csv"), "e.csv", DIGEST)
    entry = module.PublicSet("toy", (remote,), "free", "Nobody", "--source table")
    monkeypatch.setattr(module, "public_sets", lambda: {"toy": entry})
    run = CliRunner().invoke(app, ["download", "toy"])
    assert run.exit_code == 0, run.output
    found = prepare._find("path", "toy/e.csv")
    assert found is not None
    assert found.samefile("var/raw/toy/e.csv")
