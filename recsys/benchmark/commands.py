"""`recsys benchmark decode` and `constraint`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recsys.options import Json, Name, Seed

if TYPE_CHECKING:
    from recsys.benchmark.decode import Reuse


def decode(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to decode with: its models, catalogue and users.")
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
    items: Annotated[int | None, typer.Option(help="Items of a random catalogue (12000).")] = None,
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
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run in seconds; its figures mean nothing.")
    ] = False,
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
    from rich.console import Console

    from recsys.benchmark import report
    from recsys.benchmark.decode import MODES, Options, measure
    from recsys.benchmark.environment import environment
    from recsys.benchmark.sizes import PRECISIONS, SIZES, sweep
    from recsys.benchmark.workload import of_bundle, of_shape
    from recsys.errors import ConfigError
    from recsys.progress import say, track

    if threads is not None:
        torch.set_num_threads(threads)
    sources = [s for s in (bundle, name, shape) if s is not None]
    if len(sources) + sweep_sizes > 1:
        raise ConfigError("give one of --bundle, --name, --shape and --sweep-sizes")
    precisions = _words("--dtype", dtype or ",".join(PRECISIONS if sweep_sizes else PRECISIONS[:1]))
    for precision in precisions:
        if precision not in ("float32", "bfloat16", "float64"):
            raise ConfigError(f"--dtype {precision!r} is not float32, bfloat16 or float64")
    if len(precisions) > 1 and not sweep_sizes:
        raise ConfigError(f"--dtype {dtype!r}: more than one only with --sweep-sizes")
    asked = _words("--modes", modes)
    if unknown := set(asked) - set(MODES):
        raise ConfigError(f"--modes {sorted(unknown)[0]!r} is not one of {', '.join(MODES)}")
    kinds: dict[str, tuple[Reuse, ...]] = {
        "cold": ("cold",),
        "warm": ("warm",),
        "both": ("cold", "warm"),
    }
    if reuse not in kinds:
        raise ConfigError(f"--reuse {reuse!r} is not cold, warm or both")
    items = items or (2_000 if quick else 12_000)
    repeats = repeats or (1 if quick else 4 if sweep_sizes else 15)
    before = environment()
    document = {
        "benchmark": "decode",
        "schema": report.SCHEMA,
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "quick": quick,
    }
    if sweep_sizes:
        sizes = SIZES[:2] if quick else SIZES
        with track("sizes", total=len(precisions) * len(sizes)) as bar:
            rows = sweep(
                sizes=sizes,
                precisions=precisions,
                beams=_numbers("--beams", beams or "20")[0],
                reuse=kinds[reuse],
                items=items,
                history=history,
                repeats=repeats,
                seconds=seconds,
                device=device,
                seed=seed or 0,
                advance=bar.advance,
            )
        document |= report.of_sizes(rows, items=items, history=history)
    else:
        options = Options(
            beams=_numbers("--beams", beams or ("5" if quick else "5,10,20,50")),
            batches=_numbers("--batches", batches or ("1,2" if quick else "1,2,4,8,32")),
            nodes=_numbers("--nodes", nodes),
            reuse=kinds[reuse],
            modes=tuple(asked),
            repeats=repeats,
            hf_batches=_numbers("--hf-batches", hf_batches or ("1" if quick else "1,8")),
            hf_repeats=min(repeats, hf_repeats),
            seed=seed or 0,
        )
        common = {
            "users": min(512, repeats * max(options.batches)),
            "device": device,
            "dtype": getattr(torch, precisions[0]),
            "seed": options.seed,
        }
        if bundle is None and name is None:
            workload = of_shape(
                shape or ("tiny" if quick else "small"), items=items, history=history, **common
            )
        else:
            bundle, dataset = _places(bundle, name, dataset)
            workload = of_bundle(bundle, dataset, **common)
        with track("cells", total=options.cells) as bar:
            result = measure(workload, options, bar.advance)
        document |= report.of_decode(workload.facts, options, result)
    after = environment()
    document |= {"dtype": precisions, "device": device, **after, "load_before": before["load"]}
    if not as_json:
        console = Console()
        for table in report.tables(document):
            console.print(table)
        for sentence in report.headline(document):
            console.print(sentence, highlight=False)
    if out is not None:
        report.write(document, out)
        say(f"report: {out / 'report.html'}")
    typer.echo(json.dumps(document))


def _places(bundle: Path | None, name: str | None, dataset: Path | None) -> tuple[Path, Path]:
    """Of the bundle and of its data set, which has the same name."""
    from recsys.artifacts import Workspace

    workspace = Workspace.of(name or (bundle or Path()).resolve().name)
    return bundle or workspace.bundle, dataset or workspace.dataset


def _words(option: str, text: str) -> list[str]:
    from recsys.errors import ConfigError

    words = text.replace(",", " ").split()
    if not words:
        raise ConfigError(f"{option} {text!r}: want a list like 1,2,4")
    return words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from recsys.errors import ConfigError

    words = _words(option, text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"{option} {text!r}: want whole numbers above 0, like 1,2,4")
    return tuple(int(word) for word in words)


def constraint(
    items: Annotated[
        str | None, typer.Option(help="Sizes of catalogues, a list (100000,1000000,10000000).")
    ] = None,
    batches: Annotated[str, typer.Option(help="Requests a batch, a list.")] = "1,8,32",
    beams: Annotated[str, typer.Option(help="K, a list.")] = "10,70",
    rounds: Annotated[int | None, typer.Option(min=1, help="Of each measurement (31).")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    parts: Annotated[str, typer.Option(help="What is measured: items, text, or both.")] = (
        "items,text"
    ),
    vocabulary: Annotated[
        int | None, typer.Option(min=258, help="Tokens of the texts' tokenizer (32000).")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run in seconds; its figures mean nothing.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and plots.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Constraints: the item trie next to Hugging Face's prefix processor, and text by each library.

    Of items: build, memory, steps and filters; what others allow is compared first. Of text:
    compilation and steps of grammars and titles, forwards saved, and whether every text holds.
    Prints tables, and one JSON line last.

    Example: recsys benchmark constraint --out var/reports/constraint
    """
    import torch
    from rich.console import Console

    from recsys.benchmark import constraint_report as report
    from recsys.benchmark import text_constraint
    from recsys.benchmark.constraint import Options, measure
    from recsys.benchmark.environment import environment
    from recsys.errors import ConfigError
    from recsys.progress import say, track

    torch.set_num_threads(threads)
    chosen = _words("--parts", parts)
    if unknown := set(chosen) - {"items", "text"}:
        raise ConfigError(f"--parts {sorted(unknown)[0]!r} is not items or text")
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
    document: dict[str, Any] = {
        "benchmark": "constraint",
        "kind": "constraint",
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "quick": quick,
    }
    tables, said, drawings = [], [], {}
    if "items" in chosen:
        with track("items", total=options.cells) as bar:
            document |= measure(options, bar.advance)
        tables, said = report.tables(document), report.headline(document)
        drawings = report.plots(document)
    if "text" in chosen:
        sizes_of_text: dict[str, Any] = (
            {"repeats": 2, "texts": 8, "beams": (3,), "titles_of": 400} if quick else {}
        )
        with track("text", total=text_constraint.PARTS) as bar:
            text = text_constraint.measure(
                vocabulary=vocabulary or (600 if quick else 32_000),
                **sizes_of_text,
                seed=options.seed,
                advance=bar.advance,
            )
        document["text"] = text
        tables, said = tables + text_constraint.tables(text), said + text_constraint.headline(text)
        drawings |= text_constraint.plots(text)
    document |= {**environment(), "load_before": before["load"]}
    if not as_json:
        console = Console()
        for table in tables:
            console.print(table)
        for sentence in said:
            console.print(sentence, highlight=False)
    if out is not None:
        report.write(document, drawings, out)
        say(f"written: {out}")
    typer.echo(json.dumps(document))
