"""Artifacts: directories with a manifest, written atomically.

An artifact is written to a temporary directory beside its final place, and both are exchanged in
one step. A crash therefore leaves the old artifact or the new one at its place (decision 14). Its
`manifest.json` holds the kind, the configuration, the parents' digests and the SHA-256 of each
file; the digest of the artifact is a hash of the kind and the files. This module knows nothing
about the contents of the files.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from recsys.errors import ArtifactError, LockedError
from recsys.locks import lock_file, locked

FORMAT_VERSION = 1
READ_ATTEMPTS = 5  # of an artifact that is replaced while it is read
OLD = "old"  # name of a replaced artifact, for a moment, where two folders cannot be exchanged
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of renameat2(2)
MANIFEST = "manifest.json"
T = TypeVar("T")
# What the error says if one of these kinds is missing.
MADE_BY_RUN = dict.fromkeys(
    ("dataset", "bundle"), "; `recsys run EVENTS --name {}` makes it, with your file of events"
)
# Only files with these suffixes are loaded; no format that can contain a pickle is among them.
SAFE_SUFFIXES = {
    ".json", ".jsonl", ".parquet", ".safetensors", ".npy", ".html", ".svg", ".png", ".md",
    ".txt", ".jinja", ".model",
}  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """The description of an artifact.

    Attributes:
        kind: `dataset`, `ids`, `target`, `draft`, `bundle` or `evaluation`.
        config: the configuration it was made with, as plain values.
        parents: name -> digest of the artifacts it was made from.
        files: relative path -> SHA-256.
        info: counts, metrics and other results.
    """

    kind: str
    config: dict[str, Any] = field(default_factory=dict)
    parents: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        for name in ("config", "parents", "files", "info"):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name!r} is not a mapping")

    @property
    def digest(self) -> str:
        """Identity of the artifact: a hash of its kind and files, whatever its time and place."""
        text = json.dumps([self.kind, sorted(self.files.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Workspace:
    """The folders of one named run below `$RECSYS_HOME` (default `var/`)."""

    home: Path
    name: str

    @classmethod
    def of(cls, name: str) -> Workspace:
        """The workspace of run `name` under `$RECSYS_HOME`."""
        return cls(Path(os.environ.get("RECSYS_HOME", "var")), name)

    def locked(self) -> AbstractContextManager[None]:
        """Exclude other runs of this name while the block runs.

        Of a run in several processes (`RANK`), the first one holds the lock for all.

        Raises:
            LockedError: another process runs.
        """
        if int(os.environ.get("RANK") or 0) > 0:
            return nullcontext()
        way_out = "wait until it ends, or choose another --name"
        return locked(self.home / "runs" / self.name, way_out=way_out)

    @property
    def dataset(self) -> Path:
        """Folder of the canonical data."""
        return self.home / "datasets" / self.name

    def run(self, stage: str) -> Path:
        """Output of a training stage such as `ids` or `target`."""
        return self.home / "runs" / self.name / stage

    def path(self, kind: str) -> Path:
        """Where the artifact of a kind lies; see `Manifest`."""
        own = {"dataset": self.dataset, "bundle": self.bundle, "evaluation": self.report}
        return own.get(kind) or self.run(kind)

    def manifest(self, kind: str) -> Manifest:
        """The manifest of the run's artifact of a kind.

        Raises:
            ArtifactError: there is none.
        """
        return read_manifest(self.path(kind), kind)

    def digests(self, *kinds: str) -> dict[str, str]:
        """Kind -> digest of the run's artifacts: the parents of what is made from them.

        Raises:
            ArtifactError: one of them is missing.
        """
        return {kind: self.manifest(kind).digest for kind in kinds}

    @property
    def bundle(self) -> Path:
        """Folder that evaluation and serving load."""
        return self.home / "bundles" / self.name

    @property
    def report(self) -> Path:
        """Output of `recsys evaluate`."""
        return self.home / "reports" / self.name


@dataclass(frozen=True)
class Output:
    """The artifact that a stage makes.

    Attributes:
        path: where it goes.
        kind: what it is; see `Manifest`.
        config: the settings it is made with, as plain values.
        parents: name -> digest of the artifacts or raw files it is made from.
        force: make it even if an equal one is there.
    """

    path: Path
    kind: str
    config: Mapping[str, Any]
    parents: Mapping[str, str]
    force: bool = False

    def is_current(self) -> bool:
        """Whether the artifact is there, made with these settings from these parents."""
        try:
            manifest = None if self.force else read_manifest(self.path, self.kind)
        except ArtifactError:
            return False
        return (
            manifest is not None
            and manifest.parents == dict(self.parents)
            and _as_json(manifest.config) == _as_json(self.config)
        )

    def write(self, info: dict[str, Any] | None = None) -> AbstractContextManager[Path]:
        """Write the artifact; see `write_artifact`."""
        return write_artifact(
            self.path, self.kind, config=self.config, parents=self.parents, info=info
        )


@contextmanager
def write_artifact(
    path: Path,
    kind: str,
    *,
    config: Mapping[str, Any] | None = None,
    parents: Mapping[str, str] | None = None,
    info: dict[str, Any] | None = None,
) -> Iterator[Path]:
    """Yield a temporary directory; if the body succeeds, add a manifest and move it to `path`.

    Whatever happens meanwhile, `path` has the old artifact until it has the new one.

    Args:
        path: final directory. An artifact that is already there is replaced; any other content is
            left alone.
        kind: see `Manifest`.
        config: configuration it is made with.
        parents: name -> digest.
        info: a dict that the body may still fill; it is written when the body ends.

    Raises:
        ArtifactError: `path` exists and is not an artifact (it is left as it is).
        LockedError: another process writes this artifact.
    """
    path = Path(path)
    with locked(path, way_out="wait until it ends, or write to another place"):
        _restore_old(path)
        empty = path.is_dir() and not any(path.iterdir())
        if path.exists() and not (path / MANIFEST).is_file() and not empty:
            raise ArtifactError(
                f"{path} exists and is not an artifact; name another place or remove it"
            )
        for leftover in _temporaries(path):  # of a process that has died: this one has the lock
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent))
        temporary.chmod(0o755)
        try:
            yield temporary
            manifest = Manifest(
                kind,
                dict(config or {}),
                dict(parents or {}),
                {
                    file.relative_to(temporary).as_posix(): sha256(file)
                    for file in sorted(temporary.rglob("*"))
                    if file.is_file()
                },
                dict(info or {}),
            )
            text = json.dumps(manifest.__dict__, indent=2, sort_keys=True, default=str)
            (temporary / MANIFEST).write_text(text + "\n", encoding="utf-8")
            _sync(temporary)
            _replace(path, temporary)
        finally:
            if temporary.is_symlink():  # the old one was a link
                temporary.unlink()
            shutil.rmtree(temporary, ignore_errors=True)


def _prefix(path: Path) -> str:
    """Of temporary folders; no run's name has a ~, and `.a.*` would also match run `a.b`."""
    return f".{path.name}~"


def _temporaries(path: Path) -> list[Path]:
    """The temporary folders of an artifact, of which at most one is in use."""
    return [p for p in path.parent.glob(f"{_prefix(path)}*") if p != lock_file(path)]


def _replace(path: Path, new: Path) -> None:
    """Move a folder to `path` in one step; what was there is then at `new`, or removed."""
    if not os.path.lexists(path):
        new.rename(path)
    elif not _exchange(new, path):
        # Between the two steps nothing is at `path`; `_restore_old` repairs that after a crash.
        old = Path(tempfile.mkdtemp(prefix=_prefix(path), dir=path.parent)) / OLD
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
        shutil.rmtree(old.parent, ignore_errors=True)
    sync_folder(path.parent)


def _exchange(first: Path, other: Path) -> bool:
    """Exchange two paths atomically; False where the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _restore_old(path: Path) -> None:
    """Move an artifact back that a killed process has moved away. The caller holds the lock."""
    if os.path.lexists(path):
        return
    moved = [p for folder in _temporaries(path) if (p := folder / OLD / MANIFEST).is_file()]
    if moved:
        max(moved, key=lambda file: file.stat().st_mtime_ns).parent.rename(path)


def _recover(path: Path) -> None:
    """Before reading: as `_restore_old`, unless a process is at work or nothing can be written."""
    if os.path.lexists(path) or not any((p / OLD).is_dir() for p in _temporaries(path)):
        return
    with suppress(OSError, LockedError), locked(path):
        _restore_old(path)


def read_whole(path: Path, read: Callable[[], T]) -> T:
    """Read an artifact; if it was replaced meanwhile, read the new one.

    Args:
        path: the artifact.
        read: reads its files and returns what they hold, of one version then.

    Raises:
        ArtifactError: it was replaced during each of `READ_ATTEMPTS` attempts.
    """
    for _ in range(READ_ATTEMPTS):
        before = _version(path)
        try:
            loaded = read()
        except Exception:
            if _version(path) == before:
                raise
        else:
            if _version(path) == before:
                return loaded
    raise ArtifactError(f"{path} is replaced again and again while it is read; try again later")


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = Path(path).stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_mtime_ns


def read_manifest(path: Path, kind: str | None = None) -> Manifest:
    """Read the manifest of the artifact at `path`.

    Raises:
        ArtifactError: no artifact there, an unreadable manifest, another kind or a newer format.
    """
    file = Path(path) / MANIFEST
    _recover(Path(path))
    if not file.is_file():
        hint = MADE_BY_RUN.get(kind or "", "").format(Path(path).name)
        raise ArtifactError(f"{path} is not an artifact: {MANIFEST} is missing{hint}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        version = values.get("format_version", FORMAT_VERSION)
        manifest = None if version > FORMAT_VERSION else Manifest(**values)
    except (AttributeError, RecursionError, TypeError, ValueError) as error:
        raise ArtifactError(f"{file}: unreadable manifest: {error}") from error
    if manifest is None:  # a newer one may have unknown keys
        raise ArtifactError(
            f"{file}: format {version} is newer than this program's {FORMAT_VERSION}; "
            "upgrade recsys"
        )
    if kind is not None and manifest.kind != kind:
        raise ArtifactError(f"{path} is a {manifest.kind}, expected a {kind}")
    return manifest


def verify(path: Path, kind: str | None = None) -> Manifest:
    """Read the manifest and check every file against it.

    Raises:
        ArtifactError: a file is missing, altered, outside the directory, of an unsafe kind, or not
            in the manifest (for example an adapter that would be loaded unchecked). The message
            names the file.
    """
    manifest = read_manifest(path, kind)
    root = Path(path).resolve()
    for name, expected in manifest.files.items():
        try:
            file = (root / name).resolve()
            is_there = file.is_file()
        except (OSError, ValueError) as error:  # too long, or U+0000
            raise ArtifactError(f"{path}: {name[:60]!r} cannot be a file: {error}") from error
        if not file.is_relative_to(root):
            raise ArtifactError(f"{path}: {name!r} leaves the artifact's folder")
        if file.suffix not in SAFE_SUFFIXES:
            raise ArtifactError(f"{path}: {name!r} is of a kind that is never loaded")
        if not is_there:
            raise ArtifactError(f"{path}: {name!r} is missing; copy the artifact again")
        if sha256(file) != expected:
            raise ArtifactError(f"{path}: {name!r} does not match its checksum; copy it again")
    for file in sorted(root.rglob("*")):
        name = file.relative_to(root).as_posix()
        folder = file.is_dir() and not file.is_symlink()
        if not folder and name != MANIFEST and name not in manifest.files:
            raise ArtifactError(f"{path}: {name!r} is not in its manifest; remove it")
    return manifest


def _as_json(config: Mapping[str, Any]) -> str:
    return json.dumps(dict(config), sort_keys=True, default=str)


def sha256(file: Path) -> str:
    """Hex digest of a file."""
    with Path(file).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Flush a folder to disk, so that a crash after the rename loses nothing."""
    for file in folder.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        elif file.is_dir():
            sync_folder(file)
    sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
