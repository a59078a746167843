"""Global lists by one native search against passes over pruned prefixes, in one run.

    python benchmarks/global_lists.py var/bundles/beauty

Both ways complete the same beam search for histories of random items. Proven lists are compared
before times are printed: milliseconds of one thread, medians with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from recsys.decoding import Beams, beam_search, best_first, complete
from recsys.decoding.request import Search
from recsys.recommender import Recommender

HISTORIES = 30


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("bundle", type=Path)
    recommender = Recommender.load(parser.parse_args().bundle)
    torch.set_num_threads(1)
    model, trie = recommender.engine.target, recommender.trie
    rng, items = np.random.default_rng(0), trie.num_rows
    prompts = [
        recommender.encoder.encode(rng.integers(0, items, rng.integers(2, 15)))
        for _ in range(HISTORIES)
    ]
    table = Table("K", "beam search", "one native search", "proven", "passes", "proven")
    for k in (10, 20, 50, 200):
        plain = [_timed(partial(beam_search, model, [p], trie, k)) for p in prompts]
        row, proven = [str(k), _spread(plain)], []
        for is_native in (True, False):
            decoder = best_first.native_decoder if is_native else _no_decoder
            nodes = max(4096 if is_native else 2048, k * trie.num_levels + 256)
            with mock.patch.object(best_first, "native_decoder", decoder):
                timed = [
                    _timed(partial(complete, model, beams, [p], trie, max_nodes=nodes))
                    for p, (beams, _) in zip(prompts, plain, strict=True)
                ]
            proven.append([beams if beams.is_global.all() else None for beams, _ in timed])
            found = sum(beams is not None for beams in proven[-1])
            row += [_spread(timed), f"{found} of {HISTORIES}"]
        for ours, theirs in zip(*proven, strict=True):
            if ours is not None and theirs is not None:
                torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=0)
        table.add_row(*row)
    Console(width=120).print(table)


def _no_decoder(search: Search) -> None:
    return None


def _timed(call: Callable[[], Beams]) -> tuple[Beams, float]:
    start = time.thread_time()
    found = call()
    return found, time.thread_time() - start


def _spread(timed: list[tuple[Beams, float]]) -> str:
    seconds = [taken for _, taken in timed]
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    main()
