"""Report: the found values as tables, sentences and drawings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

Document = dict[str, Any]
COLUMNS = {
    "answers": "answers", "rate": "1/s", "p50_ms": "p50 ms", "p95_ms": "p95 ms",
    "p99_ms": "p99 ms", "errors": "bad", "server_cpu": "cores",
    "server_cpu_ms": "CPU ms", "generator_cpu": "load's",
}  # fmt: skip


def tables(document: Document) -> Iterator[Table]:
    """Loops and verdicts.

    Cores are what the server used of the machine and, last, what making the load did.
    """
    for title, key, rows in (
        ("Closed loop", "clients", document.get("closed", [])),
        ("Open loop", "asked_rate", document.get("open", [])),
    ):
        if rows:
            table = Table(title=title, box=SIMPLE_HEAD)
            for name in (key.replace("_", " "), *COLUMNS.values()):
                table.add_column(name, justify="right")
            for row in rows:
                table.add_row(*(_cell(row[name]) for name in (key, *COLUMNS)))
            yield table
    if verdicts := document.get("verdicts"):
        table = Table(title="Held to", box=SIMPLE_HEAD)
        for name in ("", "found", "bound", ""):
            table.add_column(name, justify="left" if not name else "right")
        for row in verdicts:
            met = "met" if row["met"] else "MISSED"
            table.add_row(row["name"], _cell(row["figure"]), _cell(row["bound"]), met)
        yield table


def sentences(document: Document) -> Iterator[str]:
    """What no table says."""
    if first := document.get("first"):
        yield (
            f"Ready after {first['ready_s']} s; first answer {first['first_ms']} ms, then "
            f"{first['median_ms']} ms (median); the middle one of {first['starts']} starts."
        )
    if single := document.get("single"):
        yield (
            f"One client: p50 {single['service_p50_ms']} ms, a direct call "
            f"{single['direct_p50_ms']} ms ({single['requests']} of each, in turn); of CPU, "
            f"{single['service_cpu_ms']} ms and {single['direct_cpu_ms']} ms."
        )
    if equality := document.get("equality"):
        yield (
            f"{equality['compared']} of {equality['requests']} mixed requests compared, "
            f"{equality['clients']} clients against alone: {equality['different']} different, "
            f"{equality['errors']} errors."
        )
        if equality["refused_alone"]:
            yield f"Refused already alone: {equality['refused_alone']}."
        if (before := equality["before"]) and (after := equality["after"]):
            megabytes = [usage["rss_bytes"] / 2**20 for usage in (before, after)]
            yield (
                f"Before and after them: {megabytes[0]:.0f} and {megabytes[1]:.0f} MB, "
                f"{before['open_files']} and {after['open_files']} open files, "
                f"{before['threads']} and {after['threads']} threads."
            )
        if events := equality["events"]:
            yield (
                f"{events['accepted']} events of {events['users']} users meanwhile, "
                f"{events['duplicates']} sent twice: {events['wrong_histories']} histories wrong."
            )
    if soak := document.get("soak"):
        flat = "flat" if soak["flat"] else "NOT flat"
        yield (
            f"Soak of {soak['minutes']:g} minutes: {soak['answers']} answers, {soak['errors']} "
            f"errors, p50 {_cell(soak['p50_ms'])} ms, p99 {_cell(soak['p99_ms'])} ms; memory "
            f"{soak['rss_mb']} MB, {soak['rss_change']:+.2%} after warm-up ({flat}); open files "
            f"{soak['open_files'][0]} to {soak['open_files'][1]}, threads {soak['threads'][0]} to "
            f"{soak['threads'][1]}."
        )


def drawings(document: Document) -> dict[str, str]:
    """SVG by name: latency by load, memory over time."""
    from recsys.evaluation import figures

    drawn = {}
    if document.get("closed"):
        label = "Line chart: latency against answers a second, closed loops and open loops."
        drawn["latency"] = figures.svg(partial(_latency, document=document), "latency", label)
    if soak := document.get("soak"):
        label = "Line chart: memory of the server over the minutes of the soak."
        drawn["memory"] = figures.svg(partial(_memory, soak=soak), "memory", label)
    return drawn


def _latency(figure: Figure, document: Document) -> None:
    from recsys.evaluation import figures

    axes = figure.subplots()
    rows = [row for row in document["closed"] if row["p50_ms"]]
    for i, key in enumerate(("p50_ms", "p95_ms", "p99_ms")):
        rates = [row["rate"] for row in rows]
        label = f"{key[:3]}, closed"
        colour = figures.SERIES[i]
        axes.plot(rates, [row[key] for row in rows], color=colour, marker="o", label=label)
        points = [row for row in document["open"] if row["p50_ms"]]
        if points:
            axes.plot(
                [row["rate"] for row in points],
                [row[key] for row in points],
                color=colour,
                marker="x",
                linestyle="none",
                label=f"{key[:3]}, open",
            )
    axes.set(xlabel="answers a second", ylabel="ms", ylim=(0, None), xlim=(0, None))


def _memory(figure: Figure, soak: Document) -> None:
    from recsys.evaluation import figures

    axes = figure.subplots()
    minutes = [sample["s"] / 60 for sample in soak["samples"]]
    memory = [sample["rss_mb"] for sample in soak["samples"]]
    axes.plot(minutes, memory, color=figures.SERIES[0], label="resident memory")
    axes.set(xlabel="minutes", ylabel="MB", ylim=(0, None))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
