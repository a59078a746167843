"""What `recsys.benchmark.constraint` measured, as tables, sentences and drawings."""

from __future__ import annotations

from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from recsys.benchmark.result import Document


def table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    """A table of cells that fit a terminal."""
    found = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, title=title)
    for column in columns:
        found.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        found.add_row(*row)
    return found


def _count(value: float) -> str:
    for limit, name in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:g}{name}"
    return f"{value:g}"


def _largest(document: Document) -> tuple[int, int]:
    """B and K of the steps that are shown: as in filters and peers."""
    options = document["options"]
    return max(b for b in options["batches"] if b <= 8), max(options["beams"])


def tables(document: Document) -> list[Table]:
    """The figures for a terminal of 80 columns."""
    batch, beams = _largest(document)
    steps = {
        (s["items"], s["levels"], s["depth"]): s["ms"]["p50"]
        for s in document["step"]
        if (s["batch"], s["beams"]) == (batch, beams)
    }
    shown = [
        table(
            f"A trie, and a step of {batch} x {beams} beams by depth",
            ("items", "L x V", "build s", "cpu s", "B/item", "open ms", "0", "1", "2", "3 ms"),
            [
                [
                    _count(row["items"]),
                    f"{row['levels']} x {row['codes']}",
                    f"{row['build_s']:.2f}",
                    f"{row['build_cpu_s']:.2f}",
                    f"{row['bytes_per_item']:.1f}",
                    f"{1000 * row['open_s']:.1f}",
                    *(
                        f"{steps[row['items'], row['levels'], d]:.3f}" if d < row["levels"] else ""
                        for d in range(4)
                    ),
                ]
                for row in document["build"]
            ],
        ),
        table(
            f"Filters: to make a mask, to find it again, steps of a search, {batch} x {beams}",
            ("items", "allowed", "first ms", "again ms", "steps", "one", "different", "+ excluded"),
            [
                [
                    _count(row["items"]),
                    f"{row['eligible'] / row['items']:.2%}",
                    f"{row['first_ms']['p50']:.2f}",
                    f"{row['again_ms']['p50']:.3f}",
                    f"{row['steps_ms']['none']['p50']:.3f}",
                    *(f"x {row['cost'][k]['p50']:.2f}" for k in ("one", "different", "excluded")),
                ]
                for row in document["filter"]
            ],
        ),
    ]
    if document["peers"]:
        shown.append(
            table(
                f"A step at {_count(document['peers'][0]['items'])} items, {batch} x {beams}",
                ("depth", "way", "ms", "x trie", "build s", "B/item"),
                [
                    [
                        str(row["depth"]),
                        row["way"],
                        f"{row['ms']['p50']:.3g}",
                        f"{row['times_trie']['p50']:.0f}",
                        "" if row["build_s"] is None else f"{row['build_s']:.1f}",
                        f"{row['bytes_per_item']:.0f}",
                    ]
                    for row in document["peers"]
                ],
            )
        )
    return shown


def headline(document: Document) -> list[str]:
    """What the figures come to, in sentences."""
    batch, beams = _largest(document)
    largest = max(document["build"], key=lambda row: (row["items"], row["bytes_per_item"]))
    said = [
        f"{_count(largest['items'])} items of {largest['levels']} x {largest['codes']} codes: "
        f"built in {largest['build_s']:.1f} s, {largest['bytes_per_item']:.1f} bytes each, "
        f"opened in {1000 * largest['open_s']:.1f} ms."
    ]
    worst: dict[int, list[float]] = {}
    for row in document["step"]:
        if (row["batch"], row["beams"], row["levels"]) == (batch, beams, largest["levels"]):
            worst.setdefault(row["items"], []).append(row["ms"]["p50"])
    sizes = sorted(worst)
    if len(sizes) > 1:
        few, many = worst[sizes[0]], worst[sizes[-1]]
        said.append(
            f"From {_count(sizes[0])} to {_count(sizes[-1])} items the widest step takes "
            f"{max(many) / max(few):.2f} times as long, all steps of a search "
            f"{sum(many) / sum(few):.2f} times."
        )
    if document["filter"]:
        costs = [row["cost"]["one"]["p50"] for row in document["filter"]]
        said.append(
            f"A filter makes steps cost {min(costs):.2f} to {max(costs):.2f} times as much."
        )
    others = [row for row in document["peers"] if row["way"] == "nested dict"]
    if others:
        ratios = [row["times_trie"]["p50"] for row in others]
        trie = sum(r["ms"]["p50"] for r in document["peers"] if r["way"] == "trie")
        whole = sum(row["ms"]["p50"] for row in others) / trie
        said.append(
            f"Hugging Face's processor with a nested dict takes {min(ratios):.0f} to "
            f"{max(ratios):.0f} times as long by depth, {whole:.0f} times over the search."
        )
    decode = document["decode"]
    if decode:
        said.append(
            f"The trie's part of a decode of preset {decode['preset']} is "
            f"{decode['percent']['p50']:.2g} %."
        )
    return said


def plots(document: Document) -> dict[str, str]:
    """Drawings: name -> inline SVG."""
    from recsys.evaluation import figures

    return {
        "constraint": figures.svg(
            partial(_draw, document=document),
            "constraint",
            "Line charts: time of a step by items, and cost of filters by share allowed.",
        )
    }


def _draw(figure: Figure, document: Document) -> None:
    from recsys.evaluation import figures

    batch, beams = _largest(document)
    left, right = figure.subplots(1, 2)
    rows = [
        row
        for row in document["step"]
        if (row["batch"], row["beams"]) == (batch, beams)
        and (row["levels"], row["codes"]) == tuple(document["options"]["codes"][0])
    ]
    lines = {f"depth {d}": [r for r in rows if r["depth"] == d] for d in {r["depth"] for r in rows}}
    series = {
        name: ([r["items"] for r in line], [r["ms"]["p50"] for r in line])
        for name, line in lines.items()
    }
    for way in ("nested dict", "sorted table"):
        peers = [row for row in document["peers"] if row["way"] == way]
        if peers:
            mean = sum(row["ms"]["p50"] for row in peers) / len(peers)
            series[way] = ([peers[0]["items"]], [mean])
    for i, (name, (x, y)) in enumerate(series.items()):
        left.plot(x, y, label=name, **_style(i))
    left.set(xscale="log", yscale="log", xlabel="items", ylabel="ms a step")
    left.set_title(f"{batch} x {beams} beams", loc="left")
    left.legend(fontsize=7)
    largest = max((row["items"] for row in document["filter"]), default=0)
    filters = [row for row in document["filter"] if row["items"] == largest]
    for i, kind in enumerate(("one", "different", "excluded")):
        y = [row["cost"][kind]["p50"] for row in filters]
        right.plot([100 * row["share"] for row in filters], y, label=kind, **_style(i))
    right.axhline(1, color=figures.INK, linewidth=0.8)
    right.set(xscale="log", ylim=(0, None), xlabel="% of items allowed", ylabel="x without")
    right.set_title(f"filters, {_count(largest)} items", loc="left")
    right.legend(fontsize=7)


def _style(i: int) -> dict[str, Any]:
    from recsys.evaluation import figures

    return {
        "color": figures.SERIES[i % len(figures.SERIES)],
        "marker": figures.MARKERS[i % len(figures.MARKERS)],
        "markersize": 4,
    }
