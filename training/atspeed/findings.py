"""Findings of an experiment: what its figures come to, in sentences, beside what was hoped for."""

from __future__ import annotations

from typing import Any

from recsys.benchmark.result import Document
from recsys.training.atspeed import paper
from recsys.training.atspeed.lineup import COSTLY, INITS, PUBLISHED, RELAXED, STRICT, TITLES

Row = dict[str, Any]

BOUND_K, BOUND_NODES, BOUND_PASSES, BOUND_FLOPS = 20, 256, 1.25, 0.25


def findings(document: Document) -> list[dict[str, Any]]:
    """What the figures come to: sentences, and whether what was hoped for held."""
    found: list[dict[str, Any]] = []
    for init in document["options"]["inits"]:
        for verification in ("strict", "relaxed"):
            rows = [
                r for r in document.get("rivals", ())
                if (r["init"], r["verification"]) == (init, verification)
            ]  # fmt: skip
            if rows:
                found.append(_order(rows, init))
    found += [_beyond(document, k) for k in (10, 20) if "table" in document and _has(document, k)]
    if document.get("nodes"):
        found.append(_one_pass(document["nodes"], document["costs"]))
    for objective in (STRICT, RELAXED):
        rows = [r for r in document.get("ablations", ()) if r["objective"] == objective]
        if rows:
            found.append(_direction(rows, objective))
            found += _tree_attention(document["drafts"], objective, rows[0]["init"])
    if document.get("recall"):
        differing = sum(row["differing"] or 0 for row in document["recall"])
        text = "Strict verification gave beam search's own list to every user."
        if differing:
            text = f"Strict verification gave {differing} lists that are not beam search's."
        found.append({"text": text, "held": not differing})
    return found


def _has(document: Document, k: int) -> bool:
    return k in document["options"]["ks"]


def _order(rows: list[Row], init: str) -> dict[str, Any]:
    name, verification = TITLES[rows[0]["objective"]], rows[0]["verification"]
    lost = [row for row in rows if row["lead"]["mean"] < 0]
    beaten = "; ".join(
        f"{TITLES[r['rival']]} leads by {-r['lead']['mean']:.2f} ± {r['lead']['error']:.2f}"
        f" at K = {r['k']}"
        for r in lost
    )
    where = f"{verification.capitalize()}, {INITS[init]}"
    if not lost:
        return {"text": f"{where}: {name} is first of the published six at every K.", "held": True}
    return {
        "text": f"{where}: {name} is first of the published six at {len(rows) - len(lost)} of "
        f"{len(rows)} K ({beaten}).",
        "held": False,
    }


def _beyond(document: Document, k: int) -> dict[str, Any]:
    rows = [r for r in document["table"] if (r["k"], r["verification"]) == (k, "strict")]
    best = max(rows, key=lambda row: row["accepted"]["mean"])
    published = max(paper.figure(paper.ACCEPTED, "strict", name, k) or 0.0 for name in PUBLISHED)
    own = next(r for r in rows if r["objective"] == STRICT)
    return {
        "text": f"AS@{k}, strict, N = {best['drafts']}: best {cell(best['accepted'])} "
        f"({best['title']}, {INITS[best['init']]}), AtSpeed-S {INITS[own['init']]} "
        f"{cell(own['accepted'])}; the paper's best is {published:.2f}.",
        "held": best["accepted"]["mean"] > published,
    }


def _one_pass(rows: list[Row], costs: dict[str, Row]) -> dict[str, Any]:
    ks = {row["k"] for row in rows}
    k = BOUND_K if BOUND_K in ks else max(ks)
    fit = [r for r in rows if r["k"] == k and r["objective"] and r["nodes"] <= BOUND_NODES]
    cheap = [r for r in fit if cost_of(costs, r["objective"], r["init"])["share"] <= BOUND_FLOPS]
    best = [_fewest(some, costs) for some in (fit, cheap) if some]
    text = f"Passes a request at K = {k} within {BOUND_NODES} nodes: best {best[0]}"
    hope = f"at most {BOUND_PASSES} at {100 * BOUND_FLOPS:.0f} % of the target's FLOPs a token"
    within = f"; of drafts that cheap, {best[1]}" if cheap else "; no draft is that cheap"
    return {
        "text": f"{text} (hoped for: {hope}{within}).",
        "held": any(row["passes"]["mean"] <= BOUND_PASSES for row in cheap),
    }


def _fewest(rows: list[Row], costs: dict[str, Row]) -> str:
    best = min(rows, key=lambda row: row["passes"]["mean"])
    share = 100 * cost_of(costs, best["objective"], best["init"])["share"]
    return f"{cell(best['passes'])} ({best['title']}, {INITS[best['init']]}, {share:.0f} %)"


def _direction(rows: list[Row], objective: str) -> dict[str, Any]:
    less = [row for row in rows if row["change"]]
    worse = [row for row in less if row["gain"]["mean"] < 0]
    against = [
        f"{row['change']} at K = {row['k']} ({cell(row['gain'], '+')})"
        for row in less
        if row["gain"]["mean"] > row["gain"]["error"]
    ]
    text = (
        f"{TITLES[objective]}: taking something away cost accepted levels in {len(worse)} of "
        f"{len(less)} cells"
    )
    text += f"; beyond chance it helped for {', '.join(against)}." if against else "."
    return {"text": text, "held": not against}


def _tree_attention(drafts: list[Row], objective: str, init: str) -> list[dict[str, Any]]:
    """What a step costs with a history's tree as one row, and without."""
    own = [r for r in drafts if (r["objective"], r["init"]) == (objective, init)]
    found = [
        next((r["seconds"] / max(r["steps"], 1) for r in own if r["title"] == title), None)
        for title in (TITLES[objective], f"{TITLES[objective]}, {COSTLY}")
    ]
    if found[0] is None or found[1] is None:
        return []
    text = (
        f"{TITLES[objective]}: a training step takes {found[0]:.2f} s, {found[1]:.2f} s without "
        "tree attention."
    )
    return [{"text": text, "held": found[1] > found[0]}]


def cost_of(costs: dict[str, Row], objective: str, init: str) -> Row:
    """Of the draft with the first seed."""
    return next(c for key, c in costs.items() if key.startswith(f"{objective}_{init}_"))


def cell(value: dict[str, float] | None, sign: str = "") -> str:
    """A mean and half its 95 % interval; empty where there is none."""
    return "" if value is None else f"{value['mean']:{sign}.2f} ±{value['error']:.2f}"
