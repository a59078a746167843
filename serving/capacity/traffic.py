"""Traffic: when requests arrive, and whose they are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NEW_USERS = 1 << 62  # numbers of users who never come back start here


@dataclass(frozen=True)
class Traffic:
    """Requests that arrive whether or not earlier ones are answered.

    Attributes:
        rate: requests a second, on average.
        users: who come back, all equally often.
        new: share of requests of users who were never seen before.
        burst: rate of a burst over the calm rate; 1 for no bursts.
        burst_s: mean length of a burst (exponential).
        burst_share: share of the time that is in bursts.
    """

    rate: float
    requests: int
    users: int = 100_000
    new: float = 0.0
    burst: float = 1.0
    burst_s: float = 10.0
    burst_share: float = 0.1

    def arrivals(self, rng: np.random.Generator) -> NDArray[np.float64]:
        """Seconds at which requests arrive, ascending.

        A Poisson process whose rate alternates between calm and burst.
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
        """The user of each request; new users have numbers from `NEW_USERS` on."""
        users = rng.integers(0, self.users, self.requests)
        strangers = rng.random(self.requests) < self.new
        return np.where(strangers, NEW_USERS + np.arange(self.requests), users)


def assign_owners(users: NDArray[np.int64], places: int, *, salt: int = 0) -> NDArray[np.int64]:
    """The place of each user among `places`, by a hash (splitmix64)."""
    x = users.astype(np.uint64) + np.uint64((salt + 1) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x % np.uint64(places)).astype(np.int64)
