"""A bundle of a small random model, which tests write in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from oracles import PATIENCE_S, tiny_model

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, DRAFT, KIND, PROMPTS, RETRIEVAL, TARGET
from recsys.catalog import Catalog
from recsys.models.checkpoint import save_model
from recsys.vocabulary import Vocabulary

TINY_RUN = {  # settings of a run of seconds
    "sasrec": {"epochs": 1, "min_steps": 0},
    "target": {
        "architecture": {"hidden_size": 16, "intermediate_size": 32, "layers": 1, "heads": 1},
        "epochs": 1,
        "min_steps": 0,
        "eval_users": 20,
    },
    "evaluate": {"ks": [1, 10], "users": 20},
}


def counted_codes(items: int, levels: Sequence[int]) -> np.ndarray:
    """(items, L) codes of items that are counted through, as the digits of a number."""
    return np.stack(np.unravel_index(np.arange(items), levels), axis=1).astype(np.int32)


def items_table(
    ids: Sequence[str], titles: Sequence[str] | None = None, **columns: Any
) -> pa.Table:
    """Items without texts, with these attributes."""
    titles = list(ids if titles is None else titles)
    return pa.table({"item_id": list(ids), "title": titles, "text": [""] * len(ids), **columns})


def log_probs(recommender: Any, history: Sequence[int]) -> np.ndarray:
    """(items,) log p of every item after a history, by one plain forward an item."""
    vocabulary, codes = recommender.bundle.vocabulary, recommender.catalog.codes
    prompt = [*vocabulary.prefix, *vocabulary.encode(codes[history]).reshape(-1).tolist()]
    answers = torch.tensor(vocabulary.encode(codes))
    tokens = torch.cat([torch.tensor(prompt).expand(len(codes), -1), answers], dim=1)
    with torch.inference_mode():
        logits = recommender.model(tokens).logits[:, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(2, answers[:, :, None]).sum((1, 2)).numpy()


def write_bundle(
    path: Path,
    table: pa.Table,
    codes: np.ndarray,
    levels: Sequence[int],
    *,
    target: Any = None,
    draft: Any = None,
    retrieval: Any = None,
    prompts: str = '{"max_items": 6, "block": 2}',
    extra: Callable[[Path], object] = lambda folder: None,
    merge: bool = True,
) -> Path:
    """Write a bundle; the target is a tiny model of the vocabulary if none is given.

    `extra` writes further parts into the folder; adapters are merged into weights if `merge`.
    """
    vocabulary = Vocabulary.from_levels(levels)
    with write_artifact(path, KIND) as folder:
        target = tiny_model(vocabulary=vocabulary.size) if target is None else target
        save_model(target, folder / TARGET, merge=merge)
        if draft is not None:
            save_model(draft, folder / DRAFT)
        (folder / CATALOG).mkdir()
        Catalog(table, codes).save(folder / CATALOG)
        vocabulary.save(folder)
        (folder / PROMPTS).write_text(prompts)
        if retrieval is not None:
            (folder / RETRIEVAL).mkdir()
            retrieval.save(folder / RETRIEVAL)
        extra(folder)
    return path


def code(response: Any) -> tuple[int, str]:
    """Status and code of a problem."""
    return response.status_code, response.json()["code"]


def wait_until_ready(client: Any) -> None:
    """Wait for a service of this process, which loads its bundle beside the server."""
    end = time.monotonic() + PATIENCE_S
    while client.get("/health/ready").status_code != 200:
        assert time.monotonic() < end, "the service did not load the bundle"
        time.sleep(0.05)
