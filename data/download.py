"""Downloads files of public data sets: verified by checksum, and moved into place whole."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import httpx

from recsys.artifacts import sha256
from recsys.data.report import sentence
from recsys.errors import ConfigError, DataError
from recsys.progress import say, track

CLIENT: dict[str, Any] = {"follow_redirects": True, "timeout": 60.0}  # seconds
PLAIN = {"Accept-Encoding": "identity"}  # else a server may compress what a checksum is of
ARCHIVES = (".zip", ".tar.gz")


@dataclass(frozen=True)
class Remote:
    """One file of a public data set: its path below the folder, and its hex digest, if known."""

    url: str
    path: str
    sha256: str | None = None


@dataclass(frozen=True)
class PublicSet:
    """A public data set; `prepare` has `{folder}` in the place of its folder."""

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


def download(name: str, folder: Path) -> Path:
    """Download a public data set into a folder of its name, and unpack archives.

    A file that is already there with the right checksum is not downloaded again.

    Raises:
        ConfigError: an unknown name.
        DataError: a failed download, another checksum, or an archive that cannot be unpacked.
    """
    known = public_sets()
    if name not in known:
        raise ConfigError(f"{name!r} is not one of {', '.join(known)}")
    for remote in known[name].files:
        file = folder / name / remote.path
        if not file.is_file() or remote.sha256 not in (None, sha256(file)):
            file.parent.mkdir(parents=True, exist_ok=True)
            _fetch(remote, file)
        if suffix := next((end for end in ARCHIVES if file.name.endswith(end)), None):
            _unpack(file, file.with_name(file.name.removesuffix(suffix)))
    return folder / name


def _fetch(remote: Remote, target: Path) -> None:
    """Download one file completely or not at all."""
    part = target.with_name(f"{target.name}.part")
    try:
        with (
            httpx.stream("GET", remote.url, headers=PLAIN, **CLIENT) as response,
            part.open("wb") as out,
        ):
            response.raise_for_status()
            length = response.headers.get("content-length", "")
            with track(f"download {target.name}", int(length) if length else None) as bar:
                for chunk in response.iter_raw():
                    out.write(chunk)
                    bar.advance(len(chunk))
        digest = sha256(part)
        if remote.sha256 is None:
            say(f"{target.name}: no checksum is known; its sha256 is {digest}")
        elif digest != remote.sha256:
            raise DataError(sentence("other_digest", remote=remote, digest=digest))
        part.replace(target)
    except (httpx.HTTPError, OSError) as error:
        failed = sentence("not_downloaded", url=remote.url, error=error, target=target)
        raise DataError(failed) from error
    finally:
        part.unlink(missing_ok=True)


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into a folder beside it, completely or not at all."""
    if folder.is_dir():
        return
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}~", dir=archive.parent))
    try:
        # Members that would leave the folder are refused (tar) or left out (zip).
        options: dict[str, Any] = {} if archive.suffix == ".zip" else {"filter": "data"}
        shutil.unpack_archive(archive, temporary, **options)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except Exception as error:  # each format has errors of its own
        raise DataError(f"{archive}: cannot be unpacked: {error}; download it again") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
