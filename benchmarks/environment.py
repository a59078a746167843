"""What a result must say of the machine it was measured on: as `recsys benchmark` says it."""

from __future__ import annotations

from recsys.benchmark.environment import environment

__all__ = ["environment"]
