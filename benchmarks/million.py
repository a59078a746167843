"""Make a catalog of a million items with users, and train a target and a draft on it.

    python benchmarks/million.py
    python benchmarks/speculation.py var/bundles/million var/datasets/million --patch-nodes 800

Codes are skewed as learned ones are (V = 256, four levels): which codes follow a code, and how
often, is a Zipf law of the code before. Users walk the same tree: the next item shares two codes
with a recent one, or one, or follows the last one's first code, or none of it. So there is
something to learn at every level, though most items are never seen.
"""

from __future__ import annotations

import argparse

import numpy as np
import pyarrow as pa

from recsys.artifacts import Workspace, write_artifact
from recsys.config import Settings
from recsys.constraint import ItemTrie
from recsys.dataset import Dataset
from recsys.interactions import Interactions
from recsys.pipeline import Context, run
from recsys.splits import LABELS, TRAIN

V, LEVELS = 256, 4
SECTIONS = ("ids", "target", "draft", "teacher", "bundle")
SKEW = (0.8, 1.0, 1.1, 1.2)  # Zipf exponents by level
# Chance that the next item keeps two codes of a recent one, keeps one, follows the last one's.
KEEP_TWO, KEEP_ONE, FOLLOW = 0.35, 0.25, 0.2


def main() -> None:
    """Write the data set, then run the stages."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--items", type=int, default=1_000_000)
    arguments.add_argument("--users", type=int, default=40_000)
    arguments.add_argument("--config", default="configs/million.yaml")
    arguments.add_argument("--set", action="append", dest="overrides", default=[])
    args = arguments.parse_args()
    settings = Settings.load(args.config, args.overrides, known=SECTIONS)
    context = Context.of(settings)
    config = {"items": args.items, "users": args.users, "seed": settings.seed}
    dataset = make(args.items, args.users, np.random.default_rng(settings.seed))
    path = Workspace.of(settings.name).dataset
    with write_artifact(path, "dataset", config=config) as folder:
        dataset.save(folder)
    run(context, ("ids", "target", "draft", "bundle"))


def make(items: int, users: int, rng: np.random.Generator) -> Dataset:
    """A data set with imported codes: `users` users of 6 to 20 events, the last one a test."""
    weights = laws(rng)
    codes = catalog(items, weights, rng)
    events, lengths = walks(codes, weights, users, rng)
    user = np.repeat(np.arange(users, dtype=np.int32), lengths)
    place = np.arange(len(user)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    left = np.repeat(lengths, lengths) - place
    split = np.full(len(user), TRAIN, np.uint8)
    split[left == 2] = LABELS["valid"]
    split[left == 1] = LABELS["test"]
    ids = np.char.add("i", np.arange(items).astype(str))
    table = pa.table({"item_id": ids, "title": ids, "text": [""] * items})
    interactions = Interactions(
        user,
        events,
        place.astype(np.int64),
        np.full(len(user), np.nan, np.float32),
        np.char.add("u", np.arange(users).astype(str)),
        ids,
        has_time=False,
    )
    return Dataset(interactions, split, table, codes)


def laws(rng: np.random.Generator) -> list[np.ndarray]:
    """(previous code, code) probabilities of each level; level 1 has one law."""
    found = []
    for level, skew in enumerate(SKEW):
        zipf = np.arange(1, V + 1) ** -skew
        rows = [rng.permutation(zipf / zipf.sum()) for _ in range(1 if level == 0 else V)]
        found.append(np.stack(rows))
    return found


def catalog(items: int, weights: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """(items, 4) distinct codes drawn from the laws."""
    found = np.zeros((0, LEVELS), np.int32)
    while len(found) < items:
        draws = np.zeros((2 * items, LEVELS), np.int32)
        before = np.zeros(2 * items, np.int64)
        for level, law in enumerate(weights):
            cumulative = law.cumsum(1)
            shift = cumulative + np.arange(len(law))[:, None]  # rows one behind the other
            point = before + rng.random(2 * items) * cumulative[before, -1]
            code = np.searchsorted(shift.ravel(), point, side="right") % V
            draws[:, level] = before = code
        found = np.unique(np.concatenate([found, draws]), axis=0)
    return rng.permutation(found)[:items]


def walks(
    codes: np.ndarray, weights: list[np.ndarray], users: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Items of all users, end to end, and how many each has."""
    trie = ItemTrie.build(codes)
    follows = rng.permutation(V)
    weight = np.ones(trie.num_states)
    parent = np.repeat(np.arange(len(trie.first_child) - 1), np.diff(trie.first_child))
    for depth in range(1, LEVELS + 1):
        here = np.arange(trie.depth_start[depth], trie.depth_start[depth + 1])
        before = (
            np.maximum(trie.token[parent[here - 1]], 0) if depth > 1 else np.zeros(len(here), int)
        )
        weight[here] = weights[depth - 1][before, trie.token[here]]
    cumulative = np.append(0, weight.cumsum())
    first_of = np.full(V, -1)
    first_of[trie.token[1 : trie.depth_start[2]]] = np.arange(1, trie.depth_start[2])
    lengths = rng.integers(6, 21, users)
    longest = int(lengths.max())
    states = np.zeros((longest, users, LEVELS), np.int64)  # prefixes of each step's item
    for step in range(longest):
        at = np.zeros(users, np.int64)
        if step:
            kind = rng.random(users)
            recent = states[np.maximum(0, step - rng.integers(1, 4, users)), np.arange(users)]
            followed = first_of[follows[trie.token[states[step - 1, :, 0]]]]
            at = np.where(kind < KEEP_TWO, recent[:, 1], at)
            at = np.where((kind >= KEEP_TWO) & (kind < KEEP_TWO + KEEP_ONE), recent[:, 0], at)
            follow = (kind >= KEEP_TWO + KEEP_ONE) & (kind < KEEP_TWO + KEEP_ONE + FOLLOW)
            at = np.where(follow & (followed >= 0), followed, at)
            depth = np.searchsorted(trie.depth_start, at, side="right") - 1
            for d in range(2):
                known = depth > d
                states[step, known, d] = (
                    recent[known, d]
                    if d
                    else np.where(depth[known] == 1, at[known], recent[known, 0])
                )
        for level in range(LEVELS):
            go = np.searchsorted(trie.depth_start, at, side="right") - 1 == level
            low, high = (
                cumulative[trie.first_child[at[go]]],
                cumulative[trie.first_child[at[go] + 1]],
            )
            point = low + rng.random(int(go.sum())) * (high - low)
            child = np.searchsorted(cumulative, point, side="right") - 1
            at[go] = np.clip(child, trie.first_child[at[go]], trie.first_child[at[go] + 1] - 1)
            states[step, go, level] = at[go]
    rows = trie.row_start[states[..., -1]]
    items = trie.row_items[trie.row_item_start[rows]]  # rows are distinct
    return np.concatenate([items[: lengths[u], u] for u in range(users)]), lengths


if __name__ == "__main__":
    main()
