"""NextToken: the training loss of a causal LM on a batch, as one module that accelerate can wrap.

The LM head is applied only to the places that carry loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class NextToken(nn.Module):
    """Mean label-smoothed cross-entropy of the asked tokens, over the whole vocabulary.

    Attributes:
        model: a Hugging Face causal LM, or a peft model of one.
    """

    def __init__(
        self,
        model: Any,
        *,
        label_smoothing: float = 0.0,
        dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap `model`.

        Args:
            model: what is trained.
            label_smoothing: share of a token's probability that is spread over the vocabulary.
            dropout: of the token embeddings, while training.
            dtype: bfloat16 runs matrix products in it (autocast); weights stay what they are.
        """
        super().__init__()
        self.model = model
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        # Not registered again: they are parts of `model`.
        self._parts = (causal.get_decoder(), causal.get_output_embeddings())
        self._label_smoothing = label_smoothing
        self._dropout = dropout
        self._dtype = dtype

    def forward(self, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Loss of one batch.

        Args:
            tokens: (B, T) int64, padded on the right. Under a causal mask real tokens never see
                the padding, so no mask is passed.
            loss: (B, T) bool, tokens that are asked for.

        Returns:
            A float32 scalar.
        """
        decoder, head = self._parts
        with torch.autocast(tokens.device.type, self._dtype, enabled=self._dtype != torch.float32):
            embedded = decoder.get_input_embeddings()(tokens[:, :-1])
            embedded = nn.functional.dropout(embedded, self._dropout, self.training)
            hidden = decoder(inputs_embeds=embedded, use_cache=False).last_hidden_state
            asked = loss[:, 1:]
            logits = head(hidden[asked])
        return smoothed_cross_entropy(logits, tokens[:, 1:][asked], self._label_smoothing)


def smoothed_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Mean over rows of `-(1 - s) log p(target) - s mean_v log p(v)`.

    The same as `torch.nn.functional.cross_entropy(..., label_smoothing=s)` in half its time on a
    CPU: one pass over the (rows, vocabulary) array forward, one backward.

    Args:
        logits: (n, V) of any float type; computed in float32.
        targets: (n,) int64.
        smoothing: s.
    """
    loss: torch.Tensor = _SmoothedCrossEntropy.apply(logits, targets, smoothing)  # type: ignore[no-untyped-call]
    return loss


class _SmoothedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, logits: torch.Tensor, targets: torch.Tensor, smoothing: float
    ) -> torch.Tensor:
        log_p = logits.float().log_softmax(-1)
        target = log_p.gather(1, targets[:, None]).squeeze(1)
        ctx.save_for_backward(log_p, targets)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype  # type: ignore[attr-defined]
        return -((1 - smoothing) * target + smoothing * log_p.mean(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        log_p, targets = ctx.saved_tensors
        rows, vocabulary = log_p.shape
        gradient = log_p.exp().sub_(ctx.smoothing / vocabulary)  # softmax minus smoothed target
        ones = gradient.new_full((rows, 1), ctx.smoothing - 1)
        gradient.scatter_add_(1, targets[:, None], ones)
        return gradient.mul_(grad / rows).to(ctx.dtype), None, None
