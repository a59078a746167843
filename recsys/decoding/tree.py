"""TokenTree: one batch of prompts and the trees that grow from them, on one model.

It keeps the ancestors, the depth and the cache slot of each node. Nodes are numbered in the order
in which they are added, and node i lies in the i-th slot behind the prompt's. All requests of the
batch add the same number of nodes at a time; padding fills up those that need fewer. The tree runs
the model and counts passes; it does not depend on a trie.

          prompt ──┬── 0 ──┬── 2
                   │       └── 3         add([a, b], parents=-1), add([c, d, e], [0, 0, 1])
                   └── 1 ───── 4
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from recsys import arguments
from recsys.decoding.output import DecodeStats
from recsys.errors import NonFiniteError
from recsys.models.cache import Finite, SlotCache, whole_blocks
from recsys.models.mask import prompt_mask, tree_mask
from recsys.models.tree_forward import TreeModel
from recsys.transfers import Upload

ROOT = -1
NO_TOKEN = -1
"""The token of a padding node. Padding is run with the prompt's last token, so that the model never
reads a token that neither the prompt nor a beam contains."""
_MOST_TOTALS = 16  # passes; more are merged


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of a batch, on the host and on the device.

    Attributes:
        host_tokens: (B, T) int64, right-padded with 0.
        host_lengths: (B,) int64.
        tokens: `host_tokens` on the device.
        lengths: `host_lengths` on the device.
        upload: takes `tokens` and `lengths`, and what is added, to the device.
        slots: cache slots to reserve for each prompt, at least.
    """

    host_tokens: NDArray[np.int64]
    host_lengths: NDArray[np.int64]
    tokens: torch.Tensor
    lengths: torch.Tensor
    upload: Upload
    slots: int = 0

    def __len__(self) -> int:
        """Requests."""
        return len(self.host_lengths)

    def take(self, requests: Sequence[int]) -> PromptBatch:
        """The prompts of some requests, on their way to the device."""
        return self._on_way(
            self.host_tokens[requests], self.host_lengths[requests], self.upload, self.slots
        )

    @classmethod
    def of(
        cls,
        prompts: Sequence[ArrayLike] | PromptBatch,
        model: TreeModel,
        depth: int = 0,
        *,
        slots: int = 0,
    ) -> PromptBatch:
        """Check `prompts` against the model that will run them, pad them, copy them to its device.

        At most `depth` tokens behind a prompt will be run, and each prompt gets `slots` cache slots
        at least. Prompts may have been checked for another model.

        Raises:
            ValueError: a prompt that holds no tokens, something else than integers, or a token
                outside the vocabulary; more positions than the model is exact for.
        """
        slots = arguments.whole_number("prompt_slots", slots, 0)
        ready = prompts if isinstance(prompts, PromptBatch) else cls._padded(prompts, model, slots)
        model.check_positions(max(ready.host_lengths.tolist(), default=0) + depth)
        return ready

    @classmethod
    def _padded(cls, prompts: Sequence[ArrayLike], model: TreeModel, slots: int) -> PromptBatch:
        arrays = [arguments.integers(f"prompt {i}", p) for i, p in enumerate(prompts)]
        sizes = [len(a) for a in arrays]
        if 0 in sizes:
            raise ValueError(f"prompt {sizes.index(0)} is empty; it needs at least one token")
        lengths = np.asarray(sizes, np.int64)
        padded = np.zeros((len(arrays), max(sizes, default=1)), np.int64)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        # as unsigned numbers, negative tokens are the largest of all
        if padded.view(np.uint64).max(initial=0) >= model.vocabulary_size:
            row, column = np.argwhere((padded < 0) | (padded >= model.vocabulary_size))[0]
            raise ValueError(
                f"prompt {row} has token {padded[row, column]} at place {column}; "
                f"the model knows 0 .. {model.vocabulary_size - 1}"
            )
        return cls._on_way(padded, lengths, Upload(model.device), slots)

    @classmethod
    def _on_way(
        cls,
        tokens: NDArray[np.int64],
        lengths: NDArray[np.int64],
        upload: Upload,
        slots: int,
    ) -> PromptBatch:
        return cls(tokens, lengths, upload.add(tokens), upload.add(lengths), upload, slots)


def require_finite(finite: torch.Tensor) -> None:
    """Raise NonFiniteError, which names requests, unless (B,) `finite` is all true.

    This synchronises with the device.
    """
    if not bool(finite.all()):
        raise NonFiniteError((~finite).nonzero().flatten().tolist())


def prompt_places(
    lengths: NDArray[np.int64], begun: NDArray[np.int64], size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(B, size) places of prompt tokens to run, and (B, 1) the last one's place among them.

    Requests with fewer of them repeat their last token, in the same slot. (B,) `begun` tokens of
    each prompt are in the cache already.
    """
    last = (lengths - 1)[:, None]
    return np.minimum(begun[:, None] + np.arange(size), last), last - begun[:, None]


class TokenTree:
    """Trees over a `SlotCache`, which is lent to the tree while it is used as a context.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4)
    >>> model = TreeModel.of(LlamaForCausalLM(config).eval())
    >>> with TokenTree(model, PromptBatch.of([[1, 2], [3]], model), capacity=4) as tree:
    ...     first = tree.add(torch.tensor([[5, 6], [5, 7]]), torch.full((2, 2), ROOT), depth=1)
    ...     logits = tree.forward()  # of each prompt's last token, then of the two nodes
    >>> first, tuple(logits.shape), tree.passes
    (0, (2, 3, 64), 1)

    Attributes:
        model: the model that runs the nodes.
        lengths: (B,) number of prompt tokens.
        cached: (B,) how many of them were found in the prefix store (host).
        nodes: nodes added so far, one number for the batch.
        passes: forwards so far.
        cache: keys and values.
    """

    cache: SlotCache

    def __init__(
        self,
        model: TreeModel,
        prompts: PromptBatch,
        capacity: int,
        *,
        reserve: int = 0,
    ) -> None:
        """Plan for prompts and at most `capacity` nodes a request; nothing is run yet.

        If the model has a prefix store, prompts are looked up and stored there. `reserve` node
        slots beyond `capacity` are for a caller that manages them itself.
        """
        self.model, self.lengths, self.prompts = model, prompts.lengths, prompts
        self.nodes = self.passes = 0
        self.cached = np.zeros(len(prompts), np.int64)
        batch, prompt = prompts.tokens.shape
        self._slots = (batch, max(prompt, prompts.slots), capacity + reserve)
        room, device = whole_blocks(capacity), prompts.tokens.device
        self._tokens = torch.zeros((batch, room), dtype=torch.int64, device=device)
        self._depth = torch.zeros((batch, room), dtype=torch.int64, device=device)
        # Row i: node i and its ancestors. The last row is the prompt's: no nodes.
        self._ancestors = torch.zeros((batch, room + 1, room), dtype=torch.bool, device=device)
        self._run = self._unused = 0
        self._totals = [torch.zeros((batch, 0), device=device)]
        self._stored: Finite | None = None
        self._noted: Finite | None = None
        self._known: list[bool] | None = None
        self._borrowed = ExitStack()

    def __enter__(self) -> Self:
        """Borrow a cache, and fill it with the stored prefixes of the prompts."""
        with ExitStack() as borrowed:  # given back if filling it fails
            self.cache = borrowed.enter_context(self.model.pool.lend(*self._slots))
            store = self.model.prefixes
            if store is not None:
                tokens, lengths = self.prompts.host_tokens, self.prompts.host_lengths
                with store.lookup(tokens, lengths) as hit:
                    self.cached = hit.cached
                    self._places = self._prompt_places()
                    store.load(hit, self.cache.buffer, self.prompts.upload)
            else:
                self._places = self._prompt_places()
            self.prompts.upload.send()
            self._padding = self.prompts.tokens.gather(1, self.lengths[:, None] - 1)
            self._borrowed = borrowed.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Give the cache back."""
        known = self._known  # what the host knows needs no operation on the device
        self._noted = self.cache.note(
            self.finite.all() if known is None else torch.tensor(all(known))
        )
        self._tell()
        self._borrowed.close()
        del self.cache

    def settle(self, finite: Sequence[bool]) -> None:
        """Record what the host knows of the logits of all passes, by the original batch.

        The next search then need not read it from the device. The tree may have been left.
        """
        self._known = list(finite)
        self._tell()

    def _tell(self) -> None:
        """Pass on what the host knows to those who keep the values."""
        if self._known is not None and self._stored is not None:
            self._stored.host = self._known
        if self._known is not None and self._noted is not None:
            self._noted.host = [all(self._known)]

    def add(
        self,
        tokens: torch.Tensor,
        parents: torch.Tensor,
        depth: torch.Tensor | int,
        *,
        within: int = 0,
        is_path: bool = False,
    ) -> int:
        """Add nodes; they are run by the next `forward`.

        Args:
            tokens: (B, W) int64; `NO_TOKEN` for padding.
            parents: (B, W) node numbers added before this call; `ROOT` for the prompt.
            depth: of the nodes, (B, W) or one for all; 1 below the prompt.
            within: longest chain of parents that are themselves among the nodes of this call.
            is_path: whether all nodes of the tree are one path, in the order of their numbers.

        Returns:
            Number of the first new node.
        """
        first, end = self.nodes, self.nodes + tokens.shape[1]
        here = slice(first, end)
        self._tokens[:, here] = torch.where(tokens == NO_TOKEN, self._padding, tokens)
        self._depth[:, here] = depth
        known, none = self._ancestors[..., :end], self._ancestors.shape[1] - 1
        rows = torch.where(parents == ROOT, none, parents).unsqueeze(-1).expand(-1, -1, end)
        slots = torch.arange(end, device=tokens.device)
        own = slots == slots[first:].unsqueeze(-1)
        if is_path:
            known[:, here] = slots <= slots[first:].unsqueeze(-1)
        for _ in range(0 if is_path else 1 + within):  # hands ancestors one generation down
            known[:, here] = known.gather(1, rows) | own
        self.nodes = end
        return first

    def stats(self, request: int, **counters: int) -> DecodeStats:
        """Counters of one request of the original batch, and the search's own `counters`."""
        slots = int(self.prompts.host_lengths[request]) + self._run - self._unused
        cached = int(self.cached[request])
        return DecodeStats(
            target_passes=self.passes,
            target_tokens=slots - cached,
            kv_slots=slots,
            kv_bytes=slots * self.cache.bytes_per_slot,
            cached_tokens=cached,
            **counters,
        )

    def forward(self, *, only_last: bool = False) -> torch.Tensor:
        """Run the nodes added since the last call, and the prompt in the first call.

        The caller passes the totals of the logits on to `note`.

        Returns:
            (B, W, V) logits of the new nodes; with the prompt, its last token's come first. With
            `only_last`, (B, 1, V) of the last one.
        """
        first, last = self._run, self.nodes
        self._run, self.passes = last, self.passes + 1
        view = self.cache.prompt + whole_blocks(last)
        tokens, depth = self._tokens[:, first:last], self._depth[:, first:last]
        node = torch.arange(first, last, device=tokens.device)
        positions = self.lengths[:, None] + depth - 1
        write = (self.cache.prompt + node).expand_as(tokens)
        places = rows = None
        if self.passes == 1:
            places, rows = self._places
            tokens = torch.cat([self.prompts.tokens.gather(1, places), tokens], dim=1)
            positions = torch.cat([places, positions], dim=1)
            write = torch.cat([places, write], dim=1)
            rows = torch.cat([rows, (node + places.shape[1]).expand(len(tokens), -1)], dim=1)

        if only_last:
            last_row = torch.full_like(self._padding, tokens.shape[1] - 1)
            rows = last_row if rows is None else rows[:, -1:]

        def mask(window: int | None) -> torch.Tensor:
            parts = []
            if places is not None:
                parts.append(prompt_mask(places, view, window=window, dtype=self.model.dtype))
            if last > first:
                seen = view - self.cache.prompt
                parts.append(
                    tree_mask(
                        self._ancestors[:, first:last, :seen],
                        self.lengths,
                        self.cache.prompt,
                        depth=depth,
                        node_depth=self._depth[:, :seen],
                        window=window,
                        dtype=self.model.dtype,
                    )
                )
            return torch.cat(parts, dim=2)

        return self.model.forward(
            tokens, positions, mask, self.cache, write=write, view=view, rows=rows
        )

    def note(self, totals: torch.Tensor) -> None:
        """Record whether the logits of a pass are finite; to be called after each pass.

        After the first pass the prompts are stored, if the model has a prefix store. A request
        whose logits are not finite may have written keys or values that are not finite, and a
        masked slot still contributes 0 x value to attention. Such prompts are therefore never found
        in the store, and the cache is cleaned before it is lent again.

        Args:
            totals: (B, W) the log-sum-exp, or the maximum, of each row of logits. It is finite if
                and only if no logit is NaN or +inf and not all are -inf.
        """
        self._totals.append(totals)
        if len(self._totals) > _MOST_TOTALS:
            self._totals = [torch.cat(self._totals, dim=1).abs().amax(1, keepdim=True)]
        if self.passes == 1:
            self._store()

    def _store(self) -> None:
        """Store the prompts, which have been run, if the model has a prefix store."""
        if (store := self.model.prefixes) is not None:
            prompts, self._stored = self.prompts, Finite(self.finite)
            store.insert(
                prompts.host_tokens,
                prompts.host_lengths,
                self.cache.buffer,
                self._stored,
            )

    @property
    def finite(self) -> torch.Tensor:
        """(b,) bool, whether all logits of a request were finite so far."""
        return torch.cat(self._totals, dim=1).isfinite().all(1)

    def _prompt_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`prompt_places` on their way to the device."""
        lengths, begun, add = self.prompts.host_lengths, self.cached, self.prompts.upload.add
        places, last = prompt_places(lengths, begun, int((lengths - begun).max()))
        return add(places), add(last)

    def move(self, nodes: int) -> None:
        """Continue in a larger cache, with room for `nodes` nodes; slots keep their places."""
        with ExitStack() as borrowed:
            cache = borrowed.enter_context(
                self.model.pool.lend(len(self.lengths), self.cache.prompt, nodes)
            )
            cache.copy_from(self.cache)
            self._borrowed.close()
            self.cache, self._borrowed = cache, borrowed.pop_all()

    def keep(self, requests: torch.Tensor) -> None:
        """Continue with some requests of the batch only; (b,) int64 places."""
        self.cache.keep(requests)
        self.lengths, self._padding = self.lengths[requests], self._padding[requests]
        self.cache.note(self.finite.all())
        self._totals = [totals[requests] for totals in self._totals]
        self._tokens, self._depth = self._tokens[requests], self._depth[requests]
        self._ancestors = self._ancestors[requests]


class FixedTree(TokenTree):
    """A tree over a cache and prompt tokens that the caller provides, so that it can be captured.

    It borrows and stores nothing. What the host knows of the prompts is not used.
    """

    def __init__(
        self,
        model: TreeModel,
        prompts: PromptBatch,
        capacity: int,
        *,
        cache: SlotCache,
        places: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Begin a tree in `cache`, which holds the stored prefixes; `places` as `prompt_places`."""
        super().__init__(model, prompts, capacity)
        self.cache, self._places = cache, places
        self._padding = prompts.tokens.gather(1, prompts.lengths[:, None] - 1)

    def continued(
        self,
        prompts: PromptBatch,
        cache: SlotCache,
        cached: NDArray[np.int64],
        *,
        unused: int,
    ) -> FixedTree:
        """This tree after a replay of its passes, with what the host knows of the batch.

        Args:
            prompts: of the requests that come first in the tree; others only fill it up.
            cache: of these requests, in the same storage.
            cached: (B,) as the attribute.
            unused: nodes per request that only fill up the tree, for `stats`.
        """
        tree = copy(self)
        tree.prompts, tree.cache, tree.cached = prompts, cache, cached
        tree._unused = unused
        return tree

    def _store(self) -> None:
        """Leave that to the caller."""
