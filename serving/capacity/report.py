"""Report: a plan or a check as tables and sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

Document = dict[str, Any]
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def tables(document: Document) -> Iterator[Table]:
    """What was predicted beside what was measured, or the fleet and its memory."""
    if check := document.get("check"):
        yield _levels(check["levels"])
    if plan := document.get("plan"):
        yield _fleet(plan)
        yield _memory(plan["memory"])
        if plan["drivers"]:
            table = _table("What the replicas hang on", "if", "1/s a replica", "replicas")
            for name, found in plan["drivers"].items():
                count = found["replicas"]
                table.add_row(
                    name, f"{found['rate_each']:.1f}", "-" if count is None else f"{count:,}"
                )
            yield table


def _levels(levels: list[dict[str, Any]]) -> Table:
    table = _table(
        "Two replicas, ms measured and predicted", "load", "1/s", "batch",
        "p50", "said", "error", "p99", "said", "error", "cores", "bad",
    )  # fmt: skip
    for level in levels:
        cells = [f"{level['load']:.0%}", f"{level['rate']:.0f}", f"{level['batch_size']:.2f}"]
        for name in ("p50", "p99"):
            cells += [
                f"{level[f'{name}_measured_ms']:.1f}",
                f"{level[f'{name}_predicted_ms']:.1f}",
                f"{level[f'{name}_error']:+.1%}",
            ]
        table.add_row(*cells, f"{level['server_cores']:.2f}", f"{level['bad']}")
    return table


def _fleet(plan: Document) -> Table:
    table = _table("The fleet", "", "replicas", "1/s", "p50 ms", "p99 ms", "batch", "busy", "lost")
    for name, found in (("at the peak", plan["peak"]), ("one dies", plan["outage"])):
        if found is not None:
            lost = found["refused"] + found["expired"] + found["failed"]
            table.add_row(
                name, f"{plan['replicas']:,}", f"{plan['needs']['rate']:,.1f}",
                f"{found['p50_ms']:.1f}", f"{found['p99_ms']:.1f}", f"{found['batch_size']:.2f}",
                f"{found['busy']:.0%}", f"{lost / found['requests']:.2%}",
            )  # fmt: skip
    return table


def _memory(memory: Document) -> Table:
    table = _table("Memory", "", "a replica", "share")
    for name, size in memory["replica"].items():
        table.add_row(name, size_of(size), f"{size / memory['replica_bytes']:.0%}")
    table.add_row("together", size_of(memory["replica_bytes"]), "")
    return table


def sentences(document: Document) -> Iterator[str]:
    """What no table says."""
    costs = document["costs"]
    offset, slope = costs["line_ms"]
    yield (
        f"A batch of n takes {offset:.2f} + {slope:.2f} n ms, a history that was not kept "
        f"{costs['cold_ms']:.2f} ms more; measured over {costs['requests']:,} requests."
    )
    if check := document.get("check"):
        met = "met" if check["met"] else "MISSED"
        yield f"Worst error {check['worst']:.1%}, bound {check['bound']:.0%}: {met}."
    if plan := document.get("plan"):
        memory = plan["memory"]
        yield (
            f"{plan['machines']:,} machines for {plan['replicas']:,} replicas, each good for "
            f"{plan['rate_each']:.1f} requests a second; {size_of(memory['machine_bytes'])} of "
            "memory a machine."
        )
        yield (
            f"{memory['item_bytes']:,} bytes an item and replica; the store holds "
            f"{size_of(memory['store_bytes'])} of events; a replica keeps the computed form of "
            f"{memory['histories_kept']:,} histories, the fleet of "
            f"{memory['fleet_histories_kept']:,}."
        )


def size_of(size: float) -> str:
    """Bytes for people."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    return table
