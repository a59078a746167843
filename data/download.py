"""Downloads files of public data sets: resumable, verified by checksum, and moved into place whole.

A file is downloaded to `NAME.part` and renamed once it is complete and its checksum is right. An
interrupted download is resumed with an HTTP Range request if the server still has the same file.
Only plain files are unpacked from archives, only below their folder, and up to a limit of bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlsplit

import httpx

from recsys.artifacts import sha256
from recsys.errors import ConfigError, DataError
from recsys.progress import say, track

TRIES = 5  # failures in a row without any new byte
TIMEOUT_S = 60.0
GIB = 1 << 30
MAX_FILES = 100_000  # in an archive
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Remote:
    """One file of a public data set.

    Attributes:
        url: http or https.
        path: below the data set's folder.
        sha256: hex digest, or None if it is not known.
    """

    url: str
    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class PublicSet:
    """A public data set.

    Attributes:
        name: of the data set and its folder.
        files: to download.
        licence: as its publisher states it.
        citation: the paper or page to cite.
        prepare: arguments of `recsys data prepare`, with `{folder}` for its folder.
    """

    name: str
    files: tuple[Remote, ...]
    licence: str
    citation: str
    prepare: str


def public_sets() -> dict[str, PublicSet]:
    """Read the registry `data/public_sets.json`: name -> data set."""
    entries = json.loads(resources("recsys.data").joinpath("public_sets.json").read_text("utf-8"))
    return {
        name: PublicSet(name, tuple(Remote(**file) for file in entry.pop("files")), **entry)
        for name, entry in entries.items()
    }


def download(
    source: str,
    folder: Path,
    *,
    digest: str | None = None,
    max_bytes: int = 20 * GIB,
) -> Path:
    """Download a public data set by name, or any file by URL, and unpack archives.

    A file that is already there with the right checksum is not downloaded again.

    Args:
        source: a name of `public_sets`, or a URL.
        folder: gets a folder for the data set, or the file itself for a URL.
        digest: SHA-256 of a file by URL.
        max_bytes: limit of the downloaded and of the unpacked size.

    Returns:
        the folder of the data set, the file, or the folder of the unpacked archive.

    Raises:
        ConfigError: an unknown name, or a URL that is not http or https.
        DataError: a failed download, or an archive that is not safe.
    """
    if "://" in source:
        name = _safe_name(unquote(urlsplit(source).path).rsplit("/", 1)[-1])
        file = fetch(Remote(source, name, digest), folder, max_bytes=max_bytes)
        return unpack(file, max_bytes=max_bytes) if file.name.endswith(ARCHIVES) else file
    known = public_sets()
    if source not in known:
        raise ConfigError(f"{source!r} is neither a URL nor one of {', '.join(known)}")
    if digest is not None:
        raise ConfigError(f"--sha256 goes with a URL; {source!r} has its own checksums")
    for remote in known[source].files:
        file = fetch(remote, folder / source, max_bytes=max_bytes)
        if file.name.endswith(ARCHIVES):
            unpack(file, max_bytes=max_bytes)
    return folder / source


def fetch(remote: Remote, folder: Path, *, max_bytes: int) -> Path:
    """Download one file completely; later attempts continue after the bytes of earlier ones.

    Raises:
        ConfigError: the URL is not http or https, or the digest is not a SHA-256.
        DataError: the server refuses, the file is too large or has another checksum, or the
            connection fails repeatedly.
    """
    if urlsplit(remote.url).scheme not in ("http", "https"):
        raise ConfigError(f"{remote.url}: expected a URL that begins with https:// or http://")
    if remote.sha256 is not None and not _DIGEST.fullmatch(remote.sha256):
        raise ConfigError(f"sha256 {remote.sha256!r}: expected 64 digits of 0-9 and a-f")
    target = folder / remote.path
    if not target.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"{remote.path!r} leaves {folder}")
    if target.is_file() and remote.sha256 in (None, sha256(target)):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            _receive(remote.url, part, max_bytes)
            break
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            if code < 500:
                raise DataError(
                    f"{remote.url}: the server answered {code}; check the URL"
                ) from error
            problem: Exception = error
        except httpx.TransportError as error:
            problem = error
        after = part.stat().st_size if part.exists() else 0
        failures = 0 if after > before else failures + 1
        if failures >= TRIES:
            raise DataError(
                f"{remote.url}: failed {TRIES} times after {after:,} bytes: {problem}; "
                "run the same command again to continue after these bytes"
            ) from problem
    digest = sha256(part)
    if remote.sha256 not in (None, digest):
        part.unlink()
        _origin(part).unlink(missing_ok=True)
        raise DataError(
            f"{remote.url}: the SHA-256 is {digest}, not {remote.sha256}; the file was deleted, "
            "because it is damaged or has changed: download it again, or check the checksum"
        )
    if remote.sha256 is None:
        say(f"{target.name}: no checksum is known; its sha256 is {digest}")
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(target)
    _origin(part).unlink(missing_ok=True)
    return target


def _origin(part: Path) -> Path:
    """The file that says from which version of which URL a partial download comes."""
    return part.with_name(f"{part.name}.json")


def _receive(url: str, part: Path, max_bytes: int) -> None:
    """Download the rest of `part`, or all of it if the server cannot resume."""
    origin = _origin(part)
    headers = {"Accept-Encoding": "identity"}  # uncompressed, so that byte positions agree
    size = part.stat().st_size if part.exists() else 0
    if size:
        try:
            known = json.loads(origin.read_text("utf-8"))
        except (OSError, ValueError):
            known = {}
        if known.get("url") == url and known.get("version"):
            headers |= {"Range": f"bytes={size}-", "If-Range": known["version"]}
    with (
        httpx.Client(follow_redirects=True, timeout=TIMEOUT_S) as client,
        client.stream("GET", url, headers=headers) as response,
    ):
        if url.startswith("https:") and response.url.scheme != "https":
            raise DataError(f"{url}: leads to {response.url}, which is not encrypted")
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            if response.headers.get("content-range") == f"bytes */{size}":
                return  # it was complete already
            part.unlink()
            raise httpx.ReadError("the server has a shorter file now", request=response.request)
        response.raise_for_status()
        goes_on = response.status_code == httpx.codes.PARTIAL_CONTENT and response.headers.get(
            "content-range", ""
        ).startswith(f"bytes {size}-")
        if response.status_code == httpx.codes.PARTIAL_CONTENT and not goes_on:
            part.unlink(missing_ok=True)
            raise httpx.ReadError("the server sent another part", request=response.request)
        if not goes_on:  # the server ignores Range or has another file
            size = 0
            version = response.headers.get("etag") or response.headers.get("last-modified")
            if version and version.startswith("W/"):  # a weak tag does not identify the bytes
                version = response.headers.get("last-modified")
            origin.write_text(json.dumps({"url": url, "version": version}), "utf-8")
        length = response.headers.get("content-length", "")
        total = size + int(length) if length.isdecimal() else None
        _check_size(url, total or 0, max_bytes)
        free = shutil.disk_usage(part.parent).free
        if total and total - size > free:
            raise DataError(f"{url}: needs {total - size:,} bytes, the disk has {free:,} free")
        with (
            track(f"download {part.stem}", total) as bar,
            part.open("ab" if goes_on else "wb") as out,
        ):
            bar.advance(size)
            for (
                chunk
            ) in response.iter_raw():  # written at once, so that an interruption loses nothing
                size += len(chunk)
                _check_size(url, size, max_bytes)
                out.write(chunk)
                bar.advance(len(chunk))
        if total is not None and size != total:
            raise httpx.ReadError(f"{size} of {total} bytes came", request=response.request)


def _check_size(url: str, size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise DataError(
            f"{url}: larger than {max_bytes / GIB:.3g} GiB; allow more with --max-gb if that is "
            "right"
        )


def _safe_name(name: str) -> str:
    """The file name at the end of a URL.

    Raises:
        ConfigError: it is not a safe file name.
    """
    if not name or name.startswith(".") or re.search(r"[\x00-\x1f/\\]", name):
        raise ConfigError(f"the URL ends with {name!r}, which is not a file name")
    return name


def unpack(archive: Path, *, max_bytes: int) -> Path:
    """Unpack a zip or tar file into a folder of the same name beside it, completely or not at all.

    Raises:
        DataError: a damaged archive, a member that is not a plain file or would leave the folder,
            or more bytes or files than allowed.
    """
    suffix = next(s for s in ARCHIVES if archive.name.endswith(s))
    folder = archive.with_name(archive.name.removesuffix(suffix))
    if folder.is_dir():
        return folder
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}~", dir=archive.parent))
    sizes: list[int] = []  # neither format unpacks more bytes of a member than are declared

    def check(name: str, size: int, is_plain: bool) -> None:
        path = PurePosixPath(name.replace("\\", "/"))
        sizes.append(size)
        if path.is_absolute() or ".." in path.parts or ":" in name or not path.parts:
            raise DataError(f"{archive}: {name!r} would leave its folder; nothing was unpacked")
        if not is_plain:
            raise DataError(f"{archive}: {name!r} is not a plain file; nothing was unpacked")
        if len(sizes) > MAX_FILES:
            raise DataError(f"{archive}: more than {MAX_FILES:,} files in it")
        if sum(sizes) > max_bytes:
            raise DataError(
                f"{archive}: unpacks to more than {max_bytes / GIB:.3g} GiB; allow more with "
                "--max-gb if that is right"
            )

    try:
        if suffix == ".zip":
            with zipfile.ZipFile(archive) as zipped:
                for entry in zipped.infolist():
                    # The highest bits of the Unix mode: 0 unknown, 8 a plain file, 4 a folder.
                    kind = entry.external_attr >> 28
                    check(entry.filename, entry.file_size, kind in (0, 4, 8))
                    zipped.extract(entry, temporary)
        else:
            with tarfile.open(archive) as packed:
                for member in packed:
                    check(member.name, member.size, member.isreg() or member.isdir())
                    packed.extract(member, temporary, filter="data")
        temporary.chmod(0o755)
        temporary.rename(folder)
    except (
        EOFError,
        OSError,
        RuntimeError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise DataError(f"{archive}: cannot be unpacked: {error}; download it again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder
