"""NextToken: the training loss of a causal LM on a batch, as one module that accelerate can wrap.

The LM head is applied only to the places that carry loss. On request the model's first layers are
trained to say what the whole model says, and it to say what they can (`agreement`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class NextToken(nn.Module):
    """Mean label-smoothed cross-entropy of the asked tokens, over the whole vocabulary.

    With agreement a, `a * KL(p || q)` is added while training: p is the model's own distribution, q
    what its last norm and head make of the hidden state behind layer `exit_layer`. Gradients flow
    into both, so the model also learns to be followed: a draft cut from its first layers proposes
    what it will say. (Early-exit losses as in LayerSkip, Elhoushi et al., 2024, teach q the labels
    and leave p alone.)

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
        exit_layer: int = 1,
        agreement: float = 0.0,
    ) -> None:
        """Wrap `model`.

        Args:
            model: what is trained.
            label_smoothing: share of a token's probability that is spread over the vocabulary.
            dropout: of the token embeddings, while training.
            dtype: bfloat16 runs matrix products in it (autocast); weights stay what they are.
            exit_layer: layers behind which q is read.
            agreement: a; 0 does without.

        Raises:
            ConfigError: agreement without a layer behind the exit.
        """
        super().__init__()
        self.model = model
        self._exit_layer, self._agreement = exit_layer, agreement
        causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        layers = causal.config.get_text_config().num_hidden_layers
        if agreement and exit_layer >= layers:
            raise ConfigError(f"exit_layer: {exit_layer} is not before the last of {layers} layers")
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
            agreeing = self._agreement > 0 and self.training
            states = decoder(inputs_embeds=embedded, use_cache=False, output_hidden_states=agreeing)
            asked = loss[:, 1:]
            logits = head(states.last_hidden_state[asked])
            if agreeing:
                early = head(decoder.norm(states.hidden_states[self._exit_layer][asked]))
        rec = smoothed_cross_entropy(logits, tokens[:, 1:][asked], self._label_smoothing)
        if not agreeing:
            return rec
        log_p, log_q = logits.float().log_softmax(-1), early.float().log_softmax(-1)
        total: torch.Tensor = rec + self._agreement * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        return total


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
