"""Stores of histories, events, the journal of the catalog, and aliases.

SQLite is embedded and the default. PostgreSQL is an extra, imported on use.
"""

import logging
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.errors import ConfigError
from recsys.serving.stores.records import NOT_HISTORY, Observer

if TYPE_CHECKING:  # loading SQLAlchemy takes time
    from recsys.serving.stores.database import Database
    from recsys.serving.stores.store import Store

logger = logging.getLogger("recsys.serving.stores")
SQLITE = "sqlite:///"
POSTGRES = ("postgresql://", "postgres://")


def sqlite_file(location: str | Path) -> Path | None:
    """The file of a store at a path or URL; None if it is not SQLite's."""
    url = str(location)
    if isinstance(location, Path) or url.startswith(SQLITE) or "://" not in url:
        return Path(url.removeprefix(SQLITE)).expanduser()
    return None


def open_store(
    location: str | Path,
    *,
    not_history: Collection[str] = NOT_HISTORY,
    observer: Observer | None = None,
    histories: Path | None = None,
) -> "Store":
    """Open the store at a path or URL.

    Args:
        location: a SQLite file, `sqlite:///relative.db`, `sqlite:////absolute.db` or
            `postgresql://user:password@host/database`.
        not_history: types of events that are not part of a history.
        observer: counts every call.
        histories: canonical data set whose histories are imported, unless they were before.

    Raises:
        ConfigError: a URL of an unknown kind, or a package that it needs is missing.
    """
    from recsys.serving.stores.store import Store

    store = Store(_database(location), not_history=not_history, observer=observer)
    try:
        if histories is not None:
            fields = {"imported": store.history.seed(histories)}
            logger.info("histories", extra={"fields": fields})
    except BaseException:
        store.close()
        raise
    return store


def _database(location: str | Path) -> "Database":
    if (path := sqlite_file(location)) is not None:
        from recsys.serving.stores.sqlite import SqliteDatabase

        return SqliteDatabase(path)
    if str(location).startswith(POSTGRES):
        from recsys.serving.stores.postgres import PostgresDatabase

        return PostgresDatabase(str(location))
    raise ConfigError(
        f"serve.store: unknown kind {str(location).partition('://')[0]!r}; give a path, "
        "sqlite:///PATH or postgresql://USER@HOST/DATABASE"
    )
