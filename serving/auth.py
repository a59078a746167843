"""API keys and scopes: the file of keys, and the scope that each route declares.

A key is 256 random bits, and the file holds only its SHA-256. Slow hashes (bcrypt, scrypt, argon2)
protect secrets that people choose. 256 random bits cannot be guessed, however fast the hash is, and
a slow one would delay every request.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

from recsys.errors import ConfigError

PREFIX = "rk_"
FORMAT_VERSION = 1
CHECK_INTERVAL_S = 1.0
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
    """A key as the file holds it: the hash of the whole key, and its date in ISO 8601."""

    name: str
    scope: str
    sha256: str
    created: str

    @property
    def may(self) -> Scope:
        """The scope as a number."""
        return Scope[self.scope.upper()]


def create(file: Path, name: str, scope: str) -> str:
    """Create a key and add it to the file (mode 0600), which is created if needed.

    Returns the key itself, which is stored nowhere and cannot be shown again.

    Raises:
        ConfigError: the name is taken or malformed, the scope is unknown, or the file is malformed.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r} is not a plain word (letters, digits, '.', '_', '-')")
    if scope not in [s.word for s in Scope if s is not Scope.PUBLIC]:
        raise ConfigError(f"scope {scope!r} is not read, write or admin")
    keys = read(file) if file.exists() else []
    if any(key.name == name for key in keys):
        raise ConfigError(
            f"{file}: there is a key {name!r} already; revoke it or choose another name"
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    _write(file, [*keys, Key(name, scope, _digest(secret), created)])
    return secret


def revoke(file: Path, name: str) -> None:
    """Remove a key from the file; a running service refuses it within about a second.

    Raises:
        ConfigError: there is no such key or no such file.
    """
    keys = read(file)
    left = [key for key in keys if key.name != name]
    if len(left) == len(keys):
        known = ", ".join(key.name for key in keys) or "none"
        raise ConfigError(f"{file}: there is no key {name!r}; known: {known}")
    _write(file, left)


def read(file: Path) -> list[Key]:
    """Read the keys of a file.

    Raises:
        ConfigError: the file cannot be read or is not a file of keys.
    """
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        if document["version"] != FORMAT_VERSION:
            raise ValueError(f"version {document['version']!r} is not {FORMAT_VERSION}")
        keys = [Key(**entry) for entry in document["keys"]]
        for key in keys:
            _ = key.may, bytes.fromhex(key.sha256)
    except OSError as error:
        raise ConfigError(
            f"keys {file}: {error.strerror or error}; make one with `recsys keys create`"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"keys {file}: not a file of `recsys keys`: {error}") from error
    return keys


def _write(file: Path, keys: Sequence[Key]) -> None:
    """Replace the file atomically, so that a reader sees the old one or the new one."""
    document = {"version": FORMAT_VERSION, "keys": [asdict(key) for key in keys]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")  # 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as out:
                json.dump(document, out, indent=1)
                out.flush()
                os.fsync(out.fileno())
            os.replace(temporary, file)  # noqa: PTH105 - a path of str
        except BaseException:
            os.unlink(temporary)  # noqa: PTH108
            raise
    except OSError as error:
        raise ConfigError(f"keys {file}: {error.strerror or error}") from error


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class Keyring:
    """The current keys of a file, which is read again when it has changed.

    If the file becomes unreadable, the last keys stay valid, and the log reports it. If it becomes
    empty (the last key was revoked), no key is accepted.
    """

    def __init__(self, file: Path) -> None:
        """Read the file; raises `ConfigError` if it is not a file of keys, or has none."""
        self._file = file
        self._seen = self._state()
        self._keys = read(file)
        if not self._keys:
            raise ConfigError(
                f"keys {file}: there is no key in it; make one with `recsys keys create`, or "
                "delete the file to serve this machine without keys"
            )
        self._checked = time.monotonic()

    def find(self, secret: str) -> Key | None:
        """Find the key with this secret, or None.

        All keys are compared, each in constant time, so that the duration reveals nothing.
        """
        self._reread_if_changed()
        shown = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(shown, key.sha256):
                found = key
        return found

    def _reread_if_changed(self) -> None:
        now = time.monotonic()
        if now - self._checked < CHECK_INTERVAL_S:
            return
        self._checked = now
        if (state := self._state()) == self._seen:
            return
        self._seen = state
        try:
            self._keys = read(self._file)
        except ConfigError as error:
            logger.error("keys not read again: %s", error)
        else:
            logger.info("keys", extra={"fields": {"keys": len(self._keys)}})

    def _state(self) -> Any:
        try:
            stat = self._file.stat()
        except OSError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size
