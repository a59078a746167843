"""TreeModel: one forward of a Hugging Face decoder over explicit tokens, positions, mask and slots.

The same call serves prefill, beam steps, drafting and verification. The model's code is Hugging
Face's, which gets position ids, a 4-D additive mask and a `SlotCache`; the native library's on a
CPU (`recsys.native`); or an own forward on a GPU (`recsys.models.llama`), for the models that these
know. The LM head is applied only to the rows whose logits are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from recsys.errors import RequestError
from recsys.models.architectures import (
    after_head,
    attention_kinds,
    check_architecture,
    exact_positions,
)
from recsys.models.cache import CachePool, SlotCache
from recsys.models.llama import LlamaForward, reason_against
from recsys.models.prefix_store import PrefixStore
from recsys.native.decoder import NativeDecoder, native_model

# In torch on a CPU, a matrix product of one to three rows uses another kernel, which rounds
# differently, than the same rows in a larger product. So queries and rows are padded to multiples
# of four there, and a request gets the same bits alone and in a batch. The native forward needs no
# padding.
_ROWS = 4

Masks = dict[str, torch.Tensor]


# In a forked child, torch starts no thread: OpenMP would wait for those of the parent, which are
# not copied, so the first large operation would wait for ever, as in a worker of
# `gunicorn --preload`.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


class CapturedPass(Protocol):
    """One pass at fixed sizes."""

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: Masks,
        write: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The logits of the rows; arguments and result are those of `TreeModel.forward`."""


FindPass = Callable[[torch.Tensor, SlotCache, int, torch.Tensor | None], CapturedPass | None]
"""The captured pass for (tokens, cache, view, rows), or None."""


class TreeModel:
    """A decoder-only causal LM that runs any tree of tokens in one pass.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from recsys.models.mask import prompt_mask
    >>> config = LlamaConfig(vocab_size=64, hidden_size=32, num_attention_heads=4)
    >>> model, prompt = TreeModel(LlamaForCausalLM(config).eval()), torch.tensor([[3, 1, 4, 1]])
    >>> places = torch.arange(4)[None]
    >>> with model.pool.lend(batch=1, prompt=4, nodes=8) as cache:
    ...     logits = model.forward(
    ...         prompt,
    ...         places,
    ...         lambda window: prompt_mask(places, 4, window=window, dtype=model.dtype),
    ...         cache,
    ...         write=places,
    ...         view=4,
    ...         rows=torch.tensor([[3]]),
    ...     )
    >>> logits.shape
    torch.Size([1, 1, 64])

    Attributes:
        config: configuration of the text model.
        window: sliding window in positions, or None.
        vocabulary_size: rows of the LM head.
        max_positions: number of positions, of a prompt and its generated tokens together, up to
            which logits equal those of the plain forward; None for no limit.
        pool: storage of the caches.
        prefixes: prefix cache, or None.
        find_graph: finds captured passes; None without any (`recsys.models.graphs`).
        native: the native forward (`recsys.native`); None where torch runs the model. It has the
            weights of now: make a new `TreeModel` when they have changed.
    """

    find_graph: FindPass | None = None
    native: NativeDecoder | None = None
    _own: LlamaForward | None = None

    def __init__(
        self,
        model: PreTrainedModel | Any,
        *,
        own_forward: bool | None = None,
    ) -> None:
        """Wrap `model`, a Hugging Face decoder-only causal LM (of a peft model, with its adapters).

        Args:
            model: in evaluation mode.
            own_forward: whether `recsys.models.llama` runs the model, which merges its weights in
                place; None: on a GPU, if it can. False there is for comparisons.

        Raises:
            TypeError: not a model.
            ValueError: a model without an LM head, an architecture that has not been verified
                (`recsys.models.architectures`), an attention whose masks cannot be given from
                outside, or a model that the own forward was asked for and cannot run.
        """
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        if not hasattr(model, "config"):
            raise TypeError(f"expected a causal LM of transformers, got {type(model).__name__}")
        check_architecture(model.config)
        if model.training:
            raise ValueError(
                f"{type(model).__name__} is in training mode, where dropout changes every pass; "
                "call model.eval() first"
            )
        self.config = model.config.get_text_config()
        self._after_head = after_head(self.config)
        self.max_positions = exact_positions(self.config)
        if self.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"attention {self.config._attn_implementation!r} ignores explicit masks; load the "
                "model with attn_implementation='sdpa'"
            )
        self._model = model
        self._decoder = model.get_decoder()
        self._head = model.get_output_embeddings()
        if self._head is None:
            raise ValueError(
                f"{type(model).__name__} has no LM head; load the model with AutoModelForCausalLM"
            )
        self.window, self._layer_kinds = attention_kinds(self.config)
        self.vocabulary_size = int(self._head.weight.shape[0])
        self.pool = CachePool(self.config, self.dtype, self.device)
        self.prefixes: PrefixStore | None = None
        self._own = self._make_own(own_forward)
        if self._own is None:
            self.native = native_model(model, tuple(self.mask_kinds), self.max_positions)
        else:
            self.max_positions = self._own.positions

    def _make_own(self, use_own: bool | None) -> LlamaForward | None:
        """The own forward, or None without one."""
        if use_own is False or (use_own is None and self.device.type != "cuda"):
            return None
        if (reason := reason_against(self._model)) is None:
            return LlamaForward(self._model, tuple(self.mask_kinds))
        if use_own:
            raise ValueError(
                f"own_forward=True: {reason}; leave own_forward out for the modules of transformers"
            )
        return None

    @classmethod
    def of(cls, model: PreTrainedModel | TreeModel | Any) -> TreeModel:
        """Wrap `model`, unless it is a `TreeModel`."""
        return model if isinstance(model, cls) else cls(model)

    def keep_prefixes(self, max_bytes: int) -> None:
        """Add a prefix cache of at most `max_bytes`."""
        self.prefixes = PrefixStore(self.config, self.dtype, self.device, max_bytes)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return torch.device(self._head.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        dtype: torch.dtype = self._head.weight.dtype
        return dtype

    @property
    def score_dtype(self) -> torch.dtype:
        """Dtype of scores: float64 for a float64 model, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def mask_kinds(self) -> dict[str, int | None]:
        """Sliding window, or None, by kind of mask that the layers need."""
        kinds = {"sliding_attention": self.window}
        return kinds | {"full_attention": None} if "full_attention" in self._layer_kinds else kinds

    def check_positions(self, longest: int) -> None:
        """Raise `RequestError` if prompt and generated tokens need more than `max_positions`."""
        if self.max_positions is not None and longest > self.max_positions:
            raise RequestError(
                f"prompt and generated tokens need {longest} positions, and architecture "
                f"{self.config.model_type!r} with this configuration is exact for at most "
                f"{self.max_positions}; shorten the prompt (see docs/architectures.md)"
            )

    @torch.inference_mode()
    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: Callable[[int | None], torch.Tensor],
        cache: SlotCache,
        *,
        write: torch.Tensor,
        view: int,
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the tokens of one pass and return the wanted logits.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64.
            mask: function from sliding window (or None) to the (B or 1, 1, S, slots in view)
                additive mask; called twice for models that mix sliding and full attention.
            cache: keys and values.
            write: (B, S) int64 slots of these tokens.
            view: attention reads slots `0 .. view`.
            rows: (B, R) indices in S whose logits are returned; None for all.

        Returns:
            (B, R, vocabulary) logits, float32 (float64 from a float64 model).

        Raises:
            ValueError: on a CPU, as `check_positions`. On other devices, reading the positions
                would wait for the device, so the caller has to check on the host.
        """
        if self.max_positions is not None and self.device.type == "cpu":
            self.check_positions(int(positions.max()) + 1)
        outputs = tokens.shape[1] if rows is None else rows.shape[1]
        masks = {kind: mask(window) for kind, window in self.mask_kinds.items()}
        graph = None if self.find_graph is None else self.find_graph(tokens, cache, view, rows)
        if graph is not None:
            return graph(tokens, positions, masks, write, rows)
        if self.device.type == "cpu" and self.native is None:
            if tokens.shape[1] % _ROWS:
                spread = _round_up(tokens.shape[1], tokens.device)
                tokens, positions = tokens[:, spread], positions[:, spread]
                write = write[:, spread]
                masks = {kind: m[:, :, spread] for kind, m in masks.items()}
            if rows is not None and outputs % _ROWS:
                rows = rows[:, _round_up(outputs, rows.device)]
        cache.select(write, view)
        logits = self.run(tokens, positions, masks, cache, rows)[:, :outputs]
        return logits if logits.dtype == torch.float64 else logits.float()

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, torch.Tensor],
        cache: SlotCache,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute a pass; arguments are those of `forward`, with a mask for each of `mask_kinds`.

        The cache's slots are selected already. Nothing waits for the device, so it can be captured.
        The logits have the model's own dtype, or float32.
        """
        own = self._own or self.native
        if own is not None:
            return own.run(tokens, positions, masks, cache.buffer, *cache.selected, rows)
        hidden = self._decoder(
            input_ids=tokens,
            attention_mask=masks if self._layer_kinds else masks["sliding_attention"],
            position_ids=positions,
            past_key_values=cache,
            use_cache=False,
        ).last_hidden_state
        if rows is not None:
            hidden = hidden.gather(1, rows.unsqueeze(-1).expand(-1, -1, hidden.shape[-1]))
        logits: torch.Tensor = self._head(hidden)
        for step, value in self._after_head:
            logits = step(logits, value)
        return logits


def _round_up(count: int, device: torch.device) -> torch.Tensor:
    """Indices 0 .. count - 1, the last one repeated up to a multiple of `_ROWS`."""
    return torch.arange(-(-count // _ROWS) * _ROWS, device=device).clamp_(max=count - 1)
