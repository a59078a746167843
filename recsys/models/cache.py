"""SlotCache: keys and values of one batch in fixed buffers, written by slot.

A slot holds one token of every request in the batch: a prompt token or a node of its tree. The
prompt is stored once a request and each node once, whatever the number of beams; who may look at
which slot is the mask's business (`recsys.models.mask`).

Slots `0 .. prompt` belong to the prompt and the rest to nodes. Both parts are rounded up to whole
blocks of `SLOT_BLOCK`: the kernels then have no remainder to sum differently, and at one fixed
`prompt` an answer has the same bits alone and beside any batch mates.

Hugging Face models take this object as `past_key_values`; of that interface only `update` is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SLOT_BLOCK = 16


def whole_blocks(slots: int) -> int:
    """`slots` rounded up to whole blocks."""
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


class SlotCache:
    """Key and value buffers of every layer, (B, H_kv, slots, D) each.

    Buffers start at zero and stale slots stay finite: a masked slot contributes 0 x value, which a
    NaN would survive.

    Attributes:
        prompt: prompt slots, in whole blocks; the first node's slot.
        slots: all slots, in whole blocks.
    """

    is_compileable = False

    def __init__(
        self,
        config: PretrainedConfig,
        batch: int,
        prompt: int,
        nodes: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        heads = config.num_key_value_heads or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.prompt = whole_blocks(prompt)
        self.slots = self.prompt + whole_blocks(nodes)
        shape = (config.num_hidden_layers, 2, batch, heads, self.slots, size)
        self._buffer = torch.zeros(shape, dtype=dtype, device=device)
        self._write = torch.zeros(0, dtype=torch.int64, device=device)
        self._view = 0

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token of one request takes in all layers."""
        return self._buffer[:, :, 0, :, 0].numel() * self._buffer.element_size()

    def select(self, write: torch.Tensor, view: int) -> None:
        """Say where the next forward writes and what it sees.

        Args:
            write: (S,) int64 slots of its tokens, shared by the batch.
            view: attention is given slots `0 .. view` (the mask's last axis).
        """
        self._write, self._view = write, view

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, H_kv, S, D) keys and values, return all that is in view."""
        cached_keys, cached_values = self._buffer[layer_idx, 0], self._buffer[layer_idx, 1]
        cached_keys.index_copy_(2, self._write, keys)
        cached_values.index_copy_(2, self._write, values)
        return cached_keys[:, :, : self._view], cached_values[:, :, : self._view]

    def keep(self, requests: torch.Tensor) -> None:
        """Go on with some requests of the batch only.

        Args:
            requests: (b,) int64 places in the batch.
        """
        self._buffer = self._buffer.index_select(2, requests)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are explicit."""
        return 0
