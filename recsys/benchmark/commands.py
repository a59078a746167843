"""`recsys benchmark decode` and `constraint`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recsys.benchmark.result import Document, asked, save, show
from recsys.errors import ConfigError
from recsys.options import Json, Name, Quick, Seed

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.benchmark.decode import Options, Reuse
    from recsys.benchmark.workload import Workload


def decode(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to decode with: its models, catalog and users.")
    ] = None,
    name: Name = None,
    dataset: Annotated[
        Path | None,
        typer.Option(help="Data set whose test users ask; by default that of the bundle's name."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="Random weights instead: tiny, small, base, 68M, 1.1B or 7B."),
    ] = None,
    items: Annotated[int | None, typer.Option(help="Items of a random catalog (12000).")] = None,
    history: Annotated[
        int, typer.Option(min=2, help="Items of a random user's history, 4 tokens each.")
    ] = 20,
    device: Annotated[str, typer.Option(help="A torch device.")] = "cpu",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float64; with --sweep-sizes: a list.")
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch; its own choice by default.")
    ] = None,
    beams: Annotated[str | None, typer.Option(help="K, a list (5,10,20,50).")] = None,
    batches: Annotated[str | None, typer.Option(help="Requests a batch, a list (1,2,4,8,32).")] = (
        None
    ),
    nodes: Annotated[str, typer.Option(help="Sizes of draft trees, a list.")] = "128,256",
    reuse: Annotated[
        str, typer.Option(help="cold: new prompts; warm: known but for the last item; both.")
    ] = "both",
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Rounds (15, sizes 4); batches below 8 get more."),
    ] = None,
    hf_batches: Annotated[
        str | None, typer.Option(help="Batches at which Hugging Face is timed, too (1,8).")
    ] = None,
    hf_repeats: Annotated[
        int, typer.Option(min=0, help="Rounds of Hugging Face; 0 leaves it out.")
    ] = 3,
    modes: Annotated[
        str,
        typer.Option(help="Of exhaustive, draft, planned and bound, which drafts without error."),
    ] = "exhaustive,draft,planned",
    sweep_sizes: Annotated[
        bool,
        typer.Option(
            "--sweep-sizes", help="Targets that grow: from which size does speculation pay?"
        ),
    ] = False,
    seconds: Annotated[
        float, typer.Option(help="With --sweep-sizes: stop growing once a size takes longer.")
    ] = 90.0,
    quick: Quick = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, plots and result.json.")
    ] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Decoding against Hugging Face and plain beams: time, passes, memory; answers compared first.

    Prints a table, and one JSON line last. Without a bundle, random weights of shape `small`.

    Example: recsys benchmark decode --name beauty --threads 1 --out var/reports/decode
    """
    import torch

    from recsys.benchmark import report
    from recsys.benchmark.decode import Options
    from recsys.benchmark.environment import environment
    from recsys.progress import say

    if threads is not None:
        torch.set_num_threads(threads)
    if sum((bundle is not None, name is not None, shape is not None, sweep_sizes)) > 1:
        raise ConfigError("give one of --bundle, --name, --shape and --sweep-sizes")
    precisions = _precisions(dtype, sweep_sizes=sweep_sizes)
    repeats = repeats or (1 if quick else 4 if sweep_sizes else 15)
    beams = beams or ("20" if sweep_sizes else "5" if quick else "5,10,20,50")
    options = Options(
        beams=_numbers("--beams", beams),
        batches=_numbers("--batches", batches or ("1,2" if quick else "1,2,4,8,32")),
        nodes=_numbers("--nodes", nodes),
        reuse=_reuse(reuse),
        modes=_modes(modes),
        repeats=repeats,
        hf_batches=_numbers("--hf-batches", hf_batches or ("1" if quick else "1,8")),
        hf_repeats=min(repeats, hf_repeats),
        seed=seed or 0,
    )
    random = {"items": items or (2_000 if quick else 12_000), "history": history}
    before = environment()
    document = {"benchmark": "decode", "schema": report.SCHEMA, **asked(quick=quick)}
    if sweep_sizes:
        document |= _sizes(options, precisions, seconds, device, quick=quick, **random)
    else:
        load = _source(bundle, name, dataset, shape or ("tiny" if quick else "small"), **random)
        document |= _cells(options, load, precisions[0], device)
    after = environment()
    document |= {"dtype": precisions, "device": device, **after, "load_before": before["load"]}
    if not as_json:
        show(report.tables(document), report.headline(document))
    if out is not None:
        report.write(document, out)
        say(f"report: {out / 'report.html'}")
    typer.echo(json.dumps(document))


def _precisions(dtype: str, *, sweep_sizes: bool) -> list[str]:
    from recsys.benchmark.sizes import PRECISIONS

    found = _words("--dtype", dtype or ",".join(PRECISIONS if sweep_sizes else PRECISIONS[:1]))
    for precision in found:
        if precision not in ("float32", "bfloat16", "float64"):
            raise ConfigError(f"--dtype {precision!r} is not float32, bfloat16 or float64")
    if len(found) > 1 and not sweep_sizes:
        raise ConfigError(f"--dtype {dtype!r}: more than one only with --sweep-sizes")
    return found


def _modes(text: str) -> tuple[str, ...]:
    from recsys.benchmark.decode import MODES

    found = _words("--modes", text)
    if unknown := set(found) - set(MODES):
        raise ConfigError(f"--modes {sorted(unknown)[0]!r} is not one of {', '.join(MODES)}")
    return tuple(found)


def _reuse(text: str) -> tuple[Reuse, ...]:
    kinds: dict[str, tuple[Reuse, ...]] = {
        "cold": ("cold",),
        "warm": ("warm",),
        "both": ("cold", "warm"),
    }
    if text not in kinds:
        raise ConfigError(f"--reuse {text!r} is not cold, warm or both")
    return kinds[text]


def _sizes(
    options: Options,
    precisions: list[str],
    seconds: float,
    device: str,
    *,
    quick: bool,
    items: int,
    history: int,
) -> Document:
    """What targets that grow come to."""
    from recsys.benchmark import report
    from recsys.benchmark.sizes import SIZES, sweep
    from recsys.progress import track

    sizes = SIZES[:2] if quick else SIZES
    with track("sizes", total=len(precisions) * len(sizes)) as bar:
        rows = sweep(
            sizes=sizes,
            precisions=precisions,
            beams=options.beams[0],
            reuse=options.reuse,
            items=items,
            history=history,
            repeats=options.repeats,
            seconds=seconds,
            device=device,
            seed=options.seed,
            advance=bar.advance,
        )
    return report.of_sizes(rows, items=items, history=history)


def _source(
    bundle: Path | None,
    name: str | None,
    dataset: Path | None,
    shape: str,
    *,
    items: int,
    history: int,
) -> Callable[..., Workload]:
    """A bundle and the data set of the same name, or else random weights of a shape."""
    from recsys.artifacts import Workspace
    from recsys.benchmark.workload import of_bundle, of_shape

    if bundle is None and name is None:
        return partial(of_shape, shape, items=items, history=history)
    workspace = Workspace.of(name or (bundle or Path()).resolve().name)
    return partial(of_bundle, bundle or workspace.bundle, dataset or workspace.dataset)


def _cells(
    options: Options, load: Callable[..., Workload], precision: str, device: str
) -> Document:
    """What every mode of one workload comes to."""
    import torch

    from recsys.benchmark import report
    from recsys.benchmark.decode import measure
    from recsys.progress import track

    workload = load(
        users=min(512, options.repeats * max(options.batches)),
        device=device,
        dtype=getattr(torch, precision),
        seed=options.seed,
    )
    with track("cells", total=options.cells) as bar:
        result = measure(workload, options, bar.advance)
    return report.of_decode(workload.facts, options, result)


def _words(option: str, text: str) -> list[str]:
    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError(f"{option} {text!r}: want a list like 1,2,4")
    return words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = _words(option, text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} {text!r}: want whole numbers above 0, like 1,2,4")
    return tuple(int(word) for word in words)


def constraint(
    items: Annotated[
        str | None, typer.Option(help="Sizes of catalogs, a list (100000,1000000,10000000).")
    ] = None,
    batches: Annotated[str, typer.Option(help="Requests a batch, a list.")] = "1,8,32",
    beams: Annotated[str, typer.Option(help="K, a list.")] = "10,70",
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each measurement (31).")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    quick: Quick = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and plots.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """The item trie next to Hugging Face's prefix processor: build, memory, steps and filters.

    The tokens that each of them allows are compared before anything is timed.
    Prints tables, and one JSON line last.

    Example: recsys benchmark constraint --out var/reports/constraint
    """
    import torch

    from recsys.benchmark import constraint_report
    from recsys.benchmark.constraint import Options, measure
    from recsys.benchmark.environment import environment
    from recsys.progress import say, track

    torch.set_num_threads(threads)
    sizes = _numbers("--items", items or ("2000,20000" if quick else "100000,1000000,10000000"))
    options = Options(
        items=sizes,
        batches=_numbers("--batches", batches),
        beams=_numbers("--beams", beams),
        rounds=rounds or (2 if quick else 31),
        peers=sizes[-1] if quick else min(1_000_000, max(sizes)),
        preset="tiny" if quick else "small",
        seed=seed or 0,
    )
    before = environment()
    document = {"benchmark": "constraint", "kind": "constraint", **asked(quick=quick)}
    with track("items", total=options.cells) as bar:
        document |= measure(options, bar.advance)
    document |= {**environment(), "load_before": before["load"]}
    if not as_json:
        show(constraint_report.tables(document), constraint_report.headline(document))
    if out is not None:
        save(out, document, constraint_report.plots(document))
        say(f"written: {out}")
    typer.echo(json.dumps(document))
