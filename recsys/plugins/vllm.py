"""The catalog as a logits processor of vLLM's V1 model runner.

    RECSYS_BUNDLE=var/bundles/shop vllm serve var/bundles/shop/target --skip-tokenizer-init \
      --no-async-scheduling --logits-processors recsys.plugins.vllm:CatalogProcessor

Written after the documented interface `vllm.v1.sample.logits_processor`, and tested with a double
of it only. Every request of the engine is constrained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from recsys.plugins.next_tokens import of_environment


class CatalogProcessor(LogitsProcessor):  # type: ignore[misc] # vllm is not installed for checks
    """Allows the tokens that continue a semantic ID of the catalog."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        """Load the bundle of `RECSYS_BUNDLE`."""
        self._next = of_environment()
        self._generated: dict[int, Sequence[int]] = {}

    def is_argmax_invariant(self) -> bool:
        """It is not: the most probable token may lead to no item."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests to their rows; vLLM appends new tokens to the lists that it gave."""
        if batch_update is None:
            return
        rows = self._generated
        for row in batch_update.removed:
            rows.pop(row, None)
        for row, _, _, generated in batch_update.added:
            rows[row] = generated
        for source, target, direction in batch_update.moved:
            moved, other = rows.pop(source, None), rows.pop(target, None)
            if moved is not None:
                rows[target] = moved
            if direction == MoveDirectionality.SWAP and other is not None:
                rows[source] = other

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Mask (B, V) logits in place."""
        return self._next.mask(logits, self._generated)
