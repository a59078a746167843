"""`recsys store`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recsys.options import ConfigFile, Name, Overrides

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _store() -> None:
    """Back up the service's store."""


@app.command("backup")
def backup(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="File to write, for example shop.db.")
    ],
    store: Annotated[
        str | None,
        typer.Option("--store", help="Path or URL of the store (default: serve.store)."),
    ] = None,
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
    from recsys.serving.settings import ServingSettings
    from recsys.serving.stores import open_store, sqlite_file
    from recsys.serving.stores.sqlite import SqliteDatabase

    # the store can be backed up before there are keys
    settings = ServingSettings.load(
        config, set_ or (), name=name, store=store, insecure_listen=True
    )
    path = sqlite_file(settings.store)
    if path is not None and not path.is_file():  # opening it would make it
        raise ConfigError(f"there is no store {path}; name one by --store")
    with closing(open_store(settings.store, not_history=settings.not_history)) as opened:
        database = opened.database
        if not isinstance(database, SqliteDatabase):
            raise ConfigError(
                f"store {database.place}: back it up by `pg_dump --format=custom --file=FILE URL`, "
                "with the URL of serve.store"
            )
        database.back_up(file)
        typer.echo(f"{opened.history.count()} events are in {file}")
