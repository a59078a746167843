"""Figures of a report as inline SVG with the colours and the font of the page.

Placeholder colours are replaced by CSS variables, so that a figure fits a light and a dark page.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

Rows = list[dict[str, Any]]

INK, GRID = "#010203", "#040506"
SERIES = tuple(f"#a1b2c{i}" for i in range(10))  # the ranker under test, then the others
MARKERS = "osD^vPX<>*"
STYLE = {
    "svg.fonttype": "none",  # text is selectable and uses the page's font
    "svg.hashsalt": "recsys",  # equal numbers give equal bytes
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "axes.titlecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "font.size": 10,
    "axes.titlesize": 10,
}
SIZE = (8.4, 3.1)  # inches; the page scales it
NAMES = {"recall": "Recall", "ndcg": "NDCG", "mrr": "MRR"}


def by_k(document: dict[str, Any]) -> str:
    """Recall and NDCG by K, with intervals, in the headline mode."""

    def draw(figure: Figure) -> None:
        for axes, metric in zip(figure.subplots(1, 2), ("recall", "ndcg"), strict=True):
            for i, ranker in enumerate(document["rankers"]):
                rows = _pick(document["metrics"], document, ranker=ranker, metric=metric)
                rows = [row for row in rows if row["targets"] == document["headline"]["targets"]]
                _line(axes, i, ranker, rows)
            _by_k_axes(axes, document["protocol"]["ks"], f"{NAMES[metric]}@K")

    return svg(draw, "by-k", "Line chart: Recall and NDCG of each recommender by list length K.")


def by_segment(document: dict[str, Any], by: str) -> str:
    """Recall at the headline K within each segment of `by`, with intervals."""
    k = document["headline"]["k"]
    label = by.replace("_", " ")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        chosen = _pick(document["segments"], document, by=by, metric="recall", k=k)
        users = {row["segment"]: row["users"] for row in chosen}
        width = 0.8 / len(document["rankers"])
        for i, ranker in enumerate(document["rankers"]):
            rows = [row for row in chosen if row["ranker"] == ranker]
            positions = [
                list(users).index(row["segment"]) + (i + 0.5) * width - 0.4 for row in rows
            ]
            axes.bar(
                positions,
                [row["mean"] for row in rows],
                width * 0.92,
                yerr=_reach(rows),
                color=SERIES[i % len(SERIES)],
                ecolor=INK,
                error_kw={"elinewidth": 0.8},
                label=ranker,
            )
        axes.set_xticks(range(len(users)), [f"{name}\n{n:,} users" for name, n in users.items()])
        axes.set_ylim(0, None)
        axes.set_title(f"Recall@{k}", loc="left")

    return svg(draw, by, f"Bar chart: Recall@{k} of each recommender by {label}.")


def coverage(document: dict[str, Any]) -> str:
    """Share of the catalog that is recommended to anyone, by K."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for i, ranker in enumerate(document["rankers"]):
            rows = _pick(document["coverage"], document, ranker=ranker)
            _line(axes, i, ranker, [{"mean": row["coverage"]} for row in rows])
        _by_k_axes(axes, document["protocol"]["ks"], "share of the catalog")
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))

    return svg(draw, "coverage", "Line chart: catalog coverage of each recommender by K.")


def _pick(rows: Rows, document: dict[str, Any], **conditions: object) -> Rows:
    """The rows of the headline mode with these values."""
    conditions["seen"] = document["headline"]["seen"]
    return [row for row in rows if all(row[key] == value for key, value in conditions.items())]


def _line(axes: Axes, i: int, label: str, rows: Rows) -> None:
    intervals = bool(rows) and "low" in rows[0]
    axes.errorbar(
        # So that error bars do not overlap.
        [position + 0.05 * i * intervals for position in range(len(rows))],
        [row["mean"] for row in rows],
        yerr=_reach(rows) if intervals else None,
        color=SERIES[i % len(SERIES)],
        marker=MARKERS[i % len(MARKERS)],
        markersize=5,
        linewidth=2.2 if i == 0 else 1.4,
        capsize=2,
        label=label,
    )


def _by_k_axes(axes: Axes, ks: list[int], label: str) -> None:
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set(xlabel="K", ylim=(0, None))
    axes.set_title(label, loc="left")


def _reach(rows: Rows) -> list[list[float]]:
    """Lengths of the error bars; 0 where a percentile interval does not contain the mean."""
    return [
        [max(row["mean"] - row["low"], 0) for row in rows],
        [max(row["high"] - row["mean"], 0) for row in rows],
    ]


def svg(draw: Callable[[Figure], None], key: str, label: str) -> str:
    """Draw an SVG element for a page that contains several of them."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(labels), 5))
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without the XML prologue, which links to a DTD
    view = re.search(r'viewBox="[^"]*"', text)
    start = f'<svg role="img" aria-label="{html.escape(label)}" {view.group() if view else ""}>'
    text = re.sub(r"<svg[^>]*>", start, text, count=1)
    # It would apply to the whole page.
    text = re.sub(r"\s*<style.*?</style>", "", text, flags=re.DOTALL)
    # Element ids must be unique in a page.
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'href="#', f'href="#{key}-', text).replace("url(#", f"url(#{key}-")
    text = re.sub(r"font-family: [^;]*; ", "", text)
    for colour, variable in (
        (INK, "--ink"),
        (GRID, "--grid"),
        *((colour, f"--series-{i}") for i, colour in enumerate(SERIES)),
    ):
        text = text.replace(colour, f"var({variable})")
    return text
