"""Commands `recsys data ...`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from recsys.options import ColumnNames, Json, Name, RunOptions, expand_options, read_columns

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Turn a file of histories into canonical data, or generate a synthetic data set.\n\n"
    "The data set goes to $RECSYS_HOME/datasets/NAME (default var/datasets/NAME).",
)


@app.command()
@expand_options
def prepare(
    *,
    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="synthetic, s3rec, atspeed, lcrec, movielens, amazon or table.",
        ),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option("--path", help="File or folder, under $RECSYS_DATASETS, var/raw or here."),
    ] = None,
    column: ColumnNames = None,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Read, check, filter and split a data set.

    Example: recsys data prepare --source s3rec --path s3rec-beauty/Beauty.txt --name beauty
    """
    own: dict[str, Mapping[str, object]] = {
        "data": {"source": source, "path": path},
        "data.columns": read_columns(column or ()),
    }
    context = run.context(minutes=None, **own)
    from recsys.data.prepare import stage

    _report(context.run(stage), as_json)


@app.command()
def download(
    source: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="A public data set (--list names them)."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", help="Where it goes (default $RECSYS_DATASETS, else var/raw)."),
    ] = None,
    listed: Annotated[bool, typer.Option("--list", help="List the public data sets.")] = False,
) -> None:
    """Download a public data set.

    Example: recsys data download s3rec-beauty
    """
    from recsys.data.download import download as fetch
    from recsys.data.download import public_sets
    from recsys.errors import ConfigError
    from recsys.raw_files import raw_folders

    known = public_sets()
    if listed:
        for name, entry in known.items():
            typer.echo(f"{name}: {entry.licence}. {entry.citation}")
        return
    if source is None:
        raise ConfigError("name a public data set; recsys data download --list names them")
    target = folder or raw_folders()[0]
    path = fetch(source, target)
    typer.echo(path)
    from recsys.progress import say

    entry = known[source]
    say(f"licence: {entry.licence}\ncite: {entry.citation}")
    say(f"next: recsys data prepare {entry.prepare.format(folder=path)} --name {source}")


@app.command()
def stats(
    path: Annotated[
        Path | None, typer.Argument(help="Folder of a data set; by default that of --name.")
    ] = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Print the statistics of a prepared data set.

    Example: recsys data stats --name beauty
    """
    _report(path or RunOptions(name=name).context().workspace.dataset, as_json)


def _report(path: Path, as_json: bool) -> None:
    from recsys.dataset import Dataset

    info = Dataset.manifest(path).info
    if as_json:
        typer.echo(json.dumps({"path": str(path), **info}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("statistics", "", box=None)
    for label, value in _rows({**info["stats"], "split": info["split"], **info["decisions"]}):
        table.add_row(label, value)
    console = Console()
    console.print(table)
    console.print(f"data set: {path}", soft_wrap=True, highlight=False, markup=False)


def _rows(values: Mapping[str, Any], group: str = "") -> Iterator[tuple[str, str]]:
    """Labels and values of a table, those of a mapping inside one below the other."""
    for key, value in values.items():
        label = f"{group}{key.replace('_', ' ')}"
        if isinstance(value, dict):
            yield from _rows(value, f"{label}, ")
        elif isinstance(value, float):
            yield label, f"{value:,.4g}"
        else:
            yield label, f"{value:,}" if type(value) is int else str(value or "none")
