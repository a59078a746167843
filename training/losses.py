"""Alignment losses: pure functions of log-probabilities, each with its equation.

A row is one node of a tree: p is the target's distribution over the node's tokens, q the draft's.
All functions take rows of any leading shape, (..., C), and return one number per row, (...). `real`
marks the tokens that exist; the others are padding. *Allowed* distributions are renormalised over
the real tokens; *whole* ones are normalised over the whole vocabulary.

Sources: AtSpeed (Lin et al., ICLR 2025), eq. 4 and 8, and the code released with it; Hinton et al.,
2015 (WordKD); Kim and Rush, 2016 (SeqKD); Wen et al., 2023 (TVDKD).
"""

from __future__ import annotations

import torch

NOWHERE = -1e9  # a finite log-prob whose exponential is zero, so that 0 * NOWHERE is 0
SCRIPT = 0.001  # temperature of AtSpeed's training script


def allowed(log_probs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Log p(v) - log sum_{w allowed} p(w): renormalised over the real tokens."""
    return log_probs.masked_fill(~real, NOWHERE).log_softmax(-1)


def with_rest(log_probs: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(..., C + 1): the real tokens, and one bucket for the rest of the vocabulary.

    rest = 1 - sum_{v allowed} p(v). Without the bucket a draft may have the right distribution
    among the children of a node but the wrong total, and beams of different nodes are compared.
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
    top: int,
    *,
    density: bool = True,
    released: bool = False,
) -> torch.Tensor:
    """AtSpeed-S with the sign of the density that the authors released, renormalised, at one step.

    sum_{v in V_c} q'(v) log(q'(v) / p'(v)) - p'(y_K) sum_{v in V_c} q'(v) log q'(v)

    p' and q' are p and q renormalised over V_c, and y_K is the K-th token of V_c; p'(y_K) is 0
    where there are fewer. The first sum is the reverse KL, the second, with its sign, p'(y_K) times
    the entropy of q'. For a given V_c the minimum is q' proportional to p'^(1 / (1 - p'(y_K))): the
    target, slightly sharper. The released code does not renormalise: it has p and q as they are
    over V_c. (Its switch `constrained_softmax` takes a softmax over probabilities / .001.)

    Args:
        log_p: (..., C) normalised over the tokens that are compared.
        log_q: (..., C) likewise.
        top: K, the size of V_c, the most probable tokens under q.
        density: False omits the entropy (the ablation "w/o DR"); the reverse KL stays renormalised.
        released: p' and q' are p and q, as in the released code without its switch.
    """
    chosen = log_q.detach().topk(min(top, log_q.shape[-1]), dim=-1).indices  # V_c, best first
    log_p, log_q = log_p.gather(-1, chosen), log_q.gather(-1, chosen)
    if not released:
        log_p, log_q = log_p.log_softmax(-1), log_q.log_softmax(-1)
    q = log_q.exp()
    reverse = (q * (log_q - log_p)).sum(-1)
    if not density or log_p.shape[-1] < top:
        return reverse
    return reverse - log_p[..., -1].exp() * (q * log_q).sum(-1)


def atspeed_s_eq4(
    log_p: torch.Tensor, log_q: torch.Tensor, log_p_last: torch.Tensor, top: int
) -> torch.Tensor:
    """AtSpeed-S as printed, eq. 4, at one step.

    sum_{v in V_c} q(v) log(q(v) / p(v)) - sum_{v in V_c} q(v) log(q(v) / p(y_K))

    The first sum is the reverse KL, the second the density regularisation. Their difference is
    linear in q: sum q(v) (log p(y_K) - log p(v)), minimal with all mass on the target's best token.

    Args:
        log_p: (..., C) allowed.
        log_q: (..., C) allowed.
        log_p_last: (...) log p(y_K), of the K-th best sequence's token at this step.
        top: K, the size of V_c, the most probable tokens under q.
    """
    chosen = log_q.detach().topk(min(top, log_q.shape[-1]), dim=-1).indices  # V_c
    log_p, q = log_p.gather(-1, chosen), log_q.gather(-1, chosen).exp()
    return (q * (log_p_last[..., None] - log_p)).sum(-1)


def atspeed_r(
    log_p: torch.Tensor, log_q: torch.Tensor, top: int | None, *, temperature: float = 1.0
) -> torch.Tensor:
    """AtSpeed-R, eq. 8, at one step: TVD(p', q').

    p' and q' are p and q renormalised over the target's `top` most probable tokens.

    Args:
        log_p: (..., C).
        log_q: (..., C).
        top: K; None takes all tokens, as the released code does.
        temperature: divides the logits; `SCRIPT` in the authors' training script.
    """
    if top is not None:
        chosen = log_p.topk(min(top, log_p.shape[-1]), dim=-1).indices
        log_p, log_q = log_p.gather(-1, chosen), log_q.gather(-1, chosen)
    return total_variation(
        (log_p / temperature).log_softmax(-1), (log_q / temperature).log_softmax(-1)
    )


def sequence_cross_entropy(log_q: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """SeqKD at one node: - sum_v share(v) log q(v).

    Args:
        log_q: (..., C) whole.
        share: (..., C) share of the target's sequences that continue with each token.
    """
    return -(share * log_q.masked_fill(share == 0, 0.0)).sum(-1)


def margin(
    beams: torch.Tensor, real: torch.Tensor, candidates: torch.Tensor, drafts: int
) -> torch.Tensor:
    """Mean over the target's beams of softplus(s_N - s(y)), where s is the draft's score.

    A level is accepted if all of the target's beams are among the draft's N best prefixes, so what
    costs a pass is a beam below the best prefix that the draft leaves out. s_N is the score of that
    prefix; it gets no gradient. The loss is 0 where nothing is left out.

    Args:
        beams: (..., K) scores of the target's beams under the draft.
        real: (..., K) bool, False where there are fewer beams.
        candidates: (..., C) scores of all prefixes of the level, `NOWHERE` for padding.
        drafts: N.
    """
    if candidates.shape[-1] <= drafts:
        return candidates.new_zeros(candidates.shape[:-1])
    first_out = candidates.detach().topk(drafts + 1, dim=-1).values[..., -1:]
    loss = torch.nn.functional.softplus(first_out - beams).masked_fill(~real, 0.0)
    return loss.sum(-1) / real.sum(-1).clamp(min=1)
