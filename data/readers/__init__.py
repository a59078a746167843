"""Readers: one module per source. To add one, write the module and add it to `READERS`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from recsys.data.raw import EventStream, ReaderConfig
from recsys.data.readers import amazon, atspeed, lcrec, movielens, s3rec, table


class Reader(Protocol):
    """The interface of a reader module."""

    def files(self, config: ReaderConfig) -> dict[str, Path]:
        """The files that `read` reads, by role; they are not opened."""

    def read(self, config: ReaderConfig) -> EventStream:
        """Read the files; events may be read while they are iterated."""


READERS: dict[str, Reader] = {
    "s3rec": s3rec,
    "atspeed": atspeed,
    "lcrec": lcrec,
    "movielens": movielens,
    "amazon": amazon,
    "table": table,
}
