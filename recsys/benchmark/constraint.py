"""The cost of the item trie: building, memory, steps and filters, and Hugging Face's processor.

Catalogs are random. Uniform codes give more prefixes than a real index of the same size, which is
the worst case for memory. A step finds the tokens that may follow B x K beams in the middle of a
search. Its counterpart is Hugging Face's `PrefixConstrainedLogitsProcessor` over a nested dict; the
tokens that both allow are compared first. Times are processor times, which other work on the
machine changes least. Every step runs once before it is timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed
from recsys.constraint.transitions import DeviceTrie
from recsys.transfers import Upload

Row = dict[str, Any]

BRANDS = 1000
CODES = ((4, 256), (3, 2048))  # levels and codes of the catalogs; filters are timed on the first
SHARES = (0.001, 0.01, 0.1, 0.5)  # of the items that filters allow
REFERENCE_ROUNDS = 5  # of Hugging Face's processor, which is slow


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        items: sizes of catalogs.
        batch: B.
        beams: K.
        rounds: measurements of every side.
        reference_items: items of the catalog on which Hugging Face's processor is measured.
        seed: of everything random.
    """

    items: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    batch: int = 8
    beams: int = 70
    rounds: int = 31
    reference_items: int = 1_000_000
    seed: int = 0

    @property
    def parts(self) -> int:
        """Number of calls of `advance`."""
        return len(self.items) * (len(CODES) + 1) + 1


def measure(options: Options, advance: Callable[[], object] = lambda: None) -> Row:
    """All parts, as lists of plain rows: `build`, `step`, `filter` and `huggingface`.

    Args:
        options: what is measured.
        advance: called after each part.
    """
    found: dict[str, Any] = {"build": [], "step": [], "filter": []}
    # glibc gives memory back to the system until a block of this size has been freed once.
    np.ones(31 << 20, np.uint8)
    for count in options.items:
        for levels, codes in CODES:
            trie, row = _build(_draw_tokens(options.seed, count, levels, codes))
            row = {"items": count, "levels": levels, "codes": codes, **row}
            found["build"].append(row)
            found["step"] += _measure_steps(trie, row, options)
            advance()
            if (levels, codes) == CODES[0]:
                found["filter"] += _measure_filters(trie, options)
                advance()
            del trie
    found["huggingface"] = _measure_huggingface(options)
    advance()
    return {"options": vars(options), **found}


def _draw_tokens(seed: int, count: int, levels: int, codes: int) -> NDArray[np.int32]:
    """(count, levels) uniform codes as tokens; each level has tokens of its own."""
    found = np.random.default_rng(seed).integers(0, codes, (count, levels), dtype=np.int32)
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


def _draw_states(trie: ItemTrie, depth: int, options: Options) -> list[torch.Tensor]:
    """For each round (B, W) states at `depth`, ascending: prefixes of random rows."""
    found = []
    starts = trie.starts_at(depth)
    shape = (options.batch, min(options.beams, trie.width(depth, options.beams)))
    for number in range(options.rounds):
        rows = np.random.default_rng([options.seed, number]).integers(0, trie.num_rows, shape)
        place = np.searchsorted(starts, rows.astype(starts.dtype), side="right") - 1
        found.append(torch.from_numpy(np.sort(place + trie.depth_start[depth], axis=1)))
    return found


def _measure_steps(trie: ItemTrie, about: Row, options: Options) -> list[Row]:
    """Time of a step at each depth."""
    device = DeviceTrie.of(trie)
    sides = {
        str(depth): Side(partial(_step, device, _draw_states(trie, depth, options), depth))
        for depth in range(trie.num_levels)
    }
    catalog = {name: about[name] for name in ("items", "levels", "codes")}
    return [
        {**catalog, "depth": int(depth), "children": trie.branching[int(depth)], "ms": _ms(seconds)}
        for depth, seconds in _time(sides, options).items()
    ]


def _step(
    device: DeviceTrie, states: list[torch.Tensor], depth: int, number: int, **limits: Any
) -> None:
    device.candidates(states[number], depth, **limits)


def _time(sides: Mapping[str, Side], options: Options) -> dict[str, list[float]]:
    """Processor seconds of each side, which runs once right before it is timed."""
    twice = {name: replace(side, prepare=side.run) for name, side in sides.items()}
    times = time_interleaved(twice, options.rounds, seed=options.seed)
    return {name: found.cpu for name, found in times.items()}


def _ms(seconds: list[float]) -> dict[str, float]:
    return summarize([1000 * s for s in seconds], 4)


def _measure_filters(trie: ItemTrie, options: Options) -> list[Row]:
    """Time to make a mask, to find it in the cache, and of a search's steps with it."""
    rng = np.random.default_rng(options.seed)
    count, device = trie.num_items, DeviceTrie.of(trie)
    brands = pa.array([f"brand {i}" for i in range(BRANDS)])
    brand = pa.DictionaryArray.from_arrays(pa.array(rng.integers(0, BRANDS, count)), brands)
    table = pa.table({"brand": brand.cast(pa.string()), "price": rng.random(count)})
    columns = Attributes(table, trie.row_items)
    for name in table.column_names:
        columns.column(name)
    rows = []
    for share in SHARES:
        cache = FilterCache(trie, columns)
        cache.prepare()  # as a service does before it answers
        wanted = [
            {
                "must": [{"key": "price", "range": {"gte": i / 100, "lt": i / 100 + share}}],
                "must_not": [{"key": "brand", "any": ["brand 7", f"brand {i + 8}"]}],
            }
            for i in range(max(options.batch, options.rounds))
        ]
        first, again = _time_masks(cache, wanted)
        mask = cache.mask(wanted[0])
        plain, filtered = _time_filtered_steps(device, mask, options)
        rows.append(
            {
                "items": count,
                "share": share,
                "eligible": mask.eligible,
                "first_ms": _ms(first),
                "again_ms": _ms(again),
                "bytes": mask.nbytes,
                "plain_ms": _ms(plain),
                "filtered_ms": _ms(filtered),
                "ratio": compare_times(filtered, plain),
            }
        )
    return rows


def _time_masks(cache: FilterCache, wanted: list[Row]) -> tuple[list[float], list[float]]:
    """Seconds to make each filter's mask, and to find it in the cache."""
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


def _time_filtered_steps(
    device: DeviceTrie, mask: RowMask, options: Options
) -> tuple[list[float], list[float]]:
    """Seconds of all steps of a search, without and with a mask for every request."""
    trie = device.source
    upload = Upload(device.device)
    allowed = Allowed.of(trie, upload, [mask] * options.batch)
    upload.send()
    limits: list[dict[str, Any]] = [{}, {"allowed": allowed}]
    depths = range(trie.num_levels)
    states = [_draw_states(trie, depth, options) for depth in depths]
    sides = {
        f"{kind} {depth}": Side(partial(_step, device, states[depth], depth, **limits[kind]))
        for kind in range(2)
        for depth in depths
    }
    seconds = _time(sides, options)
    plain, filtered = (
        np.sum([seconds[f"{kind} {depth}"] for depth in depths], axis=0).tolist()
        for kind in range(2)
    )
    return plain, filtered


def _measure_huggingface(options: Options) -> list[Row]:
    """A step of the trie and of Hugging Face's processor at each depth with more than one beam."""
    tokens = _draw_tokens(options.seed, options.reference_items, *CODES[0])
    trie = ItemTrie.build(tokens)
    device = DeviceTrie.of(trie)
    start = time.process_time()
    nested = nest(tokens)
    dict_s = time.process_time() - start
    processor = PrefixConstrainedLogitsProcessor(
        lambda _, sent: follow(nested, sent[1:].tolist()), options.beams
    )
    shape = (options.batch * options.beams, int(tokens.max()) + 1)
    scores = torch.from_numpy(
        np.random.default_rng(options.seed).standard_normal(shape).astype(np.float32)
    )
    rows = []
    for depth in range(1, trie.num_levels):
        states = _draw_states(trie, depth, options)
        sent = [_lead_to(trie, depth, s) for s in states]
        compare(device, depth, states[0], processor(sent[0], scores))
        sides = {
            "trie": Side(partial(_step, device, states, depth)),
            "nested dict": Side(
                partial(_process, processor, sent, scores),
                rounds=min(REFERENCE_ROUNDS, options.rounds),
            ),
        }
        seconds = _time(sides, options)
        rows.append(
            {
                "items": trie.num_items,
                "depth": depth,
                "trie_ms": _ms(seconds["trie"]),
                "dict_ms": _ms(seconds["nested dict"]),
                "ratio": compare_times(seconds["nested dict"], seconds["trie"]),
                "dict_build_s": round(dict_s, 2),
                "dict_bytes_per_item": round(_bytes(nested) / trie.num_items, 1),
                "trie_bytes_per_item": round(trie.nbytes / trie.num_items, 1),
            }
        )
    return rows


def _process(
    processor: Any, sent: list[torch.Tensor], scores: torch.Tensor, number: int
) -> torch.Tensor:
    masked: torch.Tensor = processor(sent[number], scores)
    return masked


def _bytes(nested: dict[int, Any]) -> int:
    """Bytes of nested dicts, and of the integers in them that Python does not share."""
    total, nodes = 0, [nested]
    while nodes:
        node = nodes.pop()
        total += sys.getsizeof(node) + sum(sys.getsizeof(token) for token in node if token > 256)
        nodes += node.values()
    return total


def nest(tokens: NDArray[np.int32]) -> dict[int, Any]:
    """The catalog as dicts of dicts, which is what users of the processor write."""
    root: dict[int, Any] = {}
    for sequence in tokens.tolist():
        node = root
        for token in sequence:
            node = node.setdefault(token, {})
    return root


def follow(root: dict[int, Any], prefix: list[int]) -> list[int]:
    """Tokens that may follow a prefix."""
    for token in prefix:
        root = root[token]
    return list(root)


def _lead_to(trie: ItemTrie, depth: int, states: torch.Tensor) -> torch.Tensor:
    """(B * W, 1 + depth) tokens that lead to the states, behind a prompt of one token."""
    place = states.flatten().numpy() - trie.depth_start[depth]
    rows = trie.rows[trie.starts_at(depth)[place], :depth].astype(np.int64)
    return torch.from_numpy(np.concatenate([np.zeros((len(rows), 1), np.int64), rows], axis=1))


def compare(device: DeviceTrie, depth: int, states: torch.Tensor, masked: torch.Tensor) -> None:
    """Check that the processor left exactly the tokens that the trie allows.

    Raises:
        RuntimeError: it did not.
    """
    children = device.children(states, depth)
    tokens, alive = device.alphabet[children.symbols].flatten(0, 1), children.alive.flatten(0, 1)
    mine = torch.zeros_like(masked, dtype=torch.bool)
    line = torch.arange(len(mine))[:, None].expand_as(tokens)
    mine[line[alive], tokens[alive]] = True
    if not torch.equal(mine, masked > -torch.inf):
        raise RuntimeError(f"the processor allows other tokens than the trie at depth {depth}")
