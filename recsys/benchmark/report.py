"""Report of a benchmark: one JSON document, tables on a terminal, plots and one HTML page.

A benchmark fills a document of plain values and makes a `Report` of it. Everything that is shown
can be made again from the document alone. Nothing heavy is imported at the top.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import typer

from recsys.benchmark.environment import environment
from recsys.errors import ConfigError
from recsys.progress import say

Document = dict[str, Any]
Row = dict[str, Any]

SCHEMA = 2
WIDTH = 150  # columns of text where standard output is not a terminal
COLOURS = {
    "ink": "#22262b", "grid": "#dcdad3", "series-0": "#1f6f6b", "series-1": "#c98a1b",
    "series-2": "#5b6fb5", "series-3": "#b4496b", "series-4": "#7d8a3c", "series-5": "#8a8f98",
    "series-6": "#3f8fd2", "series-7": "#a0522d", "series-8": "#6a4c93", "series-9": "#222222",
}  # fmt: skip


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
class Line:
    """One line of a panel.

    Attributes:
        label: its name in the legend.
        x, y: its points.
        errors: lengths of the error bars below and above each point; None draws none.
        style: a matplotlib line style.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    errors: tuple[Sequence[float], Sequence[float]] | None = None
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    Attributes:
        title: above it.
        x: label of the x axis.
        lines: what is drawn.
        ticks: names of the places 0, 1, ... of the x axis; empty for numbers.
        level: a horizontal line at this height; None draws none.
    """

    title: str
    x: str
    lines: Sequence[Line]
    ticks: Sequence[str] = ()
    level: float | None = None


@dataclass(frozen=True)
class Plot:
    """Panels side by side.

    Attributes:
        name: of the file, without its suffix.
        caption: what it shows, in one sentence.
        panels: from left to right.
    """

    name: str
    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Report:
    """What a benchmark shows of its document.

    Attributes:
        title: heading of the page.
        sentences: the results in words.
        tables: the results in figures.
        plots: the results as drawings.
    """

    title: str
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()


def begin(benchmark: str, *, quick: bool, out: Path | None = None) -> Document:
    """Start a document: which benchmark, by which command, and how busy the machine is.

    Makes the folder `out`, so that one that cannot be made is named before hours of measuring.

    Raises:
        ConfigError: `out` is a file or lies in one.
    """
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(f"--out {out}: expected a folder, and there is a file") from error
    return {
        "benchmark": benchmark,
        "schema": SCHEMA,
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "quick": quick,
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }


def publish(document: Document, report: Report, out: Path | None, *, as_json: bool) -> None:
    """Print the report, write it to a folder, and print the document as the last line.

    Args:
        document: what was measured; `environment` is added to it.
        report: what is shown of it.
        out: folder for `result.json`, `report.html` and `NAME.svg` of each plot; None writes none.
        as_json: print the last line only.
    """
    document["environment"] = environment()
    if not as_json:
        show(report)
    if out is not None:
        write(document, report, out)
        say(f"report: {out / 'report.html'}")
    typer.echo(json.dumps(document))


def show(report: Report) -> None:
    """Print tables and sentences. Tables are not squeezed where there is no terminal to fit."""
    from rich import table
    from rich.box import SIMPLE_HEAD
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    for shown in report.tables:
        drawn = table.Table(
            box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=shown.title,
            caption=shown.note or None, title_justify="left", caption_justify="left",
        )  # fmt: skip
        for place, column in enumerate(shown.columns):
            justify = "left" if place < shown.words else "right"
            drawn.add_column(column, justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
        for row in shown.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for sentence in report.sentences:
        console.print(sentence, highlight=False, soft_wrap=True)


def write(document: Document, report: Report, folder: Path) -> None:
    """Write the document, the page and the drawings; the folder is made where it is missing."""
    drawings = {plot.name: draw(plot) for plot in report.plots}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "result.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(render(document, report, drawings), encoding="utf-8")
    for name, drawing in drawings.items():
        (folder / f"{name}.svg").write_text(_stand_alone(drawing), encoding="utf-8")


def render(document: Document, report: Report, drawings: Mapping[str, str]) -> str:
    """The report as one HTML page without scripts that loads nothing else."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    pages = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = files("recsys.benchmark").joinpath("report.html.jinja").read_text(encoding="utf-8")
    style = files("recsys.evaluation").joinpath("page.css").read_text(encoding="utf-8")
    return pages.from_string(template).render(
        document=document,
        machine=document["environment"],
        report=report,
        # The style sheet is a file of this package; drawings hold numbers and our own labels.
        style=Markup(style),  # noqa: S704
        drawings={name: Markup(drawing) for name, drawing in drawings.items()},  # noqa: S704
    )


def draw(plot: Plot) -> str:
    """The plot as an SVG element for a page."""
    from recsys.evaluation.figures import svg

    return svg(partial(_draw_panels, panels=plot.panels), plot.name, plot.caption)


def _draw_panels(figure: Any, panels: Sequence[Panel]) -> None:
    from recsys.evaluation.figures import INK, MARKERS, SERIES

    drawn = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(drawn, panels, strict=True):
        for i, line in enumerate(panel.lines):
            axes.errorbar(
                line.x, line.y, yerr=line.errors, label=line.label, linestyle=line.style,
                color=SERIES[i % len(SERIES)], marker=MARKERS[i % len(MARKERS)], markersize=4,
                linewidth=1.4, capsize=2,
            )  # fmt: skip
        if panel.ticks:
            axes.set_xticks(range(len(panel.ticks)), panel.ticks)
        if panel.level is not None:
            axes.axhline(panel.level, color=INK, linewidth=0.8)
        axes.set_ylim(0, None)
        axes.set_xlabel(panel.x)
        axes.set_title(panel.title, loc="left")


def _stand_alone(drawing: str) -> str:
    """A drawing of a page as a file: with name spaces, and with the colours of the light page."""
    text = re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: COLOURS[found.group(1)], drawing)
    spaces = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'font-family="sans-serif" style="background:#fff" '
    )
    return text.replace("<svg ", f"<svg {spaces}", 1) + "\n"
