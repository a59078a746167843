"""Constrained beam search on one core: torch, native passes, native search, and other engines.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/engines.py

Models have random weights, prompts random tokens, and the catalog four levels of 256 codes. The
three ways of this project and `generate` of Hugging Face (one request, 20 beams) answer the same
constrained search. CTranslate2 and ONNX Runtime (onnxruntime-genai), where they are installed,
search without any constraint, which is less work. Answers are compared before anything is timed:
all scores of the constrained searches; of the others, the best sequence's score with the model's
own score of that sequence (ONNX Runtime gives none: with that of CTranslate2's best).

Times are processor times of this process, since other work on a machine hardly changes them; ratios
to the native search are medians and quartiles over rounds, in which every engine runs once. An
engine whose search takes more than `--limit` seconds, or that does not accept so many beams, is
left out of a cell. The last line is JSON.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product, starmap
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
from recsys.decoding import beam as steps
from recsys.decoding import beam_search
from recsys.models.checkpoint import build
from recsys.models.packed import pack
from recsys.models.tree_forward import TreeModel
from recsys.native.library import OFF, describe
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.vocabulary import Vocabulary

LEVELS, CODES, ITEMS = 4, 256, 12_000
SEARCH, TORCH, PASSES = "native search", "torch", "native passes"
CTRANSLATE2, ONNX = "CTranslate2", "ONNX Runtime"
HUGGING_FACE = "Hugging Face"
NAMES = (SEARCH, TORCH, PASSES, CTRANSLATE2, ONNX, HUGGING_FACE)
TOLERANCE = 1e-3
WARMED_S = 0.05
LEAST_ROUNDS, MOST_ROUNDS = 2, 60

Answer = list[float]
"""Scores of a request, best first."""


@dataclass(frozen=True)
class Cell:
    """Sizes of a search."""

    prompt: int
    batch: int
    beams: int


@dataclass(frozen=True)
class Engine:
    """A beam search.

    Attributes:
        search: the scores of each request, from prompts of one length and K.
        constrained: whether it answers from the catalog; otherwise `search` returns
            (tokens, score) of the best sequence of each request.
        most_beams: that it accepts.
    """

    search: Callable[[list[Any], int], list[Any]]
    constrained: bool = True
    most_beams: int = 1_000_000


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"])
    arguments.add_argument("--prompts", type=int, nargs="+", default=[30, 100, 200])
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--beams", type=int, nargs="+", default=[20, 50, 256])
    arguments.add_argument("--seconds", type=float, default=2, help="of an engine in a cell, about")
    arguments.add_argument("--limit", type=float, default=2, help="seconds of one search")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    cells = list(starmap(Cell, product(args.prompts, args.batches, args.beams)))
    rows = []
    for row in measure_all(args.sizes, cells, args.seconds, args.limit):
        show(row, header=not rows)
        rows.append(row)
    print(json.dumps({"benchmark": "engines", "rows": rows, "path": describe()} | _where()))


def _where() -> dict[str, Any]:
    """The machine, and versions of what is beside."""
    from importlib.metadata import version

    modules = ("ctranslate2", "onnxruntime_genai")
    return environment() | {name: version(name) for name in modules if find_spec(name) is not None}


def measure_all(
    sizes: list[str], cells: list[Cell], seconds: float, limit: float
) -> Iterator[dict[str, Any]]:
    """The rows of the table."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    catalog = vocabulary.encode(rng.integers(0, CODES, (ITEMS, LEVELS)))
    trie = ItemTrie.build(catalog)
    for size in sizes:
        model = build(size, vocabulary).eval()
        with torch.no_grad():  # distributions that are peaked, so that scores rarely tie
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        engines = engines_of(model, trie, catalog)
        for cell in cells:
            prompts = [rng.integers(2, vocabulary.size - 6, cell.prompt) for _ in range(cell.batch)]
            row = measure(engines, model, prompts, cell, seconds, limit)
            yield {"size": size} | asdict(cell) | row


def engines_of(model: Any, trie: ItemTrie, catalog: Any) -> dict[str, Engine]:
    """The engines by name."""
    with mock.patch.dict(os.environ, {OFF: "0"}):
        twin = TreeModel(pack(copy.deepcopy(model)))
    native, allowed = TreeModel(model), allowed_tokens(catalog)

    def by_search(prompts: list[Any], beams: int) -> list[Answer]:
        return beam_search(native, prompts, trie, beams).scores.tolist()

    def by_passes(prompts: list[Any], beams: int) -> list[Answer]:
        with mock.patch.object(steps, "native_decoder", return_value=None):
            return by_search(prompts, beams)

    def by_torch(prompts: list[Any], beams: int) -> list[Answer]:
        with mock.patch.dict(os.environ, {OFF: "0"}):
            return beam_search(twin, prompts, trie, beams).scores.tolist()

    def by_generate(prompts: list[Any], beams: int) -> list[Answer]:
        answers = huggingface_beam_search(model, prompts, allowed, beams)
        return [[score for _, score in answer] for answer in answers]

    engines = {
        SEARCH: Engine(by_search),
        TORCH: Engine(by_torch),
        PASSES: Engine(by_passes),
        HUGGING_FACE: Engine(by_generate, most_beams=20),
    }
    if find_spec("ctranslate2") is not None:
        engines[CTRANSLATE2] = Engine(ctranslate2_search(model), constrained=False)
    if find_spec("onnxruntime_genai") is not None:
        engines[ONNX] = Engine(onnx_search(model), constrained=False, most_beams=32)
    return engines


def save(model: Any, folder: Path) -> list[str]:
    """Write the model with a tokenizer, which converters ask for; returns the words of tokens."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [f"t{i}" for i in range(model.config.vocab_size)]
    model.save_pretrained(folder)
    level = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(level),
        unk_token=words[0],
        bos_token=words[1],
        eos_token=words[0],
    ).save_pretrained(folder)
    return words


def ctranslate2_search(model: Any) -> Callable[[list[Any], int], list[Any]]:
    """CTranslate2's beam search of the same model, without any constraint."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    with tempfile.TemporaryDirectory() as folder:
        words = save(model, Path(folder, "plain"))
        converter = TransformersConverter(str(Path(folder, "plain")))
        out = converter.convert(str(Path(folder, "converted")))
        generator = ctranslate2.Generator(out, device="cpu", inter_threads=1, intra_threads=1)

    def search(prompts: list[Any], beams: int) -> list[Any]:
        answers = generator.generate_batch(
            [[words[token] for token in prompt] for prompt in prompts],
            beam_size=beams,
            num_hypotheses=beams,
            min_length=LEVELS,
            max_length=LEVELS,
            max_batch_size=0,
            return_scores=True,
            include_prompt_in_result=False,
            length_penalty=0,
        )
        return [(answer.sequences_ids[0], answer.scores[0]) for answer in answers]

    return search


def onnx_search(model: Any) -> Callable[[list[Any], int], list[Any]]:
    """ONNX Runtime's beam search of the same model, without any constraint or scores."""
    import onnxruntime_genai

    with tempfile.TemporaryDirectory() as folder:
        plain, out = Path(folder, "plain"), Path(folder, "converted")
        save(model, plain)
        module = "onnxruntime_genai.models.builder"
        places = ["-i", str(plain), "-o", str(out), "-c", str(Path(folder, "cache"))]
        subprocess.run(
            [sys.executable, "-m", module, *places, "-p", "fp32", "-e", "cpu"],
            check=True,
            capture_output=True,
        )
        file = out / "genai_config.json"
        config = json.loads(file.read_text(encoding="utf-8"))
        config["model"]["decoder"]["session_options"]["intra_op_num_threads"] = 1
        file.write_text(json.dumps(config), encoding="utf-8")
        converted = onnxruntime_genai.Model(str(out))

    def search(prompts: list[Any], beams: int) -> list[Any]:
        length = len(prompts[0])
        parameters = onnxruntime_genai.GeneratorParams(converted)
        parameters.set_search_options(
            batch_size=len(prompts),
            num_beams=beams,
            num_return_sequences=beams,
            min_length=length + LEVELS,
            max_length=length + LEVELS,
            length_penalty=0.0,
            early_stopping=False,
            do_sample=False,
        )
        generator = onnxruntime_genai.Generator(converted, parameters)
        generator.append_tokens(np.stack(prompts).astype(np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        firsts = range(0, len(prompts) * beams, beams)
        return [(generator.get_sequence(i)[length:].tolist(), None) for i in firsts]

    return search


def check_answers(
    answers: dict[str, list[Any]], engines: dict[str, Engine], model: Any, prompts: list[Any]
) -> float:
    """Largest difference of a score; an error if answers differ by more than rounding."""
    worst, expected, best = 0.0, answers[SEARCH], None
    for name, answer in answers.items():
        if engines[name].constrained:
            difference = np.abs(np.subtract(answer, expected)).max()
        else:
            tokens, score = answer[0]
            own = log_probability(model, prompts[0].tolist(), list(tokens))
            if score is None:  # it found what CTranslate2 did
                score = own if best is None else best
            best, difference = own, abs(own - score)
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name}: scores differ by {difference}")
        worst = max(worst, float(difference))
    if PASSES in answers and answers[PASSES] != expected:
        raise SystemExit("native passes and native search differ")
    return worst


@torch.inference_mode()
def log_probability(model: Any, prompt: list[int], tokens: list[int]) -> float:
    """The model's own score of a sequence; the end token has no probability."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    logits[:, 0] = -torch.inf  # ruled out before the minimal length
    return float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


def measure(
    engines: dict[str, Engine],
    model: Any,
    prompts: list[Any],
    cell: Cell,
    seconds: float,
    limit: float,
) -> dict[str, Any]:
    """One cell: milliseconds of each engine, and how many times the native search's they are."""
    answers, sides, rounds, left_out = {}, {}, {}, {}
    for name, engine in engines.items():
        if cell.beams > engine.most_beams or (name == HUGGING_FACE and cell.batch > 1):
            left_out[name] = "size"
            continue
        for _ in range(2):  # the first search of a cell may allocate
            start = time.process_time()
            answers[name] = engine.search(prompts, cell.beams)
            took = time.process_time() - start
        if took > limit and name != SEARCH:
            left_out[name] = "time"
            continue
        run = partial(_run, engine, prompts, cell.beams)
        rounds[name] = int(np.clip(seconds / took, LEAST_ROUNDS, MOST_ROUNDS))
        # A short search runs once before it is timed, so that the caches hold its data.
        sides[name] = Side(run, run if took < WARMED_S else None, rounds[name])
    difference = check_answers(answers, engines, model, prompts)
    times = time_interleaved(sides, max(rounds.values()))
    native = times[SEARCH]
    return {
        "rounds": rounds,
        "difference": difference,
        "left_out": left_out,
        "cpu_ms": {n: summarize([1e3 * s for s in t.cpu]) for n, t in times.items()},
        "wall_ms": {n: summarize([1e3 * s for s in t.wall]) for n, t in times.items()},
        "ratio": {n: compare_times(t.cpu, native.cpu) for n, t in times.items()},
    }


def _run(engine: Engine, prompts: list[Any], beams: int, _round: int) -> None:
    engine.search(prompts, beams)


def show(row: dict[str, Any], *, header: bool) -> None:
    """Print a row of the table: medians in ms, ratios to the native search and their quartiles."""
    table = Table(box=None, show_header=header, pad_edge=False)
    table.add_column("prompt/batch/beams", min_width=18)
    for name in NAMES:
        table.add_column(f"{name}, ms", min_width=24)
    cells = [f"{row['size']} {row['prompt']}/{row['batch']}/{row['beams']}"]
    for name in NAMES:
        if name in row["cpu_ms"]:
            ratio = row["ratio"][name]
            spread = f"({ratio['p25']:.2f}-{ratio['p75']:.2f})"
            cells.append(f"{row['cpu_ms'][name]['p50']:.4g} x{ratio['p50']:.2f} {spread}")
        else:
            cells.append(f"- ({row['left_out'].get(name, 'not installed')})")
    table.add_row(*cells)
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
