"""Snapshots of a whole store in one file, and their restoration.

A snapshot is a ZIP archive: `TABLE.jsonl` for each table of the store, with a JSON array per row,
`keys.json` (the service's API keys, as hashes) if there are keys, and `manifest.json` with the
versions and the SHA-256 of each file. It holds the salt of the store, so hashes of erased users
stay valid. It holds no bundles and no data sets.
"""

import hashlib
import json
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO

from recsys import __version__
from recsys.artifacts import sync_folder
from recsys.errors import DataError
from recsys.locks import lock_file, locked
from recsys.progress import Bar, track
from recsys.serving import auth
from recsys.serving.stores.database import SCHEMA_VERSION
from recsys.serving.stores.store import TABLES, Store

KIND, FORMAT = "recsys store snapshot", 1
KEYS, MANIFEST = "keys.json", "manifest.json"
CHUNK = 5_000
BLOCK = 1 << 20
Part = tuple[str, list[Sequence[Any]]]  # name of a table, and rows of it
DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, KeyError, ValueError,
    TypeError, NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Restored:
    """Outcome of a restoration.

    Attributes:
        created: time of the snapshot in ISO 8601.
        events: number of events that were written.
        left_out: number of events from before the erasure of their user.
        keys: whether the file of keys was written.
    """

    created: str
    events: int
    left_out: int
    keys: bool


def write_snapshot(store: Store, path: Path, keys: Path | None = None) -> int:
    """Write a snapshot of a store and of a file of keys, atomically; returns the number of events.

    Other processes may use the store. The file can be read by its owner only.

    Raises:
        LockedError: another process writes this snapshot.
    """
    manifest: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "schema": SCHEMA_VERSION,
        "recsys": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": {},
    }
    with locked(path):
        for leftover in path.parent.glob(f".{path.name}~*"):  # of a killed process
            if leftover != lock_file(path):
                leftover.unlink()
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}~")
        try:
            with os.fdopen(descriptor, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
                    if keys is not None:
                        auth.read(keys)  # it is refused now rather than when it is restored
                        manifest["files"][KEYS] = _write(archive, KEYS, iter([keys.read_bytes()]))
                    with track("snapshot", store.count()) as bar:
                        dumped = _counted(store.dump(), bar)
                        for table, parts in groupby(dumped, key=lambda part: part[0]):
                            name = f"{table}.jsonl"
                            lines = (_line(row) for _, rows in parts for row in rows)
                            manifest["files"][name] = _write(archive, name, lines)
                    archive.writestr(MANIFEST, json.dumps(manifest, indent=1))
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
        sync_folder(path.parent)
    return int(manifest["files"]["events.jsonl"]["lines"])


def restore_snapshot(
    store: Store, path: Path, keys: Path | None = None, *, replace: bool = False
) -> Restored:
    """Fill a store from a snapshot, all of it or nothing, whatever interrupts it.

    The file of keys is written if there is none; existing keys stay as they are.

    Args:
        store: an empty store.
        path: file of `write_snapshot`.
        keys: place of the file of keys; None leaves keys out.
        replace: whether a store that is not empty is emptied first. Its erasures stay in force.

    Raises:
        DataError: the file is damaged, or of another version.
        StoreError: the store is not empty, or has erasures of another store.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    with file:
        archive, manifest = _verified(file, path)
        wrote_keys = False

        def write_keys() -> None:
            # Before the commit: a kill between the two leaves the store empty, so that the command
            # can be repeated.
            nonlocal wrote_keys
            if keys is not None and KEYS in manifest["files"]:
                wrote_keys = auth.restore(keys, archive.read(KEYS))

        events = int(manifest["files"]["events.jsonl"]["lines"])
        with track("restore", events) as bar:
            parts = _counted(_parts(archive), bar)
            left_out = store.load(parts, replace=replace, last=write_keys)
    return Restored(manifest["created"], events - left_out, left_out, wrote_keys)


def _counted(parts: Iterable[Part], bar: Bar) -> Iterator[Part]:
    for table, rows in parts:
        yield table, rows
        if table == "events":
            bar.advance(len(rows))


def _line(row: Any) -> bytes:
    return json.dumps(tuple(row), separators=(",", ":")).encode() + b"\n"


def _write(archive: zipfile.ZipFile, name: str, content: Iterator[bytes]) -> dict[str, Any]:
    """Write a file of the archive; returns its entry in the manifest."""
    digest, lines = hashlib.sha256(), 0
    with archive.open(name, "w", force_zip64=True) as out:
        for piece in content:
            out.write(piece)
            digest.update(piece)
            lines += 1
    return {"sha256": digest.hexdigest(), "lines": lines}


def _verified(file: BinaryIO, path: Path) -> tuple[zipfile.ZipFile, dict[str, Any]]:
    """Open an archive; compare its versions and the checksums of its files."""
    try:
        archive = zipfile.ZipFile(file)
        manifest: dict[str, Any] = json.loads(archive.read(MANIFEST))
        if manifest["kind"] != KIND:
            raise ValueError(f"its kind is {manifest['kind']!r}")
        versions = manifest["format"], manifest["schema"]
        if versions == (FORMAT, SCHEMA_VERSION):
            _check_files(archive, manifest["files"])
    except DAMAGED as error:
        raise DataError(f"{path}: not a whole snapshot of a store: {error}") from error
    if versions != (FORMAT, SCHEMA_VERSION):
        raise DataError(
            f"{path}: a snapshot of format {versions[0]} and schema {versions[1]}, and this "
            f"program has {FORMAT} and {SCHEMA_VERSION}; restore it with recsys "
            f"{manifest['recsys']}, which wrote it"
        )
    return archive, manifest


def _check_files(archive: zipfile.ZipFile, files: Mapping[str, Mapping[str, Any]]) -> None:
    if files.keys() - {KEYS} != {f"{table}.jsonl" for table in TABLES}:
        raise ValueError("its files are not the tables of a store")
    for name, entry in files.items():
        digest = hashlib.sha256()
        with archive.open(name) as file:
            while block := file.read(BLOCK):
                digest.update(block)
        if digest.hexdigest() != entry["sha256"]:
            raise ValueError(f"{name} does not have its checksum")


def _parts(archive: zipfile.ZipFile) -> Iterator[Part]:
    for table in TABLES:
        rows: list[Sequence[Any]] = []
        with archive.open(f"{table}.jsonl") as file:
            for line in file:
                rows.append(json.loads(line))
                if len(rows) == CHUNK:
                    yield table, rows
                    rows = []
        yield table, rows
