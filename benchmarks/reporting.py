"""What all benchmarks share: options, one JSON document, and tables on a terminal.

A benchmark declares its options as a dataclass (`read_options`), fills a document of plain values
(`begin`), and makes a `Report` of it. `publish` prints the report and, as the last line, the
document. With `--out FOLDER` it writes `report.txt` and `result.json`, too.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from measuring import Row, environment
from transformers import HfArgumentParser

from recsys.progress import say

Options = TypeVar("Options")

WIDTH = 150  # columns of text where standard output is not a terminal


@dataclass(frozen=True)
class Table:
    """A table of finished text.

    Attributes:
        title: what it shows.
        columns: their headings.
        rows: one text for each column.
        note: how to read it.
        words: number of leading columns that hold words and are aligned to the left.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: int = 1


@dataclass(frozen=True)
class Report:
    """What a benchmark shows of its document."""

    tables: Sequence[Table]
    sentences: Sequence[str] = ()


def read_options(
    kind: type[Options], about: str, quick: Row, argv: Sequence[str] | None = None
) -> tuple[Options, argparse.Namespace]:
    """Options of a command line: one for each field, whose metadata may have `choices`.

    Args:
        kind: the dataclass.
        about: the program's docstring.
        quick: values of a smoke run, which `--quick` asks for.
        argv: the command line; None for that of this process.

    Returns:
        The options, and `quick` and `out` as attributes of a namespace.
    """
    parser = HfArgumentParser(
        kind, description=about, epilog=kind.__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures say nothing")
    parser.add_argument("--out", type=Path, help="folder for report.txt and result.json")
    if "--quick" in (sys.argv if argv is None else argv):
        parser.set_defaults(**quick)
    options, run = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    return options, run


def begin(benchmark: str, options: Any, run: argparse.Namespace) -> Row:
    """Start a document: which benchmark, by which command, and how busy the machine is.

    Makes the folder `run.out`, so that one that cannot be made is noticed before it is measured.
    """
    if run.out is not None:
        run.out.mkdir(parents=True, exist_ok=True)
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", *sys.argv]),
        "quick": run.quick,
        "options": json.loads(json.dumps(asdict(options), default=str)),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def publish(document: Row, report: Report, out: Path | None) -> None:
    """Print the report and the document, and write both to a folder if one is named."""
    document["environment"] = environment()
    text = show(report)
    print(text)
    if out is not None:
        (out / "report.txt").write_text(text, encoding="utf-8")
        (out / "result.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        say(f"report: {out / 'report.txt'}")
    print(json.dumps(document))


def show(report: Report) -> str:
    """Tables and sentences as text. Tables are not squeezed where there is no terminal to fit."""
    from rich import table
    from rich.box import SIMPLE_HEAD
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDTH
    console = Console(file=io.StringIO(), width=width)
    for shown in report.tables:
        drawn = table.Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for index, column in enumerate(shown.columns):
            number = index >= shown.words
            drawn.add_column(column, justify="right" if number else "left", no_wrap=number)
        for row in shown.rows:
            drawn.add_row(*row)
        console.print(shown.title, drawn, shown.note, sep="\n", highlight=False, markup=False)
    for sentence in report.sentences:
        console.print(sentence, highlight=False, markup=False)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]
