"""SlotCache: keys and values of one batch in fixed buffers, written by slot.

A slot holds one token of every request in the batch: a prompt token or a node of its tree. The
prompt is stored once a request and each node once, whatever the number of beams; who may look at
which slot is the mask's business (`recsys.models.mask`).

Slots `0 .. nodes` belong to nodes and the rest to the prompt, whose ragged end comes last: a longer
prompt in the same batch then adds masked slots behind a request's own and leaves the order in which
its attention sums untouched. Both parts are rounded up to whole blocks of `SLOT_BLOCK`, so that the
kernels have no remainder to sum differently; at one fixed size an answer has the same bits alone
and beside any batch mates.

Hugging Face models take this object as `past_key_values`; of that interface only `update` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SLOT_BLOCK = 16


class SlotCache:
    """Key and value buffers of every layer, (B, H_kv, slots, D) each.

    Buffers start at zero and stale slots stay finite: a masked slot contributes 0 x value, which a
    NaN would survive.

    Attributes:
        nodes: tree slots, in whole blocks.
        slots: all slots, in whole blocks.
    """

    is_compileable = False

    def __init__(
        self,
        config: PretrainedConfig,
        batch: int,
        nodes: int,
        prompt: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = config.num_key_value_heads or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.nodes = -(-nodes // SLOT_BLOCK) * SLOT_BLOCK
        self.slots = self.nodes + -(-prompt // SLOT_BLOCK) * SLOT_BLOCK
        shape = (config.num_hidden_layers, 2, batch, heads, self.slots, size)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._write = torch.zeros(0, dtype=torch.int64, device=device)
        self._view = (0, 0)

    @property
    def prompt(self) -> int:
        """Prompt slots."""
        return self.slots - self.nodes

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token of one request takes in all layers."""
        return self._buffer[:, :, 0, :, 0].numel() * self._buffer.element_size()

    def select(self, write: torch.Tensor, view: tuple[int, int]) -> None:
        """Say where the next forward writes and what it sees.

        Args:
            write: (S,) int64 slots of its tokens, shared by the batch.
            view: first and last + 1 slot that attention is given (the mask's last axis).
        """
        self._write, self._view = write, view

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, H_kv, S, D) keys and values, return all that is in view."""
        start, stop = self._view
        cached_keys, cached_values = self._buffer[layer_idx, 0], self._buffer[layer_idx, 1]
        cached_keys.index_copy_(2, self._write, keys)
        cached_values.index_copy_(2, self._write, values)
        return cached_keys[:, :, start:stop], cached_values[:, :, start:stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are explicit."""
        return 0
