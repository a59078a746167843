"""Loading: the models of a bundle, on the device that answers sooner, as they are decoded with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from recsys.bundle import Bundle
from recsys.constraint import ItemTrie
from recsys.decoding.engine import Engine
from recsys.decoding.planner import Plan
from recsys.devices import AUTO, CPU, choose_device, is_large, typical_seconds
from recsys.errors import ArtifactError
from recsys.interactions import Histories
from recsys.models.checkpoint import load_model
from recsys.modes import Mode
from recsys.prompts import PromptEncoder
from recsys.requests import MIN_BEAMS


@dataclass(frozen=True)
class Models:
    """The models of a bundle.

    Attributes:
        target: Hugging Face model.
        draft: the same; None if the bundle has none.
        mode: how requests in mode `auto` are decoded.
        on_cpu: whether they are on a CPU.
    """

    target: Any
    draft: Any | None
    mode: str
    on_cpu: bool

    @classmethod
    def of(cls, bundle: Bundle, device: str, dtype: str, mode: str) -> Self:
        """Load them; the arguments are those of `Recommender.load`.

        Raises:
            ArtifactError: there is no draft, and `mode` needs one.
        """
        if mode == Mode.DRAFT and bundle.draft is None:
            raise ArtifactError(
                f"mode 'draft' needs a draft model; {bundle.path} has none: use mode 'auto', or "
                "make one (recsys train draft, then recsys bundle)"
            )
        chosen = answering_device(bundle.target, bundle.encoder, device, dtype)
        on_cpu = torch.device(chosen).type == CPU
        load = partial(load_model, dtype=getattr(torch, dtype), device=chosen)
        draft = None if bundle.draft is None else load(bundle.draft)  # needed in some modes
        if mode == Mode.AUTO:
            mode = Mode.BEAM if on_cpu else Mode.PLANNED
        return cls(load(bundle.target), draft, mode, on_cpu)


def answering_device(
    target: Path, encoder: PromptEncoder, device: str = AUTO, dtype: str = "float32"
) -> str:
    """Where a target answers: on the device that is named, or for `auto` on the faster one.

    On a CPU it answers by plain beam search, on an accelerator as its planner chooses.

    Args:
        target: its checkpoint.
        encoder: history -> prompt.
        device: a torch device, or `auto`.
        dtype: of the weights.
    """
    measure = partial(_seconds_to_answer, target, encoder, dtype)
    return choose_device(device, f"answers of {target}", measure, large=is_large(target))


def _seconds_to_answer(target: Path, encoder: PromptEncoder, dtype: str, device: str) -> float:
    """Time of one search with a history of the longest kind, as a service runs it."""
    trie = ItemTrie.build(encoder.item_tokens)
    items = len(encoder.item_tokens)
    history = np.random.default_rng(0).integers(0, items, encoder.config.max_items)
    prompts = encoder.encode_all(Histories.of([history.tolist()]))
    engine = Engine(load_model(target, getattr(torch, dtype), device), trie)
    try:
        if engine.target.device.type != "cpu":
            engine.captures.capture_passes(1, encoder.max_tokens, MIN_BEAMS, [Plan()])
        return typical_seconds(lambda: engine.decode(prompts, MIN_BEAMS, mode=Mode.BEAM))
    finally:
        engine.close()
