"""KV memory of beam search: free text against Hugging Face, and item search against greedy's.

    python benchmarks/text_memory.py

Free text: 500 tokens after a prompt of 100, 15 beams, all 15 returned, on random models from peaked
to flat (not uniform: there all scores are equal but for rounding). The same texts must come out of
Hugging Face's beam search and of ours with and without collection. Bytes are those of the tensors:
Hugging Face's from the cache that `generate` returns, ours from the buffers that the pool lent, at
their peak. Item search: the slots that K = 20 and 50 hold. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from environment import environment
from rich.console import Console
from rich.table import Table

from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.models.cache import CachePool, SlotCache
from recsys.models.tree_forward import TreeModel
from recsys.testing import huggingface_slots, random_catalog, tiny_model
from recsys.text import BeamSettings, generate_text

VOCABULARY, HIDDEN, LAYERS = 1000, 128, 3
# Standard deviation of the weights: the smaller, the nearer to uniform.
MODELS = {"peaked": 0.3, "middling": 0.2, "flat": 0.1}
EVERY = (1, 4, 8, 16, 32)
ITEMS, LEVELS = 12_000, 4


class CountedPool(CachePool):
    """A pool that knows how many bytes were out at once, and how the last cache was laid out."""

    peak = out = prompt = slots = 0

    @contextmanager
    def lend(self, batch: int, prompt: int, nodes: int) -> Iterator[SlotCache]:
        """As `CachePool.lend`."""
        with super().lend(batch, prompt, nodes) as cache:
            size = cache.buffer.numel() * cache.buffer.element_size()
            self.out += size
            self.peak = max(self.peak, self.out)
            self.prompt, self.slots = cache.prompt, cache.slots
            try:
                yield cache
            finally:
                self.out -= size


def counted(model: TreeModel) -> CountedPool:
    """Give `model` a fresh pool that counts."""
    pool = CountedPool(model.config, model.dtype, model.device)
    model.pool = pool
    return pool


def cache_bytes(cache: object) -> int:
    """Bytes of the keys and values in a Hugging Face cache."""
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors)


def main() -> None:
    """Measure, print tables and one JSON line; exit status 1 if any text differs."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--beams", type=int, default=15)
    arguments.add_argument("--tokens", type=int, default=500)
    arguments.add_argument("--prompt", type=int, default=100)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    texts = [row for kind in MODELS for row in free_text(kind, args)]
    items = [item_search(beams) for beams in (20, 50)]
    show(texts, items, args)
    result = {
        "benchmark": "text_memory",
        "beams": args.beams,
        "tokens": args.tokens,
        "prompt": args.prompt,
        "free_text": texts,
        "item_search": items,
        **environment(),
    }
    print(json.dumps(result))
    sys.exit(not all(row["equal"] for row in texts))


def free_text(kind: str, args: argparse.Namespace) -> list[dict]:
    """One row a way of decoding."""
    length = args.prompt + args.tokens
    model = tiny_model(
        "llama",
        VOCABULARY,
        hidden=HIDDEN,
        layers=LAYERS,
        initializer_range=MODELS[kind],
        max_position_embeddings=length,
    )
    tree = TreeModel(model)
    prompt = np.random.default_rng(0).integers(1, VOCABULARY, args.prompt)
    rows = []

    def add(method: str, size: int, seconds: float, **more: object) -> None:
        rows.append(
            {"model": kind, "method": method, "kv_bytes": size, "seconds": round(seconds, 2)}
            | {"equal": True, **more}
        )

    def generate(beams: int) -> object:
        start = time.perf_counter()
        found = model.generate(
            torch.from_numpy(prompt)[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=args.tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
        )
        seconds = time.perf_counter() - start
        name = "Hugging Face, beams" if beams > 1 else "Hugging Face, greedy"
        add(name, cache_bytes(found.past_key_values), seconds)
        return found

    generate(1)
    theirs = generate(args.beams)
    text = theirs.sequences[:1]
    with torch.inference_mode():
        log_probs = model(text).logits[0, args.prompt - 1 : -1].log_softmax(-1)
    chosen = log_probs.gather(1, text[0, args.prompt :, None])
    rows[-1]["perplexity"] = round(float(chosen.mean().neg().exp()), 1)
    ways = {"no collection": None} | {f"every {every}": every for every in EVERY}
    for method, every in ways.items():
        pool = counted(tree)
        start = time.perf_counter()
        settings = BeamSettings(
            args.beams, args.tokens, num_return_sequences=args.beams, collect_every=every
        )
        found = generate_text(tree, [prompt], settings)
        seconds = time.perf_counter() - start
        add(
            method,
            pool.peak,
            seconds,
            live_slots=found.live[0] if found.collections else None,
            equal=torch.equal(found.tokens[0], theirs.sequences[:, args.prompt :]),
            score_gap=float((found.scores[0] - theirs.sequences_scores).abs().max()),
        )
    for row in rows:
        row["times_greedy"] = round(row["kv_bytes"] / rows[0]["kv_bytes"], 2)
        row["below_beams"] = round(rows[1]["kv_bytes"] / row["kv_bytes"], 2)
    return rows


def item_search(beams: int) -> dict:
    """Slots of a search for items, against a greedy search's for its prompt."""
    prompt = 200
    tree = TreeModel(tiny_model("llama", VOCABULARY, hidden=HIDDEN, layers=LAYERS))
    pool = counted(tree)
    rng = np.random.default_rng(0)
    trie = ItemTrie.build(random_catalog(rng, ITEMS, LEVELS, VOCABULARY))
    found = beam_search(tree, [rng.integers(1, VOCABULARY, prompt)], trie, beams)
    return {
        "beams": beams,
        "prompt_tokens": prompt,
        "prompt_slots": pool.prompt,
        "prompt_against_greedy": round(pool.prompt / prompt, 3),
        "live_nodes": beams * (LEVELS - 1),
        "kv_slots": found.stats[0].kv_slots,
        "allocated_slots": pool.slots,
        "huggingface_slots": huggingface_slots(prompt, LEVELS, beams),
    }


def show(texts: list[dict], items: list[dict], args: argparse.Namespace) -> None:
    """The tables."""
    console = Console(width=110)
    title = f"Free text: {args.beams} beams, {args.tokens} tokens after {args.prompt}"
    table = Table(
        "model", "method", "KV, MB", "x greedy", "below HF beams", "live", "s", "equal", title=title
    )
    for row in texts:
        table.add_row(
            row["model"],
            row["method"],
            f"{row['kv_bytes'] / 1e6:.2f}",
            f"{row['times_greedy']:.2f}",
            f"{row['below_beams']:.2f}",
            str(row.get("live_slots") or ""),
            f"{row['seconds']:.1f}",
            "yes" if row["equal"] else "NO",
            end_section=row["method"] == f"every {EVERY[-1]}",
        )
    console.print(table)
    names = [
        "K",
        "prompt",
        "its slots",
        "x greedy's",
        "live nodes",
        "KV slots",
        "allocated",
        "HF's",
    ]
    table = Table(*names, title="Item search: slots of one request")
    for row in items:
        table.add_row(*(str(value) for value in row.values()))
    console.print(table)


if __name__ == "__main__":
    main()
