"""Who may ask what: API keys, their file, and the table of the scope that each route needs.

A key is 256 random bits, and the file keeps its SHA-256 only. A slow hash (bcrypt, scrypt, argon2)
makes guesses dear where people choose the secret; nobody guesses 256 random bits however quick the
hash, and a slow one would be paid with every request.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from typing import Any

from recsys.errors import ConfigError

PREFIX = "rk_"
FORMAT_VERSION = 1
LOOK_AGAIN_S = 1.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")

logger = logging.getLogger("recsys.serving.auth")


class Scope(IntEnum):
    """What a key may do; each scope includes those below it."""

    PUBLIC = 0  # needs no key
    READ = 1
    WRITE = 2
    ADMIN = 3

    @property
    def word(self) -> str:
        """As keys and messages spell it."""
        return self.name.lower()


# Every route, as OpenAPI spells it, and what it needs. What is not here is closed to all but admin.
ROUTES: dict[tuple[str, str], Scope] = {
    ("GET", "/"): Scope.PUBLIC,
    ("GET", "/docs"): Scope.PUBLIC,
    ("GET", "/openapi.json"): Scope.PUBLIC,
    ("GET", "/static/{path}"): Scope.PUBLIC,
    ("GET", "/health/live"): Scope.PUBLIC,
    ("GET", "/health/ready"): Scope.PUBLIC,
    ("GET", "/metrics"): Scope.READ,
    ("GET", "/v1/stats"): Scope.READ,
    ("POST", "/v1/recommendations"): Scope.READ,
    ("POST", "/v1/recommendations/batch"): Scope.READ,
    ("GET", "/v1/users"): Scope.READ,
    ("GET", "/v1/users/{user_id}/recommendations"): Scope.READ,
    ("GET", "/v1/users/{user_id}/history"): Scope.READ,
    ("DELETE", "/v1/users/{user_id}"): Scope.WRITE,
    ("POST", "/v1/events"): Scope.WRITE,
    ("GET", "/v1/items"): Scope.READ,
    ("POST", "/v1/items"): Scope.WRITE,
    ("GET", "/v1/items/{item_id}"): Scope.READ,
    ("PUT", "/v1/items/{item_id}"): Scope.WRITE,
    ("DELETE", "/v1/items/{item_id}"): Scope.WRITE,
    ("GET", "/v1/items/{item_id}/similar"): Scope.READ,
    ("POST", "/v1/rank"): Scope.READ,
    ("POST", "/v1/filters/validate"): Scope.READ,
    ("GET", "/v1/evaluation"): Scope.READ,
    ("GET", "/v1/models"): Scope.READ,
    ("GET", "/v1/aliases"): Scope.READ,
    ("GET", "/v1/aliases/{name}"): Scope.READ,
    ("PUT", "/v1/aliases/{name}"): Scope.ADMIN,
    ("DELETE", "/v1/aliases/{name}"): Scope.ADMIN,
    ("POST", "/v1/aliases/{name}/rollback"): Scope.ADMIN,
}


_WITH_SLASHES = ("{item_id}", "{user_id}", "{path}")


def _pattern(template: str) -> re.Pattern[str]:
    parts = re.split(r"(\{[^}]*\})", template)
    return re.compile(
        "".join(
            (".+" if part in _WITH_SLASHES else "[^/]+")
            if part.startswith("{")
            else re.escape(part)
            for part in parts
        ),
        re.DOTALL,
    )


_PLAIN = {path: path for _, path in ROUTES if "{" not in path}
_PATTERNS = [  # the longest first: an item's id may hold slashes
    (_pattern(path), path)
    for path in sorted({path for _, path in ROUTES}, key=len, reverse=True)
    if "{" in path
]


def template_of(path: str, method: str = "GET") -> str | None:
    """The route's template that a request's path fits; None if no route has it.

    Of several the longest that answers to the method: an item `a/similar` may be taken away.
    """
    if found := _PLAIN.get(path):
        return found
    fitting = [template for pattern, template in _PATTERNS if pattern.fullmatch(path)]
    answering = (t for t in fitting if scope_of(method, t) is not None)
    return next(answering, fitting[0] if fitting else None)


def scope_of(method: str, template: str) -> Scope | None:
    """What a route needs; None if the path does not answer to the method."""
    return ROUTES.get(("GET" if method == "HEAD" else method, template))


def methods_of(template: str) -> list[str]:
    """Methods that a path answers to."""
    return sorted(method for method, path in ROUTES if path == template)


@dataclass(frozen=True)
class Key:
    """What the file knows of a key.

    Attributes:
        name: for people, logs and revocation; unique.
        scope: `read`, `write` or `admin`.
        sha256: of the whole key, in hexadecimal.
        created: ISO 8601, UTC.
    """

    name: str
    scope: str
    sha256: str
    created: str

    @property
    def may(self) -> Scope:
        """The scope as a number."""
        return Scope[self.scope.upper()]


def create(file: Path, name: str, scope: str) -> str:
    """Make a key and add it to the file (mode 0600), which is made where there is none.

    Returns:
        The key itself. It is nowhere else, and cannot be had again.

    Raises:
        ConfigError: the name is taken or not a plain word, no such scope, a file that is not one.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"key name {name!r} is not a plain word (letters, digits, '.', '_', '-')")
    if scope not in [s.word for s in Scope if s is not Scope.PUBLIC]:
        raise ConfigError(f"scope {scope!r} is not read, write or admin")
    keys = read(file) if file.exists() else []
    if any(key.name == name for key in keys):
        raise ConfigError(
            f"{file}: there is a key {name!r} already; revoke it or take another name"
        )
    secret = PREFIX + secrets.token_urlsafe(32)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    _write(file, [*keys, Key(name, scope, _digest(secret), created)])
    return secret


def revoke(file: Path, name: str) -> None:
    """Take a key out of the file; a running service refuses it within about a second.

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
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read or is not a file of keys.
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
    """Replace the file in one step, so that a reader sees the old one or the new one."""
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
    """The keys of a file, as they are now: it is read again when it has changed.

    A file that has become unreadable keeps the keys that were last read (and says so in the log);
    one that was emptied leaves nobody a way in, which is what revoking the last key means.
    """

    def __init__(self, file: Path) -> None:
        """Read the file.

        Raises:
            ConfigError: it cannot be read, is not a file of keys, or has none.
        """
        self._file = file
        self._seen = self._state()
        self._keys = read(file)
        if not self._keys:
            raise ConfigError(
                f"keys {file}: there is no key in it; make one with `recsys keys create`, or "
                "delete the file to serve this machine without keys"
            )
        self._looked = time.monotonic()

    def find(self, secret: str) -> Key | None:
        """The key that a client showed, if it is one of ours.

        All keys are compared, each in constant time, so that the time taken tells nothing.
        """
        self._look_again()
        shown = _digest(secret)
        found = None
        for key in self._keys:
            if hmac.compare_digest(shown, key.sha256):
                found = key
        return found

    def _look_again(self) -> None:
        now = time.monotonic()
        if now - self._looked < LOOK_AGAIN_S:
            return
        self._looked = now
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
