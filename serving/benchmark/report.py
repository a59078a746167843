"""What `recsys benchmark serve` shows of its document."""

from collections.abc import Iterator
from typing import Any

from recsys.benchmark.report import Document, Line, Panel, Plot, Report, Table

COLUMNS = {
    "answers": "answers", "rate": "1/s", "p50_ms": "p50 ms", "p95_ms": "p95 ms",
    "p99_ms": "p99 ms", "errors": "errors", "server_cpu": "cores",
    "server_cpu_ms": "CPU ms", "generator_cpu": "generator cores",
}  # fmt: skip


def report(document: Document) -> Report:
    """The report."""
    tables, plots = [], []
    for name, key in (("closed", "clients"), ("open", "sent_rate")):
        if rows := document.get(name):
            cells = [[_cell(row[column]) for column in (key, *COLUMNS)] for row in rows]
            columns = (key.replace("_", " "), *COLUMNS.values())
            tables.append(Table(f"{name.capitalize()} loop", columns, cells, words=0))
    if document.get("closed"):
        plots.append(_plot_latency(document))
    if soak := document.get("soak"):
        minutes = [sample["s"] / 60 for sample in soak["samples"]]
        memory = Line("resident memory", minutes, [sample["rss_mb"] for sample in soak["samples"]])
        panel = Panel("MB", "minutes", [memory])
        plots.append(Plot("memory", "Memory of the server over the soak.", [panel]))
    return Report(document["bundle"]["name"], list(_sentences(document)), tables, plots)


def _sentences(document: Document) -> Iterator[str]:
    if equality := document.get("equality"):
        yield (
            f"{equality['compared']} of {equality['requests']} mixed requests compared, "
            f"{equality['clients']} clients against one: {equality['different']} different, "
            f"{equality['errors']} errors."
        )
        if refused := equality["refused_alone"]:
            yield f"Refused without load, by status: {refused}."
    if soak := document.get("soak"):
        yield (
            f"Soak of {soak['minutes']:g} minutes: {soak['answers']} answers, {soak['errors']} "
            f"errors, p50 {_cell(soak['p50_ms'])} ms, p99 {_cell(soak['p99_ms'])} ms; memory "
            f"{soak['rss_mb']} MB, {soak['rss_change']:+.2%} after the warm-up "
            f"({'flat' if soak['flat'] else 'NOT flat'}); open files {soak['open_files'][0]} to "
            f"{soak['open_files'][1]}, threads {soak['threads'][0]} to {soak['threads'][1]}."
        )


def _plot_latency(document: Document) -> Plot:
    lines = []
    for name, style in (("closed", "-"), ("open", "none")):
        rows = [row for row in document[name] if row["p50_ms"]]
        rates = [row["rate"] for row in rows]
        for key in ("p50_ms", "p95_ms", "p99_ms"):
            label = f"{key[:3]}, {name} loop"
            lines.append(Line(label, rates, [row[key] for row in rows], style=style))
    caption = "Latency by answers a second, in closed and in open loops."
    return Plot("latency", caption, [Panel("ms", "answers a second", lines)])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"
