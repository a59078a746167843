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
    """Back up the service's store; export and import its events and erasures."""


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write all events and erasures to a file. The service may be running.

    Example: recsys store export events.ndjson
    """
    from contextlib import closing

    from recsys.serving.transfer import export_events

    with closing(_open(store, name, config, set_)) as opened:
        count = export_events(opened, file)
    typer.echo(f"{count} events exported to {file}")


@app.command("import")
def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="File of `export`, or lines of POST /v1/events."),
    ],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Take over the erasures of a file, and append its events.

    Stored events are skipped, so the command can be repeated.

    Example: recsys store import events.ndjson --store postgresql://localhost/shop
    """
    import asyncio
    from contextlib import closing

    from recsys.errors import DataError
    from recsys.serving.transfer import import_events

    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    with closing(_open(store, name, config, set_, is_old=False)) as opened:
        done = asyncio.run(import_events(opened, file))
    typer.echo(
        f"{done.accepted} events imported, {done.duplicates} were there, {done.ignored} of erased "
        f"users left out"
        + (f", {done.erasures} erasures taken over" if done.erasures else "")
        + (f", {done.seeded} of a data set left out: the store has its own" if done.seeded else "")
    )


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
    store: str | None,
    name: str | None,
    config: Path | None,
    overrides: list[str] | None,
    *,
    is_old: bool = True,
) -> Store:
    """The store of the options; an old one must be there: opening a SQLite file would make it."""
    from recsys.errors import ConfigError
    from recsys.serving.settings import ServingSettings
    from recsys.serving.stores import open_store, sqlite_file

    # the store can be moved before there are keys
    settings = ServingSettings.load(
        config, overrides or (), name=name, store=store, insecure_listen=True
    )
    file = sqlite_file(settings.store)
    if is_old and file is not None and not file.is_file():
        raise ConfigError(f"there is no store {file}; name one by --store")
    return open_store(settings.store, not_history=settings.not_history)
