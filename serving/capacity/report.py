"""What `recsys benchmark capacity` shows of its document: a plan or a check."""

from collections.abc import Iterator

from rich.filesize import decimal

from recsys.benchmark.report import Document, Report, Row, Table


def report(document: Document) -> Report:
    """The report."""
    tables = []
    columns: tuple[str, ...]
    if check := document.get("check"):
        columns = (
            "load", "1/s", "batch", "p50 ms", "predicted", "error", "p99 ms", "predicted", "error",
            "cores", "bad",
        )  # fmt: skip
        rows = [_compare(level) for level in check["levels"]]
        tables.append(Table("Two replicas, measured and predicted", columns, rows))
    if plan := document.get("plan"):
        columns = ("", "replicas", "1/s", "p50 ms", "p99 ms", "batch", "busy", "lost")
        named = (("at the peak", plan["peak"]), ("one dies", plan["outage"]))
        rows = [_describe(name, plan, found) for name, found in named if found]
        memory = plan["memory"]
        parts = [
            [name, decimal(size), f"{size / memory['replica_bytes']:.0%}"]
            for name, size in memory["replica"].items()
        ]
        drivers = [
            [name, f"{found['rate_each']:.1f}", str(found["replicas"] or "-")]
            for name, found in plan["drivers"].items()
        ]
        tables += [
            Table("The fleet", columns, rows),
            Table("Memory of a replica", ("", "bytes", "share"), parts),
            Table("Replicas under other conditions", ("if", "1/s each", "replicas"), drivers),
        ]
    return Report(document["bundle"]["name"], list(_sentences(document)), tables)


def _compare(level: Row) -> list[str]:
    cells = [f"{level['load']:.0%}", f"{level['rate']:.0f}", f"{level['batch_size']:.2f}"]
    for name in ("p50", "p99"):
        cells += [
            f"{level[f'{name}_measured_ms']:.1f}",
            f"{level[f'{name}_predicted_ms']:.1f}",
            f"{level[f'{name}_error']:+.1%}",
        ]
    return [*cells, f"{level['server_cores']:.2f}", f"{level['bad']}"]


def _describe(name: str, plan: Row, found: Row) -> list[str]:
    lost = found["refused"] + found["expired"] + found["failed"]
    return [
        name, f"{plan['replicas']:,}", f"{plan['needs']['rate']:,.1f}", f"{found['p50_ms']:.1f}",
        f"{found['p99_ms']:.1f}", f"{found['batch_size']:.2f}", f"{found['busy']:.0%}",
        f"{lost / found['requests']:.2%}",
    ]  # fmt: skip


def _sentences(document: Document) -> Iterator[str]:
    costs = document["costs"]
    offset, slope = costs["line_ms"]
    yield (
        f"A batch of n takes {offset:.2f} + {slope:.2f} n ms, a history that is not kept "
        f"{costs['cold_ms']:.2f} ms more; measured over {costs['requests']:,} requests."
    )
    if check := document.get("check"):
        met = "met" if check["met"] else "MISSED"
        yield f"Worst error {check['worst']:.1%}, bound {check['bound']:.0%}: {met}."
    if plan := document.get("plan"):
        memory = plan["memory"]
        yield (
            f"{plan['machines']:,} machines for {plan['replicas']:,} replicas, each good for "
            f"{plan['rate_each']:.1f} requests a second; "
            f"{decimal(memory['machine_bytes'])} of memory a machine."
        )
        yield (
            f"{memory['item_bytes']:,} bytes an item and replica; "
            f"{decimal(memory['store_bytes'])} of events in the store; "
            f"{memory['histories_kept']:,} histories in the prefix cache of a replica."
        )
