"""What `recsys.benchmark.text_constraint` measured, as tables, sentences and drawings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from recsys.benchmark.constraint_report import table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    Row = dict[str, Any]


def tables(found: Row) -> list[Table]:
    """The figures for a terminal of 80 columns."""

    def cells(row: Row, *columns: str) -> list[str]:
        if "refused" in row:
            return ["refused", *[""] * (len(columns) - 1)]
        return [f"{row[c]:g}" if isinstance(row[c], float) else str(row[c]) for c in columns]

    return [
        table(
            f"Grammars, {found['vocabulary']} tokens: compile, find again, step",
            ("case", "library", "compile ms", "again ms", "step us", "p99 us"),
            [
                [
                    r["case"],
                    r["backend"],
                    *cells(r, "compile_ms", "again_ms", "step_us", "step_us_p99"),
                ]
                for r in found["grammars"]
            ],
        ),
        table(
            "Titles, as a trie and as a choice",
            ("titles", "way", "build s", "first mask ms", "step us"),
            [
                [str(r["titles"]), r["way"], *cells(r, "build_s", "first_mask_ms", "step_us")]
                for r in found["titles"]
            ],
        ),
        table(
            "Texts of a random model",
            ("case", "library", "texts", "valid", "tokens", "forwards", "saved"),
            [
                [
                    r["case"],
                    r["backend"],
                    *cells(r, "texts", "valid", "tokens", "forwards", "saved"),
                ]
                for r in found["valid"]
            ],
        ),
        table(
            "Titles written by beam search",
            (
                "catalogue",
                "titles",
                "build s",
                "beams",
                "asked",
                "written",
                "titles of it",
                "twice",
            ),
            [
                [
                    r["catalogue"],
                    *cells(
                        r,
                        "titles",
                        "build_s",
                        "beams",
                        "asked",
                        "written",
                        "in_catalogue",
                        "repeated",
                    ),
                ]
                for r in found["written"]
            ],
        ),
        table(
            "Draft trees: masks in one call, equal to a replay from the root",
            ("constraint", "nodes", "equal"),
            [[r["constraint"], *cells(r, "nodes", "equal")] for r in found["rewind"]],
        ),
    ]


def headline(found: Row) -> list[str]:
    """What the figures come to, in sentences."""
    valid = [row for row in found["valid"] if "refused" not in row]
    saved = [row["saved"] for row in valid]
    return [
        f"{sum(r['valid'] for r in valid)} of {sum(r['texts'] for r in valid)} texts are valid; "
        f"forced tokens save {min(saved):.0%} to {max(saved):.0%} of the forwards.",
        f"{sum(r['in_catalogue'] for r in found['written'])} of "
        f"{sum(r['written'] for r in found['written'])} titles written are in the catalogue.",
    ]


def plots(found: Row) -> dict[str, str]:
    """Drawings: name -> inline SVG."""
    from recsys.evaluation import figures

    alt = "Bar charts: time to compile each case and of a step, by library."
    return {"text_constraint": figures.svg(partial(_draw, found=found), "text_constraint", alt)}


def _draw(figure: Figure, found: Row) -> None:
    from recsys.evaluation import figures

    left, right = figure.subplots(1, 2, sharey=True)
    cases = list(dict.fromkeys(row["case"] for row in found["grammars"]))
    high = 0.8 / len(found["backends"])
    for i, backend in enumerate(found["backends"]):
        rows = [r for r in found["grammars"] if r["backend"] == backend and "refused" not in r]
        place = [cases.index(row["case"]) + i * high for row in rows]
        style = {"height": high, "label": backend, "color": figures.SERIES[i]}
        left.barh(place, [row["compile_ms"] for row in rows], **style)
        right.barh(place, [row["step_us"] for row in rows], **style)
    left.set(xscale="log", xlabel="ms to compile", yticks=range(len(cases)))
    left.set_yticklabels(cases, fontsize=7)
    left.invert_yaxis()
    right.set(xscale="log", xlabel="us a step")
    right.legend(fontsize=7)
