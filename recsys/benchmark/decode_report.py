"""What `recsys benchmark decode` shows of its document."""

from __future__ import annotations

from dataclasses import replace

from recsys.benchmark.report import Document, Line, Panel, Plot, Report, Row, Table

BEAM, HUGGING_FACE, PLANNED = "beam", "huggingface", "planned"
NAMES = {BEAM: "own beams", HUGGING_FACE: "Hugging Face"}
COLUMNS = ("B", "mode", "ms", "IQR", "p99", "WS", "WS HF", "AS", "pass", "tokens", "KV")
MEANINGS = (
    "ms: median of a batch, then its interquartile range. WS: own beams' time over this one's, "
    "WS HF: Hugging Face's; medians of the ratios within rounds. AS: levels accepted of what was "
    "drafted. pass, tokens: of the target, a request. KV: bytes held over those of one beam."
)


def report(document: Document) -> Report:
    """The report."""
    groups = _group(document["rows"], "beams", "reuse")
    tables = [
        Table(f"K = {beams}, prompts {reuse}", COLUMNS, _lines(rows), words=2)
        for (beams, reuse), rows in groups.items()
    ]
    tables[-1] = replace(tables[-1], note=MEANINGS)
    plots = [_plot(reuse, rows) for (reuse,), rows in _group(document["rows"], "reuse").items()]
    return Report(document["workload"]["weights"], _sentences(document), tables, plots)


def _group(rows: list[Row], *keys: str) -> dict[tuple[object, ...], list[Row]]:
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def _lines(rows: list[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        ms, against = row["ms"], row["ws_huggingface"]
        plan, count = next(iter(row.get("plans", {}).items()), ("", 0))
        share = "" if count in (0, row["rounds"]) else f" {count / row['rounds']:.0%}"
        name = str(NAMES.get(row["mode"], row["mode"]))
        lines.append(
            [
                str(row["batch"]) if row["mode"] == BEAM else "",
                f"{name}: {plan}{share}" if plan else name,
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
        )
    return lines


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _sentences(document: Document) -> list[str]:
    sentences = []
    planned = [row for row in document["rows"] if row["mode"] == PLANNED]
    if planned:
        worst = min(planned, key=lambda row: row["ws_beam"]["p50"])
        wall, cpu = (1 / worst[ws]["p50"] for ws in ("ws_beam", "ws_beam_cpu"))
        sentences.append(
            f"Planned decoding takes {wall:.2f} times as long as own beams at its worst "
            f"({_where(worst)}), {cpu:.2f} times the processor time."
        )
    gains = [row for row in planned if row["ws_huggingface"]]
    if gains:
        gains.sort(key=lambda row: float(row["ws_huggingface"]["p50"]))
        least, most = (f"{row['ws_huggingface']['p50']:.1f} ({_where(row)})"
                       for row in (gains[0], gains[-1]))  # fmt: skip
        sentences.append(f"It is {least} to {most} times as fast as Hugging Face.")
    rounded = [row["agreement"] for row in document["rows"] if row["agreement"]["requests"] < 1]
    if rounded:
        lists, items = (min(row[key] for row in rounded) for key in ("requests", "items"))
        sentences.append(
            f"In {document['dtype']} some lists are not beam search's: at worst {lists:.1%} are, "
            f"{items:.1%} of items are in common, and a score differs by "
            f"{max(row['gap'] for row in rounded)}."
        )
    return sentences


def _where(row: Row) -> str:
    return f"K = {row['beams']}, B = {row['batch']}, {row['reuse']}"


def _plot(reuse: object, rows: list[Row]) -> Plot:
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    panels = []
    for (beams,), some in _group(rows, "beams").items():
        lines = []
        for (mode,), cells in _group(some, "mode").items():
            if mode in (BEAM, HUGGING_FACE):
                continue
            ws = [row["ws_beam"] for row in cells]
            errors = ([r["p50"] - r["p25"] for r in ws], [r["p75"] - r["p50"] for r in ws])
            places = [batches.index(row["batch"]) for row in cells]
            lines.append(Line(str(mode), places, [r["p50"] for r in ws], errors))
        panels.append(Panel(f"K = {beams}", "B", lines, [str(b) for b in batches], level=1))
    caption = (
        f"Speed relative to own beams by batch size B, prompts {reuse}; bars are quartiles over "
        "rounds. Above the line a mode is faster."
    )
    return Plot(str(reuse), caption, panels)
