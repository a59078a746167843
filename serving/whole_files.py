"""Files that are the old one or the new one at any moment."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from recsys.artifacts import sync_folder

UNFINISHED = ".writing"


@contextmanager
def replaced(file: Path, mode: int = 0o666) -> Iterator[Path]:
    """A file of another name, which replaces `file` after the block.

    Who may use it is `mode`, without what the process withholds; if root writes it, its owner is
    the same as before. What a killed process left of one is written anew. The caller excludes
    others.
    """
    path = file.with_name(f".{file.name}{UNFINISHED}")
    path.unlink(missing_ok=True)
    path.touch(mode)
    if file.exists() and os.geteuid() == 0:
        os.chown(path, file.stat().st_uid, file.stat().st_gid)
    try:
        yield path
        with path.open("rb") as written:
            os.fsync(written.fileno())
        path.replace(file)
    finally:
        path.unlink(missing_ok=True)
    sync_folder(file.parent)
