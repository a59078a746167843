"""The cost of the item trie: building, memory, steps and filters.

    OMP_NUM_THREADS=1 python benchmarks/constraint.py --out var/reports/constraint

Catalogs are random. Uniform codes give more prefixes than a real index of the same size, which is
the worst case for memory. A step finds the tokens that may follow B x K beams in the middle of a
search. Times are processor times, which other work on the machine changes least. Every step runs
once before it is timed. `decode.py` has searches as a whole, and those of Hugging Face.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from measuring import Row, Side, compare_times, milliseconds, time_interleaved
from numpy.typing import NDArray
from reporting import Report, Table, begin, publish, read_options

from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.restrictions import Allowed
from recsys.constraint.transitions import DeviceTrie
from recsys.progress import say
from recsys.transfers import Upload

CODES = ((4, 256), (3, 2048))  # levels and codes of the catalogs; filters are timed on the first
SHARES = (0.001, 0.01, 0.1, 0.5)  # of the items that filters allow
BRANDS = 1000


@dataclass(frozen=True)
class Options:
    """What is measured.

    Attributes:
        items: sizes of catalogs.
        batch: B.
        beams: K.
        rounds: measurements of every side.
        seed: of everything random.
    """

    items: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    batch: int = 8
    beams: int = 70
    rounds: int = 31
    seed: int = 0


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print tables and one JSON line."""
    options, run = read_options(Options, __doc__, {"items": (2_000, 20_000), "rounds": 2}, argv)
    document = begin("constraint", options, run) | measure(options)
    publish(document, report(document), run.out)


def measure(options: Options) -> Row:
    """Lists of plain rows: `trie`, one for each catalog, and `filter`."""
    parts: dict[str, list[Row]] = {"trie": [], "filter": []}
    # glibc gives memory back to the system until a block of this size has been freed once.
    np.ones(31 << 20, np.uint8)
    for count, (levels, codes) in product(options.items, CODES):
        say(f"{count:,} items of {levels} x {codes} codes ...")
        tokens = _draw_tokens(options.seed, count, levels, codes)
        start = time.process_time()
        trie = ItemTrie.build(tokens)
        row = {"items": count, "levels": levels, "codes": codes}
        row["build_s"] = round(time.process_time() - start, 3)
        row["bytes_per_item"] = round(trie.nbytes / trie.num_items, 1)
        device = DeviceTrie.of(trie)
        sides = {str(depth): _steps(device, depth, options) for depth in range(levels)}
        row["step_ms"] = [milliseconds(s, 4) for s in _time(sides, options).values()]
        parts["trie"].append(row)
        if (levels, codes) == CODES[0]:
            parts["filter"] += _measure_filters(device, options)
    return parts


def _draw_tokens(seed: int, count: int, levels: int, codes: int) -> NDArray[np.int32]:
    """(count, levels) uniform codes as tokens; each level has tokens of its own."""
    tokens = np.random.default_rng(seed).integers(0, codes, (count, levels), dtype=np.int32)
    tokens += np.arange(levels, dtype=np.int32) * codes
    return tokens


def _draw_states(trie: ItemTrie, depth: int, options: Options) -> list[torch.Tensor]:
    """For each round (B, W) states at `depth`, ascending: prefixes of random rows."""
    states = []
    starts = trie.starts_at(depth)
    shape = (options.batch, min(options.beams, trie.width(depth, options.beams)))
    for number in range(options.rounds):
        rows = np.random.default_rng([options.seed, number]).integers(0, trie.num_rows, shape)
        within = np.searchsorted(starts, rows.astype(starts.dtype), side="right") - 1
        states.append(torch.from_numpy(np.sort(within + trie.depth_start[depth], axis=1)))
    return states


def _steps(device: DeviceTrie, depth: int, options: Options, **limits: Any) -> Side:
    """A step at a depth, from other states in each round."""
    states = _draw_states(device.source, depth, options)
    return Side(lambda number: device.children(states[number], depth, **limits))


def _time(sides: Mapping[str, Side], options: Options) -> dict[str, list[float]]:
    """Processor seconds of each side, which runs once right before it is timed."""
    twice = {name: replace(side, prepare=side.run) for name, side in sides.items()}
    times = time_interleaved(twice, options.rounds, seed=options.seed)
    return {name: taken.cpu for name, taken in times.items()}


def _measure_filters(device: DeviceTrie, options: Options) -> list[Row]:
    """Time to make a mask, to find it in the cache, and of a search's steps with it."""
    trie, rng = device.source, np.random.default_rng(options.seed)
    count = trie.num_items
    brands = rng.integers(0, BRANDS, count).astype(str)
    columns = Attributes(pa.table({"brand": brands, "price": rng.random(count)}), trie.row_items)
    depths = range(trie.num_levels)
    rows = []
    for share in SHARES:
        cache = FilterCache(trie, columns)
        filters = [
            {
                "must": [{"key": "price", "range": {"gte": i / 100, "lt": i / 100 + share}}],
                "must_not": [{"key": "brand", "any": ["7", f"{i + 8}"]}],
            }
            for i in range(max(options.batch, options.rounds))
        ]
        cache.mask({"must": [{"key": "price", "range": {"gte": 2}}]})  # the columns are read once
        first, again = ([_timed(cache, f) for f in filters] for _ in range(2))
        mask = cache.mask(filters[0])
        upload = Upload(device.device)
        allowed = Allowed.of(trie, upload, [mask] * options.batch)
        upload.send()
        sides = {f"plain {d}": _steps(device, d, options) for d in depths}
        sides |= {f"filtered {d}": _steps(device, d, options, allowed=allowed) for d in depths}
        seconds = _time(sides, options)
        plain, filtered = (
            np.sum([seconds[f"{kind} {d}"] for d in depths], axis=0).tolist()
            for kind in ("plain", "filtered")
        )
        rows.append(
            {
                "items": count,
                "share": share,
                "eligible": mask.eligible,
                "first_ms": milliseconds(first, 4),
                "again_ms": milliseconds(again, 4),
                "plain_ms": milliseconds(plain, 4),
                "filtered_ms": milliseconds(filtered, 4),
                "ratio": compare_times(filtered, plain),
            }
        )
    return rows


def _timed(cache: FilterCache, expression: Row) -> float:
    start = time.process_time()
    cache.mask(expression)
    return time.process_time() - start


def report(document: Row) -> Report:
    """What is shown."""
    size = f"{document['options']['batch']} x {document['options']['beams']} beams"
    tries = [
        [
            f"{row['items']:,}",
            f"{row['levels']} x {row['codes']}",
            f"{row['build_s']:.2f}",
            f"{row['bytes_per_item']:.1f}",
            " ".join(f"{step['p50']:.3f}" for step in row["step_ms"]),
        ]
        for row in document["trie"]
    ]
    names = ("first_ms", "again_ms", "plain_ms", "filtered_ms", "ratio")
    filters = [
        [
            f"{row['items']:,}",
            f"{row['eligible'] / row['items']:.2%}",
            *(f"{row[name]['p50']:.3f}" for name in names),
        ]
        for row in document["filter"]
    ]
    columns = ("items", "allowed", "made ms", "again ms", "steps ms", "filtered ms", "ratio")
    title = f"A trie, and a step of {size} by depth"
    return Report(
        [
            Table(title, ("items", "L x V", "build s", "B/item", "step ms"), tries),
            Table("Filters: a mask made and found again, and a search's steps", columns, filters),
        ]
    )


if __name__ == "__main__":
    main()
