"""One small module per source. To add one: write it, then add its line to `READERS`."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from recsys.data.raw import EventStream, RawData, ReaderConfig
from recsys.data.readers import amazon, atspeed, lcrec, minionerec, movielens, recbole, s3rec, table


class Reader(Protocol):
    """What a reader module offers."""

    def files(self, config: ReaderConfig) -> dict[str, Path]:
        """The files that `read` would read, by their role; found, not yet opened."""

    def read(self, config: ReaderConfig) -> RawData:
        """Read them."""


class StreamingReader(Reader, Protocol):
    """What the module of a source offers that may be too large to hold in memory."""

    def stream(self, config: ReaderConfig) -> EventStream:
        """Read them part by part."""


READERS: dict[str, Reader] = {
    "s3rec": s3rec,
    "atspeed": atspeed,
    "lcrec": lcrec,
    "minionerec": minionerec,
    "movielens": movielens,
    "amazon": amazon,
    "recbole": recbole,
    "table": table,
}
STREAMING: dict[str, StreamingReader] = {"amazon": amazon, "recbole": recbole, "table": table}
