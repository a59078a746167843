"""`recsys export`. `recsys --help` reads this module: nothing heavy is imported at the top."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recsys.options import Name, RunOptions

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich")
BundleFolder = Annotated[
    Path | None, typer.Option(help="Bundle directory; by default that of --name.")
]
Out = Annotated[Path, typer.Option(help="Folder to write; it must not exist, or be empty.")]


@app.callback()
def _export() -> None:
    """Write a bundle in the formats of other programs."""


@app.command("hub")
def hub(
    out: Out,
    bundle: BundleFolder = None,
    name: Name = None,
    report: Annotated[
        Path | None,
        typer.Option(help="report.json of `recsys evaluate`; by default that of the bundle."),
    ] = None,
    licence: Annotated[
        str, typer.Option("--license", help="Licence, as the Hub lists them: apache-2.0, ...")
    ] = "unknown",
) -> None:
    """Write a folder for the Hugging Face Hub: model card, safetensors, catalog.

    The Hub's own client uploads it: hf upload ORG/NAME FOLDER --private.

    Example: recsys export hub --name shop --out shop-hub --license cc-by-4.0
    """
    from recsys.exporting.hub import export
    from recsys.progress import say

    source = _find(bundle, name)
    digest = export(source, out, report=report, licence=licence)
    say(f"Version {digest} of {source.name}; the card is {out / 'README.md'}.")
    say("The titles, texts and attributes of all items leave with it: read the card first.")
    typer.echo(f"hub: {out}")


def _find(bundle: Path | None, name: str | None) -> Path:
    return bundle or RunOptions(name=name).context().workspace.bundle
