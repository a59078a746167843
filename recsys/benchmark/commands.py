"""`recsys benchmark decode` and `constraint`. Nothing heavy is imported at the top."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recsys.benchmark.options import Out, numbers, words
from recsys.errors import ConfigError
from recsys.options import Json, Name, Quick, Seed

REUSE: dict[str, tuple[Literal["cold", "warm"], ...]] = {
    "cold": ("cold",),
    "warm": ("warm",),
    "both": ("cold", "warm"),
}


def decode(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to decode with: its models, catalog and users.")
    ] = None,
    name: Name = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights instead: tiny, small, base, 68M, 1.1B or 7B."),
    ] = None,
    items: Annotated[int | None, typer.Option(help="Items of a random catalog (12000).")] = None,
    history: Annotated[
        int, typer.Option(min=2, help="Items of a random user's history, 4 tokens each.")
    ] = 20,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64.")] = "float32",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; its own choice by default.")
    ] = None,
    beams: Annotated[str | None, typer.Option(help="K, a list (5,10,20,50).")] = None,
    batches: Annotated[
        str | None, typer.Option(help="Requests of a batch, a list (1,2,4,8,32).")
    ] = None,
    nodes: Annotated[str, typer.Option(help="Sizes of draft trees, a list.")] = "128,256",
    reuse: Annotated[
        str, typer.Option(help="cold: new prompts; warm: known but for the last item; both.")
    ] = "both",
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Rounds (15); batches below 8 get more.")
    ] = None,
    hf_repeats: Annotated[
        int, typer.Option(min=0, help="Rounds of Hugging Face; 0 leaves it out.")
    ] = 3,
    modes: Annotated[str, typer.Option(help="Modes to compare, a list.")] = (
        "exhaustive,draft,planned"
    ),
    quick: Quick = False,
    out: Out = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare decoding with Hugging Face and plain beams: time, passes, memory.

    Answers are compared before anything is timed. Without a bundle, weights are random and of
    shape `small`. Prints tables, and one JSON line last.

    Example: recsys benchmark decode --name beauty --threads 1 --out var/reports/decode
    """
    import torch

    from recsys.benchmark import report
    from recsys.benchmark.decode import MODES, Options, measure
    from recsys.benchmark.decode_report import report as report_decode
    from recsys.benchmark.workload import Setup
    from recsys.progress import track

    if threads is not None:
        torch.set_num_threads(threads)
    if sum(given is not None for given in (bundle, name, shape)) > 1:
        raise ConfigError("give one of --bundle, --name and --shape")
    if dtype not in ("float32", "bfloat16", "float64"):
        raise ConfigError(f"--dtype {dtype!r} is not one of float32, bfloat16, float64")
    if reuse not in REUSE:
        raise ConfigError(f"--reuse {reuse!r} is not one of cold, warm, both")
    repeats = repeats or (1 if quick else 15)
    options = Options(
        beams=numbers("--beams", beams or ("5" if quick else "5,10,20,50")),
        batches=numbers("--batches", batches or ("1,2" if quick else "1,2,4,8,32")),
        nodes=numbers("--nodes", nodes),
        reuse=REUSE[reuse],
        modes=words("--modes", modes, MODES),
        repeats=repeats,
        hf_repeats=min(repeats, hf_repeats),
        seed=seed or 0,
    )
    load = _loader(
        bundle,
        name,
        shape or ("tiny" if quick else "small"),
        items or (2_000 if quick else 12_000),
        history,
    )
    document = report.begin("decode", quick=quick, out=out)
    users = min(512, options.repeats * max(options.batches))
    workload = load(Setup(users, device, getattr(torch, dtype), options.seed))
    with track("cells", total=options.cells) as bar:
        document |= measure(workload, options, bar.advance)
    document |= {"workload": workload.facts, "options": vars(options)}
    document |= {"dtype": dtype, "device": device}
    report.publish(document, report_decode(document), out, as_json=as_json)


def _loader(
    bundle: Path | None, name: str | None, shape: str, items: int, history: int
) -> Callable[..., Any]:
    """The function that makes the workload: of a bundle and its data set, or of a shape."""
    from recsys.artifacts import Workspace
    from recsys.benchmark.workload import load_bundle_workload, make_shape_workload

    if bundle is None and name is None:
        return partial(make_shape_workload, shape, items=items, history=history)
    workspace = Workspace.of(name or (bundle or Path()).resolve().name)
    return partial(load_bundle_workload, bundle or workspace.bundle, workspace.dataset)


def constraint(
    items: Annotated[
        str | None, typer.Option(help="Sizes of catalogs, a list (100000,1000000,10000000).")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Requests of a batch.")] = 8,
    beams: Annotated[int, typer.Option(min=1, help="K.")] = 70,
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each measurement (31).")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare the item trie with Hugging Face's prefix processor: build, memory, steps, filters.

    The tokens that both allow are compared before anything is timed. Prints tables, and one JSON
    line last.

    Example: recsys benchmark constraint --out var/reports/constraint
    """
    import torch

    from recsys.benchmark import report
    from recsys.benchmark.constraint import Options, measure
    from recsys.benchmark.constraint_report import report as report_constraint
    from recsys.progress import track

    torch.set_num_threads(threads)
    sizes = numbers("--items", items or ("2000,20000" if quick else "100000,1000000,10000000"))
    options = Options(
        items=sizes,
        batch=batch,
        beams=beams,
        rounds=rounds or (2 if quick else 31),
        reference_items=min(1_000_000, max(sizes)),
        seed=seed or 0,
    )
    document = report.begin("constraint", quick=quick, out=out)
    with track("items", total=options.parts) as bar:
        document |= measure(options, bar.advance)
    report.publish(document, report_constraint(document), out, as_json=as_json)
