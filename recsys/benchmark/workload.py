"""Workloads: models, a catalog and users' prompts, of a bundle or random at a named size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.artifacts import MANIFEST
from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.dataset import Dataset
from recsys.errors import ConfigError
from recsys.interactions import Histories
from recsys.models.checkpoint import PRESETS, Architecture, build, load_model
from recsys.progress import say
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.vocabulary import Vocabulary

LEVELS, CODES = 4, 256
LOGITS = 3.0  # standard deviation of a random model's; peaked enough that scores rarely tie
SHAPES = {
    **PRESETS,
    "68M": Architecture(768, 3072, 2, 12),
    "1.1B": Architecture(2048, 5632, 22, 32, kv_heads=4),
    "7B": Architecture(4096, 11008, 32, 32),
}
# Shapes of published models come with the words of their tokenizer and are drafted for by the 68M.
WORDS = {"68M": 32_000, "1.1B": 32_000, "7B": 32_000}
DRAFTS = {"1.1B": "68M", "7B": "68M"}


@dataclass(frozen=True)
class Workload:
    """What is decoded.

    Attributes:
        target: Hugging Face model whose answers count.
        draft: one that drafts for it, or None.
        item_tokens: (items, L) the catalog.
        prompts: token ids, one a user.
        earlier: the same users' prompts one item ago.
        longest: tokens of the longest prompt that can come.
        facts: what a result says of it, plain values.
    """

    target: Any
    draft: Any | None
    item_tokens: NDArray[np.int64]
    prompts: list[NDArray[np.int64]]
    earlier: list[NDArray[np.int64]]
    longest: int
    facts: dict[str, Any]

    @property
    def trie(self) -> ItemTrie:
        """The catalog."""
        return ItemTrie.build(self.item_tokens)

    def group(self, number: int, size: int) -> list[int]:
        """Users of the batch that round `number` asks about, one after another."""
        return [(number * size + i) % len(self.prompts) for i in range(size)]


def of_bundle(
    path: Path, dataset: Path, *, users: int, device: str, dtype: torch.dtype, seed: int
) -> Workload:
    """A bundle's models and catalog; test users of its data set, or random histories without it.

    Raises:
        ArtifactError: not a bundle.
        DataError: a broken data set.
    """
    bundle = Bundle.load(path)
    target = load_model(bundle.target, dtype=dtype, device=device)
    draft = None if bundle.draft is None else load_model(bundle.draft, dtype=dtype, device=device)
    rng = np.random.default_rng(seed)
    histories, source = _test_histories(bundle, dataset, users, rng), "test users"
    if histories is None:
        say(f"{dataset} is not this bundle's data set: histories are random")
        lengths = rng.integers(2, bundle.prompt.max_items + 1, users)
        items = [rng.integers(0, len(bundle.catalog), n).tolist() for n in lengths]
        histories, source = Histories.of(items), "random histories"
    facts = {"weights": path.name, "bundle": bundle.manifest.digest, "prompts": source}
    return _workload(target, draft, bundle.encoder, histories, facts)


def _test_histories(
    bundle: Bundle, dataset: Path, users: int, rng: np.random.Generator
) -> Histories | None:
    """Of users with at least two events before what the test asks for."""
    if not (dataset / MANIFEST).is_file():
        return None
    data = Dataset.load(dataset)
    if data.item_ids.tolist() != list(bundle.catalog.item_ids):
        return None
    histories = data.examples("test").histories
    fit = rng.permutation(np.flatnonzero(histories.lengths > 1))[:users]
    return histories.take(fit) if len(fit) else None


def of_shape(
    shape: str,
    *,
    items: int,
    history: int,
    users: int,
    device: str,
    dtype: torch.dtype,
    seed: int,
) -> Workload:
    """Random weights of a named shape, and a random draft: tiny's, or 68M's for the billions.

    Raises:
        ConfigError: an unknown shape, or more items than a catalog can have.
    """
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r} is not one of {', '.join(SHAPES)}")
    words = WORDS.get(shape, 2)
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS, first=words)
    draft = random_model(
        SHAPES[DRAFTS.get(shape, "tiny")], vocabulary, device=device, dtype=dtype, seed=seed + 1
    )
    found = of_sizes(
        SHAPES[shape],
        vocabulary,
        items=items,
        history=history,
        users=users,
        device=device,
        dtype=dtype,
        seed=seed,
        draft=draft,
    )
    found.facts["weights"] = f"random, {shape}"
    return found


def of_sizes(
    sizes: Architecture,
    vocabulary: Vocabulary,
    *,
    items: int,
    history: int,
    users: int,
    device: str,
    dtype: torch.dtype,
    seed: int,
    draft: Any | None = None,
) -> Workload:
    """Random weights, a skewed random catalog, and users who chose `history` of its items."""
    rng = np.random.default_rng(seed)
    tokens = vocabulary.encode(skewed_codes(rng, items, vocabulary.level_sizes))
    encoder = PromptEncoder(tokens, vocabulary.prefix, PromptConfig(history, 1))
    histories = Histories.of(rng.integers(0, items, (users, history)).tolist())
    target = random_model(sizes, vocabulary, device=device, dtype=dtype, seed=seed)
    facts = {"weights": "random", "prompts": f"random histories of {history} items"}
    return _workload(target, draft, encoder, histories, facts)


def _workload(
    target: Any,
    draft: Any | None,
    encoder: PromptEncoder,
    histories: Histories,
    facts: dict[str, Any],
) -> Workload:
    prompts = encoder.encode_all(histories)
    earlier = encoder.encode_all(Histories.of([h[:-1] for h in histories]))
    trie = ItemTrie.build(encoder.item_tokens)
    facts |= {
        "target_parameters": _parameters(target),
        "draft_parameters": None if draft is None else _parameters(draft),
        "items": trie.num_items,
        "rows": trie.num_rows,
        "branching": list(trie.branching),
        "users": len(prompts),
        "prompt_tokens": round(float(np.mean([len(p) for p in prompts])), 1),
    }
    return Workload(target, draft, encoder.item_tokens, prompts, earlier, encoder.max_tokens, facts)


def _parameters(model: Any) -> int:
    return sum(p.numel() for p in model.parameters())


def skewed_codes(
    rng: np.random.Generator, items: int, level_sizes: tuple[int, ...]
) -> NDArray[np.int64]:
    """(items, L) distinct codes: at each level few are common, and which ones hangs on the prefix.

    Raises:
        ConfigError: more items than half of all there can be.
    """
    room = np.prod([float(size) for size in level_sizes])
    if not 1 <= items <= room / 2:
        raise ConfigError(f"--items {items}: want 1 to {room / 2:.0f} with codes {level_sizes}")
    found = np.empty((0, len(level_sizes)), np.int64)
    while len(found) < items:
        drawn = np.empty((2 * items, len(level_sizes)), np.int64)
        prefix = np.zeros(2 * items, np.int64)
        for level, size in enumerate(level_sizes):
            common = 1 / np.sqrt(np.arange(1, size + 1))
            rank = rng.choice(size, 2 * items, p=common / common.sum())
            drawn[:, level] = (rank + prefix) % size
            prefix = (prefix + drawn[:, level] + 1) * 2_654_435_761 % 2**31
        found = np.unique(np.concatenate([found, drawn]), axis=0)
    return rng.permutation(found)[:items]


def random_model(
    sizes: Architecture, vocabulary: Vocabulary, *, device: str, dtype: torch.dtype, seed: int
) -> Any:
    """A model with random weights, made where and as it is used: billions need no second copy."""
    with torch.random.fork_rng(), torch.device(device), _default(dtype):
        torch.manual_seed(seed)
        model = build(sizes, vocabulary).eval()
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(LOGITS / (float(head.float().std()) * sizes.hidden_size**0.5))
    return model


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
