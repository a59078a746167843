"""Alignment losses: pure functions of log-probabilities, each beside its equation.

A row is one node of a tree: p is the target's distribution over the tokens there, q the draft's.
All functions take rows in any leading shape, (..., C), and return one number a row, (...). `real`
marks the tokens that exist; the others are padding. Where a function says *allowed*, p and q are
renormalised over the real tokens; *whole* means that they are normalised over the whole vocabulary.

Sources: AtSpeed (Lin et al., ICLR 2025), eq. 4 and 8; Hinton et al., 2015 (WordKD); Kim and Rush,
2016 (SeqKD); Wen et al., 2023 (TVDKD).
"""

from __future__ import annotations

import torch

NOWHERE = -1e9  # a log-prob whose exponential is zero, and whose product with zero is too


def allowed(log_probs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Log p(v) - log sum_{w allowed} p(w): renormalised over the real tokens."""
    return log_probs.masked_fill(~real, NOWHERE).log_softmax(-1)


def with_rest(log_probs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(..., C + 1): the real tokens, and one bucket for all that the vocabulary has besides.

    rest = 1 - sum_{v allowed} p(v). Without it a draft that is right among a node's children may be
    wrong about the node, and scores of beams are compared across nodes.
    """
    log_probs = log_probs.masked_fill(~real, NOWHERE)
    taken = log_probs.exp().sum(-1, keepdim=True)
    rest = torch.log1p(-taken.clamp(max=1 - 1e-6))
    return torch.cat([log_probs, rest], dim=-1)


def forward_kl(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = sum_v p(v) (log p(v) - log q(v))."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def total_variation(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """TVD(p, q) = 1/2 sum_v |p(v) - q(v)|."""
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1)


def atspeed_s(
    log_p: torch.Tensor,
    log_q: torch.Tensor,
    log_p_last: torch.Tensor,
    top: int,
    *,
    density: bool = True,
) -> torch.Tensor:
    """AtSpeed-S, eq. 4, at one step.

    sum_{v in V_c} q(v) log(q(v) / p(v)) - sum_{v in V_c} q(v) log(q(v) / p(y_K))

    The first sum is the reverse KL, the second the density regularisation; together they are linear
    in q: sum q(v) (log p(y_K) - log p(v)), least where all mass is on the target's best token.

    Args:
        log_p: (..., C) allowed.
        log_q: (..., C) allowed.
        log_p_last: (...) log p(y_K): the target's, of the K-th best sequence's token at this step.
        top: K, the size of V_c: the most probable tokens under q.
        density: False leaves the second sum out (the ablation "w/o DR").
    """
    chosen = log_q.detach().topk(min(top, log_q.shape[-1]), dim=-1).indices  # V_c
    log_p, log_q = log_p.gather(-1, chosen), log_q.gather(-1, chosen)
    q = log_q.exp()
    if density:
        return (q * (log_p_last[..., None] - log_p)).sum(-1)
    return (q * (log_q - log_p)).sum(-1)


def atspeed_r(log_p: torch.Tensor, log_q: torch.Tensor, top: int) -> torch.Tensor:
    """AtSpeed-R, eq. 8, at one step: TVD(p', q').

    p' and q' are p and q renormalised over the target's `top` most probable tokens.

    Args:
        log_p: (..., C).
        log_q: (..., C).
        top: K.
    """
    chosen = log_p.topk(min(top, log_p.shape[-1]), dim=-1).indices
    return total_variation(
        log_p.gather(-1, chosen).log_softmax(-1), log_q.gather(-1, chosen).log_softmax(-1)
    )


def sequence_cross_entropy(log_q: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """SeqKD at one node: - sum_v share(v) log q(v).

    Args:
        log_q: (..., C) whole.
        share: (..., C) how many of the target's sequences go on with each token, over all of them.
    """
    return -(share * log_q.masked_fill(share == 0, 0.0)).sum(-1)


def listwise(
    score_p: torch.Tensor, score_q: torch.Tensor, real: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Ranking of candidates across beams: tau^2 KL(softmax(s_p / tau) || softmax(s_q / tau)).

    A candidate is a prefix with its sum of log-probs s, as beam search compares them. tau > 1 makes
    the tail of the top K count, which is where a draft misses (tau^2 keeps gradients alike).

    Args:
        score_p: (..., C) of the target.
        score_q: (..., C) of the draft.
        real: (..., C).
        temperature: tau.
    """
    log_p = allowed(score_p / temperature, real)
    log_q = allowed(score_q / temperature, real)
    return temperature**2 * forward_kl(log_p, log_q)
