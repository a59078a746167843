"""`recsys store`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recsys.options import ConfigFile, Name, Overrides

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.serving.settings import ServingSettings
    from recsys.serving.stores.store import Store

app = typer.Typer(no_args_is_help=True, add_completion=False)
Location = Annotated[
    str | None,
    typer.Option("--store", help="Path or URL of the store (default: serve.store)."),
]
KeysFile = Annotated[
    Path | None, typer.Option("--keys", help="File of API keys (default: serve.keys).")
]


@app.callback()
def _store() -> None:
    """Snapshot, restore and migrate the service's store; export and import its events."""


@app.command("export")
def export(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="File or object (s3://, gs://) that ends with .ndjson, .jsonl or .parquet.",
        ),
    ],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write all events to a file. The service may be running.

    Example: recsys store export events.parquet
    """
    from contextlib import closing

    from recsys.object_stores import shown, writing
    from recsys.serving.transfer import export_events

    with closing(_open_old(store, name, config, set_)) as opened, writing(file) as path:
        count = export_events(opened, path)
    typer.echo(f"{count} events exported to {shown(file)}")


@app.command("import")
def import_(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="File or object of `export`, or lines of POST /v1/events."
        ),
    ],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Append the events of a file. Stored ones are skipped, so the command can be repeated.

    Example: recsys store import events.parquet --store postgresql://localhost/shop
    """
    import asyncio
    from contextlib import closing

    from recsys.errors import DataError
    from recsys.object_stores import reading, shown
    from recsys.serving.transfer import import_events

    with reading(file) as path:
        if not path.is_file():
            raise DataError(f"{shown(file)}: there is no such file")
        with closing(_open(store, name, config, set_)) as opened:
            done = asyncio.run(import_events(opened, path))
    typer.echo(
        f"{done.accepted} events imported, {done.duplicates} were there, {done.ignored} of erased "
        f"users left out"
        + (f", {done.seeded} of a data set left out: the store has its own" if done.seeded else "")
    )


@app.command("snapshot")
def snapshot(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE", help="File or object to write or replace, for example shop.zip."
        ),
    ],
    store: Location = None,
    keys: KeysFile = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write the whole store and the hashes of the keys to one file. The service may be running.

    Example: recsys store snapshot backup.zip, or recsys store snapshot s3://backups/shop.zip
    """
    from contextlib import closing

    from recsys.object_stores import shown, writing
    from recsys.serving.snapshots import write_snapshot

    place = keys or _settings(store, name, config, set_).keys
    with closing(_open_old(store, name, config, set_)) as opened, writing(file) as path:
        count = write_snapshot(opened, path, place)
    typer.echo(f"{count} events and {'the' if place else 'no'} keys are in {shown(file)}")


@app.command("restore")
def restore(
    file: Annotated[str, typer.Argument(metavar="FILE", help="File or object of `snapshot`.")],
    store: Location = None,
    keys: KeysFile = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Lose what the store has, except its erasures.")
    ] = False,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Fill an empty store from a snapshot: all of it or nothing.

    Keys are written if there are none. Restart a service that has the store open.

    Example: recsys store restore backup.zip --store postgresql://localhost/shop
    """
    from contextlib import closing

    from recsys.object_stores import reading
    from recsys.serving.settings import default_keys
    from recsys.serving.snapshots import restore_snapshot

    settings = _settings(store, name, config, set_)
    is_chosen = "keys" in settings.model_fields_set
    place = keys or (settings.keys if is_chosen else default_keys())
    with reading(file) as path, closing(_open(store, name, config, set_)) as opened:
        done = restore_snapshot(opened, path, place, replace=replace)
    typer.echo(
        f"{done.events} events of {done.created} restored, {done.left_out} of erased users left out"
        + (f"; keys are in {place}" if done.keys else "; keys were not written")
    )


@app.command("migrate")
def migrate(
    to: Annotated[
        int | None, typer.Option("--to", help="Version (default: the last that is known).")
    ] = None,
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Bring the schema of a store to this program's version, or back to the one before it.

    Forward, every command and the service do it by themselves. Back is for the last program: stop
    all services, migrate, and install it.

    Example: recsys store migrate --to 5
    """
    from recsys.serving.stores import open_store
    from recsys.serving.stores.database import SCHEMA_VERSION

    version = SCHEMA_VERSION if to is None else to
    place = _settings(store, name, config, set_).store
    _require(place)
    opened = open_store(place, schema=version)
    opened.close()
    typer.echo(f"{opened.place} has schema {version}")


def _settings(
    store: str | None, name: str | None, config: Path | None, overrides: list[str] | None
) -> ServingSettings:
    from recsys.serving.settings import ServingSettings

    # keys may be missing before they are restored
    return ServingSettings.load(
        config, overrides or (), name=name, store=store, insecure_listen=True
    )


def _require(place: str | Path) -> None:
    """Refuse a SQLite file that is not there: opening it would make it, and a backup of nothing."""
    from recsys.errors import ConfigError
    from recsys.serving.stores import sqlite_file

    file = sqlite_file(place)
    if file is not None and not file.is_file():
        raise ConfigError(f"there is no store {file}; name one by --store")


def _open_old(
    store: str | None, name: str | None, config: Path | None, overrides: list[str] | None
) -> Store:
    """As `_open`, of a store that is there."""
    _require(_settings(store, name, config, overrides).store)
    return _open(store, name, config, overrides)


def _open(
    store: str | None, name: str | None, config: Path | None, overrides: list[str] | None
) -> Store:
    from recsys.serving.stores import open_store

    settings = _settings(store, name, config, overrides)
    return open_store(
        settings.store,
        history_cache=settings.history_cache,
        not_history=settings.not_history,
    )
