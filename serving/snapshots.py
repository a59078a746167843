"""Snapshots of a whole store in one file, and their restoration.

A snapshot is a ZIP archive: `TABLE.jsonl` for each table of the store, with a JSON array per row,
`keys.json` (the service's API keys, as hashes) if there are keys, and `manifest.json` with the
versions and the SHA-256 of each file. It holds the salt of the store, so hashes of erased users
stay valid. It holds no bundles and no data sets.
"""

import hashlib
import io
import json
import lzma
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import from_json

from recsys import __version__
from recsys.artifacts import sync_folder
from recsys.errors import DataError
from recsys.locks import lock_file, locked
from recsys.progress import Bar, track
from recsys.serving import auth
from recsys.serving.stores.database import SALT, SCHEMA_VERSION
from recsys.serving.stores.store import TABLES, RefusedError, Store

KIND, FORMAT = "recsys store snapshot", 1
KEYS, MANIFEST = "keys.json", "manifest.json"
CHUNK = 5_000
BLOCK = 1 << 20
MAX_LINE = 32 << 20  # bytes of a row, of the manifest and of the file of keys
MAX_PART = 32 << 20  # bytes of the rows that are in memory at once, about
Part = tuple[str, list[Sequence[Any]]]  # name of a table, and rows of it
DAMAGED = (
    zipfile.BadZipFile, zlib.error, struct.error, lzma.LZMAError, EOFError, OSError, KeyError,
    ValueError, TypeError, RuntimeError,  # RuntimeError: encrypted, or of an unknown method
)  # fmt: skip


def _json(text: str) -> str:
    from_json(text)  # at most 200 levels deep
    return text


def _json_object(text: str) -> str:
    if not isinstance(from_json(text), dict):
        raise ValueError("it is not a JSON object")
    return text


def _check_salt(row: tuple[str, str]) -> tuple[str, str]:
    if row[0] == SALT:
        salt = from_json(row[1])
        if not isinstance(salt, str) or not bytes.fromhex(salt):
            raise ValueError(f"{SALT} is not hexadecimal")
    return row


def _date(text: str) -> str:
    datetime.fromisoformat(text)
    return text


STRICT = ConfigDict(strict=True)
Id = Annotated[int, Field(ge=1, le=2**53)]  # the ids of new rows come after it
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Linked = Annotated[int, Field(ge=0, le=1)]
Json = Annotated[str, AfterValidator(_json)]
Record = Annotated[str, AfterValidator(_json_object)]
# Types of the columns of `TABLES`.
ROWS: Mapping[str, TypeAdapter[Any]] = {
    "state": TypeAdapter(
        Annotated[tuple[str, Json], AfterValidator(_check_salt)], config=STRICT
    ),
    "erasures": TypeAdapter(tuple[str, Whole], config=STRICT),
    "seeds": TypeAdapter(tuple[str, Count], config=STRICT),
    "journal": TypeAdapter(tuple[Id, str, str | None, Record], config=STRICT),
    "recommendations": TypeAdapter(
        tuple[Id, str, str | None, str, Json, Whole], config=STRICT
    ),
    "exposures": TypeAdapter(tuple[Id, str, str, str, str, Whole], config=STRICT),
    "events": TypeAdapter(
        tuple[
            Id, str | None, str, str, str, Whole, float | None, str | None, Linked | None,
            str | None, str | None,
        ],
        config=STRICT,
    ),
}  # fmt: skip


class Header(BaseModel):
    """The versions of a snapshot, which every format has."""

    model_config = STRICT

    kind: str = Field(max_length=64)
    format: Count
    schema_version: Count = Field(alias="schema")
    recsys: str = Field(pattern=r"^[A-Za-z0-9.+!_-]{1,64}$")


class Entry(BaseModel):
    """A file of a snapshot; `lines` is the number of rows of a table."""

    model_config = STRICT

    sha256: str
    lines: Count


class Manifest(Header):
    """The manifest of a snapshot of this format."""

    created: Annotated[str, Field(max_length=64), AfterValidator(_date)]
    files: dict[str, Entry]


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
        DataError: there is something else than a snapshot at `path`, such as the store itself.
        LockedError: another process writes this snapshot.
    """
    if path.exists() and not _may_be_replaced(path):
        raise DataError(f"{path} is there and is no snapshot; name another file, or remove it")
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
        DataError: the file is damaged, or of another version; the text names the file and line.
        ConfigError: its file of keys is malformed, or cannot be written.
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
            if keys is not None and KEYS in manifest.files:
                with _explained(path):
                    content = _read(archive, KEYS)
                wrote_keys = auth.restore(keys, content)

        events = manifest.files["events.jsonl"].lines
        with track("restore", events) as bar:
            parts = _counted(_parts(archive, path), bar)
            try:
                left_out = store.load(parts, replace=replace, last=write_keys)
            except RefusedError as error:
                raise DataError(f"{path}: {error}; take another snapshot") from error
    return Restored(manifest.created, events - left_out, left_out, wrote_keys)


def _may_be_replaced(path: Path) -> bool:
    """Whether nothing is lost by a snapshot at a path: what is there is one, or an empty file."""
    if not path.is_file():
        return False
    if not path.stat().st_size:
        return True
    try:
        with zipfile.ZipFile(path) as archive:
            return MANIFEST in archive.namelist()
    except DAMAGED:
        return False


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


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{path}: not a whole snapshot of a store: {reason}; take another snapshot"
        ) from error


def _reason(error: ValidationError, columns: Sequence[str] = ()) -> str:
    """The first fault of a JSON document, with the name of its field or column."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [
        columns[key] if columns and isinstance(key, int) and key < len(columns) else str(key)
        for key in first["loc"]
    ]
    return ": ".join([".".join(place)[:64], first["msg"]] if place else [first["msg"]])


def _verified(file: BinaryIO, path: Path) -> tuple[zipfile.ZipFile, Manifest]:
    """Open an archive; compare its versions, and the checksums and lines of its files."""
    with _explained(path):
        archive = zipfile.ZipFile(file)
        content = _read(archive, MANIFEST)
        try:
            header = Header.model_validate_json(content)
            if header.kind != KIND:
                raise ValueError(f"its kind is {header.kind!r}")
            versions = header.format, header.schema_version
            if versions == (FORMAT, SCHEMA_VERSION):
                manifest = Manifest.model_validate_json(content)
                _check_files(archive, manifest.files)
                return archive, manifest
        except ValidationError as error:
            raise ValueError(f"{MANIFEST}: {_reason(error)}") from error
    raise DataError(
        f"{path}: a snapshot of format {versions[0]} and schema {versions[1]}, and this "
        f"program has {FORMAT} and {SCHEMA_VERSION}; restore it with recsys "
        f"{header.recsys}, which wrote it"
    )


def _read(archive: zipfile.ZipFile, name: str) -> bytes:
    """Read a small file of the archive."""
    with archive.open(name) as file:
        content = file.read(MAX_LINE + 1)
    if len(content) > MAX_LINE:
        raise ValueError(f"{name} has more than {MAX_LINE} bytes")
    return content


def _check_files(archive: zipfile.ZipFile, files: Mapping[str, Entry]) -> None:
    if files.keys() - {KEYS} != {f"{table}.jsonl" for table in TABLES}:
        raise ValueError("its files are not the tables of a store")
    for name, entry in files.items():
        digest, lines = hashlib.sha256(), 0
        with archive.open(name) as file:
            while block := file.read(BLOCK):
                digest.update(block)
                lines += block.count(b"\n")
        if digest.hexdigest() != entry.sha256:
            raise ValueError(f"{name} does not have its checksum")
        if name != KEYS and lines != entry.lines:
            raise ValueError(f"{name} has {lines} lines, and {MANIFEST} says {entry.lines}")


def _parts(archive: zipfile.ZipFile, path: Path) -> Iterator[Part]:
    with _explained(path):  # an exception of the reader of this iterator does not come here
        has_salt = False
        for table in TABLES:
            rows: list[Sequence[Any]] = []
            size = 0
            for row, length in _rows(archive, table):
                rows.append(row)
                size += length
                has_salt |= table == "state" and row[0] == SALT
                if len(rows) == CHUNK or size > MAX_PART:
                    yield table, rows
                    rows, size = [], 0
            if not has_salt:
                raise ValueError(f"state.jsonl has no line of {SALT}")
            yield table, rows


def _rows(archive: zipfile.ZipFile, table: str) -> Iterator[tuple[Sequence[Any], int]]:
    """Iterate over the rows of a table and the lengths of their lines, in bytes."""
    name, adapter = f"{table}.jsonl", ROWS[table]
    with archive.open(name) as raw, io.BufferedReader(raw, BLOCK) as file:  # type: ignore[type-var]
        number = 0
        while line := file.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise ValueError(f"{name}, line {number}: it has more than {MAX_LINE} bytes")
            if not line.endswith(b"\n"):
                raise ValueError(f"{name}, line {number}: its end is missing")
            try:
                row = adapter.validate_json(line)
            except ValidationError as error:
                reason = _reason(error, TABLES[table])
                raise ValueError(f"{name}, line {number}: {reason}") from error
            yield row, len(line)
