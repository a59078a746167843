"""`recsys COMMAND`: the commands are entry points; only the module of the command is imported.

Command modules import typer and nothing heavy at the top, so that `recsys --help` is fast; a
command imports torch when it runs.
"""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
from importlib.metadata import entry_points

import typer
from typer._click.core import Command, Context  # typer carries its own click
from typer.core import TyperGroup

from recsys import __version__
from recsys.errors import RecsysError

COMMANDS = "recsys.commands"  # entry points
ORDER = (
    "quickstart", "run", "retrain", "data", "ids", "train", "bundle", "evaluate", "export",
    "recommend", "serve", "keys", "experiment", "store", "batch", "doctor",
)  # fmt: skip


class _Commands(TyperGroup):
    """A group whose commands are entry points: a typer app, or a function."""

    def list_commands(self, ctx: Context) -> list[str]:
        names = {e.name for e in entry_points(group=COMMANDS)}
        return [n for n in ORDER if n in names] + sorted(names - set(ORDER))

    def get_command(self, ctx: Context, cmd_name: str) -> Command | None:
        matches = entry_points(group=COMMANDS, name=cmd_name)
        if not matches:
            return None
        loaded = next(iter(matches)).load()
        if not isinstance(loaded, typer.Typer):
            wrapper = typer.Typer(add_completion=False)
            wrapper.command(cmd_name)(loaded)
            loaded = wrapper
        command = typer.main.get_command(loaded)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generative recommendation: from a file of histories to exact, catalog-safe answers.\n\n"
    "Start with [bold]recsys quickstart[/bold]; every command explains itself with --help.",
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True),
) -> None:
    pass


def main() -> None:
    """Run the command line. Expected errors are printed without a traceback; the status is 2."""
    try:
        app()
    except RecsysError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except Exception as error:
        reason = _not_writable(error)
        if reason is None:
            raise
        again = "then run the same command again: what is finished is kept"
        typer.echo(f"error: {reason}; make room or choose another folder, {again}", err=True)
        sys.exit(2)
    finally:
        gc.freeze()  # else the interpreter visits all objects at its end, for a second with torch


def _not_writable(error: Exception) -> str | None:
    """The reason if a file could not be written for want of space or of permission, or None."""
    number = error.errno if isinstance(error, OSError) else None
    name = error.filename if isinstance(error, OSError) else None
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # an error of safetensors
        number = int(match[1])
    if number not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES):
        return None
    return os.strerror(number) + (f": {name}" if name is not None else "")
