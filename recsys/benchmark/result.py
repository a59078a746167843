"""A benchmark's result: one document, shown to people, kept in a folder, or given to programs.

The document is plain values; what it holds and how its tables look is each benchmark's own
business. Nothing heavy is imported at the top.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

Document = dict[str, Any]
COLOURS = {
    "ink": "#22262b", "grid": "#dcdad3", "series-0": "#1f6f6b", "series-1": "#c98a1b",
    "series-2": "#5b6fb5", "series-3": "#b4496b", "series-4": "#7d8a3c", "series-5": "#8a8f98",
}  # fmt: skip


def asked(*, quick: bool) -> Document:
    """What a document says of the call that it answers."""
    return {"command": shlex.join(["recsys", *sys.argv[1:]]), "quick": quick}


def show(tables: Iterable[Table], sentences: Iterable[str], *, soft_wrap: bool = False) -> None:
    """Print tables, then sentences.

    Args:
        tables: of the figures.
        sentences: what they come to.
        soft_wrap: leave it to the terminal where a sentence breaks.
    """
    from rich.console import Console

    console = Console()
    for table in tables:
        console.print(table)
    for sentence in sentences:
        console.print(sentence, highlight=False, soft_wrap=soft_wrap)


def save(
    folder: Path, document: Document, drawings: Mapping[str, str], page: str | None = None
) -> None:
    """Write `result.json`, each drawing as `NAME.svg` and, if there is one, a page.

    Args:
        folder: made where it is not there.
        document: plain values.
        drawings: name -> inline SVG.
        page: HTML of `report.html`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1)
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")
    if page is not None:
        (folder / "report.html").write_text(page, encoding="utf-8")
    for name, drawing in drawings.items():
        (folder / f"{name}.svg").write_text(_alone(drawing), encoding="utf-8")


def _alone(drawing: str) -> str:
    """An inline drawing as a file: with name spaces, and colours that a page would have given."""
    text = re.sub(r"var\(--([a-z0-9-]+)\)", lambda found: COLOURS[found.group(1)], drawing)
    spaces = (
        'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        'font-family="sans-serif" style="background:#fff" '
    )
    return text.replace("<svg ", f"<svg {spaces}", 1) + "\n"
