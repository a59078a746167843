"""Files in object stores: `s3://BUCKET/KEY` (S3 and its protocol elsewhere), `gs://BUCKET/KEY`.

pyarrow speaks to both, so nothing else is installed. Credentials come from where the stores' own
tools find them: environment, profile, or the machine's role; a URL with credentials is refused, and
no text of an error has any. Objects are copied to the disk and back as wholes: a file that was read
is complete, and an upload that is interrupted leaves nothing, or what was there.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from recsys.errors import ArtifactError, ConfigError, DataError

if TYPE_CHECKING:  # a path needs none of it
    from pyarrow import fs

SCHEMES = ("s3://", "gs://")
BLOCK = 1 << 22  # bytes
ANONYMOUS = "anonymous"  # the user's name in the URL of a public bucket at Google


def is_object(location: str) -> bool:
    """Whether a location is the URL of an object and not a path.

    >>> is_object("s3://exports/events.parquet"), is_object("exports/events.parquet")
    (True, False)
    """
    return location.lower().startswith(SCHEMES)


@contextmanager
def reading(location: str | Path) -> Iterator[Path]:
    """A file to read: the path itself, or a copy of an object for as long as the body runs.

    Raises:
        ConfigError: a URL that is malformed or has credentials.
        DataError: there is no such object, or the store does not give it.
    """
    if not is_object(str(location)):
        yield Path(location)
        return
    with tempfile.TemporaryDirectory(prefix="recsys-") as folder:
        file = fetch(str(location), Path(folder))
        with _named_after(str(location), file):
            yield file


@contextmanager
def writing(location: str | Path) -> Iterator[Path]:
    """A file to write: the path itself, or one that becomes the object after the body.

    Nothing is uploaded if the body raises. `TMPDIR` has the file until then.

    Raises:
        ConfigError: a URL that is malformed, has credentials, or names no object.
        DataError: the store does not take it.
    """
    if not is_object(str(location)):
        yield Path(location)
        return
    url = str(location)
    system, path = _open(url)
    name = path.rpartition("/")[2]
    if name in (".", ".."):
        raise ConfigError(f"{shown(url)}: the object cannot be a file; give it another name")
    if "/" not in path or url.partition("?")[0].endswith("/"):
        raise ConfigError(f"{shown(url)}: the URL names no object; give BUCKET/KEY")
    with tempfile.TemporaryDirectory(prefix="recsys-") as folder:
        file = Path(folder) / name
        with _named_after(url, file):
            yield file
        with _explained(url):
            _upload(system, file, path)


@contextmanager
def _named_after(url: str, file: Path) -> Iterator[None]:
    """Name the object instead of its local copy in errors, which the user never sees."""
    try:
        yield
    except (ArtifactError, ConfigError, DataError) as error:
        raise type(error)(str(error).replace(str(file), shown(url))) from error


def fetch(url: str, folder: Path) -> Path:
    """Copy an object, or the objects directly below a prefix, into a folder.

    What is there already, with the same size and time, is not copied again; of a prefix, files
    whose objects are gone are removed.

    Returns:
        The file, or for a prefix a folder of files, named as in the URL.

    Raises:
        ConfigError: a URL that is malformed or has credentials.
        DataError: there is no such object, the store does not give it, or the disk is full.
    """
    from pyarrow import fs

    system, path = _open(url)
    with _explained(url):
        found = system.get_file_info(path.rstrip("/"))
        if found.type == fs.FileType.File:
            return _download(system, found, folder)
        if found.type == fs.FileType.NotFound:
            raise DataError(f"{shown(url)}: there is no such object")
        below = system.get_file_info(fs.FileSelector(path.rstrip("/")))
    files = [info for info in below if info.type == fs.FileType.File]
    if not files:
        raise DataError(f"{shown(url)}: there are no objects directly below; name a longer prefix")
    target: Path = folder / found.base_name
    if target.is_dir():
        names = {info.base_name for info in files}
        for old in target.iterdir():
            if old.is_file() and old.name not in names:
                old.unlink()
    target.mkdir(parents=True, exist_ok=True)
    for info in files:
        with _explained(url):
            _download(system, info, target)
    return target


def shown(url: str) -> str:
    """A location as errors show it: a URL without user, password and options.

    >>> shown("s3://key:secret@exports/events.csv?region=eu-west-1"), shown("a?.csv")
    ('s3://exports/events.csv', 'a?.csv')
    """
    if not is_object(url):
        return url
    scheme, _, rest = url.partition("://")
    if ":" in rest.partition("/")[0]:  # a password, which may have any character; no bucket has one
        rest = rest.rpartition("@")[2]
    bucket, slash, key = rest.partition("?")[0].partition("/")
    return f"{scheme}://{bucket.rpartition('@')[2]}{slash}{key}"


def _open(url: str) -> tuple[fs.FileSystem, str]:
    """The store of a URL, and the place in it as BUCKET/KEY."""
    import pyarrow as pa
    from pyarrow import fs

    authority = urlsplit(url).netloc
    if authority.rpartition("@")[0] not in ("", ANONYMOUS) or ":" in authority:
        raise ConfigError(
            f"{shown(url)}: a URL with credentials ends in logs and histories; set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE or "
            "GOOGLE_APPLICATION_CREDENTIALS instead"
        )
    if "#" in url:  # Arrow would drop it with the rest, and use another object
        raise ConfigError(f"{shown(url)}: write %23 in place of #")
    try:
        system, path = fs.FileSystem.from_uri(url)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise ConfigError(
            f"{shown(url)}: {_reason(error)}; write spaces and other special characters "
            "percent-encoded, a space as %20"
        ) from None
    return system, path


def _download(system: fs.FileSystem, info: Any, folder: Path) -> Path:
    """Copy an object to a file of its name, completely or not at all."""
    if info.base_name in ("", ".", ".."):
        raise DataError(f"the object {info.path!r} cannot be a file; rename it")
    path: Path = folder / info.base_name
    time_ns = info.mtime_ns or 0
    if path.is_file():
        there = path.stat()
        if (there.st_size, there.st_mtime_ns) == (info.size, time_ns):
            return path
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if info.size > free:
        raise DataError(f"{info.path} has {info.size:,} bytes, and {folder} has {free:,} free")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with system.open_input_stream(info.path) as source, partial.open("wb") as target:
            while target.tell() <= info.size and (block := source.read(BLOCK)):
                target.write(block)
            size = target.tell()
        if size != info.size:
            raise DataError(f"{info.path} was changed while it was read; try again")
        os.utime(partial, ns=(time_ns, time_ns))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _upload(system: fs.FileSystem, file: Path, path: str) -> None:
    """Copy a file to an object.

    A stream of Arrow completes the upload when it is closed, and it is closed even if an exception
    ends its use. So nothing may interrupt the copy: it runs on a thread, where signals do not
    arrive. After a part that failed, `close` raises and completes nothing.
    """

    def copy() -> None:
        with file.open("rb") as source, system.open_output_stream(path) as target:
            while block := source.read(BLOCK):
                target.write(block)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(copy).result()


@contextmanager
def _explained(url: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{shown(url)}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:400]
