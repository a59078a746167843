"""NextToken and WordDistillation: training losses of a causal LM on a batch of windows.

The LM head is applied only to the positions that carry loss. Optionally the target is trained with
an early-exit KL loss (`agreement`), and with soft labels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx

from recsys.errors import ConfigError
from recsys.training import losses
from recsys.training.settings import AlignmentSettings
from recsys.training.tree import causal_parts


class NextToken(nn.Module):
    """Mean label-smoothed cross-entropy of the tokens with loss, over the whole vocabulary.

    With agreement a, the early-exit loss `a * KL(p || q)` is added in training: p is the model's
    distribution, q the distribution of its last norm and head on the hidden state after layer
    `exit_layer`. Gradients flow into both p and q, so that a draft cut from the first layers
    predicts the model better. (In LayerSkip, Elhoushi et al., 2024, q is trained on the labels
    instead.)

    With soft labels, a share of each token's target is distributed over the items of the label that
    have the same preceding codes, by their code at the token's level. The first code therefore uses
    the whole label, later codes the part below the item's prefix. A token without such items keeps
    its hard target.

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
        soft_labels: float = 0.0,
    ) -> None:
        """Wrap `model`.

        Args:
            model: the model to train.
            label_smoothing: share of a token's probability that is spread over the vocabulary.
            dropout: of the token embeddings in training.
            dtype: bfloat16 runs matrix products in it (autocast); the weights keep their type.
            exit_layer: number of layers before the early exit.
            agreement: a; 0 omits the early-exit loss.
            soft_labels: share of the target that comes from soft labels, if a batch has them.

        Raises:
            ConfigError: agreement with an exit after the last layer.
        """
        super().__init__()
        self.model = model
        self._exit_layer, self._agreement = exit_layer, agreement
        decoder, head = causal_parts(model)
        layers = decoder.config.num_hidden_layers
        if agreement and exit_layer >= layers:
            raise ConfigError(f"exit_layer: {exit_layer} is not before the last of {layers} layers")
        # Not registered again: they are parts of `model`.
        self._parts = (decoder, head)
        self._label_smoothing = label_smoothing
        self._soft_labels = soft_labels
        self._dropout = dropout
        self._dtype = dtype

    def forward(
        self,
        tokens: torch.Tensor,
        loss: torch.Tensor,
        soft_tokens: torch.Tensor | None = None,
        soft_shares: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Loss of one batch.

        Args:
            tokens: (B, T) int64, padded on the right. No mask is needed, because under the causal
                mask real tokens do not attend to the padding.
            loss: (B, T) bool, tokens that carry loss.
            soft_tokens: (N, k, L) int64 tokens of the soft labels of the N items with loss.
            soft_shares: (N, k) their shares, which add up to 1 or to 0.

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
        targets = tokens[:, 1:][asked]
        if soft_tokens is None or soft_shares is None:
            rec = smoothed_cross_entropy(logits, targets, self._label_smoothing)
        else:
            rec = soft_cross_entropy(
                logits,
                *mixed_targets(targets, soft_tokens, soft_shares, self._soft_labels),
                self._label_smoothing,
            )
        if not agreeing:
            return rec
        log_p, log_q = logits.float().log_softmax(-1), early.float().log_softmax(-1)
        total: torch.Tensor = rec + self._agreement * (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        return total


class WordDistillation(nn.Module):
    """alpha * KL or TVD over the whole vocabulary + (1 - alpha) * next-item loss, at every token.

    The target runs in every training step, because whole distributions are too large to store.

    Attributes:
        model: the draft.
    """

    def __init__(
        self,
        model: Any,
        target: Any,
        settings: AlignmentSettings,
        *,
        label_smoothing: float = 0.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Wrap `model`; `target` runs under the same autocast."""
        super().__init__()
        self.model = model
        self._target = (target,)
        self._settings, self._smoothing, self._dtype = settings, label_smoothing, dtype

    def forward(self, tokens: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        """Loss of one `recsys.training.batches.Batch`."""
        settings, asked = self._settings, loss[:, 1:]
        enabled = self._dtype != torch.float32
        with torch.autocast(tokens.device.type, self._dtype, enabled=enabled):
            logits = self._logits(self.model, tokens, asked)
            with torch.no_grad():
                log_p = self._logits(self._target[0], tokens, asked)
            rec = smoothed_cross_entropy(logits, tokens[:, 1:][asked], self._smoothing)
        kind = torch.float64 if logits.dtype == torch.float64 else torch.float32
        row = losses.forward_kl if settings.objective == "wordkd" else losses.total_variation
        align = row(log_p.log_softmax(-1, dtype=kind), logits.log_softmax(-1, dtype=kind)).mean()
        total: torch.Tensor = settings.align_weight * align + (1 - settings.align_weight) * rec
        return total

    @staticmethod
    def _logits(model: Any, tokens: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        decoder, head = causal_parts(model)
        hidden = decoder(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
        logits: torch.Tensor = head(hidden[asked])
        return logits


def mixed_targets(
    targets: torch.Tensor, soft_tokens: torch.Tensor, soft_shares: torch.Tensor, share: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Targets of each token with loss: its own first, then those of its item's soft label.

    Args:
        targets: (N * L,) int64 tokens of the items with loss, level by level.
        soft_tokens: (N, k, L) int64.
        soft_shares: (N, k).
        share: of the soft label, if it has items below the prefix.

    Returns:
        (N * L, 1 + k) int64 tokens and their float32 shares, which add up to 1.
    """
    n, k, levels = soft_tokens.shape
    own = targets.view(n, 1, levels)
    # An item counts at a level if all its preceding codes are those of the target item.
    same = (soft_tokens == own).cumprod(-1)
    below = torch.cat([same.new_ones(n, k, 1), same[..., :-1]], dim=-1) * soft_shares[..., None]
    total = below.sum(1, keepdim=True)
    soft = below * (share / total.clamp(min=1e-9))
    hard = torch.where(total > 0, 1 - share, 1.0)
    shares = torch.cat([hard, soft], dim=1).transpose(1, 2).reshape(n * levels, 1 + k)
    return torch.cat([own, soft_tokens], dim=1).transpose(1, 2).reshape(n * levels, 1 + k), shares


def smoothed_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Mean over rows of `-(1 - s) log p(target) - s mean_v log p(v)`.

    Equal to `torch.nn.functional.cross_entropy(..., label_smoothing=s)` in half its time on a CPU:
    one pass over the (rows, vocabulary) array forward, one backward.

    Args:
        logits: (n, V) of any float type; computed in float32.
        targets: (n,) int64.
        smoothing: s.
    """
    return soft_cross_entropy(
        logits, targets[:, None], torch.ones(len(targets), 1, device=logits.device), smoothing
    )


def soft_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, shares: torch.Tensor, smoothing: float = 0.0
) -> torch.Tensor:
    """Cross-entropy with several targets: `-(1 - s) sum_j share_j log p(target_j) - ...`.

    Args:
        logits: (n, V) of any float type; computed in float32.
        targets: (n, j) int64; a repeated target counts with the sum of its shares.
        shares: (n, j) float32 that add up to 1.
        smoothing: s.
    """
    loss: torch.Tensor = _CrossEntropy.apply(logits, targets, shares, smoothing)  # type: ignore[no-untyped-call]
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shares: torch.Tensor,
        smoothing: float,
    ) -> torch.Tensor:
        log_p = logits.float().log_softmax(-1)
        ctx.save_for_backward(log_p, targets, shares)
        ctx.smoothing, ctx.dtype = smoothing, logits.dtype  # type: ignore[attr-defined]
        mass = (shares * log_p.gather(1, targets)).sum(1)
        return -((1 - smoothing) * mass + smoothing * log_p.mean(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        log_p, targets, shares = ctx.saved_tensors
        rows, vocabulary = log_p.shape
        gradient = log_p.exp().sub_(ctx.smoothing / vocabulary)  # softmax minus smoothed target
        gradient.scatter_add_(1, targets, shares * (ctx.smoothing - 1))
        return gradient.mul_(grad / rows).to(ctx.dtype), None, None, None
