"""From which target size speculation pays here: one request, K beams, targets that grow.

Forced modes against plain beam search: exhaustion, whose passes are real, and `bound`, one pass
over the very beams that the target will want, first at no cost for drafting (where even that does
not pay, no draft can), then beside a draft model of the smallest preset.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from recsys.benchmark.decode import Options, Reuse, measure
from recsys.benchmark.workload import CODES, LEVELS, of_sizes, random_model
from recsys.models.checkpoint import PRESETS, Architecture
from recsys.vocabulary import Vocabulary

SIZES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 8), (768, 8), (1024, 8))  # hidden, layers
DRAFT, NODES = "tiny", 128
CLEARLY = 1.05
PRECISIONS = ("float32", "bfloat16")


def sweep(
    *,
    sizes: Sequence[tuple[int, int]] = SIZES,
    precisions: Sequence[str] = PRECISIONS,
    beams: int,
    reuse: tuple[Reuse, ...],
    items: int,
    history: int,
    repeats: int,
    seconds: float,
    device: str,
    seed: int,
    advance: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Rows as `recsys.benchmark.decode.measure` makes them, with the target's sizes beside.

    Args:
        sizes: hidden size and layers of each target, smallest first.
        precisions: torch dtypes.
        beams: K.
        reuse: `cold`, `warm` or both.
        items: of the catalog.
        history: items of a prompt.
        repeats: rounds.
        seconds: once a size takes longer, larger ones of its precision are left out.
        device: torch device.
        seed: of weights, catalog and prompts.
        advance: called after each size.
    """
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    options = Options(
        beams=(beams,),
        batches=(1,),
        reuse=reuse,
        nodes=(NODES,),
        modes=("exhaustive", "bound"),
        repeats=repeats,
        hf_batches=(),
        seed=seed,
    )
    rows = []
    for dtype in precisions:
        taken = 0.0
        for hidden, layers in sizes:
            if taken <= seconds:
                start = time.perf_counter()
                workload = of_sizes(
                    Architecture(hidden, 11 * hidden // 4, layers, max(1, hidden // 64)),
                    vocabulary,
                    items=items,
                    history=history,
                    users=options.rounds(repeats, 1),
                    device=device,
                    dtype=getattr(torch, dtype),
                    seed=seed,
                    draft=random_model(
                        PRESETS[DRAFT],
                        vocabulary,
                        device=device,
                        dtype=getattr(torch, dtype),
                        seed=seed + 1,
                    ),
                )
                about = {
                    "dtype": dtype,
                    "hidden_size": hidden,
                    "layers": layers,
                    "draft_parameters": workload.facts["draft_parameters"],
                    "parameters": workload.facts["target_parameters"],
                }
                rows += [about | row for row in measure(workload, options).rows]
                taken = time.perf_counter() - start
            advance()
    return rows


def pays_from(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Smallest target from which a forced mode clearly beats plain beams, there and at all larger.

    One entry for each precision, reuse and mode; `parameters` is None where it never does.
    """
    found = []
    kinds = dict.fromkeys((r["dtype"], r["reuse"], r["mode"]) for r in rows)
    for dtype, reuse, mode in kinds:
        same = [r for r in rows if (r["dtype"], r["reuse"], r["mode"]) == (dtype, reuse, mode)]
        parameters = None
        for row in sorted(same, key=lambda r: r["parameters"], reverse=True):
            if row["ws_beam"]["p50"] < CLEARLY:
                break
            parameters = row["parameters"]
        if mode != "beam":
            about = {"dtype": dtype, "reuse": reuse, "mode": mode}
            found.append({**about, "parameters": parameters})
    return found
