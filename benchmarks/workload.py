"""Workloads: models, a catalog and users' prompts, of a bundle or random at a named size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.errors import ConfigError
from recsys.interactions import Histories
from recsys.models.architecture import PRESETS, Architecture
from recsys.models.checkpoint import build
from recsys.prompts import PromptConfig, PromptEncoder
from recsys.vocabulary import Vocabulary

LEVELS, CODES = 4, 256
LOGITS = 3.0  # standard deviation of a random model's logits, so that scores rarely tie
SHAPES = {
    **PRESETS,
    "68M": Architecture(768, 3072, 2, 12),
    "1.1B": Architecture(2048, 5632, 22, 32, kv_heads=4),
    "7B": Architecture(4096, 11008, 32, 32),
}
WORDS = dict.fromkeys(("68M", "1.1B", "7B"), 32_000)  # tokens of the published tokenizer
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
        facts: description for a result, plain values.
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
        """Indices of the users whose prompts are the batch of round `number`."""
        return [(number * size + i) % len(self.prompts) for i in range(size)]


class Setup(NamedTuple):
    """Users with prompts, at most, and the models' torch device and type."""

    users: int
    device: str
    dtype: torch.dtype


def load_bundle_workload(path: Path, setup: Setup) -> Workload:
    """A bundle's models and catalog, and test users of the data set of its name.

    Users have at least two events before the test event.

    Raises:
        ArtifactError: not a bundle, or no data set.
        ConfigError: the data set is not the bundle's.
    """
    from recsys.artifacts import Workspace  # random workloads need none of these
    from recsys.bundle import Bundle
    from recsys.dataset import Dataset
    from recsys.models.checkpoint import load_model

    bundle = Bundle.load(path)
    target, draft = (
        None if folder is None else load_model(folder, setup.dtype, setup.device)
        for folder in (bundle.target, bundle.draft)
    )
    folder = Workspace.of(path.resolve().name).dataset
    data = Dataset.load(folder)
    if data.item_ids.tolist() != list(bundle.catalog.item_ids):
        raise ConfigError(f"{folder} is not the data set of {path}: set RECSYS_HOME to its home")
    histories = data.examples("test").histories
    users = np.random.default_rng(0).permutation(np.flatnonzero(histories.lengths > 1))
    facts = {"weights": path.name, "bundle": bundle.manifest.digest, "prompts": "test users"}
    return _workload(target, draft, bundle.encoder, histories.take(users[: setup.users]), facts)


def make_shape_workload(shape: str, setup: Setup, *, items: int, history: int) -> Workload:
    """Random weights of a shape of `SHAPES` and of a draft: `tiny`, or `68M` for the billions."""
    vocabulary = Vocabulary.from_levels([CODES] * LEVELS, first=WORDS.get(shape, 2))
    shapes = (SHAPES[shape], SHAPES[DRAFTS.get(shape, "tiny")])
    workload = make_random_workload(shapes, vocabulary, setup, items=items, history=history)
    workload.facts["weights"] = f"random, {shape}"
    return workload


def make_random_workload(
    shapes: tuple[Architecture, Architecture | None],
    vocabulary: Vocabulary,
    setup: Setup,
    *,
    items: int,
    history: int,
) -> Workload:
    """Random weights of a target and perhaps a draft, over a skewed random catalog.

    Args:
        shapes: of the target and the draft.
        vocabulary: of both.
        setup: how it is made.
        items: of the catalog.
        history: items in the history of each user.
    """
    rng = np.random.default_rng(0)
    tokens = vocabulary.encode(draw_skewed_codes(rng, items, vocabulary.level_sizes))
    encoder = PromptEncoder(tokens, vocabulary.prefix, PromptConfig(history, 1))
    histories = Histories.of(rng.integers(0, items, (setup.users, history)).tolist())
    target, draft = (
        None if shape is None else make_random_model(shape, vocabulary, setup, seed)
        for seed, shape in enumerate(shapes)
    )
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
    sizes = [None if m is None else sum(p.numel() for p in m.parameters()) for m in (target, draft)]
    facts |= {
        "target_parameters": sizes[0],
        "draft_parameters": sizes[1],
        "items": trie.num_items,
        "rows": trie.num_rows,
        "branching": list(trie.branching),
        "users": len(prompts),
        "prompt_tokens": round(float(np.mean([len(p) for p in prompts])), 1),
    }
    return Workload(target, draft, encoder.item_tokens, prompts, earlier, encoder.max_tokens, facts)


def draw_skewed_codes(
    rng: np.random.Generator, items: int, level_sizes: tuple[int, ...]
) -> NDArray[np.int64]:
    """(items, L) distinct codes: at each level few are common, and the prefix decides which.

    Raises:
        ConfigError: more items than half of all that are possible.
    """
    room = np.prod([float(size) for size in level_sizes])
    if not 1 <= items <= room / 2:
        raise ConfigError(f"--items {items}: want 1 to {room / 2:.0f} with codes {level_sizes}")
    distinct = np.empty(0, np.int64)  # codes of all levels as one number: faster to sort than rows
    while len(distinct) < items:
        drawn, prefix = np.zeros((2, 2 * items), np.int64)
        for size in level_sizes:
            common = 1 / np.sqrt(np.arange(1, size + 1))
            rank = rng.choice(size, 2 * items, p=common / common.sum())
            code = (rank + prefix) % size
            prefix = (prefix + code + 1) * 2_654_435_761 % 2**31
            drawn = drawn * size + code
        distinct = np.sort(np.concatenate([distinct, drawn]))
        distinct = distinct[np.append(True, distinct[1:] != distinct[:-1])]
    return np.stack(np.unravel_index(rng.permutation(distinct)[:items], level_sizes), axis=1)


def make_random_model(
    shape: Architecture, vocabulary: Vocabulary, setup: Setup, seed: int = 0
) -> Any:
    """A model with random weights, made on its device so that billions need no second copy."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(setup.dtype)
    try:
        with torch.random.fork_rng(), torch.device(setup.device):
            torch.manual_seed(seed)
            model = build(shape, vocabulary).eval()
    finally:
        torch.set_default_dtype(before)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        head.mul_(LOGITS / (float(head.float().std()) * shape.hidden_size**0.5))
    return model
