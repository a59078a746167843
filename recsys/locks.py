"""Locks between processes: a lock file that is held only as long as its process lives.

The lock is `flock` on a hidden file beside what it protects. The kernel releases it when the
process ends, however it ends, so a crash leaves no lock behind; at most an empty file is left.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from recsys.errors import LockedError

POLL_S = 0.02
_held: set[int] = set()  # descriptors of locks of this process


@contextmanager
def locked(
    path: Path, *, wait_s: float = 0.0, way_out: str = "wait until it ends"
) -> Iterator[None]:
    """Exclude other processes and threads that lock the same path, while the block runs.

    The lock file is `.NAME~lock` beside `path`, which need not exist. It is removed at the end.

    Args:
        path: what is protected.
        wait_s: longest time to wait for another holder.
        way_out: what a person can do if the path is in use; a part of the message.

    Raises:
        LockedError: another process uses the path; the message names it.
        OSError: the lock file cannot be made, or the file system has no locks.
    """
    file = lock_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + wait_s
    while (descriptor := _acquire(file)) is None:
        if time.monotonic() >= deadline:
            raise LockedError(f"{path} is in use by {_holder(file)}; {way_out}")
        time.sleep(POLL_S)
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child does not hold it
            # Removed before it is released: whoever waits for this file sees that it is gone.
            file.unlink(missing_ok=True)
            _held.discard(descriptor)
            os.close(descriptor)


def lock_file(path: Path) -> Path:
    """The lock file of a path."""
    return path.with_name(f".{path.name}~lock")


def _acquire(file: Path) -> int | None:
    """The descriptor of the locked file, or None if another process holds it."""
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, file):
                _held.add(descriptor)
                _describe(descriptor)
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            _held.discard(descriptor)
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder has removed it meanwhile


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


def _describe(descriptor: int) -> None:
    """Write into the lock file who holds it."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": now})
    os.ftruncate(descriptor, 0)
    with suppress(OSError):  # a full disk does not make the lock weaker
        os.pwrite(descriptor, text.encode(), 0)


def _holder(file: Path) -> str:
    try:
        holder = json.loads(file.read_text(encoding="utf-8"))
        return f"process {holder['process']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _forget_inherited() -> None:
    """Close inherited descriptors in a forked child, which would otherwise prolong the locks."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_forget_inherited)
