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
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from recsys.errors import ConfigError
from recsys.locks import locked
from recsys.serving.whole_files import replaced

PREFIX = "rk_"
NAME = "^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
CHECK_INTERVAL_S = 1.0
LOCK_WAIT_S = 10.0
WITHOUT_KEYS = "to serve this machine without keys, set serve.keys to null (--set serve.keys=null)"
_DURATION = re.compile(r"([1-9]\d{0,3})([dh])")

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
        """The name of the scope in files of keys and in messages."""
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


class Key(BaseModel):
    """A key as the file holds it. A field that this program does not know may be a limit."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=NAME)]
    """A plain word."""
    scope: Literal["read", "write", "admin"]
    """What it allows."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Hash of the whole key."""
    created: AwareDatetime
    """When it was made."""
    expires: AwareDatetime | None = None
    """From when on it is refused."""

    @property
    def may(self) -> Scope:
        """The scope as a number, to compare with that of a route."""
        return Scope[self.scope.upper()]

    @property
    def is_expired(self) -> bool:
        """Whether its time is over."""
        return self.expires is not None and datetime.now(UTC) >= self.expires


class KeyFile(BaseModel):
    """The content of a file of keys."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1]
    keys: list[Key]


def create(file: Path, name: str, scope: str, expires: str | None = None) -> str:
    """Create a key and add it to the file (mode 0600), which is created if needed.

    It can be used for the time `expires`, as `90d` or `12h`, or without limit.

    Returns the key itself, which is stored nowhere and cannot be shown again.

    Raises:
        ConfigError: the name is taken or malformed, the scope or the time is unknown, or the file
            is malformed.
        LockedError: another process has been changing the file for `LOCK_WAIT_S` seconds.
    """
    secret = PREFIX + secrets.token_urlsafe(32)
    now = datetime.now(UTC).replace(microsecond=0)
    until = None if expires is None else now + _duration(expires)
    fields = {"name": name, "scope": scope, "sha256": _digest(secret)}
    try:
        key = Key.model_validate({**fields, "created": now, "expires": until})
    except ValidationError as error:
        wrong = error.errors()[0]
        raise ConfigError(f"{wrong['loc'][0]} {wrong['input']!r}: {wrong['msg']}") from error
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
        return KeyFile.model_validate_json(content).keys
    except ValidationError as error:
        wrong = error.errors()[0]
        parts = (".".join(map(str, wrong["loc"])), wrong["msg"])
        raise ConfigError(
            f"keys {file}: not a file of `recsys keys`: {': '.join(filter(None, parts))}; mend "
            "it, or delete that key from it and make another one (`recsys keys create`)"
        ) from error


@contextmanager
def _changing(file: Path) -> Iterator[Path]:
    """Exclude other changes of the file; yields its place, which a link may name."""
    path = file.resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, wait_s=LOCK_WAIT_S, way_out="try again"):
            yield path
    except OSError as error:
        raise ConfigError(f"keys {file}: {error.strerror or error}") from error


def _write(file: Path, keys: list[Key]) -> None:
    """Replace the file, so that a reader sees the old one or the new one."""
    with replaced(file, 0o600) as path:
        text = KeyFile(version=1, keys=keys).model_dump_json(indent=1, exclude_none=True)
        path.write_text(text, encoding="utf-8")


def mark(file: Path) -> None:
    """Write the marker of a file of keys, unless it is there."""
    path = marker(file)
    if not path.exists():
        path.write_text(f"{file.name} was in use; {WITHOUT_KEYS}\n", encoding="utf-8")


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
