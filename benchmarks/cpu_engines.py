"""Constrained beam search on one core: torch, native passes, native search; CTranslate2 beside.

    OMP_NUM_THREADS=1 python benchmarks/cpu_engines.py

Models have random weights, prompts random tokens, and the catalog four levels of 256 codes. The
three ways of this project answer the same constrained search, and their answers are compared before
anything is timed. CTranslate2, if it is installed, searches without any constraint, which is less
work: the score of its best sequence is compared with that of the model. Times are processor times
of this process, since other work on a machine hardly changes them; ratios are medians over rounds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from recsys.benchmark.environment import environment
from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.constraint import ItemTrie
from recsys.decoding import Beams, beam_search
from recsys.decoding import beam as steps
from recsys.models.checkpoint import build
from recsys.models.packed import pack
from recsys.models.tree_forward import TreeModel
from recsys.native.library import OFF, describe
from recsys.vocabulary import Vocabulary

LEVELS, CODES, ITEMS = 4, 256, 12_000
TORCH, PASSES, SEARCH, OTHER = "torch", "native passes", "native search", "CTranslate2"
TOLERANCE = 1e-3


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"])
    arguments.add_argument("--prompts", type=int, nargs="+", default=[30, 100, 200])
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--beams", type=int, default=20)
    arguments.add_argument("--seconds", type=float, default=6, help="of a cell, about")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    trie = ItemTrie.build(vocabulary.encode(rng.integers(0, CODES, (ITEMS, LEVELS))))
    rows = []
    for size in args.sizes:
        model = build(size, vocabulary).eval()
        with torch.no_grad():  # distributions that are peaked, so that scores rarely tie
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        engines = engines_of(model, trie, args.beams)
        for length in args.prompts:
            for batch in args.batches:
                prompts = [rng.integers(2, vocabulary.size - 6, length) for _ in range(batch)]
                rows.append(
                    {"size": size, "prompt": length, "batch": batch}
                    | measure(engines, model, prompts, args.seconds)
                )
                show([rows[-1]], header=len(rows) == 1)
    result = {"benchmark": "cpu_engines", "beams": args.beams, "rows": rows, "path": describe()}
    print(json.dumps(result | environment()))


def engines_of(model: Any, trie: ItemTrie, num_beams: int) -> dict[str, Callable[..., Any]]:
    """The searches by name; each takes prompts."""
    with mock.patch.dict(os.environ, {OFF: "0"}):
        twin = TreeModel(pack(copy.deepcopy(model)))
    native = TreeModel(model)

    def by_passes(prompts: list[Any]) -> Beams:
        with mock.patch.object(steps, "native_decoder", return_value=None):
            return beam_search(native, prompts, trie, num_beams)

    def by_torch(prompts: list[Any]) -> Beams:
        with mock.patch.dict(os.environ, {OFF: "0"}):
            return beam_search(twin, prompts, trie, num_beams)

    found = {
        TORCH: by_torch,
        PASSES: by_passes,
        SEARCH: lambda prompts: beam_search(native, prompts, trie, num_beams),
    }
    try:
        import ctranslate2
    except ImportError:
        return found
    return found | {OTHER: ctranslate2_search(ctranslate2, model, num_beams)}


def ctranslate2_search(ctranslate2: Any, model: Any, num_beams: int) -> Callable[..., Any]:
    """CTranslate2's beam search of the same model, without any constraint."""
    from ctranslate2.converters import TransformersConverter
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [f"t{i}" for i in range(model.config.vocab_size)]
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "plain")
        model.save_pretrained(plain)
        level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
        PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(level),
            unk_token=words[0],
            bos_token=words[1],
            eos_token=words[0],
        ).save_pretrained(plain)
        out = TransformersConverter(str(plain)).convert(str(Path(folder, "converted")))
        generator = ctranslate2.Generator(out, device="cpu", inter_threads=1, intra_threads=1)

    def search(prompts: list[Any]) -> Any:
        return generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            beam_size=num_beams,
            num_hypotheses=num_beams,
            min_length=LEVELS,
            max_length=LEVELS,
            max_batch_size=0,
            return_scores=True,
            include_prompt_in_result=False,
            length_penalty=0,
        )

    return search


@torch.inference_mode()
def compare(engines: dict[str, Callable[..., Any]], model: Any, prompts: list[Any]) -> float:
    """Largest difference of a score; an error if answers differ by more than rounding."""
    answers = {name: engine(prompts) for name, engine in engines.items()}
    expected, worst = answers[TORCH], 0.0
    for name in (PASSES, SEARCH):
        worst = max(worst, float((answers[name].scores - expected.scores).abs().max()))
    if not torch.equal(answers[PASSES].scores, answers[SEARCH].scores):
        raise SystemExit("native passes and native search differ")
    if OTHER in answers:
        best = answers[OTHER][0]
        prompt, tokens = prompts[0].tolist(), best.sequences_ids[0]
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits[:, 0] = -torch.inf  # the end token, which it rules out before the minimal length
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum()
        if abs(float(own) - best.scores[0]) > TOLERANCE:
            raise SystemExit(f"CTranslate2 gives {best.scores[0]} where the model gives {own}")
    if worst > TOLERANCE:
        raise SystemExit(f"scores differ by {worst}")
    return worst


def measure(
    engines: dict[str, Callable[..., Any]], model: Any, prompts: list[Any], seconds: float
) -> dict[str, Any]:
    """One cell: milliseconds of each engine, and how many times the native search's they are."""
    difference = compare(engines, model, prompts)
    start = time.perf_counter()
    for engine in engines.values():
        engine(prompts)
    rounds = int(np.clip(seconds / (time.perf_counter() - start), 3, 60))
    sides = {name: Side(partial(_run, engine, prompts)) for name, engine in engines.items()}
    times = time_interleaved(sides, rounds)
    return {
        "rounds": rounds,
        "difference": difference,
        "cpu_ms": {n: summarize([1e3 * s for s in t.cpu]) for n, t in times.items()},
        "wall_ms": {n: summarize([1e3 * s for s in t.wall]) for n, t in times.items()},
        "ratio": {n: compare_times(t.cpu, times[SEARCH].cpu) for n, t in times.items()},
    }


def _run(engine: Callable[..., Any], prompts: list[Any], _round: int) -> None:
    engine(prompts)


def show(rows: list[dict[str, Any]], *, header: bool) -> None:
    """Print rows of the table: median and quartiles in ms, ratios to the native search."""
    table = Table(box=None, show_header=header, pad_edge=False)
    for name, width in [("cell", 16), ("rounds", 6)]:
        table.add_column(name, min_width=width)
    names = (TORCH, PASSES, SEARCH, OTHER)
    for name in names:
        table.add_column(f"{name}, ms", min_width=26)
    for row in rows:
        cells = []
        for name in names:
            if name not in row["cpu_ms"]:
                cells.append("-")
                continue
            ms, ratio = row["cpu_ms"][name], row["ratio"][name]["p50"]
            cells.append(f"{ms['p50']:.4g} ({ms['p25']:.4g}-{ms['p75']:.4g}) x{ratio:.2f}")
        table.add_row(f"{row['size']} {row['prompt']}/{row['batch']}", str(row["rounds"]), *cells)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
