"""API keys and scopes: the file of keys, and the scope that each route declares.

A key is 256 random bits, and the file holds only its SHA-256. Slow hashes (bcrypt, scrypt, argon2)
protect secrets that people choose. 256 random bits cannot be guessed, however fast the hash is, and
a slow one would delay every request.

The file is changed under a lock and replaced atomically, so parallel changes are all kept. A marker
beside it, `.NAME.in-use`, tells that the service had keys: if the file is deleted, the service does
not start without keys by itself.
"""

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from recsys.artifacts import sync_folder
from recsys.errors import ConfigError
from recsys.locks import lock_file, locked

PREFIX = "rk_"
FORMAT_VERSION = 1
CHECK_INTERVAL_S = 1.0
LOCK_WAIT_S = 10.0
WITHOUT_KEYS = "to serve this machine without keys, set serve.keys to null (--set serve.keys=null)"
_DURATION = re.compile(r"([1-9]\d{0,3})([dh])")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

EndpointT = TypeVar("EndpointT", bound=Callable[..., Any])

logger = logging.getLogger("recsys.serving.auth")


class Scope(IntEnum):
    """What a key allows; each scope includes those below it."""

    PUBLIC = 0  # needs no key
    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """The name in files and messages."""
        return self.name.lower()


def requires(scope: Scope) -> Callable[[EndpointT], EndpointT]:
    """Declare the scope that a route's endpoint needs; put it below the route's own decorator."""

    def declare(endpoint: EndpointT) -> EndpointT:
        endpoint.scope = scope  # type: ignore[attr-defined]
        return endpoint

    return declare


def scope_of(endpoint: Callable[..., Any]) -> Scope:
    """The scope that an endpoint needs: the declared one, or `admin` where none is declared."""
    return getattr(endpoint, "scope", Scope.ADMIN)


@dataclass(frozen=True)
class Key:
    """A key as the file holds it.

    Attributes:
        sha256: hash of the whole key.
        created: its date in ISO 8601.
        expires: the date from which it is refused.
    """

    name: str
    scope: str
    sha256: str
    created: str
    expires: str | None = None

    @property
    def may(self) -> Scope:
        """The scope as a number."""
        return Scope[self.scope.upper()]

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and datetime.now(UTC) >= datetime.fromisoformat(
            self.expires
        )


KEY_FIELDS = {field.name for field in fields(Key)}


def create(file: Path, name: str, scope: str, expires: str | None = None) -> str:
    """Create a key and add it to the file (mode 0600), which is created if needed.

    It can be used for the time `expires`, as `90d` or `12h`, or without limit.

    Returns the key itself, which is stored nowhere and cannot be shown again.

    Raises:
        ConfigError: the name is taken or malformed, the scope or the time is unknown, or the file
            is malformed.
        LockedError: another process has been changing the file for `LOCK_WAIT_S` seconds.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r} is not a plain word (letters, digits, '.', '_', '-')")
    if scope not in [s.word for s in Scope if s is not Scope.PUBLIC]:
        raise ConfigError(f"scope {scope!r} is not read, write or admin")
    secret = PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC).replace(microsecond=0)
    until = None if expires is None else (now + _duration(expires)).isoformat()
    key = Key(name, scope, _digest(secret), now.isoformat(), until)
    with _changing(file) as path:
        keys = read(path) if path.exists() else []
        if any(key.name == name for key in keys):
            raise ConfigError(
                f"{file}: there is a key {name!r} already; revoke it or choose another name"
            )
        _write(path, [*keys, key])
        mark(file)
    return secret


def revoke(file: Path, name: str) -> None:
    """Remove a key from the file; a running service refuses it within about a second.

    Raises:
        ConfigError: there is no such key or no such file.
        LockedError: as `create`.
    """
    read(file)  # a missing file is refused before a lock is made
    with _changing(file) as path:
        keys = read(path)
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"{file}: there is no key {name!r}; known: {known}")
        _write(path, left)
        mark(file)


def marker(file: Path) -> Path:
    """The file which tells that a service had the keys of `file`, even if `file` is deleted."""
    return file.with_name(f".{file.name}.in-use")


def read(file: Path) -> list[Key]:
    """Read the keys of a file.

    Raises:
        ConfigError: the file cannot be read or is not a file of keys.
    """
    return _parse(file, _read_bytes(file))


def _read_bytes(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        way_out = "make one with `recsys keys create`"
        if marker(file).exists():
            way_out = f"keys were in use here: restore the file, {way_out}, or, {WITHOUT_KEYS}"
        raise ConfigError(f"keys {file}: {error.strerror or error}; {way_out}") from error


def _parse(file: Path, content: bytes) -> list[Key]:
    try:
        document = json.loads(content)
        if document["version"] != FORMAT_VERSION:
            raise ValueError(f"version {document['version']!r} is not {FORMAT_VERSION}")
        for entry in document["keys"]:
            # A limit that this program does not know is not dropped: the key would do more.
            for field in entry.keys() - KEY_FIELDS:
                raise ValueError(
                    f"key {entry.get('name')!r} has the field {field!r}, which keys do not have; "
                    "delete its entry from the file and make another key (`recsys keys create`)"
                )
        keys = [Key(**entry) for entry in document["keys"]]
        for key in keys:
            _ = key.may, bytes.fromhex(key.sha256), key.is_expired
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"keys {file}: not a file of `recsys keys`: {error}") from error
    return keys


@contextmanager
def _changing(file: Path) -> Iterator[Path]:
    """Exclude other changes of the file; yields its place, which a link may name."""
    path = file.resolve()
    try:
        _make_folder(path.parent)
        with locked(path, wait_s=LOCK_WAIT_S, way_out="try again"):
            for leftover in path.parent.glob(_temporary(path) + "*"):  # of a killed process
                if leftover != lock_file(path):
                    leftover.unlink()
            yield path
    except OSError as error:
        raise ConfigError(f"keys {file}: {error.strerror or error}") from error


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it, for the user who owns the nearest one that is there."""
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _hand_over(folder, like=folder.parent)


def _hand_over(path: Path, like: Path) -> None:
    """Give a path the owner of another one: root makes keys for a service of another user."""
    if os.geteuid() == 0:
        stat = like.stat()
        os.chown(path, stat.st_uid, stat.st_gid)


def _temporary(file: Path) -> str:
    """How the names of temporary files begin."""
    return f".{file.name}~"


def _write(file: Path, keys: Sequence[Key]) -> None:
    """Replace the file atomically, so that a reader sees the old one or the new one."""
    document = {
        "version": FORMAT_VERSION,
        "keys": [{n: v for n, v in asdict(key).items() if v is not None} for key in keys],
    }
    like = file if file.exists() else file.parent
    descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=_temporary(file))  # 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            json.dump(document, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        _hand_over(Path(temporary), like)
        os.replace(temporary, file)  # noqa: PTH105 - a path of str
    except BaseException:
        os.unlink(temporary)  # noqa: PTH108
        raise
    sync_folder(file.parent)


def mark(file: Path) -> None:
    """Write the marker of a file of keys, unless it is there."""
    path = marker(file)
    if not path.exists():
        path.write_text(f"{file.name} was in use; {WITHOUT_KEYS}\n", encoding="utf-8")
        _hand_over(path, file.parent)


def _duration(text: str) -> timedelta:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ConfigError(f"expires {text!r} is not a number of days or hours, such as 90d or 12h")
    return timedelta(**{{"d": "days", "h": "hours"}[match[2]]: int(match[1])})


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """The current keys of a file, which is read again about every second.

    If the file becomes unreadable, the last keys stay valid, and the log reports it. If it becomes
    empty (the last key was revoked), no key is accepted.
    """

    def __init__(self, file: Path) -> None:
        """Read the file; raises `ConfigError` if it is not a file of keys, or has none."""
        self._file = file
        self._seen: bytes | None = _read_bytes(file)
        self._keys = _parse(file, self._seen)
        if not self._keys:
            raise ConfigError(
                f"keys {file}: there is no key in it; make one with `recsys keys create`, or, "
                + WITHOUT_KEYS
            )
        with suppress(OSError):  # a file of a secret may lie in a folder that is read-only
            mark(file)
        self._checked = time.monotonic()

    def find(self, secret: str) -> Key | None:
        """Find the key with this secret, or None; an expired one is not found.

        Each digest is compared in constant time.
        """
        self._reread_if_changed()
        shown = _digest(secret)
        match = next((k for k in self._keys if hmac.compare_digest(k.sha256, shown)), None)
        return None if match is None or match.is_expired else match

    def _reread_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_INTERVAL_S:
            return
        self._checked = now
        before = self._seen
        try:
            # Its content and not its time: two changes may have the same time and size.
            self._seen = None
            self._seen = _read_bytes(self._file)
            if self._seen != before:
                self._keys = _parse(self._file, self._seen)
                logger.info("keys", extra={"fields": {"keys": len(self._keys)}})
        except ConfigError as error:
            if self._seen != before:
                logger.error("keys not read again: %s", error)
