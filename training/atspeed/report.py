"""Report of an experiment: tables beside the published ones, sentences, plots, one HTML page.

The document holds all that is shown. A table is plain strings, so that terminal and page show the
same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from recsys.benchmark.result import Document, save
from recsys.training.atspeed import paper
from recsys.training.atspeed.findings import cell, cost_of
from recsys.training.atspeed.lineup import INITS, OURS, PUBLISHED, RELAXED, STRICT, TITLES

Row = dict[str, Any]

PAPER = "paper (7B)"
WIDTH = 150  # columns, where nobody says


@dataclass(frozen=True)
class Shown:
    """A table.

    Attributes:
        key: names it in the page.
        title: what it shows.
        note: how to read it.
        columns: their heads.
        rows: cells; the first is the row's own name, empty where it is the one above's.
        text: columns that hold words.
    """

    key: str
    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    text: int = 2


def sizes(document: Document) -> str:
    """Whose figures stand side by side, said plainly."""
    parameters = document["costs"]["target"]["parameters"]
    shares = {}
    for init in document["options"]["inits"]:
        cost = next(c for key, c in document["costs"].items() if f"_{init}_" in key)
        shares[init] = (
            f"{cost['parameters']:,} {INITS[init]} "
            f"({100 * cost['share']:.0f} % of the target's FLOPs a token)"
        )
    return (
        f"The paper's target has {paper.TARGET_PARAMETERS / 1e9:.1f} billion parameters and its "
        f"draft {paper.DRAFT_PARAMETERS / 1e6:.0f} million (1 %). This target has {parameters:,}, "
        f"its drafts {' and '.join(shares.values())}. Accepted levels can be compared with care: a "
        "small target is easier to imitate. Walltimes cannot: here both models are small and run "
        "on a CPU, where drafting costs a larger share and a wide pass costs more than a narrow "
        "one."
    )


def _find(rows: Iterable[Row], **wanted: object) -> Row | None:
    return next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)


def tables(document: Document) -> list[Shown]:
    """All tables of what was run."""
    shown = []
    for verification in ("strict", "relaxed"):
        if "table" in document:
            shown.append(_accepted(document, verification))
        if "speed" in document:
            shown.append(_speedup(document, verification))
    for objective in (STRICT, RELAXED):
        rows = [r for r in document.get("ablations", ()) if r["objective"] == objective]
        if rows:
            shown.append(_ablation(rows, objective))
    if "effects" in document:
        shown += _effects(document["effects"])
    if "nodes" in document:
        shown.append(_passes(document))
    if "recall" in document:
        shown.append(_recall(document["recall"]))
    return [*shown, _training(document), _time(document)]


def _names(document: Document) -> list[tuple[str, str]]:
    """(objective, init) in the order of rows."""
    return [(name, init) for name in (*PUBLISHED, *OURS) for init in document["options"]["inits"]]


def _title(objective: str) -> str:
    return TITLES.get(objective, f"{objective} (ours)")


def _accepted(document: Document, verification: str) -> Shown:
    ks = document["options"]["ks"]
    rows = []
    for objective, init in _names(document):
        found = [
            _find(document["table"], objective=objective, init=init, verification=verification, k=k)
            for k in ks
        ]
        first = init == document["options"]["inits"][0]
        if first and objective in PUBLISHED:
            published = [paper.figure(paper.ACCEPTED, verification, objective, k) for k in ks]
            rows.append(
                [_title(objective), PAPER, *("" if v is None else f"{v:.2f}" for v in published)]
            )
        name = _title(objective) if first and objective not in PUBLISHED else ""
        rows.append([name, INITS[init], *(cell(row and row["accepted"]) for row in found)])
    return Shown(
        f"as-{verification}",
        f"Accepted levels (AS@K), {verification}",
        f"Levels of the first draft that the target accepts whole, at most L - 1. Draft tree: "
        f"{document['options']['drafts']} nodes a level. ± is half the 95 % interval over users.",
        ["objective", "draft", *(f"AS@{k}" for k in ks)],
        rows,
    )


def _speedup(document: Document, verification: str) -> Shown:
    ks = document["options"]["ks"]
    rows = []
    for objective, init in _names(document):
        first = init == document["options"]["inits"][0]
        if first and objective in PUBLISHED:
            published = [paper.figure(paper.SPEEDUP, verification, objective, k) for k in ks]
            rows.append(
                [_title(objective), PAPER, *("" if v is None else f"{v:.2f}" for v in published)]
            )
        cells = []
        for k in ks:
            row = _find(
                document["speed"], objective=objective, init=init, verification=verification, k=k
            )
            theirs = row["ws_huggingface"] if row else None
            cells.append(
                ""
                if row is None
                else f"{row['ws_beam']['p50']:.2f}" + (f" / {theirs['p50']:.1f}" if theirs else "")
            )
        name = _title(objective) if first and objective not in PUBLISHED else ""
        rows.append([name, INITS[init], *cells])
    baseline = "sampling over the same shared cache" if verification == "relaxed" else "beam search"
    return Shown(
        f"ws-{verification}",
        f"Walltime speedup (WS@K), {verification}",
        f"Time of own {baseline} over that of drafting and verifying / the same with Hugging "
        "Face's generate (beam search) for a baseline; one request at a time, one thread, medians "
        "of the ratios within rounds. The paper's baseline is its own beam search.",
        ["objective", "draft", *(f"WS@{k}" for k in ks)],
        rows,
    )


def _ablation(rows: list[Row], objective: str) -> Shown:
    ks = list(dict.fromkeys(row["k"] for row in rows))
    lines = []
    for change in dict.fromkeys(row["change"] for row in rows):
        own = [_find(rows, change=change, k=k) for k in ks]
        lines.append([change or TITLES[objective], *(cell(r and r["accepted"]) for r in own)])
        if change:
            lines.append(["  difference", *(cell(r and r["gain"], "+") for r in own)])
    return Shown(
        f"ablation-{objective}",
        f"Ablations of {TITLES[objective]}, {rows[0]['verification']}, {INITS[rows[0]['init']]}",
        "Accepted levels. Differences are paired over users. What training without tree attention "
        "costs is in the table of drafts; it learns the same.",
        ["", *(f"AS@{k}" for k in ks)],
        lines,
        text=1,
    )


def _effects(rows: list[Row]) -> list[Shown]:
    shown = []
    names = {"N": "drafts", "gamma": "depth", "alpha": "alpha"}
    for effect, column in names.items():
        own = [row for row in rows if row["effect"] == effect]
        values = sorted({row[column] for row in own})
        groups = dict.fromkeys((row["verification"], row["k"]) for row in own)
        lines = [
            [verification, str(k)]
            + [
                cell(r and r["accepted"])
                for v in values
                for r in [_find(own, verification=verification, k=k, **{column: v})]
            ]
            for verification, k in groups
        ]
        notes = {
            "N": "Strict: AtSpeed-S; relaxed: AtSpeed-R.",
            "gamma": "AtSpeed-S with a draft of so many levels.",
            "alpha": "AtSpeed-S by the weight of its alignment loss; 0 is SFT.",
        }
        shown.append(
            Shown(
                f"effect-{effect}",
                f"Effect of {effect} on accepted levels, {INITS[rows[0]['init']]}",
                notes[effect],
                ["verification", "K", *(f"{effect}={v:g}" for v in values)],
                lines,
            )
        )
    return shown


def _passes(document: Document) -> Shown:
    rows, options = document["nodes"], document["options"]
    ks, nodes = options["node_ks"], options["nodes"]
    lines = []
    for objective, init in _names(document):
        cells = [
            "" if row is None else f"{row['passes']['mean']:.2f}"
            for k in ks
            for n in nodes
            for row in [_find(rows, objective=objective, init=init, k=k, nodes=n)]
        ]
        share = cost_of(document["costs"], objective, init)["share"]
        first = init == options["inits"][0]
        lines.append(
            [_title(objective) if first else "", INITS[init], f"{100 * share:.0f} %", *cells]
        )
    none = [_find(rows, objective=None, k=k) for k in ks]
    cells = [f"{row['passes']['mean']:.2f}" for row in none if row for _ in nodes]
    lines.append(["no draft", "", "0 %", *cells])
    return Shown(
        "nodes",
        "Passes of the target a request, strict, draft trees that know the trie",
        "Columns: K / nodes. FLOPs: of a draft's token next to the target's, layers and head. Beam "
        "search takes one pass a level; without a draft, level 1 is tried whole. Half of a 95 % "
        f"interval over users is {max(row['passes']['error'] for row in rows):.2f} at most.",
        ["objective", "draft", "FLOPs", *(f"{k}/{n}" for k in ks for n in nodes)],
        lines,
    )


def _recall(rows: list[Row]) -> Shown:
    lines = []
    for row in rows:
        way = f"sampled, T = {row['temperature']:g}" if row["sampled"] else "searched"
        gains = [
            f"{g['mean']:+.4f} ({g['low']:+.4f} to {g['high']:+.4f})" if g else ""
            for g in (row.get("recall_gain"), row.get("ndcg_gain"))
        ]
        published = paper.RECALL.get((row["name"], row["temperature"]), {}).get(row["k"])
        cells = [f"{row[m]['mean']:.4f}" for m in ("recall", "ndcg")]
        name = str(TITLES.get(row["name"], row["name"]))
        theirs = "" if published is None else f"{published:.4f}"
        differing = "" if row["differing"] is None else str(row["differing"])
        measured = [cells[0], gains[0], cells[1], gains[1]]
        lines.append([name, way, str(row["k"]), *measured, theirs, differing])
    return Shown(
        "recall",
        "Recommendations of the target and of what accelerates it",
        "All of a user's test items count; seen items are not masked. Differences are from the "
        "target asked in the same way, paired over users, with 95 % bootstrap intervals. The last "
        "column counts users whose list is not beam search's.",
        ["who", "how", "K", "Recall", "difference", "NDCG", "difference", PAPER, "lists"],
        lines,
    )


def _training(document: Document) -> Shown:
    rows = [
        [
            row["title"], INITS[row["init"]], str(row["seed"]), f"{row['parameters']:,}",
            str(row["epochs"]), f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{1000 * row['seconds'] / max(row['steps'], 1):.0f}",
        ]
        for row in document["drafts"]
    ]  # fmt: skip
    budget = document["options"]["budget"]
    return Shown(
        "drafts",
        "Drafts",
        f"Each was trained for at most {budget['minutes']:g} minutes or {budget['epochs']} epochs "
        "on one thread. Time: when it was trained, which may be an earlier run.",
        ["objective", "draft", "seed", "parameters", "epochs", "steps", "seconds", "ms a step"],
        rows,
    )


def _time(document: Document) -> Shown:
    teachers = sum(row["spent"] for row in document["teachers"])
    rows = [[name, f"{value:.0f}"] for name, value in document["seconds"].items()]
    rows.append(["all", f"{sum(document['seconds'].values()):.0f}"])
    return Shown(
        "time",
        "Where the time went",
        f"Wall seconds of this run with {document['options']['workers']} processes; what was there "
        f"already took none. Teacher data: {teachers:.0f} s of one process.",
        ["part", "seconds"],
        rows,
        text=1,
    )


def show(document: Document, console: Console) -> None:
    """Tables and sentences for people; not squeezed where there is no terminal to fit."""
    if not console.is_terminal:
        console = type(console)(width=WIDTH, file=console.file)
    for shown in tables(document):
        table = Table(
            box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=shown.title,
            caption=shown.note, title_justify="left", caption_justify="left",
        )  # fmt: skip
        for i, column in enumerate(shown.columns):
            table.add_column(column, justify="left" if i < shown.text else "right", no_wrap=True)
        for row in shown.rows:
            table.add_row(*row)
        console.print(table)
    console.print(sizes(document), highlight=False)
    for finding in document["findings"]:
        console.print(("✓ " if finding["held"] else "✗ ") + finding["text"], highlight=False)


def plots(document: Document) -> dict[str, str]:
    """Drawings for the page: name -> inline SVG."""
    from recsys.evaluation.figures import svg

    drawn = {}
    if "table" in document:
        label = "Line charts: accepted levels by K of each objective, strict and relaxed."
        drawn["accepted"] = svg(partial(_by_k, document=document), "accepted", label)
    if "nodes" in document:
        label = "Line charts: target passes a request by nodes of the draft tree, for each K."
        drawn["passes"] = svg(partial(_by_nodes, document=document), "passes", label)
    if "effects" in document:
        label = "Line charts: accepted levels by N, by gamma and by alpha."
        drawn["effects"] = svg(partial(_by_effect, document=document), "effects", label)
    return drawn


def _by_k(figure: Figure, document: Document) -> None:
    """The first beginning; the paper's champion dashed."""
    from recsys.evaluation.figures import INK

    options = document["options"]
    ks = options["ks"]
    panels = figure.subplots(1, 2, sharey=True)
    for axes, verification in zip(panels, ("strict", "relaxed"), strict=True):
        for i, objective in enumerate((*PUBLISHED, *OURS)):
            rows = [
                r for r in document["table"]
                if (r["objective"], r["init"], r["verification"])
                == (objective, options["inits"][0], verification)
            ]  # fmt: skip
            _line(axes, i, _title(objective), range(len(ks)), [r["accepted"] for r in rows])
        champion = {"strict": STRICT, "relaxed": RELAXED}[verification]
        theirs = [paper.figure(paper.ACCEPTED, verification, champion, k) for k in ks]
        if None not in theirs:
            axes.plot(range(len(ks)), theirs, color=INK, linestyle="--", label="paper's best")
        axes.set_xticks(range(len(ks)), [str(k) for k in ks])
        axes.set(xlabel="K", ylim=(0, None))
        axes.set_title(f"accepted levels, {verification}", loc="left")


def _by_nodes(figure: Figure, document: Document) -> None:
    """The last beginning: drafts cut from the target where there are any."""
    options = document["options"]
    nodes, ks = options["nodes"], options["node_ks"]
    panels = figure.subplots(1, len(ks), sharey=True, squeeze=False)[0]
    for axes, k in zip(panels, ks, strict=True):
        for i, objective in enumerate((*PUBLISHED, *OURS)):
            rows = [
                r for r in document["nodes"]
                if (r["objective"], r["init"], r["k"]) == (objective, options["inits"][-1], k)
            ]  # fmt: skip
            _line(axes, i, _title(objective), range(len(nodes)), [r["passes"] for r in rows])
        axes.set_xticks(range(len(nodes)), [str(n) for n in nodes])
        axes.set(xlabel="nodes")
        axes.set_title(f"passes, K = {k}", loc="left")


def _by_effect(figure: Figure, document: Document) -> None:
    columns = {"N": "drafts", "gamma": "depth", "alpha": "alpha"}
    for axes, (effect, column) in zip(figure.subplots(1, 3), columns.items(), strict=True):
        own = [row for row in document["effects"] if row["effect"] == effect]
        groups = dict.fromkeys((row["verification"], row["k"]) for row in own)
        for i, (verification, k) in enumerate(groups):
            rows = [r for r in own if (r["verification"], r["k"]) == (verification, k)]
            places = [r[column] for r in rows]
            _line(axes, i, f"{verification}, K = {k}", places, [r["accepted"] for r in rows])
        axes.set(xlabel=effect, ylim=(0, None))
        axes.set_title("accepted levels", loc="left")


def _line(axes: Any, i: int, label: str, places: Iterable[float], cells: list[Row]) -> None:
    from recsys.evaluation.figures import MARKERS, SERIES

    axes.errorbar(
        list(places),
        [c["mean"] for c in cells],
        yerr=[c["error"] for c in cells],
        color=SERIES[i % len(SERIES)],
        linestyle="-" if i < len(SERIES) else ":",
        marker=MARKERS[i % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        capsize=2,
        label=label,
    )


def render(document: Document) -> str:
    """The document as one self-contained HTML page: no script, nothing fetched."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (
        files("recsys.training.atspeed").joinpath("report.html.jinja").read_text(encoding="utf-8")
    )
    style = files("recsys.evaluation").joinpath("page.css").read_text(encoding="utf-8")
    return environment.from_string(template).render(
        document=document,
        sizes=sizes(document),
        tables=tables(document),
        # Markup of our own making: a style sheet, and drawings of numbers and names.
        style=Markup(style),  # noqa: S704
        plots={key: Markup(value) for key, value in plots(document).items()},  # noqa: S704
    )


def write(document: Document, folder: Path) -> None:
    """Write `result.json`, `report.html` and a drawing for each part, `PART.svg`."""
    save(folder, document, plots(document), render(document))
