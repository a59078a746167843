"""Readers: one module per source. To add one, write the module and add it to `READERS`.

Of a `ReaderConfig`, its `files` gives the paths by role, and its `read` the `EventStream`.
"""

from __future__ import annotations

from types import ModuleType

from recsys.data.readers import amazon, atspeed, lcrec, movielens, s3rec, table

READERS: dict[str, ModuleType] = {
    "s3rec": s3rec,
    "atspeed": atspeed,
    "lcrec": lcrec,
    "movielens": movielens,
    "amazon": amazon,
    "table": table,
}
