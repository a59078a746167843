"""SlotCache: keys and values of one batch in fixed buffers, written by slot.

A slot holds one token of one request: a prompt token or a node of its tree. The prompt and each
node are stored once per request, whatever the number of beams. The attention mask says which slots
a token attends to (`recsys.models.mask`). Token p of a prompt is always in slot p, so keys and
values from an earlier call (`recsys.models.prefix_store`) are bit for bit those of this call.

Slots `0 .. prompt` belong to the prompt and the rest to nodes. Both parts are rounded up to whole
blocks of `SLOT_BLOCK`, so that kernels have no remainder that they would sum in another order. With
a fixed `prompt`, an answer then has the same bits alone and in any batch.

Hugging Face models take this object as `past_key_values`; they only use `update`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

SLOT_BLOCK = 16
_FREE_BUFFERS = 2


def whole_blocks(slots: int) -> int:
    """`slots` rounded up to whole blocks."""
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


def key_value_shape(config: PretrainedConfig) -> tuple[int, int, int]:
    """Number of layers, number of key/value heads, and size of a head."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):  # newer Falcon models have the field and ignore it
        heads = heads if getattr(config, "new_decoder_architecture", False) else 1
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, heads, size


class Finite:
    """Whether values on a device are finite, read there only if the host does not know.

    Attributes:
        on_device: bool, of any shape.
        host: the same as a list, once it is known.
    """

    def __init__(self, on_device: torch.Tensor) -> None:
        """Nothing is read yet."""
        self.on_device = on_device
        self.host: list[bool] | None = None

    def read(self) -> list[bool]:
        """The flags; waits for the device if the host does not know them."""
        if self.host is None:
            self.host = self.on_device.flatten().tolist()
        return self.host


@dataclass
class Storage:
    """Memory for the keys and values of a batch.

    Attributes:
        values: (layers, 2, tokens, H_kv, D).
        finite: () bool, whether all values written since the last `clean` are finite; None if
            nothing was written.
    """

    values: torch.Tensor
    finite: Finite | None = None

    def clean(self) -> Storage:
        """Fill the storage with zeros if it contains values that are not finite, and return it.

        A masked slot contributes 0 x value to attention, which is NaN if the value is. The flag is
        read when the storage is lent again, so that no decode waits for the device.
        """
        if self.finite is not None and not all(self.finite.read()):
            self.values.zero_()
        self.finite = None
        return self


class SlotCache:
    """Key and value buffers of every layer, (B, slots, H_kv, D) each.

    >>> storage = Storage(torch.zeros(1, 2, 32, 1, 4))
    >>> cache = SlotCache(storage, batch=1, prompt=5, nodes=3)
    >>> cache.prompt, cache.slots
    (16, 32)
    >>> cache.select(write=torch.tensor([[0, 16]]), view=17)  # a prompt token and a node
    >>> keys, values = cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), layer_idx=0)
    >>> keys.shape, keys.sum().item()
    (torch.Size([1, 1, 17, 4]), 8.0)

    Attributes:
        buffer: (layers, 2, B, slots, H_kv, D). Unused slots are finite (`Storage.clean`).
        prompt: number of prompt slots, in whole blocks, and slot of the first node.
        slots: number of all slots, in whole blocks.
    """

    is_compileable = False

    def __init__(self, storage: Storage, batch: int, prompt: int, nodes: int) -> None:
        """Use the front of `storage`, with at least `prompt` and `nodes` slots a request."""
        self.prompt = whole_blocks(prompt)
        self.slots = self.prompt + whole_blocks(nodes)
        self._storage = storage
        layers, two, _, heads, size = storage.values.shape
        room = storage.values[:, :, : batch * self.slots]
        self.buffer = room.view(layers, two, batch, self.slots, heads, size)
        self._write: torch.Tensor | None = None
        self._view = 0

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token of one request in all layers."""
        layers, two, _, _, heads, size = self.buffer.shape
        return layers * two * heads * size * self.buffer.element_size()

    def note(self, finite: torch.Tensor) -> Finite:
        """Record whether the written values are finite, () bool, without waiting for the device.

        Returns the record, for a caller who will know it on the host.
        """
        before = self._storage.finite
        self._storage.finite = Finite(finite if before is None else before.on_device & finite)
        return self._storage.finite

    def copy_from(self, other: SlotCache) -> None:
        """Copy all slots of a smaller cache with the same requests and prompt slots."""
        self.buffer[:, :, :, : other.slots] = other.buffer
        if other._storage.finite is not None:
            self.note(other._storage.finite.on_device)

    @property
    def selected(self) -> tuple[torch.Tensor, int]:
        """(B x S) slots to write, those of request b from b x slots; and the slots in view."""
        if self._write is None:
            raise RuntimeError("no slots are selected; call select first")
        return self._write, self._view

    def select(self, write: torch.Tensor, view: int) -> None:
        """Set the slots that the next forward writes and reads.

        Args:
            write: (B, S) int64 slot of each token. Two tokens of a request may share a slot if they
                are the same token at the same position (padding by repetition).
            view: attention reads slots `0 .. view` (the last axis of the mask).
        """
        first = torch.arange(len(write), device=write.device).unsqueeze(-1) * self.slots
        self._write, self._view = (write + first).flatten(), view

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *_: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write (B, H_kv, S, D) keys and values; return those of all slots in view."""
        cached, (write, view) = self.buffer[layer_idx], self.selected
        for buffer, new in zip(cached, (keys, values), strict=True):
            buffer.flatten(0, 1).index_copy_(0, write, new.transpose(1, 2).flatten(0, 1))
        in_view = cached[:, :, :view].transpose(2, 3)
        return in_view[0], in_view[1]

    def keep(self, requests: torch.Tensor) -> None:
        """Keep the requests at (b,) ascending places of the batch, moved to the front in place."""
        if len(requests) == self.buffer.shape[2]:
            return  # all of them
        selected = self.buffer.index_select(2, requests)
        self.buffer = self.buffer[:, :, : len(requests)]
        self.buffer.copy_(selected)

    def gather(self, slots: torch.Tensor, first: int) -> None:
        """Compact the cache: move the (B, n) slots still needed to `first .. first + n`."""
        layers, _, batch, _, heads, size = self.buffer.shape
        index = slots.view(1, 1, batch, -1, 1, 1).expand(layers, 2, -1, -1, heads, size)
        self.buffer[:, :, :, first : first + slots.shape[1]] = self.buffer.gather(3, index)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Always 0: positions and masks are explicit."""
        return 0


class CachePool:
    """Storage for caches, allocated once and lent for the duration of a decode.

    Attributes:
        lent: number of caches in use; 0 between decodes, even after errors.
    """

    def __init__(self, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Make an empty pool for models of one configuration."""
        self._shape, self._dtype, self._device = key_value_shape(config), dtype, device
        self._free: list[Storage] = []
        self._lock = threading.Lock()
        self.lent = 0

    @contextmanager
    def lend(self, batch: int, prompt: int, nodes: int) -> Iterator[SlotCache]:
        """Lend a cache for `batch` requests; its storage returns when the context is left."""
        tokens = batch * (whole_blocks(prompt) + whole_blocks(nodes))
        with self._lock:
            self.lent += 1
            sizes = (s.values.shape[2] for s in self._free)
            number = next((i for i, size in enumerate(sizes) if size >= tokens), None)
            storage = None if number is None else self._free.pop(number)
        try:
            if storage is None:
                layers, heads, size = self._shape
                shape = (layers, 2, tokens, heads, size)
                storage = Storage(torch.zeros(shape, dtype=self._dtype, device=self._device))
            yield SlotCache(storage.clean(), batch, prompt, nodes)
        except BaseException:
            storage = None  # a failed pass may have left values that are not finite
            raise
        finally:
            with self._lock:
                self.lent -= 1
                if storage is not None:
                    # The smallest storage that fits is found first, and the largest ones are kept.
                    self._free = sorted([*self._free, storage], key=lambda s: s.values.shape[2])
                    self._free = self._free[-_FREE_BUFFERS:]
