"""Traffic: who asks when. Arrays of a whole day's worth at once; knows no replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recsys.errors import ConfigError

NEW_USERS = 1 << 62  # numbers of users who never come back begin here


@dataclass(frozen=True)
class Traffic:
    """Requests of an open world: nobody waits for an answer before asking again.

    Attributes:
        rate: requests a second, on average.
        requests: how many.
        users: people who come back.
        skew: exponent of the Zipf law of how often each comes; 0 is all alike.
        new: share of requests of people who were never seen before.
        burst: how many times the calm rate a burst has; 1 has no bursts.
        burst_s: mean length of a burst (exponential).
        burst_share: share of the time that is burst.
    """

    rate: float
    requests: int
    users: int = 100_000
    skew: float = 0.0
    new: float = 0.0
    burst: float = 1.0
    burst_s: float = 10.0
    burst_share: float = 0.1

    def __post_init__(self) -> None:
        for name, least in (("rate", 0.0), ("requests", 0), ("users", 0), ("burst_s", 0.0)):
            if getattr(self, name) <= least:
                raise ConfigError(f"{name}: want more than {least:g}, got {getattr(self, name)}")
        if not 0 <= self.new <= 1 or not 0 < self.burst_share < 1:
            raise ConfigError(
                f"new, burst_share: want shares, got {self.new:g} and {self.burst_share:g}"
            )
        if self.burst < 1 or self.skew < 0:
            raise ConfigError(
                f"burst: want at least 1, got {self.burst:g}; skew: at least 0, got {self.skew:g}"
            )

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds at which requests come, ascending.

        A Poisson process whose rate is that of calm or burst, which take turns.
        """
        work = rng.exponential(size=self.requests).cumsum()  # of a process of rate 1
        if self.burst == 1:
            return work / self.rate
        calm = self.rate / (1 + self.burst_share * (self.burst - 1))
        spans = []
        expected, done = work[-1], 0.0
        while done <= expected:
            count = 64 + int((expected - done) / (self.rate * self.burst_s / self.burst_share))
            calms = rng.exponential(self.burst_s * (1 / self.burst_share - 1), count)
            bursts = rng.exponential(self.burst_s, count)
            spans.append(np.stack([calms, bursts], axis=1).ravel())
            done += calm * float(calms.sum() + self.burst * bursts.sum())
        seconds = np.concatenate(spans)
        rates = np.tile([calm, calm * self.burst], len(seconds) // 2)
        ends = np.append(0.0, seconds.cumsum())
        done_by = np.append(0.0, (seconds * rates).cumsum())
        return np.asarray(np.interp(work, done_by, ends))

    def askers(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Who asks each request; people who come back are numbered by how often they do."""
        u = rng.random(self.requests)
        top = float(self.users)
        if self.skew == 0:
            ranks = u * top
        elif self.skew == 1:
            ranks = (top + 1) ** u - 1
        else:  # the continuous law, by its inverse
            power = 1 - self.skew
            ranks = (((top + 1) ** power - 1) * u + 1) ** (1 / power) - 1
        users = np.minimum(ranks.astype(np.int64), self.users - 1)
        strangers = rng.random(self.requests) < self.new
        return np.where(strangers, NEW_USERS + np.arange(self.requests), users)


def owners(users: NDArray[np.int64], places: int, *, salt: int = 0) -> NDArray[np.int64]:
    """Which of so many places each user belongs to: a hash (splitmix64), so that all are alike."""
    x = users.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(places)).astype(np.int64)
