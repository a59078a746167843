"""What the stress programs share: a bundle to serve, and a store that is full."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import torch

from recsys.models.checkpoint import build
from recsys.serving.stores import open_store
from recsys.serving.stores.records import Event, Served, now_ms
from recsys.serving.stores.served import SERVED_KEPT
from recsys.vocabulary import Vocabulary

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[1] / "suites"))

import toy_bundle
from measuring import environment as environment

ITEMS, CODES = 2_000, 16


def write_bundle(path: Path, seed: int = 0) -> None:
    """Write a bundle of `ITEMS` items whose model has random weights."""
    torch.manual_seed(seed)
    levels = (CODES,) * 3
    flat = np.random.default_rng(0).choice(CODES**3, ITEMS, replace=False)
    toy_bundle.write_bundle(
        path,
        toy_bundle.items_table(
            [f"B{i:04d}" for i in range(ITEMS)],
            [f"Thing no. {i}" for i in range(ITEMS)],
            price=[float(i % 100) for i in range(ITEMS)],
            tags=[["tag"]] * ITEMS,
        ),
        np.stack(np.unravel_index(flat, levels), axis=1).astype(np.int32),
        levels,
        target=build("tiny", Vocabulary.from_levels(levels)),
        prompts='{"max_items": 20, "block": 5}',
    )


def some_item(rng: random.Random) -> str:
    """An item of such a bundle."""
    return f"B{rng.randrange(ITEMS):04d}"


def fill_store(path: Path) -> None:
    """Make a store as full as figures read it, with a user `busy` whose events do not count."""
    rng, store, now, part = random.Random(0), open_store(path), now_ms(), 5_000
    database = store.history._database
    with database.bulk(database.begin) as connection:
        for first in range(0, SERVED_KEPT, part):
            answers = [
                Served(f"r{n}", f"u{n % 50_000}", "m", tuple(map(some_item, [rng] * 20)), now)
                for n in range(first, first + part)
            ]
            events = [
                Event(f"{kind} {n}", str(one.user), one.items[0], kind, now, None, f"r{n}", "")
                for n, one in enumerate(answers, first)
                for kind in ("view", "click")
            ]
            events += [Event(None, "busy", "B0001", "impression", now)] * part
            store.served.insert(connection, answers)
            store.history.insert(connection, [events])
        connection.exec_driver_sql("COMMIT")
    store.close()
