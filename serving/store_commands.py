"""`recsys store`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recsys.options import ConfigFile, Name, Overrides

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.serving.stores.store import Store

app = typer.Typer(no_args_is_help=True, add_completion=False)
Location = Annotated[
    str | None,
    typer.Option("--store", help="Path or URL of the store (default: serve.store)."),
]


@app.callback()
def _store() -> None:
    """Back up the service's store; copy it to another place."""


@app.command("copy")
def copy(
    to: Annotated[
        str, typer.Argument(metavar="TO", help="Path or URL of a store that is empty or new.")
    ],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Copy a store to another place, such as one of SQLite to PostgreSQL.

    Stop the service first: what it writes meanwhile is not copied.

    Example: recsys store copy postgresql://localhost/shop
    """
    from contextlib import closing

    from recsys.serving.stores import open_database

    with closing(_open(store, name, config, set_)) as opened, closing(open_database(to)) as other:
        count = opened.database.copy_to(other)
    typer.echo(f"{count} events are in {other.place}")


@app.command("backup")
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write, for example shop.db.")
    ],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write a copy of a store in SQLite to one file. The service may be running.

    To restore it, stop the service and put the file in the place of the store.

    Example: recsys store backup backup.db
    """
    from contextlib import closing

    from recsys.errors import ConfigError
    from recsys.serving.stores.sqlite import SqliteDatabase

    with closing(_open(store, name, config, set_)) as opened:
        database = opened.database
        if not isinstance(database, SqliteDatabase):
            raise ConfigError(
                f"store {database.place}: back it up by `pg_dump --format=custom --file=FILE URL`, "
                "with the URL of serve.store"
            )
        database.back_up(file)
        typer.echo(f"{opened.history.count()} events are in {file}")


def _open(
    store: str | None, name: str | None, config: Path | None, overrides: list[str] | None
) -> Store:
    """The store of the options, which must be there: opening a SQLite file would make it."""
    from recsys.errors import ConfigError
    from recsys.serving.settings import ServingSettings
    from recsys.serving.stores import open_store, sqlite_file

    # the store can be moved before there are keys
    settings = ServingSettings.load(
        config, overrides or (), name=name, store=store, insecure_listen=True
    )
    file = sqlite_file(settings.store)
    if file is not None and not file.is_file():
        raise ConfigError(f"there is no store {file}; name one by --store")
    return open_store(settings.store, not_history=settings.not_history)
