"""What `atspeed.py` shows of its document: its tables beside the published ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

from atspeed_tables import paper
from atspeed_tables.lineup import (
    BUDGETS,
    EPOCHS,
    INITS,
    PUBLISHED,
    RELAXED,
    STRICT,
    TITLES,
)
from recsys.benchmark.report import Document, Line, Panel, Plot, Report, Row, Table

PAPER = "paper (7B)"
# verification -> in words; published figures stand beside what compares with them.
HOW = {
    "strict": "strict", "relaxed": "relaxed", "released": "relaxed, as released"
}  # fmt: skip
COLUMNS = {"N": "drafts", "gamma": "depth", "alpha": "alpha"}  # effect -> column of its values


def report(document: Document) -> Report:
    """The report."""
    tables, plots = [], []
    budgets = document["options"]["budgets"]
    if "table" in document:
        for verification, budget in product(HOW, budgets):
            tables.append(_accepted(document, verification, budget))
        tables += [_order(document["orders"], how, budget) for how, budget in product(HOW, budgets)]
    if "speed" in document:
        tables += [_speedup(document, verification) for verification in ("strict", "relaxed")]
        tables.append(_prompts(document["speed"]))
    for objective, budget in product((STRICT, RELAXED), budgets):
        rows = [
            r
            for r in document.get("ablations", ())
            if (r["objective"], r["budget"]) == (objective, budget)
        ]
        if rows:
            tables.append(_ablation(rows))
    if "tree_attention" in document:
        tables.append(_tree_attention(document["tree_attention"]))
    if "effects" in document:
        tables += [_effect(document["effects"], effect) for effect in COLUMNS]
    if "effect_speed" in document:
        tables.append(_effect_speed(document["effect_speed"]))
    if "recall" in document:
        tables.append(_recall(document["recall"]))
    if "table" in document:
        plots.append(_plot_accepted(document))
    tables += [_drafts(document), _teachers(document), _seconds(document)]
    title = f"{document['run']}: AtSpeed's tables"
    return Report(title, _sentences(document), [t for t in tables if t.rows], plots)


def _sentences(document: Document) -> list[str]:
    sizes = {draft["init"]: draft["parameters"] for draft in document["drafts"]}
    drafts = " and ".join(f"{size:,} {INITS[init]}" for init, size in sizes.items())
    own = f"{document['target']['parameters']:,}" + (f", its drafts {drafts}" if drafts else "")
    sentences = [
        f"The paper's target has {paper.TARGET_PARAMETERS / 1e9:.1f} billion parameters and its "
        f"draft {paper.DRAFT_PARAMETERS / 1e6:.0f} million. This target has {own}. A small target "
        "is easier to imitate, and on a CPU drafting takes a larger share of the time."
    ]
    strict = [r for r in document.get("table", ()) if r["verification"] == "strict"]
    for k in sorted({row["k"] for row in strict} & set(paper.KS)):
        best = max((r for r in strict if r["k"] == k), key=lambda row: row["accepted"]["mean"])
        figures = [paper.figure(paper.ACCEPTED, "strict", name, k) or 0.0 for name in PUBLISHED]
        sentences.append(
            f"AS@{k}, strict: best {cell(best['accepted'])} ({best['title']}, "
            f"{INITS[best['init']]}); the paper's best is {max(figures):.2f}."
        )
    if "recall" in document:
        differing = sum(row["differing"] or 0 for row in document["recall"])
        sentences.append(f"Strict verification: {differing} lists differ from beam search's.")
    return sentences


def cell(value: Row | None, sign: str = "") -> str:
    """A mean and half its 95 % interval; empty without a value."""
    return "" if value is None else f"{value['mean']:{sign}.2f} ±{value['error']:.2f}"


def _find(rows: Iterable[Row], **wanted: object) -> Row | None:
    return next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)


def _title(objective: str) -> str:
    return TITLES.get(objective, f"{objective} (ours)")


def _beside_paper(
    document: Document,
    part: str,
    verification: str,
    budget: str,
    published: dict[str, dict[str, tuple[float, ...]]],
) -> list[list[Row | str | None]]:
    """Lines of objective, draft and a row for each K; published figures are texts."""
    options = document["options"]
    lines: list[list[Row | str | None]] = []
    for objective in options["objectives"]:
        title = _title(objective)
        theirs = [paper.figure(published, verification, objective, k) for k in options["ks"]]
        if any(v is not None for v in theirs):
            lines.append([title, PAPER, *("" if v is None else f"{v:.2f}" for v in theirs)])
            title = ""
        for init in options["inits"]:
            about = {
                "objective": objective, "init": init, "budget": budget,
                "verification": verification,
            }  # fmt: skip
            found = [_find(document[part], **about, k=k) for k in options["ks"]]
            lines.append([title, INITS[init], *found])
            title = ""
    return lines


def _accepted(document: Document, verification: str, budget: str) -> Table:
    first = "Levels of the first draft that the target accepts whole, at most L - 1."
    counted = {
        "strict": f"{first} The paper's count adds those of later drafts of the same request.",
        "relaxed": first,
        "released": "Levels that the target accepts, at most L - 1, of all rounds of a request, as "
        "the published figures count them.",
    }
    lines = _beside_paper(document, "table", verification, budget, paper.ACCEPTED)
    return Table(
        f"Accepted levels (AS@K), {HOW[verification]}, {BUDGETS[budget]}",
        ["objective", "draft", *(f"AS@{k}" for k in document["options"]["ks"])],
        [[v if isinstance(v, str) else cell(v and v["accepted"]) for v in line] for line in lines],
        f"{counted[verification]} The draft tree has {document['options']['drafts']} nodes a "
        "level. ± is half the 95 % interval over users.",
        words=2,
    )


def _order(rows: Sequence[Row], verification: str, budget: str) -> Table:
    about = {"verification": verification, "budget": budget}
    own = [row for row in rows if about.items() <= row.items()]
    lines = []
    for init, k in dict.fromkeys((row["init"], row["k"]) for row in own):
        words = ""
        for row in (r for r in own if (r["init"], r["k"]) == (init, k)):
            words += f"{row['title']} {row['accepted']['mean']:.2f}"
            if lead := row["lead"]:
                words += " > " if lead["mean"] > lead["error"] else " ≈ "
        lines.append([INITS[init], str(k), words])
    return Table(
        f"Order of objectives, {HOW[verification]}, {BUDGETS[budget]}",
        ["draft", "K", "accepted levels, most first"],
        lines,
        "Neighbours are compared over the same users: > where the 95 % interval of the difference "
        "is above 0, ≈ otherwise. Intervals are over users, not over seeds.",
        words=3,
    )


def _speedup(document: Document, verification: str) -> Table:
    budget = document["options"]["budgets"][0]
    lines = _beside_paper(document, "speed", verification, budget, paper.SPEEDUP)
    baseline = "sampling over the shared cache" if verification == "relaxed" else "beam search"
    return Table(
        f"Walltime speedup (WS@K), {verification}",
        ["objective", "draft", *(f"WS@{k}" for k in document["options"]["ks"])],
        [
            [v if isinstance(v, str) else f"{v['speedup']['p50']:.2f}" if v else "" for v in line]
            for line in lines
        ],
        f"Time of {baseline} over that of drafting and verifying, as in the paper; one request at "
        "a time, one thread, medians of the ratios within rounds.",
        words=2,
    )


def _prompts(rows: Sequence[Row]) -> Table:
    lines = []
    for verification, k in dict.fromkeys((row["verification"], row["k"]) for row in rows):
        own = [r for r in rows if (r["verification"], r["k"]) == (verification, k)]
        prompt, plain = own[0]["prompt_ms"]["p50"], own[0]["plain_ms"]["p50"]
        fastest = min(row["ms"]["p50"] for row in own)
        shares = [f"{prompt / time:.0%}" for time in (plain, fastest)]
        lines.append(
            [verification, str(k), f"{prompt:.1f}", f"{plain:.1f}", f"{fastest:.1f}", *shares]
        )
    return Table(
        "Share of the target's pass over the prompt",
        ["verification", "K", "prompt, ms", "plain, ms", "drafted, ms", "of plain", "of drafted"],
        lines,
        "Medians of one request at a time; drafted: the fastest draft.",
    )


def _effect_speed(rows: Sequence[Row]) -> Table:
    lines = [
        [
            str(row["k"]), str(row["drafts"]), str(row["depth"] or "all"),
            f"{row['ms']['p50']:.1f}", f"{row['plain_ms']['p50']:.1f}",
            f"{row['speedup']['p50']:.2f}",
        ]
        for row in rows
    ]  # fmt: skip
    return Table(
        f"Walltime by N and gamma, strict, {TITLES[STRICT]}, {INITS[rows[0]['init']]}",
        ["K", "N", "gamma", "ms", "beam search, ms", "WS"],
        lines,
        "One request at a time, one thread; medians.",
        words=0,
    )


def _ablation(rows: Sequence[Row]) -> Table:
    ks = list(dict.fromkeys(row["k"] for row in rows))
    name = TITLES[rows[0]["objective"]]
    lines = []
    for change in dict.fromkeys(row["change"] for row in rows):
        own = [_find(rows, change=change, k=k) for k in ks]
        lines.append([change or name, *(cell(r and r["accepted"]) for r in own)])
        if change:
            lines.append(["  difference", *(cell(r and r["gain"], "+") for r in own)])
    return Table(
        f"Ablations of {name}, {rows[0]['verification']}, {INITS[rows[0]['init']]}, "
        f"{BUDGETS[rows[0]['budget']]}",
        ["", *(f"AS@{k}" for k in ks)],
        lines,
        "Accepted levels. Differences are paired over users.",
    )


def _tree_attention(rows: Sequence[Row]) -> Table:
    lines = []
    for row in rows:
        ratio = row["ratio"]
        spread = f"{ratio['p50']:.1f} ({ratio['p25']:.1f} to {ratio['p75']:.1f})"
        times = [f"{row[side]['p50']:.1f}" for side in ("tree_ms", "rows_ms")]
        gap = f"{row['largest_difference']:.1e}"
        lines.append([str(row["drafts"]), str(row["nodes"]), *times, spread, gap])
    return Table(
        "A verification pass with and without tree attention",
        ["N", "nodes", "one row, ms", "a row for each node, ms", "ratio", "difference"],
        lines,
        "The target's logits at all drafted nodes of one request, stock forward without a cache, "
        "one thread: medians, and the ratio within rounds with quartiles. The last column is the "
        "largest difference of logits of the first request.",
        words=0,
    )


def _effect(rows: Sequence[Row], effect: str) -> Table:
    notes = {
        "N": "Strict: AtSpeed-S; relaxed: AtSpeed-R.",
        "gamma": "AtSpeed-S with a draft of gamma levels.",
        "alpha": "AtSpeed-S (strict) and AtSpeed-R (relaxed) by the weight of the alignment loss; "
        "0 is SFT.",
    }
    column = COLUMNS[effect]
    own = [row for row in rows if row["effect"] == effect]
    values = sorted({row[column] for row in own})
    lines = []
    for verification, k in dict.fromkeys((row["verification"], row["k"]) for row in own):
        about = {"verification": verification, "k": k}
        found = [_find(own, **about, **{column: value}) for value in values]
        lines.append([verification, str(k), *(cell(r and r["accepted"]) for r in found)])
    return Table(
        f"Effect of {effect} on accepted levels, {INITS[rows[0]['init']]}",
        ["verification", "K", *(f"{effect}={value:g}" for value in values)],
        lines,
        notes[effect],
        words=2,
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
        name = str(TITLES.get(row["name"], row["name"]))
        lines.append([name, way, str(row["k"]), *cells, theirs, differing])
    return Table(
        "Recommendations of the target and of what accelerates it",
        ["", "how", "K", "Recall", "difference", "NDCG", "difference", PAPER, "lists"],
        lines,
        "All test items of a user count; seen items are not masked. Differences are from the "
        "target used in the same way, paired over users, with 95 % bootstrap intervals. The last "
        "column is the number of users whose list is not beam search's.",
        words=2,
    )


def _drafts(document: Document) -> Table:
    rows = [
        [
            row["title"], INITS[row["init"]], BUDGETS[row["budget"]], str(row["seed"]),
            f"{row['parameters']:,}",
            str(row["epochs"]), f"{row['steps']:,}", f"{row['seconds']:.0f}",
            f"{1000 * row['seconds'] / max(row['steps'], 1):.0f}",
        ]
        for row in document["drafts"]
    ]  # fmt: skip
    return Table(
        "Drafts",
        [
            "objective",
            "draft",
            "budget",
            "seed",
            "parameters",
            "epochs",
            "steps",
            "seconds",
            "ms a step",
        ],
        rows,
        f"Equal time: at most {document['options']['minutes']:g} minutes or {EPOCHS} epochs; equal "
        f"steps: {document['options']['steps']}. On one thread, perhaps in an earlier run.",
        words=3,
    )


def _teachers(document: Document) -> Table:
    rows = [
        [
            row["teacher"], f"{row['histories']:,}", f"{row['bytes'] / 1e6:.0f}",
            f"{row['bytes'] / 1e3 / row['histories']:.1f}", f"{row['spent']:.0f}",
        ]
        for row in document["teachers"]
    ]  # fmt: skip
    return Table(
        "Teacher data",
        ["name", "prompts", "MB", "KB a prompt", "seconds"],
        rows,
        "Seconds of this run; 0 where the data were there already.",
    )


def _seconds(document: Document) -> Table:
    rows = [[name, f"{value:.0f}"] for name, value in document["seconds"].items()]
    note = f"Wall time of this run with {document['options']['workers']} processes."
    return Table("Time", ["part", "seconds"], rows, note)


def _plot_accepted(document: Document) -> Plot:
    options = document["options"]
    ks, panels = options["ks"], []
    for verification, champion in (("strict", STRICT), ("released", RELAXED)):
        lines = []
        for objective in options["objectives"]:
            about = {
                "objective": objective, "init": options["inits"][0], "budget": options["budgets"][0]
            }  # fmt: skip
            found = [
                r["accepted"]
                for k in ks
                if (r := _find(document["table"], **about, verification=verification, k=k))
            ]
            if len(found) == len(ks):
                lines.append(_line(_title(objective), range(len(ks)), found))
        theirs = [paper.figure(paper.ACCEPTED, verification, champion, k) for k in ks]
        known = [value for value in theirs if value is not None]
        if len(known) == len(ks):
            lines.append(Line("paper's best", range(len(ks)), known, style="--"))
        panels.append(
            Panel(f"accepted levels, {HOW[verification]}", "K", lines, [str(k) for k in ks])
        )
    caption = (
        f"Accepted levels by K, drafts {INITS[options['inits'][0]]}; dashed: the paper's AtSpeed-S "
        "(strict) and AtSpeed-R (relaxed)."
    )
    return Plot("accepted", caption, panels)


def _line(label: str, places: Sequence[float], values: Sequence[Row]) -> Line:
    errors = [value["error"] for value in values]
    return Line(label, places, [value["mean"] for value in values], (errors, errors))
