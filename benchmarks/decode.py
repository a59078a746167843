"""The cost of decoding: every mode against plain beam search and Hugging Face's `generate`.

    python benchmarks/decode.py --bundle var/bundles/beauty --threads 1 --out var/reports/decode
    python benchmarks/decode.py --shape small --history 50 --beams 20 --batches 1 8

A cell is one K, one batch size, and prompts that are new (`cold`) or known but for the last item
(`warm`). All modes of a cell answer the same users. Their answers are compared with plain beam
search's before anything is timed. docs/benchmarks.md says how to read the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from answers import HF_ROUNDING, ROUNDING, Agreement, Answer
from huggingface import allowed_tokens, huggingface_beam_search
from measuring import Row, Side, compare_times, milliseconds, time_interleaved
from reporting import Report, Table, begin, publish, read_options
from workload import SHAPES, Setup, Workload, load_bundle_workload, make_shape_workload

from recsys.decoding import (
    Engine,
    ModelDrafter,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.errors import RecsysError
from recsys.models.cache import key_value_shape
from recsys.models.tree_forward import TreeModel
from recsys.progress import track

MODES = ("exhaustive", "draft", "planned")
BEAM, HUGGING_FACE, PLANNED = "beam", "huggingface", "planned"
HF_BATCHES = (1, 8)  # batch sizes at which Hugging Face is timed
REUSE = ("cold", "warm")
DTYPES = ("float32", "bfloat16", "float64")
QUICK = {
    "shape": "tiny", "items": 2_000, "beams": [5], "batches": [1, 2], "repeats": 1, "hf_repeats": 1
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What is decoded and compared.

    Attributes:
        bundle: its models, catalog and users are decoded; None for random weights.
        shape: of random weights.
        items: of a random catalog.
        history: items of a random user's history, 4 tokens each.
        dtype: of the models.
        threads: of torch; 0 for its own choice.
        beams: K.
        batches: requests decoded together.
        nodes: sizes of draft trees.
        reuse: kinds of prompts.
        modes: that are compared; plain beam search is always measured.
        repeats: rounds of batches of eight requests or more; smaller batches get more rounds.
        hf_repeats: rounds of Hugging Face, likewise; 0 leaves it out.
    """

    bundle: Path | None = None
    shape: str = field(default="small", metadata={"choices": tuple(SHAPES)})
    items: int = 12_000
    history: int = 20
    dtype: str = field(default="float32", metadata={"choices": DTYPES})
    threads: int = 0
    beams: list[int] = field(default_factory=lambda: [5, 10, 20, 50])
    batches: list[int] = field(default_factory=lambda: [1, 2, 4, 8, 32])
    nodes: list[int] = field(default_factory=lambda: [128, 256])
    reuse: list[str] = field(default_factory=lambda: [*REUSE], metadata={"choices": REUSE})
    modes: list[str] = field(default_factory=lambda: [*MODES], metadata={"choices": MODES})
    repeats: int = 15
    hf_repeats: int = 3

    def rounds(self, repeats: int, batch: int) -> int:
        """Rounds of batches of this size, so that small batches cover as many users."""
        return repeats * max(1, 8 // batch)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables and one JSON line."""
    options, run = read_options(Options, __doc__, QUICK, argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    document = begin("decode", options, run)
    users = min(512, options.repeats * max(options.batches))
    setup = Setup(users, "cpu", getattr(torch, options.dtype))
    if options.bundle is not None:
        workload = load_bundle_workload(options.bundle, setup)
    else:
        workload = make_shape_workload(
            options.shape, setup, items=options.items, history=options.history
        )
    document |= {"workload": workload.facts, "rows": measure(workload, options)}
    publish(document, report(document), run.out)


def measure(workload: Workload, options: Options) -> list[Row]:
    """Time every cell; a row for each cell and mode.

    Raises:
        RecsysError: a mode's answer is not beam search's. In precisions other than float32 and
            float64 the rows say how far they agree instead.
    """
    rows: list[Row] = []
    cells = list(product(options.reuse, options.beams))
    with track("cells", total=len(cells) * len(options.batches)) as bar:
        for reuse, beams in cells:
            engine = _engine(workload, options, reuse)
            if PLANNED in options.modes:
                engine.warm_up(workload.prompts[: max(options.batches)], beams, options.batches)
            for batch in options.batches:
                rows += _Cell(workload, options, engine, reuse, beams, batch).measure()
                bar.advance()
    return rows


def _engine(workload: Workload, options: Options, reuse: str) -> Engine:
    """An engine that keeps the prompts of a whole batch where they are warm."""
    room = 0
    if reuse == "warm":
        tokens = max(options.batches) * (workload.longest + 4)  # one block of slots in addition
        both = (workload.target, workload.draft)
        models = [TreeModel.of(m) for m in both if m is not None]
        shapes = [(key_value_shape(m.config), m.dtype.itemsize) for m in models]
        room = tokens * max(2 * int(np.prod(shape)) * size for shape, size in shapes)
    return Engine(
        workload.target,
        workload.trie,
        draft=workload.draft,
        prefix_bytes=room,
        prompt_slots=workload.longest,
    )


@dataclass
class _Cell:
    """One kind of prompts, K and batch size."""

    workload: Workload
    options: Options
    engine: Engine
    reuse: str
    beams: int
    batch: int

    def __post_init__(self) -> None:
        self.rounds = self.options.rounds(self.options.repeats, self.batch)
        self.hf_rounds = self.options.rounds(self.options.hf_repeats, self.batch)

    def measure(self) -> list[Row]:
        """Compare the answers, time all modes side by side, and count their work."""
        modes = self._modes()
        agreement = self._compare(modes)
        answers: dict[str, list[Answer]] = {name: [] for name in modes}

        def side(name: str) -> Side:
            rounds = self.hf_rounds if name == HUGGING_FACE else None
            return Side(lambda r: answers[name].append(modes[name](r)), self._prepare, rounds)

        sides = {name: side(name) for name in modes}
        times = time_interleaved(sides, self.rounds)
        own, theirs = times[BEAM], times.get(HUGGING_FACE, [])
        first = answers[BEAM][0].stats[0]
        bytes_per_slot = first.kv_bytes // first.kv_slots
        rows = []
        for name, taken in times.items():
            if name == HUGGING_FACE:
                work = self._count_hugging_face(bytes_per_slot)
            else:
                work = _count(answers[name])
            row = {
                "reuse": self.reuse,
                "beams": self.beams,
                "batch": self.batch,
                "mode": name,
                "rounds": len(taken),
                "ms": milliseconds(taken),
                "ws_beam": compare_times(own, taken),
                "ws_huggingface": compare_times(theirs, taken),
                **work,
                "kv_to_greedy": round(work["kv_bytes"] / (self._slots(1) * bytes_per_slot), 2),
                "agreement": agreement[name],
            }
            if name == PLANNED:
                row["plans"] = dict(Counter(a.plan for a in answers[name]).most_common())
            rows.append(row)
        return rows

    def _modes(self) -> dict[str, Callable[[int], Answer]]:
        """Name of a mode -> the function that answers round r."""
        engine, names = self.engine, self.options.modes
        modes: dict[str, Callable[[int], Answer]] = {BEAM: self._search}
        if self.batch in HF_BATCHES and self.options.hf_repeats:
            allowed = allowed_tokens(self.workload.item_tokens)
            modes[HUGGING_FACE] = partial(self._generate, allowed=allowed)
        if "exhaustive" in names:
            modes["exhaustive"] = partial(self._speculate, drafter=None)
        for n in self.options.nodes if "draft" in names and engine.draft is not None else ():
            drafter = ModelDrafter(engine.draft, n)
            modes[f"draft-{n}"] = partial(self._speculate, drafter=drafter)
        if PLANNED in names:
            modes[PLANNED] = self._plan
        return modes

    def _search(self, number: int) -> Answer:
        engine, request = self.engine, self._request(number)
        return Answer.of(beam_search(engine.target, request, engine.trie, self.beams))

    def _generate(self, number: int, allowed: dict[tuple[int, ...], list[int]]) -> Answer:
        prompts = self._prompts(number)
        return Answer(huggingface_beam_search(self.workload.target, prompts, allowed, self.beams))

    def _speculate(self, number: int, drafter: Any) -> Answer:
        engine, request = self.engine, self._request(number)
        return Answer.of(
            speculative_beam_search(engine.target, drafter, request, engine.trie, self.beams)
        )

    def _plan(self, number: int) -> Answer:
        decoded = self.engine.decode(self._prompts(number), self.beams)
        return Answer.of(decoded.beams, str(decoded.plan))

    def _request(self, number: int) -> SearchRequest:
        return SearchRequest(self._prompts(number), prompt_slots=self.engine.prompt_slots)

    def _prompts(self, number: int) -> list[Any]:
        return [self.workload.prompts[i] for i in self.workload.group(number, self.batch)]

    def _prepare(self, number: int) -> None:
        """Warm: have the models keep the prompts of one item ago."""
        if self.reuse == "cold":
            return
        self.engine.forget()
        earlier = [self.workload.earlier[i] for i in self.workload.group(number, self.batch)]
        for model in (self.engine.target, self.engine.draft):
            if model is not None:
                with TokenTree(model, PromptBatch.of(earlier, model), 0) as tree:
                    tree.note(tree.forward().amax(-1))

    def _compare(self, modes: dict[str, Callable[[int], Answer]]) -> dict[str, Row]:
        """How far every mode agrees with plain beam search, over the rounds to be timed."""
        exact = self.engine.target.dtype in (torch.float32, torch.float64)
        agreements: dict[str, list[Agreement]] = {name: [] for name in modes}
        for number in range(self.rounds):
            self._prepare(number)
            expected = modes[BEAM](number).rankings
            for name, mode in modes.items():
                theirs = name == HUGGING_FACE
                if theirs and number >= self.hf_rounds:
                    continue
                self._prepare(number)
                rounding = HF_ROUNDING if theirs else ROUNDING
                agreement = Agreement.of(mode(number).rankings, expected, *rounding)
                if exact and agreement.requests < 1:
                    raise RecsysError(
                        f"{name} at K = {self.beams}, B = {self.batch}, {self.reuse}: an answer is "
                        f"not beam search's ({agreement}); nothing was timed"
                    )
                agreements[name].append(agreement)
        return {name: asdict(Agreement.join(parts)) for name, parts in agreements.items()}

    def _count_hugging_face(self, bytes_per_slot: int) -> Row:
        """Computed, not measured: every beam has its own cache, padded to the longest prompt."""
        slots = self._slots(self.beams, shared=False)
        return {
            "passes": self.workload.item_tokens.shape[1],
            "accepted_levels": 0,
            "target_tokens": round(slots, 2),
            "draft_passes": 0,
            "drafted_nodes": 0,
            "kv_slots": round(slots, 2),
            "kv_bytes": round(slots * bytes_per_slot),
        }

    def _slots(self, beams: int, *, shared: bool = True) -> float:
        """Mean cache slots of a request: the prompt, and a token of every level but the last."""
        length = np.mean if shared else np.max
        prompts = [float(length([len(p) for p in self._prompts(r)])) for r in range(self.rounds)]
        levels = int(self.workload.item_tokens.shape[1])
        return beams * (float(np.mean(prompts)) + levels - 1)


def _count(answers: Sequence[Answer]) -> Row:
    """Mean work of a request."""
    stats = [s for answer in answers for s in answer.stats]
    names = (
        "target_passes", "accepted_levels", "target_tokens", "draft_passes", "drafted_nodes",
        "kv_slots", "kv_bytes",
    )  # fmt: skip
    means = {name: round(float(np.mean([getattr(s, name) for s in stats])), 3) for name in names}
    return {"passes": means.pop("target_passes"), **means, "kv_bytes": round(means["kv_bytes"])}


NAMES = {BEAM: "own beams", HUGGING_FACE: "Hugging Face"}
COLUMNS = ("B", "mode", "ms", "IQR", "p99", "WS", "WS HF", "AS", "pass", "tokens", "KV")
MEANINGS = (
    "ms: median of a batch, then its interquartile range. WS: own beams' time over this one's, "
    "WS HF: Hugging Face's; medians of the ratios within rounds. AS: levels accepted of what was "
    "drafted. pass, tokens: of the target, a request. KV: bytes held over those of one beam."
)


def report(document: Row) -> Report:
    """What is shown: a table for each K and kind of prompts."""
    cells: dict[tuple[int, str], list[list[str]]] = {}
    for row in document["rows"]:
        cells.setdefault((row["beams"], row["reuse"]), []).append(_line(row))
    tables = [
        Table(f"K = {beams}, prompts {reuse}", COLUMNS, lines, words=2)
        for (beams, reuse), lines in cells.items()
    ]
    return Report(tables, [MEANINGS, f"Weights: {document['workload']['weights']}."])


def _line(row: Row) -> list[str]:
    ms, against = row["ms"], row["ws_huggingface"]
    plan, count = next(iter(row.get("plans", {}).items()), ("", 0))
    share = "" if count in (0, row["rounds"]) else f" {count / row['rounds']:.0%}"
    name = str(NAMES.get(row["mode"], row["mode"]))
    return [
        str(row["batch"]) if row["mode"] == BEAM else "",
        f"{name}: {plan}{share}" if plan else name,
        f"{ms['p50']:.2f}",
        f"{ms['p75'] - ms['p25']:.2f}",
        f"{ms['p99']:.2f}",
        f"{row['ws_beam']['p50']:.2f}",
        "" if against is None else f"{against['p50']:.1f}",
        f"{row['accepted_levels']:.2f}" if row["drafted_nodes"] else "",
        f"{row['passes']:.2f}",
        f"{row['target_tokens']:.0f}",
        f"{row['kv_to_greedy']:.2f}",
    ]


if __name__ == "__main__":
    main()
