"""Sampling without replacement as a search, with Gumbel noise that is keyed by seed and state.

K sequences drawn without replacement from p are the top K of `log p + Gumbel noise`. Beam search
finds them exactly if a prefix carries the largest perturbed log-probability of its descendants
(stochastic beam search; Kool, van Hoof and Welling 2019, algorithm 1).

The noise is a function of (seed, trie state), not the state of a random generator. Draft and target
therefore see the same noise, and strict verification applies unchanged: speculative sampling and
plain sampling return the same sample for the same seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Noise:
    """Gumbel noise of a batch.

    Attributes:
        seeds: (B,) int64, one a request.
        temperature: divides the logits.
    """

    seeds: torch.Tensor
    temperature: float = 1.0

    def take(self, requests: torch.Tensor) -> Noise:
        """The noise of some requests of the batch."""
        return replace(self, seeds=self.seeds[requests])

    def perturb(
        self, parents: torch.Tensor, log_probs: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Perturbed log-probabilities of children, whose largest is their parent's.

        Args:
            parents: (B, W) perturbed log-probabilities.
            log_probs: (B, W, C) log-probabilities of the children; -inf for those not alive.
            states: (B, W, C) their trie states.

        Returns:
            (B, W, C), -inf for children that are not alive.
        """
        noisy = log_probs + self.gumbel(states).to(log_probs.dtype)
        most = noisy.amax(-1, keepdim=True)
        parent = parents.unsqueeze(-1)
        # log-sum-exp form of appendix B.3: no overflow, and exactly `parent` at the largest.
        gap = parent - noisy + torch.log1p(-torch.exp(noisy - most))
        scores = parent - gap.relu() - torch.log1p(torch.exp(-gap.abs()))
        alive = (log_probs > -torch.inf) & (parent > -torch.inf)
        return torch.where(alive, scores, -torch.inf)

    def stream(self, number: int) -> Noise:
        """Independent noise for the same requests; number >= 1."""
        return replace(self, seeds=_mix(self.seeds) + number)

    def gumbel(self, states: torch.Tensor) -> torch.Tensor:
        """(B, ...) standard Gumbel noise, float64, keyed by seed and state."""
        return -torch.log(-torch.log(self.uniform(states)))

    def uniform(self, states: torch.Tensor) -> torch.Tensor:
        """(B, ...) noise in the open interval (0, 1), float64, keyed by seed and state."""
        seeds = self.seeds.view(-1, *[1] * (states.dim() - 1))
        bits = _mix(_mix(seeds) + states)
        # 52 bits and a half: with 53 bits the largest would round to 1, with infinite Gumbel noise
        return _shift(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's step and finaliser (Steele, Lea and Flood 2014) on int64, which wraps."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """An unsigned 64-bit constant as int64."""
    return value - (1 << 64) if value >> 63 else value & _MASK
