"""Constraint: what building, keeping, stepping and filtering a trie costs, against what others do.

Catalogs are random: uniform codes give more prefixes than any real index of their size, which is
the worst case for memory. A step is what the trie has to say of B x K beams in the middle of a
search: which of their candidates may follow. Others are Hugging Face's
`PrefixConstrainedLogitsProcessor` over a nested dict, and over a table of sorted sequences that is
searched by halves; what they allow is compared first. But for files, times are the processor's:
neighbours on a machine stretch what passes on a clock. Steps are taken once before they are timed;
only in the comparison with a decode they come right after a model's passes.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from recsys.benchmark.timing import Side, interleaved, ratio, spread
from recsys.benchmark.workload import random_model
from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.mask import RowMask
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import beam_search
from recsys.models.checkpoint import PRESETS
from recsys.vocabulary import Vocabulary

Row = dict[str, Any]

BRANDS = 1000
EXCLUDED = 50
PROMPT = 80  # tokens: twenty items of four
KINDS = ("none", "one", "different", "excluded")


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        items: sizes of catalogs.
        codes: sizes of code books, (levels, codes); the first is used wherever one must be chosen.
        batches: B.
        beams: K.
        shares: of the items that filters allow.
        rounds: each is a measurement of every side.
        peers: items at which others are measured; 0 leaves them out.
        preset: model to compare a decode with; its catalog has `peers` items.
        seed: of everything.
    """

    items: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    codes: tuple[tuple[int, int], ...] = ((4, 256), (3, 2048))
    batches: tuple[int, ...] = (1, 8, 32)
    beams: tuple[int, ...] = (10, 70)
    shares: tuple[float, ...] = (0.001, 0.01, 0.1, 0.5)
    rounds: int = 31
    peers: int = 1_000_000
    preset: str = "small"
    seed: int = 0

    @property
    def cells(self) -> int:
        """How often `advance` is called."""
        return len(self.items) * (len(self.codes) + 1) + 2 * bool(self.peers)


def measure(options: Options, advance: Callable[[], object] = lambda: None) -> dict[str, Any]:
    """All parts, as plain values.

    Args:
        options: what is measured.
        advance: called after each part.
    """
    found: dict[str, Any] = {"build": [], "step": [], "filter": [], "peers": [], "decode": None}
    # glibc gives memory back, and faults it in again, until it has seen blocks of this size freed
    np.ones(31 << 20, np.uint8)
    batch, beams = max(b for b in options.batches if b <= 8), max(options.beams)
    for count in options.items:
        for levels, codes in options.codes:
            rng = np.random.default_rng(options.seed)
            trie, facts = _build(_tokens(rng, count, levels, codes))
            facts = {"items": count, "levels": levels, "codes": codes, **facts}
            found["build"].append(facts)
            found["step"] += _steps(trie, facts, options)
            advance()
            if (levels, codes) == options.codes[0]:
                found["filter"] += _filters(trie, options, batch, beams)
                advance()
            del trie
    if options.peers:
        levels, codes = options.codes[0]
        rng = np.random.default_rng(options.seed)
        tokens = _tokens(rng, options.peers, levels, codes)
        trie = ItemTrie.build(tokens)
        found["peers"] = _peers(trie, tokens, options, batch, beams)
        advance()
        found["decode"] = _decode(trie, options, batch, beams)
        advance()
    return {"kind": "constraint", "options": asdict(options), **found}


def _tokens(rng: np.random.Generator, count: int, levels: int, codes: int) -> NDArray[np.int32]:
    """(items, L) uniform codes as tokens: each level has its own."""
    found = rng.integers(0, codes, (count, levels), dtype=np.int32)
    found += np.arange(levels, dtype=np.int32) * codes
    return found


def _build(tokens: NDArray[np.int32]) -> tuple[ItemTrie, Row]:
    start, cpu = time.perf_counter(), time.process_time()
    trie = ItemTrie.build(tokens)
    built, cpu = time.perf_counter(), time.process_time() - cpu
    with TemporaryDirectory() as name:
        folder = Path(name) / "trie"
        trie.save(folder)
        saved = time.perf_counter()
        DeviceTrie.of(ItemTrie.open(folder))
        opened = time.perf_counter()
    return trie, {
        "build_s": round(built - start, 3),
        "build_cpu_s": round(cpu, 3),
        "bytes_per_item": round(trie.nbytes / trie.num_items, 1),
        "save_s": round(saved - built, 3),
        "open_s": round(opened - saved, 4),
        "states": trie.num_states,
        "branching": list(trie.branching),
    }


def _frontier(
    trie: ItemTrie, depth: int, batch: int, beams: int, rng: np.random.Generator
) -> torch.Tensor:
    """(B, W) states at `depth` that beams may be at, ascending: prefixes of random rows."""
    rows = rng.integers(0, trie.num_rows, (batch, min(beams, trie.width(depth, beams))))
    starts = trie.starts_at(depth)
    place = np.searchsorted(starts, rows.astype(starts.dtype), side="right") - 1
    return torch.from_numpy(np.sort(place + trie.depth_start[depth], axis=1))


def _steps(trie: ItemTrie, facts: Row, options: Options) -> list[Row]:
    """Time of a step by depth, batch and beams."""
    device = DeviceTrie.of(trie)
    sides = {}
    for depth, batch, beams in product(range(trie.num_levels), options.batches, options.beams):
        states = [
            _frontier(trie, depth, batch, beams, np.random.default_rng([options.seed, r]))
            for r in range(options.rounds)
        ]
        sides[depth, batch, beams] = Side(partial(_step, device, states, depth))
    seconds = _timed(sides, options)
    return [
        {
            **{name: facts[name] for name in ("items", "levels", "codes")},
            "depth": depth,
            "batch": batch,
            "beams": beams,
            "children": trie.branching[depth],
            "ms": _ms(seconds[depth, batch, beams]),
        }
        for depth, batch, beams in sides
    ]


def _step(
    device: DeviceTrie, states: list[torch.Tensor], depth: int, number: int, **limits: Any
) -> None:
    device.candidates(states[number], depth, **limits)


def _timed(sides: Mapping[Any, Side], options: Options) -> dict[Any, list[float]]:
    """As `interleaved`, each side once right before it is timed."""
    names = {str(key): key for key in sides}
    named = {name: replace(sides[key], prepare=sides[key].run) for name, key in names.items()}
    times = interleaved(named, options.rounds, seed=options.seed)
    return {names[name]: found.cpu for name, found in times.items()}


def _ms(seconds: list[float]) -> dict[str, float]:
    return spread([1000 * s for s in seconds], 4)


def _filters(trie: ItemTrie, options: Options, batch: int, beams: int) -> list[Row]:
    """Time to make a mask, to find it again, and of a search's steps under it."""
    rng = np.random.default_rng(options.seed)
    count, device, rows = trie.num_items, DeviceTrie.of(trie), []
    brands = pa.array([f"brand {i}" for i in range(BRANDS)])
    brand = pa.DictionaryArray.from_arrays(pa.array(rng.integers(0, BRANDS, count)), brands)
    table = pa.table({"brand": brand.cast(pa.string()), "price": rng.random(count)})
    columns = Attributes(table, trie.row_items)
    start = time.perf_counter()
    for name in table.column_names:
        columns.column(name)
    read = time.perf_counter() - start
    for share in options.shares:
        cache = FilterCache(trie, columns)
        start = time.perf_counter()
        cache.prepare()  # as a service does before it answers
        prepared = time.perf_counter() - start
        wanted = [
            {
                "must": [{"key": "price", "range": {"gte": i / 100, "lt": i / 100 + share}}],
                "must_not": [{"key": "brand", "any": ["brand 7", f"brand {i + 8}"]}],
            }
            for i in range(max(batch, options.rounds))
        ]
        first, again = _mask_times(cache, wanted)
        masks = [cache.mask(expression) for expression in wanted[:batch]]
        gone = [rng.choice(trie.num_rows, EXCLUDED, replace=False) for _ in masks]
        total = _filtered_steps(trie, device, masks, gone, options, beams)
        rows.append(
            {
                "items": count,
                "share": share,
                "eligible": masks[0].eligible,
                "read_s": round(read, 3),
                "prepare_s": round(prepared, 3),
                "first_ms": _ms(first),
                "again_ms": _ms(again),
                "bytes": masks[0].nbytes,
                "steps_ms": {kind: _ms(total[kind]) for kind in KINDS},
                "cost": {kind: ratio(total[kind], total["none"]) for kind in KINDS[1:]},
            }
        )
    return rows


def _mask_times(
    cache: FilterCache, wanted: list[dict[str, Any]]
) -> tuple[list[float], list[float]]:
    """Seconds to make each filter's mask, and to find it again."""
    first, again = [], []
    for expression in wanted:
        start = time.process_time()
        cache.mask(expression)
        first.append(time.process_time() - start)
        cache.mask(expression)
        start = time.process_time()
        cache.mask(expression)
        again.append(time.process_time() - start)
    return first, again


def _filtered_steps(
    trie: ItemTrie,
    device: DeviceTrie,
    masks: list[RowMask],
    gone: list[NDArray[np.int64]],
    options: Options,
    beams: int,
) -> dict[str, list[float]]:
    """Seconds of a search's steps, by `KINDS`: no mask, one for all, one each, one and exclusions.

    Args:
        trie: the catalog.
        device: the same.
        masks: one a request.
        gone: rows that each request must not get.
        options: rounds and seed.
        beams: K.
    """
    batch, one = len(masks), [masks[0]] * len(masks)
    limits: dict[str, dict[str, Any]] = {
        "none": {},
        "one": {"allowed": device.allow(one)},
        "different": {"allowed": device.allow(masks)},
        "excluded": {"allowed": device.allow(one), "excluded": device.pad_excluded(gone, one)},
    }
    states = [
        [
            _frontier(trie, depth, batch, beams, np.random.default_rng([options.seed, r]))
            for r in range(options.rounds)
        ]
        for depth in range(trie.num_levels)
    ]
    sides = {
        (kind, depth): Side(partial(_step, device, states[depth], depth, **limits[kind]))
        for kind in KINDS
        for depth in range(trie.num_levels)
    }
    seconds = _timed(sides, options)
    return {
        kind: np.sum([seconds[kind, d] for d in range(trie.num_levels)], axis=0).tolist()
        for kind in KINDS
    }


def _peers(
    trie: ItemTrie, tokens: NDArray[np.int32], options: Options, batch: int, beams: int
) -> list[Row]:
    """A step of each, by depth, at one size; depth 0 has one beam and is left out."""
    rng, device = np.random.default_rng(options.seed), DeviceTrie.of(trie)
    start = time.process_time()
    nested = _nested(tokens)
    dict_s = time.process_time() - start
    start = time.process_time()
    table = _SortedTable(tokens)
    table_s = time.process_time() - start
    dict_bytes = _bytes(nested)
    ways: dict[str, Callable[[list[int]], list[int]]] = {
        "nested dict": partial(_follow, nested),
        "sorted table": table.allowed,
    }
    processors = {
        name: PrefixConstrainedLogitsProcessor(partial(_allowed, way), beams)
        for name, way in ways.items()
    }
    scores = torch.from_numpy(
        rng.standard_normal((batch * beams, int(tokens.max()) + 1)).astype(np.float32)
    )
    rows = []
    for depth in range(1, trie.num_levels):
        states = [
            _frontier(trie, depth, batch, beams, np.random.default_rng([options.seed, r]))
            for r in range(options.rounds)
        ]
        sent = [_inputs(trie, depth, s) for s in states]
        for name, processor in processors.items():
            _compare(device, depth, states[0], processor(sent[0], scores), name)
        sides = {"trie": Side(partial(_step, device, states, depth))}
        for name, processor in processors.items():
            run = partial(_process, processor, sent, scores)
            sides[name] = Side(run, rounds=min(5, options.rounds))
        seconds = _timed(sides, options)
        rows += [
            {
                "items": trie.num_items,
                "batch": batch,
                "beams": beams,
                "depth": depth,
                "way": way,
                "ms": _ms(values),
                "times_trie": ratio(values, seconds["trie"]),
                "build_s": {"nested dict": dict_s, "sorted table": table_s}.get(way),
                "bytes_per_item": {
                    "nested dict": dict_bytes / trie.num_items,
                    "trie": trie.nbytes / trie.num_items,
                    "sorted table": table.nbytes / trie.num_items,
                }[way],
            }
            for way, values in seconds.items()
        ]
    return rows


def _allowed(way: Callable[[list[int]], list[int]], request: int, sent: torch.Tensor) -> list[int]:
    """What a processor asks for: `sent` is a prompt of one token, and the prefix."""
    return way(sent[1:].tolist())


def _process(
    processor: Any, sent: list[torch.Tensor], scores: torch.Tensor, number: int
) -> torch.Tensor:
    masked: torch.Tensor = processor(sent[number], scores)
    return masked


def _bytes(nested: dict[int, Any]) -> int:
    """Of dicts of dicts, and of the integers in them that Python does not share."""
    total, nodes = 0, [nested]
    while nodes:
        node = nodes.pop()
        total += sys.getsizeof(node) + sum(sys.getsizeof(token) for token in node if token > 256)
        nodes += node.values()
    return total


def _nested(tokens: NDArray[np.int32]) -> dict[int, Any]:
    """The catalog as dicts of dicts, which is what users of the processor write."""
    root: dict[int, Any] = {}
    for sequence in tokens.tolist():
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    return root


def _follow(root: dict[int, Any], prefix: list[int]) -> list[int]:
    for token in prefix:
        root = root[token]
    return list(root)


class _SortedTable:
    """Sorted sequences; a prefix's range is found by halving, its tokens are read off there."""

    def __init__(self, tokens: NDArray[np.int32]) -> None:
        self._base = int(tokens.max()) + 1
        key = np.zeros(len(tokens), np.int64)
        for column in tokens.T:
            key = key * self._base + column
        self._keys, self._levels = np.unique(key), tokens.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        return self._keys.nbytes

    def allowed(self, prefix: list[int]) -> list[int]:
        """Tokens that may follow."""
        low = 0
        for token in prefix:
            low = low * self._base + token
        room = self._base ** (self._levels - len(prefix))
        start = bisect_left(self._keys, low * room)
        stop = bisect_left(self._keys, (low + 1) * room)
        here = self._keys[start:stop] // (room // self._base) % self._base
        tokens: list[int] = here[np.append(True, here[1:] != here[:-1])].tolist()
        return tokens


def _inputs(trie: ItemTrie, depth: int, states: torch.Tensor) -> torch.Tensor:
    """(B * W, 1 + depth) tokens that lead to the states, behind a prompt of one token."""
    place = states.flatten().numpy() - trie.depth_start[depth]
    rows = trie.rows[trie.starts_at(depth)[place], :depth].astype(np.int64)
    return torch.from_numpy(np.concatenate([np.zeros((len(rows), 1), np.int64), rows], axis=1))


def _compare(
    device: DeviceTrie, depth: int, states: torch.Tensor, masked: torch.Tensor, name: str
) -> None:
    """Raises RuntimeError unless a processor left the very tokens that the trie allows."""
    children = device.children(states, depth)
    tokens, alive = device.alphabet[children.symbols].flatten(0, 1), children.alive.flatten(0, 1)
    mine = torch.zeros_like(masked, dtype=torch.bool)
    line = torch.arange(len(mine))[:, None].expand_as(tokens)
    mine[line[alive], tokens[alive]] = True
    if not torch.equal(mine, masked > -torch.inf):
        raise RuntimeError(f"{name} allows other tokens than the trie at depth {depth}")


def _decode(trie: ItemTrie, options: Options, batch: int, beams: int) -> Row:
    """The trie's part of a whole search of a model."""
    rng, (levels, codes) = np.random.default_rng(options.seed), options.codes[0]
    vocabulary = Vocabulary.from_levels([codes] * levels)
    model = random_model(
        PRESETS[options.preset], vocabulary, device="cpu", dtype=torch.float32, seed=options.seed
    )
    rounds = min(5, options.rounds)
    prompts = [
        [rng.integers(0, levels * codes, PROMPT) for _ in range(batch)] for _ in range(rounds)
    ]
    device = DeviceTrie.of(trie)
    states = [
        [
            _frontier(trie, depth, batch, beams, np.random.default_rng([options.seed, r]))
            for depth in range(levels)
        ]
        for r in range(rounds)
    ]

    def steps(number: int) -> None:
        for depth in range(levels):
            device.candidates(states[number][depth], depth)

    sides = {
        "decode": Side(lambda number: beam_search(model, prompts[number], device, beams)),
        "steps": Side(steps),
    }
    for side in sides.values():
        side.run(0)
    times = interleaved(sides, rounds, seed=options.seed)
    seconds = {name: found.cpu for name, found in times.items()}
    percent = [100 * s / d for s, d in zip(seconds["steps"], seconds["decode"], strict=True)]
    return {
        "preset": options.preset,
        "items": trie.num_items,
        "batch": batch,
        "beams": beams,
        "prompt_tokens": PROMPT,
        "decode_ms": _ms(seconds["decode"]),
        "steps_ms": _ms(seconds["steps"]),
        "percent": spread(percent),
    }
