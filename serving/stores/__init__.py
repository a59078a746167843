"""Stores of histories, events, the journal of the catalog, and aliases.

SQLite is embedded and the default. PostgreSQL is an extra, imported on use.
"""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from recsys.errors import ConfigError
from recsys.serving.stores.records import NOT_HISTORY, Observer

if TYPE_CHECKING:  # loading SQLAlchemy takes time
    from recsys.serving.stores.database import Database
    from recsys.serving.stores.store import Store

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
) -> "Store":
    """Open the store at a path or URL, whose calls `observer` counts.

    Args:
        location: a SQLite file, `sqlite:///relative.db`, `sqlite:////absolute.db` or
            `postgresql://user:password@host/database`.
        not_history: types of events that are not part of a history.
        observer: counts every call.

    Raises:
        ConfigError: a URL of an unknown kind, or a package that it needs is missing.
    """
    database = open_database(location)
    try:
        from recsys.serving.stores.store import Store

        return Store(database, not_history=not_history, observer=observer)
    except BaseException:
        database.close()
        raise


def open_database(location: str | Path) -> "Database":
    """Open the database of the store at a path or URL (`open_store`)."""
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
