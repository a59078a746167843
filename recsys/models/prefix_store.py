"""PrefixStore: keys and values of prompts that were run before, so that only new tokens are run.

A radix tree of fixed blocks over one preallocated pool. A node is one block: the keys and values of
`block` successive tokens in all layers. Its key is (parent block, the block's tokens), at the root
(the model version's number, tokens), so a match compares the tokens of the whole prefix themselves:
no hash is trusted and no user id is asked. Keys and values depend on nothing but the model and the
tokens up to theirs, which is why a prefix may be shared.

    version "a" ── [5 9 2 7] ──┬── [1 1 4 8] ── [3 6 6 2]
                               └── [1 1 4 9]
    version "b" ── [5 9 2 7]

Python work is one dictionary step and one step of recency per block of a prompt; tensor work is one
gather and one indexed copy a batch, whatever the layers. This module knows block ids and buffers;
it never runs a model and knows neither trees of nodes nor beams.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import count
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from transformers import PretrainedConfig

from recsys.models.cache import key_value_shape

_TOKEN = np.dtype(np.int64)


@dataclass(frozen=True)
class PrefixStatistics:
    """What a `PrefixStore` holds and has done.

    Attributes:
        blocks: blocks of the pool.
        used: blocks in the tree.
        free: blocks that hold nothing.
        pinned: requests of hits not yet released, each of which holds its prefix.
        bytes: of the pool, used or not.
        hits: prompt tokens that lookups found.
        misses: prompt tokens that lookups did not find, to be computed.
        evictions: blocks given up to make room.
    """

    blocks: int
    used: int
    free: int
    pinned: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class Hit:
    """Stored prefixes of a batch, held in the pool until released (`with store.lookup(...)`).

    Attributes:
        cached: (B,) int64 leading tokens of each prompt that the store holds.
        pool: (cached.sum(),) int64 pool slot of each of these tokens.
        request: (cached.sum(),) int64 its request.
        position: (cached.sum(),) int64 its place in the prompt.
    """

    def __init__(self, store: PrefixStore, paths: list[list[int]]) -> None:
        self._store, self._tips = store, [path[-1] for path in paths if path]
        self._released = False
        self.cached = np.array([len(path) for path in paths], dtype=np.int64) * store.block
        self.pool, self.request, self.position = store._token_places(
            [(block, b, place) for b, path in enumerate(paths) for place, block in enumerate(path)]
        )

    def release(self) -> None:
        """Let the blocks go; they may then be evicted. A second call does nothing."""
        with self._store._lock:
            if not self._released:
                self._released = True
                self._store._let_go(self._tips)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class StoredModel(Protocol):
    """What the store has to know of a model (`recsys.models.tree_forward.TreeModel`)."""

    config: PretrainedConfig

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""


class PrefixStore:
    """Keys and values of prompts by model version and tokens, least recently used blocks leave.

    Threads may share it. One lock guards the tree, the recency order, the pins and the counters,
    and is kept while `insert` copies, so no lookup meets a block before its content. `load` takes
    no lock: blocks of a live hit are not written. On CUDA, `load` and `insert` are to be called on
    one stream: a block may be given away while a copy out of it is still queued, and only the
    stream's order keeps the two apart.

    Attributes:
        block: tokens of a block.
        blocks: blocks of the pool.
    """

    # _order: block -> key, oldest first; touching a path leaves parents newer than their children,
    # so the oldest block of all is always a leaf.
    # _blocks: key -> block. A key is (parent block or version's number, token bytes).
    # _roots: version -> its number, negative and never given twice.
    # _root, _children: version's number and child count of each block.
    # _unproven: blocks that the last `insert` added, by request, and whether the keys and values of
    # each request are finite; read by the next call that needs to know, so that `insert` does not
    # wait for the device.
    # _pins: block -> holders. Only the last block of a held path is counted: a block with children
    # is never evicted, so it guards the ones above.

    def __init__(
        self,
        layers: int,
        heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_bytes: int,
        block: int = 4,
    ) -> None:
        """Allocate the pool, (layers, 2, blocks x block, heads, head_dim).

        Args:
            layers: of the model.
            heads: key/value heads.
            head_dim: size of a head.
            dtype: of keys and values.
            device: where the working caches are.
            max_bytes: the pool takes no more; it is filled up with whole blocks.
            block: tokens of a block. Reuse is in whole blocks.

        Raises:
            ValueError: `block` is not positive, or `max_bytes` holds no block.
        """
        if block < 1:
            raise ValueError(f"block is {block}; a block has at least one token")
        block_bytes = block * layers * 2 * heads * head_dim * dtype.itemsize
        if max_bytes < block_bytes:
            raise ValueError(
                f"max_bytes is {max_bytes}, but one block of {block} tokens takes {block_bytes}; "
                "give it more, or make do without a prefix store"
            )
        self.block, self.blocks = block, max_bytes // block_bytes
        self._pool = torch.empty(
            (layers, 2, self.blocks * block, heads, head_dim), dtype=dtype, device=device
        )
        self._lock = threading.Lock()
        self._order: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        self._blocks: dict[tuple[int, bytes], int] = {}
        self._roots: dict[str, int] = {}
        self._root_numbers = count(-1, -1)
        self._root = [0] * self.blocks
        self._children = [0] * self.blocks
        self._pins: Counter[int] = Counter()
        self._unproven: tuple[list[tuple[int, int]], torch.Tensor] | None = None
        self._free = list(range(self.blocks))[::-1]
        self._hits = self._misses = self._evictions = 0

    @classmethod
    def for_model(cls, model: StoredModel, max_bytes: int, block: int = 4) -> PrefixStore:
        """A store for the keys and values of `model`, in its dtype and on its device."""
        layers, heads, head_dim = key_value_shape(model.config)
        return cls(
            layers,
            heads,
            head_dim,
            dtype=model.dtype,
            device=model.device,
            max_bytes=max_bytes,
            block=block,
        )

    @property
    def pinned(self) -> int:
        """Requests of hits not yet released; 0 when nothing runs, or something has leaked."""
        with self._lock:
            return self._pins.total()

    def statistics(self) -> PrefixStatistics:
        """Sizes now and counts since the store was made."""
        with self._lock:
            return PrefixStatistics(
                blocks=self.blocks,
                used=len(self._order),
                free=len(self._free),
                pinned=self._pins.total(),
                bytes=self._pool.nbytes,
                hits=self._hits,
                misses=self._misses,
                evictions=self._evictions,
            )

    def lookup(self, version: str, tokens: ArrayLike, lengths: ArrayLike) -> Hit:
        """Find, and hold, the longest stored prefix of each prompt.

        The last token of a prompt is never part of it: it has to be run for its logits.

        Args:
            version: of the model; prefixes of another version never match.
            tokens: (B, T) integers, right-padded.
            lengths: (B,) tokens of each prompt.

        Returns:
            What was found; release it, best by `with`.

        Raises:
            ValueError: `tokens` and `lengths` do not belong together.
        """
        prompts, sizes = _check_prompts(tokens, lengths)
        with self._lock:
            self._prove()
            root = self._roots.get(version)
            paths = [
                [] if root is None else self._match(root, prompt, (size - 1) // self.block)
                for prompt, size in zip(prompts, sizes, strict=True)
            ]
            hit = Hit(self, paths)
            for tip in hit._tips:
                self._pins[tip] += 1
                self._touch(tip)
            found = int(hit.cached.sum())
            self._hits += found
            self._misses += sum(sizes) - found
        return hit

    def known(self, version: str, tokens: ArrayLike, lengths: ArrayLike) -> NDArray[np.int64]:
        """(B,) tokens that `lookup` would find; nothing is held, counted or touched."""
        prompts, sizes = _check_prompts(tokens, lengths)
        with self._lock:
            self._prove()
            root = self._roots.get(version)
            if root is None:
                return np.zeros(len(sizes), np.int64)
            paths = (
                self._match(root, prompt, (size - 1) // self.block)
                for prompt, size in zip(prompts, sizes, strict=True)
            )
            return np.fromiter(map(len, paths), np.int64, len(sizes)) * self.block

    @torch.inference_mode()
    def load(self, hit: Hit, cache: torch.Tensor) -> None:
        """Copy what was found into a working cache: token p of request b into slot p of b.

        Args:
            hit: of this store, not yet released.
            cache: (layers, 2, B, slots, heads, head_dim), a `SlotCache`'s buffer; B and slots may
                be larger than the prompts need. Other slots are not touched.

        Raises:
            ValueError: the hit was released or is another store's, or the cache does not fit.
        """
        if hit._store is not self or hit._released:
            raise ValueError(
                "the hit is not held by this store; load it inside `with store.lookup(...)`"
            )
        flat = self._flat(cache, len(hit.cached), int(hit.cached.max(initial=0)))
        if len(hit.pool):
            pool, slots = self._indices(hit.pool, hit.request, hit.position, cache.shape[3])
            flat.index_copy_(1, slots, self._pool.flatten(0, 1).index_select(1, pool))

    @torch.inference_mode()
    def insert(
        self,
        version: str,
        tokens: ArrayLike,
        lengths: ArrayLike,
        cache: torch.Tensor,
        finite: torch.Tensor | None = None,
    ) -> None:
        """Store the whole blocks of each prompt that are not there yet.

        Makes room by giving up the least recently used blocks, children before their parents, but
        none that a live hit holds and none of this batch. Stores less where there is no more room.

        Args:
            version: of the model that computed `cache`.
            tokens: (B, T) integers, right-padded.
            lengths: (B,) tokens of each prompt.
            cache: as in `load`, with the keys and values of every prompt token in place.
            finite: (B,) bool on the device, whether the keys and values of each prompt are finite;
                those that are not will never be found. None where that is known.

        Raises:
            ValueError: `tokens` and `lengths` do not belong together, or the cache does not fit.
        """
        prompts, sizes = _check_prompts(tokens, lengths)
        flat = self._flat(cache, len(sizes), max(sizes, default=0))
        with self._lock:
            self._prove()
            if version not in self._roots:
                self._roots[version] = next(self._root_numbers)
            root = self._roots[version]
            added: list[tuple[int, int, int]] = []
            held: list[int] = []
            try:
                for request, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
                    self._grow(root, prompt, size // self.block, request, added, held)
                if added:
                    pool, slots = self._indices(*self._token_places(added), cache.shape[3])
                    self._pool.flatten(0, 1).index_copy_(1, pool, flat.index_select(1, slots))
                    if finite is not None:
                        self._unproven = [(block, owner) for block, owner, _ in added], finite
            except BaseException:
                # What was not copied must never be found.
                for block, _, _ in reversed(added):
                    self._remove(block)
                raise
            finally:
                self._let_go(held)

    def drop(self, version: str) -> None:
        """Forget a version. Blocks that a live hit holds become free when it is released."""
        with self._lock:
            self._prove()
            self._drop(version)

    def clear(self) -> None:
        """Forget all versions; counts of the past stay."""
        with self._lock:
            self._prove()
            for version in list(self._roots):
                self._drop(version)

    # Below: the lock is held by the caller.

    def _prove(self) -> None:
        """Remove what the last `insert` added for requests that were not finite.

        All of it: masked values that are not finite reach the tokens before them, too. Blocks of
        other requests go with the blocks that they follow.
        """
        if self._unproven is None:
            return
        (added, finite), self._unproven = self._unproven, None
        proven = finite.tolist()
        bad: dict[int, None] = {}  # in the order of `added`, where blocks come after their parents
        for block, request in added:
            if not proven[request] or self._order[block][0] in bad:
                bad[block] = None
        for block in reversed(bad):
            self._remove(block)

    def _match(self, root: int, prompt: bytes, limit: int) -> list[int]:
        """Blocks of the longest stored prefix of `prompt`, at most `limit`."""
        path: list[int] = []
        above, width = root, self.block * _TOKEN.itemsize
        for start in range(0, limit * width, width):
            block = self._blocks.get((above, prompt[start : start + width]))
            if block is None:
                break
            path.append(block)
            above = block
        return path

    def _grow(
        self,
        root: int,
        prompt: bytes,
        size: int,
        request: int,
        added: list[tuple[int, int, int]],
        held: list[int],
    ) -> None:
        """Lengthen a prompt's path to `size` blocks, as far as there is room, and hold it.

        Appends (block, request, place in the prompt) of new blocks to `added`, and what it holds
        to `held`.
        """
        path = self._match(root, prompt, size)
        above = root
        if path:
            above = path[-1]
            self._pins[above] += 1
            held.append(above)
        width = self.block * _TOKEN.itemsize
        # All new blocks are taken before the first is linked, so that none evicts its own parent.
        for place, block in enumerate(self._take(size - len(path)), start=len(path)):
            key = (above, prompt[place * width : (place + 1) * width])
            self._order[block] = key
            self._blocks[key] = block
            self._root[block] = root
            if above >= 0:
                self._children[above] += 1
            added.append((block, request, place))
            above = block
        if above >= 0:
            self._pins[above] += 1
            held.append(above)
            self._touch(above)

    def _take(self, wanted: int) -> list[int]:
        """Up to `wanted` blocks out of the tree, evicting where none is free."""
        taken: list[int] = []
        while len(taken) < wanted and (self._free or self._evict()):
            taken.append(self._free.pop())
        return taken

    def _evict(self) -> bool:
        """Free the oldest leaf that nobody holds; False where there is none."""
        # The oldest block is a leaf. If it is held it is in use, hence recent: it and its path are
        # moved behind all others. Once every holder has had its turn there is nothing else left.
        for _ in range(len(self._pins) + 1):
            oldest = next(iter(self._order), None)
            if oldest is None:
                return False
            if oldest not in self._pins:
                self._remove(oldest)
                self._evictions += 1
                return True
            self._touch(oldest)
        return False

    def _touch(self, block: int) -> None:
        """Make a path the most recent: its last block first, so that parents end up newer."""
        while block >= 0:
            self._order.move_to_end(block)
            block = self._order[block][0]

    def _remove(self, block: int) -> None:
        """Take a leaf out of the tree."""
        key = self._order.pop(block)
        del self._blocks[key]
        if key[0] >= 0:
            self._children[key[0]] -= 1
        self._free.append(block)

    def _let_go(self, tips: list[int]) -> None:
        """Undo one pin of each tip; what is left of a dropped version goes with its last pin."""
        for tip in tips:
            self._pins[tip] -= 1
            if self._pins[tip] == 0:
                del self._pins[tip]
            block = tip
            if self._root[tip] not in self._roots.values():
                while block >= 0 and not self._children[block] and block not in self._pins:
                    above = self._order[block][0]
                    self._remove(block)
                    block = above

    def _drop(self, version: str) -> None:
        """`drop` with the lock held."""
        root = self._roots.pop(version, None)
        # Children come before their parents in this order: one round is enough.
        for block in list(self._order):
            if self._root[block] == root and not self._children[block] and block not in self._pins:
                self._remove(block)

    # Below: no state is read that ever changes.

    def _token_places(
        self, blocks: list[tuple[int, int, int]]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Pool slot, request and position of every token of (block, request, place) triples."""
        table = np.array(blocks, dtype=np.int64).reshape(-1, 3)
        inside = np.arange(self.block)
        pool = (table[:, :1] * self.block + inside).ravel()
        position = (table[:, 2:] * self.block + inside).ravel()
        return pool, table[:, 1].repeat(self.block), position

    def _indices(
        self,
        pool: NDArray[np.int64],
        request: NDArray[np.int64],
        position: NDArray[np.int64],
        slots: int,
    ) -> torch.Tensor:
        """(2, tokens) on the device: pool slots, and slots of the flattened working cache."""
        host = torch.from_numpy(np.stack([pool, request * slots + position]))
        return host.to(self._pool.device, non_blocking=True)

    def _flat(self, cache: torch.Tensor, batch: int, length: int) -> torch.Tensor:
        """(layers x 2, B x slots, heads, head_dim) view of a cache that is fit for this store."""
        layers, two, _, heads, head_dim = self._pool.shape
        ends = (*cache.shape[:2], *cache.shape[4:])
        roomy = cache.dim() == 6 and cache.shape[2] >= batch and cache.shape[3] >= length
        if not roomy or ends != (layers, two, heads, head_dim):
            raise ValueError(
                f"cache has shape {tuple(cache.shape)}; this store and batch need (layers "
                f"{layers}, {two}, requests >= {batch}, slots >= {length}, heads {heads}, head "
                f"size {head_dim}): make it for the same model and prompts"
            )
        if (cache.dtype, cache.device) != (self._pool.dtype, self._pool.device):
            raise ValueError(
                f"cache is {cache.dtype} on {cache.device}, the store {self._pool.dtype} on "
                f"{self._pool.device}; make both for the same model"
            )
        try:
            return cache.view(2 * layers, cache.shape[2] * cache.shape[3], heads, head_dim)
        except RuntimeError as error:
            raise ValueError(
                f"cache has strides {cache.stride()}; requests and slots must lie one behind the "
                "other, as in a SlotCache"
            ) from error


def _check_prompts(tokens: ArrayLike, lengths: ArrayLike) -> tuple[list[bytes], list[int]]:
    """Bytes and length of each prompt; equal bytes are equal tokens, whatever their dtype was."""
    table, sizes = np.asarray(tokens), np.asarray(lengths)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise ValueError(f"tokens are {table.dtype} {table.shape}; give integers (B, T)")
    if sizes.shape != table.shape[:1] or (sizes.size and sizes.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths are {sizes.dtype} {sizes.shape}; give one integer for each of the "
            f"{len(table)} prompts"
        )
    if sizes.size and not (sizes.min() >= 0 and sizes.max() <= table.shape[1]):
        raise ValueError(
            f"lengths go from {sizes.min()} to {sizes.max()}; prompts have 0 to {table.shape[1]} "
            "tokens"
        )
    return [row.tobytes() for row in table.astype(_TOKEN)], sizes.tolist()
