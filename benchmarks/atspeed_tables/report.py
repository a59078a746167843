"""What `atspeed.py` shows of its document: its tables beside the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from measuring import Row
from reporting import Report, Table

from atspeed_tables import paper
from atspeed_tables.lineup import OBJECTIVES, RELAXED, STRICT, title_of

PAPER = "paper (7B)"
# verification -> in words; published figures stand beside what compares with them.
HOW = {"strict": "strict", "relaxed": "relaxed", "released": "relaxed, as released"}
FIRST = "Levels of the first draft that the target accepts whole, at most L - 1."
COUNTS = {
    "strict": f"{FIRST} The paper's count adds those of later drafts of the same request.",
    "relaxed": FIRST,
    "released": "Levels that the target accepts, at most L - 1, of all rounds of a request, as the "
    "published figures count them.",
}


def report(document: Row) -> Report:
    """What is shown."""
    tables = []
    if "table" in document:
        tables += [_accepted(document, verification) for verification in HOW]
        tables += [_speedup(document, verification) for verification in ("strict", "relaxed")]
    if "ablations" in document:
        tables += [_ablation(document["ablations"], objective) for objective in (STRICT, RELAXED)]
    if "recall" in document:
        tables.append(_recall(document["recall"]))
    tables.append(_drafts(document))
    return Report([table for table in tables if table.rows], _sentences(document))


def _sentences(document: Row) -> list[str]:
    options, sizes = document["options"], {row["parameters"] for row in document["drafts"]}
    sentences = [
        f"{document['run']}: drafts from scratch, {options['steps']:,} steps each, "
        f"{options['seeds']} seeds, trees of {options['drafts']} nodes a level. ± is half the 95 % "
        "interval over users.",
        f"The paper's target has {paper.TARGET_PARAMETERS / 1e9:.1f} billion parameters and its "
        f"draft {paper.DRAFT_PARAMETERS / 1e6:.0f} million. This target has "
        f"{document['target']['parameters']:,}, its drafts {max(sizes, default=0):,}. A small "
        "target is easier to imitate, and on a CPU drafting takes a larger share of the time.",
    ]
    if "recall" in document:
        differing = sum(row["differing"] or 0 for row in document["recall"])
        sentences.append(f"Strict verification: {differing} lists differ from beam search's.")
    return sentences


def cell(value: Row | None, sign: str = "") -> str:
    """A mean and half its 95 % interval; empty without a value."""
    return "" if value is None else f"{value['mean']:{sign}.2f} ±{value['error']:.2f}"


def _find(rows: Iterable[Row], **columns: object) -> Row | None:
    return next((r for r in rows if all(r[k] == v for k, v in columns.items())), None)


def _beside_paper(
    document: Row,
    part: str,
    verification: str,
    published: paper.Figures,
    show: Callable[[Row], str],
) -> list[list[str]]:
    """For each objective: its title, a cell for each K, and below it the published figures."""
    ks, lines = document["options"]["ks"], []
    for objective in OBJECTIVES:
        about = {"objective": objective, "verification": verification}
        own = [_find(document[part], **about, k=k) for k in ks]
        lines.append([title_of(objective), *("" if row is None else show(row) for row in own)])
        theirs = [paper.figure(published, verification, objective, k) for k in ks]
        if any(theirs):
            lines.append([f"  {PAPER}", *("" if v is None else f"{v:.2f}" for v in theirs)])
    return lines


def _accepted(document: Row, verification: str) -> Table:
    lines = _beside_paper(
        document, "table", verification, paper.ACCEPTED, lambda row: cell(row["accepted"])
    )
    columns = ["objective", *(f"AS@{k}" for k in document["options"]["ks"])]
    name = f"Accepted levels (AS@K), {HOW[verification]}"
    return Table(name, columns, lines, COUNTS[verification])


def _speedup(document: Row, verification: str) -> Table:
    lines = _beside_paper(
        document, "speed", verification, paper.SPEEDUP, lambda row: f"{row['speedup']['p50']:.2f}"
    )
    baseline = "sampling over the shared cache" if verification == "relaxed" else "beam search"
    return Table(
        f"Walltime speedup (WS@K), {verification}",
        ["objective", *(f"WS@{k}" for k in document["options"]["ks"])],
        lines,
        f"Time of {baseline} over that of drafting and verifying, as in the paper; one request at "
        "a time, one thread, medians of the ratios within rounds.",
    )


def _ablation(rows: Sequence[Row], objective: str) -> Table:
    rows = [row for row in rows if row["objective"] == objective]
    ks = list(dict.fromkeys(row["k"] for row in rows))
    lines = []
    for change in dict.fromkeys(row["change"] for row in rows):
        own = [_find(rows, change=change, k=k) for k in ks]
        lines.append([change or title_of(objective), *(cell(r and r["accepted"]) for r in own)])
        if change:
            lines.append(["  difference", *(cell(r and r["gain"], "+") for r in own)])
    how = "strict" if objective == STRICT else "relaxed"
    return Table(
        f"Ablations of {title_of(objective)}, {how}",
        ["", *(f"AS@{k}" for k in ks)],
        lines,
        "Accepted levels. Differences are paired over users.",
    )


def _recall(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        way = f"sampled, T = {row['temperature']:g}" if row["sampled"] else "searched"
        cells = []
        for metric in ("recall", "ndcg"):
            gain = row.get(f"{metric}_gain")
            interval = gain and f"{gain['mean']:+.4f} ({gain['low']:+.4f} to {gain['high']:+.4f})"
            cells += [f"{row[metric]['mean']:.4f}", interval or ""]
        published = paper.RECALL.get((row["name"], row["temperature"]), {}).get(row["k"])
        theirs = "" if published is None else f"{published:.4f}"
        differing = "" if row["differing"] is None else str(row["differing"])
        lines.append([title_of(row["name"]), way, str(row["k"]), *cells, theirs, differing])
    return Table(
        "Recommendations of the target and of what accelerates it",
        ["", "how", "K", "Recall", "difference", "NDCG", "difference", PAPER, "lists"],
        lines,
        "All test items of a user count; seen items are not masked. Differences are from the "
        "target used in the same way, paired over users, with 95 % bootstrap intervals. The last "
        "column is the number of users whose list is not beam search's.",
        words=2,
    )


def _drafts(document: Row) -> Table:
    names = ("title", "seed", "parameters", "epochs", "steps", "seconds")
    rows = [
        [f"{row[n]:,.0f}" if isinstance(row[n], float) else str(row[n]) for n in names]
        for row in document["drafts"]
    ]
    return Table("Drafts", names, rows, "On one thread, perhaps in an earlier run.")
