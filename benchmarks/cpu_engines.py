"""Constrained beam search on one core: torch, native passes, native search, and other engines.

    OMP_NUM_THREADS=1 taskset -c 0 python benchmarks/cpu_engines.py --out cpu_engines.txt

Models have random weights, prompts random tokens, and the catalog four levels of 256 codes. The
three ways of this project and `generate` of Hugging Face (one request, 20 beams) answer the same
constrained search. CTranslate2, ONNX Runtime (onnxruntime-genai) and OpenVINO (openvino-genai),
where they are installed, search without any constraint, which is less work. Models for OpenVINO are
converted by optimum-intel, which needs an older transformers than this project: `--optimum-cli` is
that command of another environment. Answers are compared before anything is timed:
all scores of the constrained searches; of the others, the best sequence's score with the model's
own score of that sequence (ONNX Runtime gives none: with that of CTranslate2's best).

Times are processor times of this process, since other work on a machine hardly changes them; ratios
to the native search are medians and quartiles over rounds, in which every engine runs once. An
engine that takes less than 50 ms runs once more before its time is taken, so that the processor's
caches hold its data and not the last engine's. Rounds also contain products of large float32
matrices in NumPy (OpenBLAS, which was faster than torch's): `of GEMM` is the share of its rate that
the native search reaches with the multiplications that the search needs (`products`).

An engine is left out of a cell where its time, estimated from smaller cells, is more than `--limit`
seconds a search (`--limit-others` for the slowest engines), where its caches, one for each beam,
take more than `--memory` GB, and where it does not accept so many beams. The last line is JSON.
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
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, TextIO
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
CTRANSLATE2, ONNX, OPENVINO = "CTranslate2", "ONNX Runtime", "OpenVINO"
HUGGING_FACE = "Hugging Face"
NAMES = (SEARCH, TORCH, PASSES, CTRANSLATE2, ONNX, OPENVINO, HUGGING_FACE)
GEMM = "GEMM"
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

    def work(self, shared: bool) -> int:
        """What the time of an engine grows with; `shared`: beams share the prompt's cache."""
        nodes = (LEVELS - 1) * self.beams
        return self.batch * (self.prompt + nodes if shared else self.prompt * self.beams)


@dataclass
class Engine:
    """A beam search.

    Attributes:
        search: the scores of each request, from prompts of one length and K.
        constrained: whether it answers from the catalog; otherwise `search` returns
            (tokens, score) of the best sequence of each request.
        shared: whether beams share the keys and values of their prompt.
        most_beams: that it accepts.
        others: whether `Limits.others` is what it may take, and not `Limits.search`.
        times: seconds of one search by cell.
    """

    search: Callable[[list[Any], int], list[Any]]
    constrained: bool = True
    shared: bool = True
    most_beams: int = 1_000_000
    others: bool = False
    times: dict[Cell, float] = field(default_factory=dict)

    def estimate(self, cell: Cell) -> float:
        """Seconds of a search, from the measured cell that is nearest in work; 0 without any."""
        if not self.times:
            return 0.0
        work = cell.work(self.shared)
        near = min(self.times, key=lambda c: abs(np.log(c.work(self.shared) / work)))
        return self.times[near] * work / near.work(self.shared)


@dataclass(frozen=True)
class Limits:
    """How long and how much an engine may take.

    Attributes:
        seconds: of one engine in one cell, about; at least `LEAST_ROUNDS` searches.
        search: seconds of one search.
        others: the same for ONNX Runtime, OpenVINO and Hugging Face.
        memory: bytes of the keys and values of all beams.
    """

    seconds: float
    search: float
    others: float
    memory: float

    def reason(self, engine: Engine, config: Any, cell: Cell) -> str | None:
        """Why the engine is left out of a cell."""
        if cell.beams > engine.most_beams:
            return f"<= {engine.most_beams} beams"
        if not engine.shared:
            floats = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
            tokens = cell.batch * cell.beams * (cell.prompt + LEVELS)
            if 4 * floats * tokens > self.memory:
                return "memory"
        most = self.others if engine.others else self.search
        return "time" if engine.estimate(cell) > most else None


def main() -> None:
    """Measure, print a table and one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--sizes", nargs="+", default=["tiny", "small", "base"])
    arguments.add_argument("--prompts", type=int, nargs="+", default=[30, 100, 200])
    arguments.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    arguments.add_argument("--beams", type=int, nargs="+", default=[20, 50, 256])
    arguments.add_argument("--seconds", type=float, default=2, help="of an engine in a cell, about")
    arguments.add_argument("--limit", type=float, default=20, help="seconds of one search")
    arguments.add_argument(
        "--limit-others",
        type=float,
        default=0.5,
        help="the same for ONNX Runtime, OpenVINO and Hugging Face",
    )
    arguments.add_argument("--optimum-cli", help="command that converts models for OpenVINO")
    arguments.add_argument("--memory", type=float, default=4, help="GB of the caches of beams")
    arguments.add_argument("--out", type=Path, help="file that gets each line when it is measured")
    args = arguments.parse_args()
    torch.set_num_threads(1)
    limits = Limits(args.seconds, args.limit, args.limit_others, args.memory * 1e9)
    cells = [
        Cell(prompt, batch, beams)
        for beams in args.beams
        for prompt in args.prompts
        for batch in args.batches
    ]
    with (args.out or Path(os.devnull)).open("w", encoding="utf-8") as file:
        rows = []
        for row in measure_all(args.sizes, cells, limits, args.optimum_cli):
            rows.append(row)
            show(row, header=len(rows) == 1, file=file)
        line = json.dumps({"benchmark": "cpu_engines", "rows": rows, "path": describe()} | _where())
        print(line)
        file.write(f"{line}\n")


def _where() -> dict[str, Any]:
    """The machine, and versions of what is beside."""
    from importlib.metadata import version

    modules = ("ctranslate2", "onnxruntime_genai", "openvino_genai")
    found = {name: version(name) for name in modules if find_spec(name) is not None}
    return environment() | found


def measure_all(
    sizes: list[str], cells: list[Cell], limits: Limits, optimum_cli: str | None
) -> Iterator[dict[str, Any]]:
    """The rows of the table."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS)
    catalog = vocabulary.encode(rng.integers(0, CODES, (ITEMS, LEVELS)))
    trie = ItemTrie.build(catalog)
    models, engines = {}, {}
    for size in sizes:
        model = models[size] = build(size, vocabulary).eval()
        with torch.no_grad():  # distributions that are peaked, so that scores rarely tie
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() > 1 else 1)
        engines[size] = engines_of(model, trie, catalog, optimum_cli)
    for size, cell in sorted(product(sizes, cells), key=lambda found: cells.index(found[1])):
        prompts = [rng.integers(2, vocabulary.size - 6, cell.prompt) for _ in range(cell.batch)]
        start = time.perf_counter()
        row = measure(engines[size], models[size], trie, prompts, cell, limits)
        seconds = round(time.perf_counter() - start, 1)
        yield {"size": size} | asdict(cell) | row | {"seconds": seconds}


def engines_of(
    model: Any, trie: ItemTrie, catalog: Any, optimum_cli: str | None
) -> dict[str, Engine]:
    """The engines by name; OpenVINO only with a command that converts models for it."""
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
        found = huggingface_beam_search(model, prompts, allowed, beams)
        return [[score for _, score in answer] for answer in found]

    found = {
        SEARCH: Engine(by_search),
        TORCH: Engine(by_torch),
        PASSES: Engine(by_passes),
        HUGGING_FACE: Engine(by_generate, shared=False, others=True),
    }
    free = partial(Engine, constrained=False, shared=False)
    if find_spec("ctranslate2") is not None:
        found[CTRANSLATE2] = free(ctranslate2_search(model))
    if find_spec("onnxruntime_genai") is not None:
        found[ONNX] = free(onnx_search(model), most_beams=32, others=True)
    if find_spec("openvino_genai") is not None and optimum_cli is not None:
        found[OPENVINO] = free(openvino_search(model, optimum_cli), others=True)
    return found


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
        found = generator.generate_batch(
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
        return [(answer.sequences_ids[0], answer.scores[0]) for answer in found]

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


def openvino_search(model: Any, optimum_cli: str) -> Callable[[list[Any], int], list[Any]]:
    """OpenVINO's beam search of the same model, without any constraint or end token."""
    import openvino
    import openvino_genai

    with tempfile.TemporaryDirectory() as folder:
        plain, out = Path(folder, "plain"), Path(folder, "converted")
        save(model, plain)
        kind = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        subprocess.run(
            [optimum_cli, "export", "openvino", "-m", str(plain), *kind, str(out)],
            check=True,
            capture_output=True,
        )
        types = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), "f32")
        pipeline = openvino_genai.LLMPipeline(
            str(out), "CPU", ATTENTION_BACKEND="SDPA", INFERENCE_NUM_THREADS=1, **types
        )

    def search(prompts: list[Any], beams: int) -> list[Any]:
        settings = openvino_genai.GenerationConfig()
        settings.num_beams = settings.num_return_sequences = beams
        settings.max_new_tokens, settings.length_penalty = LEVELS, 0.0
        settings.eos_token_id = model.config.vocab_size  # no token
        settings.stop_criteria = openvino_genai.StopCriteria.NEVER
        tokens = np.stack(prompts).astype(np.int64)
        given = (openvino.Tensor(tokens), openvino.Tensor(np.ones_like(tokens)))
        found = pipeline.generate(openvino_genai.TokenizedInputs(*given), settings)
        firsts = range(0, len(prompts) * beams, beams)
        return [(found.tokens[i], found.scores[i]) for i in firsts]

    return search


def products(config: Any, widths: list[int], cell: Cell) -> int:
    """Multiplications of a search, which runs each token once.

    Queries, keys and values of the first layer are not counted, since they are read from a table;
    of the last layer, tokens whose logits are not needed have keys and values only.
    """
    heads = config.num_attention_heads * config.head_dim
    pairs = 2 * config.num_key_value_heads * config.head_dim
    rest = config.hidden_size * (heads + 3 * config.intermediate_size)
    before, nodes = config.num_hidden_layers - 1, sum(widths[:-1])
    tokens, wanted = cell.prompt + nodes, 1 + nodes
    linear = before * (tokens * rest + config.hidden_size * (tokens * pairs + wanted * heads))
    linear += (before - 1) * (tokens - wanted) * config.hidden_size * heads + wanted * rest
    seen = sum(width * (cell.prompt + d + 1) for d, width in enumerate(widths[:-1])) + cell.prompt
    unwanted = cell.prompt * (cell.prompt - 1) // 2
    attention = 2 * heads * ((before + 1) * seen + before * unwanted)
    head = wanted * config.hidden_size * config.vocab_size
    return cell.batch * (linear + attention + head)


def check_answers(
    answers: dict[str, list[Any]], engines: dict[str, Engine], model: Any, prompts: list[Any]
) -> float:
    """Largest difference of a score; an error if answers differ by more than rounding."""
    worst, expected, best = 0.0, answers[SEARCH], None
    for name, found in answers.items():
        if engines[name].constrained:
            difference = np.abs(np.subtract(found, expected)).max()
        else:
            tokens, score = found[0]
            end = name == OPENVINO  # where the end token is one like others
            own = log_probability(model, prompts[0].tolist(), list(tokens), end=end)
            if score is None:  # it found what CTranslate2 did
                score = own if best is None else best
            best, difference = None if end else own, abs(own - score)
        if not difference <= TOLERANCE:
            raise SystemExit(f"{name}: scores differ by {difference}")
        worst = max(worst, float(difference))
    if PASSES in answers and answers[PASSES] != expected:
        raise SystemExit("native passes and native search differ")
    return worst


@torch.inference_mode()
def log_probability(model: Any, prompt: list[int], tokens: list[int], *, end: bool) -> float:
    """The model's own score of a sequence; without `end`, the end token has no probability."""
    logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    if not end:
        logits[:, 0] = -torch.inf  # ruled out before the minimal length
    return float(logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).sum())


def measure(
    engines: dict[str, Engine],
    model: Any,
    trie: ItemTrie,
    prompts: list[Any],
    cell: Cell,
    limits: Limits,
) -> dict[str, Any]:
    """One cell: milliseconds of each engine, and how many times the native search's they are."""
    config, here, left_out, answers = model.config, {}, {}, {}
    for name, engine in engines.items():
        if name == HUGGING_FACE and (cell.batch > 1 or cell.beams > min(20, CODES)):
            continue
        reason = limits.reason(engine, config, cell)
        if name != SEARCH and reason is not None:
            left_out[name] = reason
            continue
        here[name] = engine
        for _ in range(2):  # the first search of a cell may allocate; a long one hardly differs
            start = time.process_time()
            answers[name] = engine.search(prompts, cell.beams)
            engine.times[cell] = time.process_time() - start
            if engine.times[cell] > 4 * WARMED_S:
                break
    difference = check_answers(answers, engines, model, prompts)
    widths = [trie.width(depth, cell.beams) for depth in range(1, LEVELS + 1)]
    size = 768
    matrix = np.random.default_rng(0).random((size, size), np.float32)
    count = max(1, int(min(engines[SEARCH].times[cell], 1) * 1e11 / (2 * size**3)))
    sides, rounds = {GEMM: Side(lambda _: [matrix @ matrix for _ in range(count)])}, {}
    for name, engine in here.items():
        seconds = engine.times[cell]
        run = partial(_run, engine, prompts, cell.beams)
        rounds[name] = int(np.clip(limits.seconds / seconds, LEAST_ROUNDS, MOST_ROUNDS))
        sides[name] = Side(run, run if seconds < WARMED_S else None, rounds[name])
    times = time_interleaved(sides, max(rounds.values()))
    gemm, native = times.pop(GEMM), times[SEARCH]
    rate = 2 * size**3 * count / np.asarray(gemm.cpu)
    own = 2 * products(config, widths, cell) / np.asarray(native.cpu)
    return {
        "rounds": rounds,
        "difference": difference,
        "left_out": left_out,
        "cpu_ms": {n: summarize([1e3 * s for s in t.cpu]) for n, t in times.items()},
        "wall_ms": {n: summarize([1e3 * s for s in t.wall]) for n, t in times.items()},
        "ratio": {n: compare_times(t.cpu, native.cpu) for n, t in times.items()},
        "gemm_gflops": summarize(rate / 1e9),
        "of_gemm": summarize(own / rate[: len(own)]),
    }


def _run(engine: Engine, prompts: list[Any], beams: int, _round: int) -> None:
    engine.search(prompts, beams)


def show(row: dict[str, Any], *, header: bool, file: TextIO) -> None:
    """Print a row of the table: medians in ms, ratios to the native search and their quartiles."""
    table = Table(box=None, show_header=header, pad_edge=False)
    table.add_column("prompt/batch/beams", min_width=18)
    table.add_column(f"{SEARCH}, ms", min_width=22)
    table.add_column("of GEMM", min_width=7)
    for name in NAMES[1:]:
        table.add_column(f"{name}, ms", min_width=24)
    ms = row["cpu_ms"][SEARCH]
    cells = [
        f"{row['size']} {row['prompt']}/{row['batch']}/{row['beams']}",
        f"{ms['p50']:.4g} ({ms['p25']:.4g}-{ms['p75']:.4g})",
        f"{row['of_gemm']['p50']:.0%}",
    ]
    for name in NAMES[1:]:
        if name not in row["cpu_ms"]:
            reason = row["left_out"].get(name)
            cells.append("-" if reason is None else f"- ({reason})")
            continue
        ratio = row["ratio"][name]
        spread = f"({ratio['p25']:.2f}-{ratio['p75']:.2f})"
        cells.append(f"{row['cpu_ms'][name]['p50']:.4g} x{ratio['p50']:.2f} {spread}")
    table.add_row(*cells)
    for console in (Console(width=210), Console(width=210, file=file)):
        console.print(table)
    file.flush()


if __name__ == "__main__":
    main()
