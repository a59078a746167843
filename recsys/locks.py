"""Locks between processes: a lock file that is held only as long as its process lives.

The lock is `flock` on a hidden file beside what it protects. The kernel releases it when the
process ends, however it ends, so a crash leaves no lock behind; at most an empty file is left.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from recsys.errors import LockedError

POLL_S = 0.02


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
        LockedError: another process uses the path.
        OSError: the lock file cannot be made, or the file system has no locks.
    """
    file = lock_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    owner = os.getpid()
    lock = FileLock(file, thread_local=False, fallback_to_soft=False)  # a soft one outlives a crash
    try:
        lock.acquire(timeout=wait_s, poll_interval=POLL_S)
    except Timeout:
        raise LockedError(f"{path} is in use by another process; {way_out}") from None
    try:
        yield
    finally:
        if os.getpid() == owner:  # a forked child does not hold it
            # Removed before it is released: whoever waits for this file sees that it is gone.
            file.unlink(missing_ok=True)
            lock.release()


def lock_file(path: Path) -> Path:
    """The lock file of a path."""
    return path.with_name(f".{path.name}~lock")
