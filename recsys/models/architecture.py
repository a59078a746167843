"""Sizes of LLaMA models: the presets, and what may replace their values. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import PositiveInt

from recsys.config import build, section
from recsys.errors import ConfigError


@section
class Architecture:
    """Sizes of a LLaMA model over a semantic vocabulary."""

    hidden_size: PositiveInt = 128
    """Width of a token's state."""
    intermediate_size: PositiveInt = 256
    """Width of the feed-forward layer."""
    layers: PositiveInt = 2
    """Number of decoder layers."""
    heads: PositiveInt = 2
    """Attention heads; few wide heads are faster on a CPU than many narrow ones."""
    kv_heads: PositiveInt | None = None
    """Key/value heads; None for as many as `heads`."""
    tied: bool = False
    """Whether token embeddings and LM head share one matrix."""
    attention_dropout: float = 0.0
    """Share of attention weights dropped while training."""

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise ConfigError(
                f"hidden_size: {self.hidden_size} is not a multiple of twice the "
                f"{self.heads} heads (a head's width must be even)"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(f"kv_heads: {self.kv_heads} does not divide the {self.heads} heads")


# Parameters with 4 levels of 256 codes: 0.6, 3.2 and 19 million.
PRESETS = {
    "tiny": Architecture(),
    "small": Architecture(hidden_size=256, intermediate_size=512, layers=4, heads=4),
    "base": Architecture(hidden_size=512, intermediate_size=1408, layers=6, heads=8),
}


def architecture(preset: str, overrides: Mapping[str, Any] | None = None) -> Architecture:
    """Get a preset, with some sizes replaced.

    Raises:
        ConfigError: unknown preset or size.
    """
    if preset not in PRESETS:
        raise ConfigError(f"preset: {preset!r} is not one of {', '.join(PRESETS)}")
    values = {**asdict(PRESETS[preset]), **(overrides or {})}
    return build(Architecture, values, where="architecture")
