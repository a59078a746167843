"""Report: a result as one JSON document, as tables on a terminal, as a plot and one HTML page.

The document holds all that is shown, so everything can be made again from it alone.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from recsys.benchmark.decode import BEAM, HUGGING_FACE, PLANNED, Options, Result
from recsys.benchmark.result import Document, save
from recsys.benchmark.sizes import NODES, pays_from

Row = dict[str, Any]

SCHEMA = 1
NAMES = {BEAM: "own beams", HUGGING_FACE: "Hugging Face"}


def of_decode(facts: dict[str, Any], options: Options, result: Result) -> Document:
    """The part of the document that `recsys.benchmark.decode.measure` fills."""
    return {
        "kind": "decode",
        "workload": facts,
        "options": asdict(options),
        "warm_ups": result.warm_ups,
        "rows": result.rows,
        "summary": _summary(result.rows),
    }


def of_sizes(rows: list[Row], *, items: int, history: int) -> Document:
    """The part of the document that `recsys.benchmark.sizes.sweep` fills."""
    return {
        "kind": "sizes",
        "items": items,
        "history": history,
        "nodes": NODES,
        "draft_parameters": rows[0]["draft_parameters"],
        "rows": rows,
        "pays_from": pays_from(rows),
    }


def _summary(rows: list[Row]) -> Document:
    """The worst of planned decoding against own beams, and its gain over Hugging Face."""
    planned = [row for row in rows if row["mode"] == PLANNED]
    if not planned:
        return {}
    worst = min(planned, key=lambda row: row["ws_beam"]["p50"])
    where = ("reuse", "beams", "batch")
    ws = ("ws_beam", "ws_beam_cpu")
    gains = [row for row in planned if row["ws_huggingface"]]
    return {
        "planned_at_worst": {k: worst[k] for k in (*where, *ws, "plans")},
        "planned_to_huggingface": [
            {**{k: row[k] for k in where}, "ws": row["ws_huggingface"]["p50"]} for row in gains
        ],
    }


def headline(document: Document) -> list[str]:
    """What the figures come to, in sentences."""
    rounded = [row for row in document["rows"] if row["agreement"]["requests"] < 1]
    agreement = []
    if rounded:
        kinds = dict.fromkeys(row.get("dtype", document["dtype"][0]) for row in rounded)
        lists, items = (min(row["agreement"][k] for row in rounded) for k in ("requests", "items"))
        gap = max(row["agreement"]["gap"] for row in rounded)
        agreement = [
            f"In {', '.join(kinds)} some lists are not beam search's: at worst {lists:.1%} are, "
            f"{items:.1%} of items are in common, and a score is {gap} away."
        ]
    if document["kind"] == "sizes":
        return [_pays(entry, document) for entry in document["pays_from"]] + agreement
    summary = document["summary"]
    if not summary:
        return agreement
    worst = summary["planned_at_worst"]
    cpu = "" if document["gpu"] else f", {_above(worst['ws_beam_cpu'])} in processor time"
    sentences = [
        f"Planned decoding at its worst takes {_above(worst['ws_beam'])} own beams "
        f"({_where(worst)}, median of the ratios within rounds{cpu})."
    ]
    gains = summary["planned_to_huggingface"]
    if gains:
        least, most = (f(gains, key=lambda g: g["ws"]) for f in (min, max))
        sentences.append(
            f"Against Hugging Face it is {least['ws']:.1f} ({_where(least)}) to {most['ws']:.1f} "
            f"({_where(most)}) times as fast."
        )
    return sentences + agreement


def _above(ws: dict[str, float]) -> str:
    percent = 100 * (1 / ws["p50"] - 1)
    return f"{abs(percent):.1f} % {'above' if percent > 0 else 'below'}"


def _where(entry: Row) -> str:
    return f"K = {entry['beams']}, B = {entry['batch']}, {entry['reuse']}"


def _pays(entry: Row, document: Document) -> str:
    nodes, draft = document["nodes"], _millions(document["draft_parameters"])
    mode = {
        "exhaustive": "exhaustion",
        "bound": "a perfect draft at no cost",
        f"bound-{nodes}": f"a perfect draft of {draft} parameters and {nodes} nodes",
    }[entry["mode"]]
    size = entry["parameters"]
    found = "at no size measured" if size is None else f"from {_millions(size)} parameters on"
    return f"{entry['dtype']}, {entry['reuse']}: {mode} pays {found}."


def _millions(parameters: int) -> str:
    return f"{parameters / 1e6:.1f}M"


def _groups(document: Document) -> dict[str, list[Row]]:
    """Rows by table: its title -> rows."""
    groups: dict[str, list[Row]] = {}
    for row in document["rows"]:
        title = f"K = {row['beams']}, prompts {row['reuse']}"
        if document["kind"] == "sizes":
            title = f"{row['dtype']}, K = {row['beams']}, B = 1, prompts {row['reuse']}"
        groups.setdefault(title, []).append(row)
    return groups


def _cells(row: Row) -> list[str]:
    """What every table shows of a row, after its first columns."""
    ms, against = row["ms"], row["ws_huggingface"]
    return [
        _short(ms["p50"]),
        _short(ms["p75"] - ms["p25"]),
        _short(ms["p99"]),
        f"{row['ws_beam']['p50']:.2f}",
        "" if against is None else f"{against['p50']:.1f}",
        f"{row['accepted_levels']:.2f}" if row["drafted_nodes"] else "",
        f"{row['passes']:.2f}",
        f"{row['target_tokens']:.0f}",
        f"{row['kv_to_greedy']:.2f}",
    ]


COLUMNS = ("ms", "IQR", "p99", "WS", "WS HF", "AS", "pass", "tokens", "KV")
MEANINGS = (
    "ms: median of a batch, then its interquartile range. WS: own beams' time over this one's, "
    "WS HF: Hugging Face's; medians of the ratios within rounds. AS: levels accepted of what was "
    "drafted. pass, tokens: of the target, a request. KV: bytes held over those of one beam."
)


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _name(row: Row) -> str:
    mode: str = row["mode"]
    return NAMES.get(mode, mode)


def _plan(row: Row) -> str:
    """Of planned decoding: which plan was taken most, and how often."""
    for plan, count in (row.get("plans") or {}).items():
        return f"{plan}" if count == row["rounds"] else f"{plan} {count / row['rounds']:.0%}"
    return ""


def tables(document: Document) -> list[Table]:
    """The figures for a terminal of 80 columns."""
    shown = []
    first = ("size",) if document["kind"] == "sizes" else ("B",)
    for title, rows in _groups(document).items():
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
        table.add_column(*first, justify="right", no_wrap=True)
        table.add_column("mode", no_wrap=True)
        for column in COLUMNS:
            table.add_column(column, justify="right", no_wrap=True)
        for i, row in enumerate(rows):
            size = _millions(row["parameters"]) if "parameters" in row else str(row["batch"])
            again = i and rows[i - 1]["mode"] != rows[-1]["mode"]
            last = i + 1 == len(rows) or rows[i + 1]["mode"] == BEAM
            mode = f"{_name(row)}\n {_plan(row)}" if _plan(row) else _name(row)
            table.add_row("" if again else size, mode, *_cells(row), end_section=last)
        shown.append(table)
    shown[-1].caption = MEANINGS
    return shown


def plots(document: Document) -> dict[str, str]:
    """Drawings for the page: name -> inline SVG."""
    from recsys.evaluation import figures

    if document["kind"] == "sizes":
        return {"sizes": figures.svg(partial(_by_size, document=document), "sizes", SIZES_LABEL)}
    drawn = {}
    for reuse in dict.fromkeys(row["reuse"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["reuse"] == reuse]
        label = f"Line charts: speed against own beams by batch size, for each K, prompts {reuse}."
        drawn[reuse] = figures.svg(partial(_by_batch, rows=rows), reuse, label)
    return drawn


SIZES_LABEL = "Line charts: speed of forced speculation against own beams by target size."


def _by_batch(figure: Figure, rows: list[Row]) -> None:
    ks = list(dict.fromkeys(row["beams"] for row in rows))
    modes = [m for m in dict.fromkeys(r["mode"] for r in rows) if m not in (BEAM, HUGGING_FACE)]
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    panels = figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]
    for axes, k in zip(panels, ks, strict=True):
        for i, mode in enumerate(modes):
            here = [row for row in rows if row["beams"] == k and row["mode"] == mode]
            _line(axes, i, mode, [batches.index(row["batch"]) for row in here], here)
        axes.set_xticks(range(len(batches)), [str(b) for b in batches])
        _even(axes, f"K = {k}", "B")


def _by_size(figure: Figure, document: Document) -> None:
    groups = dict.fromkeys((row["dtype"], row["reuse"]) for row in document["rows"])
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for axes, (dtype, reuse) in zip(panels, groups, strict=True):
        for i, mode in enumerate(("bound", f"bound-{document['nodes']}", "exhaustive")):
            rows = [
                row
                for row in document["rows"]
                if (row["dtype"], row["reuse"], row["mode"]) == (dtype, reuse, mode)
            ]
            _line(axes, i, mode, [row["parameters"] / 1e6 for row in rows], rows)
        axes.set_xscale("log")
        _even(axes, f"{dtype}, {reuse}", "million parameters")


def _line(axes: Axes, i: int, label: str, places: list[float], rows: list[Row]) -> None:
    from recsys.evaluation import figures

    ratios = [row["ws_beam"] for row in rows]
    axes.errorbar(
        places,
        [r["p50"] for r in ratios],
        yerr=[[r["p50"] - r["p25"] for r in ratios], [r["p75"] - r["p50"] for r in ratios]],
        color=figures.SERIES[i % len(figures.SERIES)],
        marker=figures.MARKERS[i % len(figures.MARKERS)],
        markersize=4,
        linewidth=2.2 if label == PLANNED else 1.4,
        capsize=2,
        label=label,
    )


def _even(axes: Axes, title: str, x: str) -> None:
    """Finish a panel of ratios: a line where both sides take as long."""
    from recsys.evaluation import figures

    axes.axhline(1, color=figures.INK, linewidth=0.8)
    axes.set(xlabel=x, ylim=(0, None))
    axes.set_title(title, loc="left")


def render(document: Document) -> str:
    """The document as one self-contained HTML page: no script, nothing fetched."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["count"] = lambda value: f"{value:,}"
    template = files("recsys.benchmark").joinpath("report.html.jinja").read_text(encoding="utf-8")
    style = files("recsys.evaluation").joinpath("page.css").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        document=document,
        headline=headline(document),
        groups={
            title: [
                (
                    _millions(row["parameters"]) if "parameters" in row else row["batch"],
                    _name(row),
                    _plan(row),
                    _cells(row),
                    row,
                )
                for row in rows
            ]
            for title, rows in _groups(document).items()
        },
        first="Target" if document["kind"] == "sizes" else "B",
        columns=COLUMNS,
        meanings=MEANINGS,
        planned=PLANNED,
        beam=BEAM,
        # Markup of our own making: a style sheet, and drawings of numbers and mode names.
        style=Markup(style),  # noqa: S704
        plots={key: Markup(value) for key, value in plots(document).items()},  # noqa: S704
    )


def write(document: Document, folder: Path) -> None:
    """Write `result.json`, `report.html` and a drawing for each part, `PART.svg`."""
    save(folder, document, plots(document), render(document))
