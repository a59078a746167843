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
    """Export the service's events to a file, and import them."""


@app.command("export")
def export(
    file: Annotated[Path, typer.Argument(help="File that ends with .ndjson, .jsonl or .parquet.")],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Write all events to a file. The service may be running.

    Example: recsys store export events.parquet
    """
    from recsys.serving.transfer import export_events

    opened = _open(store, name, config, set_)
    try:
        typer.echo(f"{export_events(opened, file)} events exported to {file}")
    finally:
        opened.close()


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="File of `export`, or lines of POST /v1/events.")],
    store: Location = None,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Append the events of a file. Stored ones are skipped, so the command can be repeated.

    Example: recsys store import events.parquet --store postgresql://localhost/shop
    """
    import asyncio

    from recsys.errors import DataError
    from recsys.serving.transfer import import_events

    if not file.is_file():
        raise DataError(f"{file}: there is no such file")
    opened = _open(store, name, config, set_)
    try:
        done = asyncio.run(import_events(opened, file))
    finally:
        opened.close()
    typer.echo(
        f"{done.accepted} events imported, {done.duplicates} were there, {done.ignored} of erased "
        f"users left out"
        + (f", {done.seeded} of a data set left out: the store has its own" if done.seeded else "")
    )


def _open(
    store: str | None, name: str | None, config: Path | None, overrides: list[str] | None
) -> Store:
    from recsys.serving.settings import ServingSettings
    from recsys.serving.stores import open_store

    settings = ServingSettings.load(config, overrides or (), name=name, store=store)
    return open_store(
        settings.store,
        history_cache=settings.history_cache,
        not_history=settings.not_history,
    )
