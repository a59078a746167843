"""PrefixStore: a prefix cache. It keeps keys and values of prompts, so that only new tokens run.

The store is a radix tree over one preallocated pool. A node of the tree is one `Block`: the keys
and values of `block` successive tokens in all layers of one model. A match compares the tokens of
the whole prefix themselves; no hash is trusted and no user id is needed.
Keys and values depend only on the model and on the tokens up to theirs, so requests may share them.

    root ── [5 9 2 7] ──┬── [1 1 4 8] ── [3 6 6 2]
                        └── [1 1 4 9]

The Python work is one dictionary access per block of a prompt; the tensor work is one gather and
one indexed copy per batch, for all layers together. This module knows block numbers and buffers. It
never runs a model, and it knows neither beams nor trees of nodes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import PretrainedConfig

from recsys.models.cache import Finite, key_value_shape
from recsys.transfers import Upload

_TOKEN = np.dtype(np.int64)
_WIDEST = torch.complex128  # 16 bytes, which copies move as they are


@dataclass(eq=False, slots=True)
class Block:
    """A node of the radix tree: a block of the pool, or the root.

    A holder of a block also holds its ancestors. So a block without holders has no held
    descendant, and may be evicted once it has no children.

    Attributes:
        number: place in the pool; -1 for the root.
        tokens: bytes of the block's tokens, which is its key among the children of `parent`.
        parent: None for the root, and for a block that has left the tree.
        children: blocks that follow, by their tokens.
        holders: live hits, and a running insert, that need the content.
        dropped: no lookup can reach the block; its last holder frees it.
    """

    number: int = -1
    tokens: bytes = b""
    parent: Block | None = None
    children: dict[bytes, Block] = field(default_factory=dict)
    holders: int = 0
    dropped: bool = False

    def add(self, number: int, tokens: bytes) -> Block:
        """Append a child, held by the caller."""
        child = self.children[tokens] = Block(number, tokens, self, holders=1)
        return child

    def detach(self) -> None:
        """Leave the tree; the block has no children."""
        parent, self.parent = self.parent, None
        if parent is not None:
            del parent.children[self.tokens]

    def follow(self, prompt: Sequence[bytes]) -> list[Block]:
        """Blocks of the longest stored prefix of a prompt, which is given block by block."""
        path, block = [], self
        for tokens in prompt:
            child = block.children.get(tokens)
            if child is None:
                break
            path.append(child)
            block = child
        return path

    def descendants(self) -> Iterator[Block]:
        """All blocks below this one, parents before their children."""
        blocks = list(self.children.values())
        while blocks:
            block = blocks.pop()
            yield block
            blocks += block.children.values()


class Hit:
    """Stored prefixes of a batch, held in the pool until released (`with store.lookup(...)`).

    Attributes:
        cached: (B,) int64 leading tokens of each prompt that the store holds.
        paths: blocks of each prompt's prefix.
    """

    def __init__(self, store: PrefixStore, paths: list[list[Block]]) -> None:
        self.store, self.paths, self.released = store, paths, False
        self.cached = np.array([len(path) for path in paths], dtype=np.int64) * store.block

    def places(self, slots: int) -> NDArray[np.int64]:
        """(2, tokens): slots of the pool that hold what was found, and where it belongs.

        The latter are slots of a flattened working cache, in which a request has `slots`.
        """
        positions = [
            (block, request, number)
            for request, path in enumerate(self.paths)
            for number, block in enumerate(path)
        ]
        return _places(positions, self.store.block, slots)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.store.release(self)


class PrefixStore:
    """Keys and values of prompts by their tokens, with least-recently-used eviction.

    Threads may share a store. One lock guards all bookkeeping. `insert` keeps it while it copies,
    so a lookup never finds a block before its content. `load` takes no lock, because the blocks of
    a live hit are never written. On CUDA, call `load` and `insert` on one stream: a block may be
    evicted while a copy out of it is still queued, and only the order of the stream keeps the two
    apart.

    >>> from transformers import LlamaConfig
    >>> config = LlamaConfig(num_hidden_layers=1, num_attention_heads=1, hidden_size=2)
    >>> store = PrefixStore(config, torch.float32, torch.device("cpu"), max_bytes=1024)
    >>> prompt, keys_and_values = [[7, 8, 9, 7, 5]], torch.randn(1, 2, 1, 5, 1, 2)
    >>> store.insert(prompt, [5], keys_and_values)
    >>> with store.lookup(prompt, [5]) as hit:
    ...     store.load(hit, torch.zeros_like(keys_and_values))
    ...     hit.cached
    array([4])

    Attributes:
        block: tokens of a block.
        blocks: blocks of the pool.
    """

    # _order holds the blocks without holders, least recently used first. A path is released from
    # its last block to its first, so children come before their parents and the first entry is
    # always a leaf.
    # _unchecked: blocks that the last `insert` added, with their requests, and whether the keys and
    # values of each request are finite. The next call that depends on it reads it, so that `insert`
    # does not wait for the device.

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
        block: int = 4,
    ) -> None:
        """Allocate the pool, (layers, 2, blocks x block, heads, head_dim), on `device`.

        Args:
            config: configuration of the model.
            dtype: type of keys and values.
            device: where the working caches lie.
            max_bytes: limit of the pool, which holds as many whole blocks as fit.
            block: tokens of a block. Only whole blocks are reused.

        Raises:
            ValueError: `block` is not positive, or no block fits into `max_bytes`.
        """
        layers, heads, head_dim = key_value_shape(config)
        if block < 1:
            raise ValueError(f"block is {block}; a block has at least one token")
        block_bytes = block * layers * 2 * heads * head_dim * dtype.itemsize
        if max_bytes < block_bytes:
            raise ValueError(
                f"max_bytes is {max_bytes}, but one block of {block} tokens takes {block_bytes}; "
                "give it more, or run without a prefix store"
            )
        self.block, self.blocks = block, max_bytes // block_bytes
        shape = (layers, 2, self.blocks * block, heads, head_dim)
        # Written once, so that a process has its final size from the start, and not after hours.
        self._pool = torch.full(shape, 0.0, dtype=dtype, device=device)
        self._lock = threading.Lock()
        self._root = Block()
        self._order: OrderedDict[Block, None] = OrderedDict()
        self._free = list(range(self.blocks))[::-1]
        self._unchecked: tuple[list[tuple[Block, int]], Finite] | None = None

    @property
    def used(self) -> int:
        """Blocks that hold something."""
        return self.blocks - len(self._free)

    @property
    def held(self) -> int:
        """Blocks held by live hits; 0 when nothing runs, unless a hit was not released."""
        return self.used - len(self._order)

    def lookup(self, tokens: ArrayLike, lengths: ArrayLike) -> Hit:
        """Find and hold the longest stored prefix of each of (B, T) right-padded prompts.

        The last token of a prompt is never part of it, because it has to be run for its logits.
        Release the result, preferably by `with`. ValueError if `tokens` and (B,) `lengths` do not
        fit together.
        """
        prompts, _ = self._split(tokens, lengths, last=False)
        with self._lock:
            hit = Hit(self, self._find(prompts))
            for path in hit.paths:
                self._hold(path)
        return hit

    def release(self, hit: Hit) -> None:
        """Let the blocks of a hit go; they may then be evicted. A second call does nothing."""
        with self._lock:
            if not hit.released:
                hit.released = True
                for path in hit.paths:
                    self._release(path)

    def known(self, tokens: ArrayLike, lengths: ArrayLike) -> NDArray[np.int64]:
        """(B,) tokens that `lookup` would find; nothing is held or marked as used."""
        prompts, _ = self._split(tokens, lengths, last=False)
        with self._lock:
            paths = self._find(prompts)
        return np.array([len(path) for path in paths], np.int64) * self.block

    @torch.inference_mode()
    def load(self, hit: Hit, cache: torch.Tensor, upload: Upload | None = None) -> None:
        """Copy what was found into a working cache: token p of request b into slot p of b.

        Args:
            hit: a hit of this store that has not been released.
            cache: (layers, 2, B, slots, heads, head_dim), a `SlotCache`'s buffer; B and slots may
                be larger than the prompts need. Other slots are not touched.
            upload: the copy to the device that the caller shares, which is sent; None for one of
                its own.

        Raises:
            ValueError: the hit was released or belongs to another store, or the cache does not fit.
        """
        if hit.store is not self or hit.released:
            raise ValueError(
                "the hit is not held by this store; load it inside `with store.lookup(...)`"
            )
        flat = self._flat(cache, len(hit.cached), int(hit.cached.max(initial=0)))
        if any(hit.paths):
            self._copy(self._send(hit.places(cache.shape[3]), upload), flat)

    def read(self, positions: torch.Tensor, cache: torch.Tensor) -> None:
        """`load` of (2, tokens) int64 `Hit.places` that are on the device.

        Nothing waits for the device or depends on the values, so it can be captured.
        """
        self._copy(positions, self._flat(cache, 0, 0))

    @torch.inference_mode()
    def insert(
        self,
        tokens: ArrayLike,
        lengths: ArrayLike,
        cache: torch.Tensor,
        finite: Finite | None = None,
    ) -> None:
        """Store the whole blocks of each prompt that are not stored yet.

        Evicts the least recently used blocks where the pool is full, but none that a live hit
        holds and none of this batch. Where no block can be evicted, the rest is not stored.

        Args:
            tokens: (B, T) integers, right-padded.
            lengths: (B,) tokens of each prompt.
            cache: as in `load`, with the keys and values of every prompt token in place.
            finite: (B,) bool, whether the keys and values of each prompt are finite.
                Those that are not will never be found. None if all are known to be finite.

        Raises:
            ValueError: `tokens` and `lengths` do not fit together, or the cache does not fit.
        """
        prompts, sizes = self._split(tokens, lengths)
        flat = self._flat(cache, len(sizes), max(sizes, default=0))
        paths: list[list[Block]] = []
        added: list[tuple[Block, int, int]] = []
        with self._lock:
            self._discard_non_finite()
            try:
                for request, prompt in enumerate(prompts):
                    path = self._root.follow(prompt)
                    self._hold(path)
                    paths.append(path)
                    for part in prompt[len(path) :]:
                        if not self._free and self._order:  # evict the least recently used block
                            self._remove(next(iter(self._order)))
                        if not self._free:
                            break
                        block = (path[-1] if path else self._root).add(self._free.pop(), part)
                        added.append((block, request, len(path)))
                        path.append(block)
                if added:
                    pool, slots = self._send(_places(added, self.block, cache.shape[3]))
                    self._wide_pool.index_copy_(1, pool, flat.index_select(1, slots))
                    if finite is not None:
                        self._unchecked = [(block, request) for block, request, _ in added], finite
            except BaseException:
                for block, *_ in added:  # without its content a block must never be found
                    block.dropped = True
                raise
            finally:
                for path in paths:
                    self._release(path)

    def clear(self) -> None:
        """Forget all prompts. Blocks that a live hit holds become free when it is released."""
        with self._lock:
            self._discard_non_finite()
            root, self._root = self._root, Block()
            self._remove_below(root)

    # The caller of the methods below holds the lock.

    def _find(self, prompts: list[list[bytes]]) -> list[list[Block]]:
        """Path of the longest stored prefix of each prompt."""
        self._discard_non_finite()
        return [self._root.follow(prompt) for prompt in prompts]

    def _hold(self, path: list[Block]) -> None:
        """Protect a path from eviction."""
        for block in path:
            if not block.holders:
                del self._order[block]
            block.holders += 1

    def _release(self, path: list[Block]) -> None:
        """Undo one `_hold`. Blocks without another holder become the most recently used ones."""
        for block in reversed(path):
            block.holders -= 1
            if not block.holders:
                self._order[block] = None
                if block.dropped:
                    self._remove(block)

    def _remove(self, block: Block) -> None:
        """Free a block that has neither holders nor children."""
        block.detach()
        del self._order[block]
        self._free.append(block.number)

    def _remove_below(self, top: Block) -> None:
        """Free the descendants of a block; those that are held, when they are released."""
        for block in reversed(list(top.descendants())):
            block.dropped = True
            if not block.holders:
                self._remove(block)

    def _discard_non_finite(self) -> None:
        """Remove what the last `insert` added for requests that were not finite.

        All of their new blocks go, with what follows: masked values that are not finite also reach
        the tokens before them.
        """
        if self._unchecked is None:
            return
        (added, finite), self._unchecked = self._unchecked, None
        good = finite.read()
        for block, request in added:
            if not good[request] and not block.dropped:
                self._remove_below(block)
                self._remove(block)

    # The methods below read nothing that changes.

    def _split(
        self, tokens: ArrayLike, lengths: ArrayLike, *, last: bool = True
    ) -> tuple[list[list[bytes]], list[int]]:
        """Whole blocks of each prompt as bytes of int64 tokens, and the lengths of the prompts.

        Without `last`, the last token of a prompt does not count.
        """
        table, sizes = np.asarray(tokens), np.asarray(lengths)
        if table.ndim != 2 or table.dtype.kind not in "iu":
            raise ValueError(f"tokens are {table.dtype} {table.shape}; give integers (B, T)")
        valid = sizes.shape == table.shape[:1] and (not sizes.size or sizes.dtype.kind in "iu")
        if not valid or not ((sizes >= 0) & (sizes <= table.shape[1])).all():
            raise ValueError(
                f"lengths are {sizes.tolist()}; give one integer from 0 to {table.shape[1]} for "
                f"each of the {len(table)} prompts"
            )
        width, prompts = self.block * _TOKEN.itemsize, []
        for row, size in zip(table.astype(_TOKEN), sizes.tolist(), strict=True):
            data, count = row.tobytes(), max(0, size if last else size - 1) // self.block
            prompts.append([data[i * width : (i + 1) * width] for i in range(count)])
        return prompts, sizes.tolist()

    def _send(self, positions: NDArray[np.int64], upload: Upload | None = None) -> torch.Tensor:
        """(2, tokens) places on the device, by `upload` or by a copy of their own."""
        upload = Upload(self._pool.device) if upload is None else upload
        on_device = upload.add(positions)
        upload.send()
        return on_device

    def _copy(self, positions: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy tokens of the pool into a `_flat` working cache; places are `Hit.places`."""
        pool, slots = positions
        flat.index_copy_(1, slots, self._wide_pool.index_select(1, pool))

    @property
    def _wide_pool(self) -> torch.Tensor:
        """(layers x 2, tokens, n) view of the pool."""
        return _widened(self._pool.flatten(0, 1))

    def _flat(self, cache: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """(layers x 2, B x slots, n) view of a cache that fits this store."""
        layers, two, _, heads, head_dim = self._pool.shape
        ends = (*cache.shape[:2], *cache.shape[4:], cache.dtype, cache.device)
        fits = cache.dim() == 6 and cache.shape[2] >= batch and cache.shape[3] >= length
        if not fits or ends != (layers, two, heads, head_dim, self._pool.dtype, self._pool.device):
            raise ValueError(
                f"cache is {cache.dtype} {tuple(cache.shape)} on {cache.device}; this store and "
                f"batch need {self._pool.dtype} (layers {layers}, {two}, requests >= {batch}, "
                f"slots >= {length}, heads {heads}, head size {head_dim}) on {self._pool.device}: "
                "make both for the same model"
            )
        return _widened(cache.view(2 * layers, cache.shape[2] * cache.shape[3], heads, head_dim))


def _places(blocks: list[tuple[Block, int, int]], block: int, slots: int) -> NDArray[np.int64]:
    """(2, tokens): slots of the pool, and of a flattened working cache, of the tokens of blocks.

    Each block is given with its request and its place in the prompt. In the cache, a request has
    `slots`.
    """
    first = [(b.number * block, r * slots + p * block) for b, r, p in blocks]
    both = np.array(first, np.int64).reshape(-1, 2).T[:, :, None] + np.arange(block)
    return both.reshape(2, -1)


def _widened(values: torch.Tensor) -> torch.Tensor:
    """(n, tokens, m) view of (n, tokens, heads, head_dim) in elements of 16 bytes, if they fit.

    On a GPU, an indexed copy moves one element per thread and instruction.
    """
    flat = values.flatten(2)
    whole = flat.shape[-1] * flat.element_size() % _WIDEST.itemsize == 0
    return flat.view(_WIDEST) if whole else flat
