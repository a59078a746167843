"""Limits: the work of a request, one token bucket per client, and bytes of all clients together.

Work is in units of an ordinary request: at most 20 items for a full history. Batches of the worker
and the rate limit are in these units.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from recsys.modes import Mode
from recsys.recommender import MIN_BEAMS, RecommendRequest

IN_TORCH = 5  # times the work of a native search
PROVEN, PROVEN_BLEND = 7, 10  # likewise, with the guarantee global; 6.6 was measured
CLIENTS = 10_000


@dataclass(frozen=True)
class Caller:
    """The client of the current request.

    Attributes:
        deadline: time on the event loop's clock by which it wants an answer; it counts from the
            head of the request. None for work that no request asked for.
        charge: takes units of work from its bucket; raises a `ProblemError` if it is in debt.
    """

    deadline: float | None = None
    charge: Callable[[float], None] = lambda work: None


CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039 - it is immutable


def work_of(request: RecommendRequest, prompt_items: int, blended: bool = False) -> float:
    """Estimate the work of a request: beams x prompt, and more if more than beams is wanted.

    The prompt has `prompt_items` items at most; half of the work does not depend on it. Looking up
    500 items of a history is a unit. A guarantee is a second search, of many prefixes if the list
    is `blended`. The native library, which is several times faster than torch, draws no trees.

    >>> work_of(RecommendRequest(["a"] * 50, 10), 50), work_of(RecommendRequest([], 200), 50)
    (1.1, 5.0)
    >>> in_torch = {"trace": True}, {"mode": "strict"}, {"mode": "relaxed", "seed": 1}
    >>> [work_of(RecommendRequest(["a"] * 50, 10, **more), 50) for more in in_torch]
    [5.1, 5.1, 5.1]
    >>> [work_of(RecommendRequest([], 20, guarantee="global"), 50, b) for b in (False, True)]
    [3.5, 5.0]
    """
    beams = max(MIN_BEAMS, request.k) / MIN_BEAMS
    prompt = (1 + min(1.0, len(request.history) / prompt_items)) / 2
    in_torch = request.trace or request.mode not in (Mode.AUTO, Mode.BEAM)
    proof = (PROVEN_BLEND if blended else PROVEN) if request.guarantee == "global" else 1
    more = max(proof, IN_TORCH) if in_torch else proof
    return beams * prompt * more + len(request.history) / 500


class Room:
    """Bytes that bodies or answers may take together; what is alone may have any number.

    >>> room = Room(10)
    >>> room.take(20), room.take(1), room.take(0)
    (True, False, True)
    """

    def __init__(self, most: int) -> None:
        """At most so many bytes."""
        self.most, self.taken = most, 0

    def take(self, count: int) -> bool:
        """Take so many bytes if they are free; returns whether they were."""
        fits = not count or not self.taken or self.taken + count <= self.most
        self.taken += count if fits else 0
        return fits

    def give(self, count: int) -> None:
        """Give bytes back."""
        self.taken -= count


class RateLimit:
    """Allows each client `burst` units of work at once and `rate` per second on average.

    >>> limit = RateLimit(rate=2.0, burst=1, clock=lambda: 0.0)
    >>> limit.take("a"), limit.take("a"), limit.take("b")
    (0.0, 0.5, 0.0)
    """

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        clients: int = CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start with full buckets; of more than `clients`, the least recently used are dropped."""
        self._rate, self._burst, self._clients, self._clock = rate, burst, clients, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> float:
        """Take a unit of a client; returns 0, or the seconds until there is one."""
        return self._take(client, 1.0, least=1.0)

    def charge(self, client: str, work: float) -> float:
        """Take units of a client, who may be in debt afterwards, but not before.

        Returns 0, or the seconds until an earlier debt is paid: then nothing is taken.
        """
        return self._take(client, work, least=0.0)

    def _take(self, client: str, work: float, least: float) -> float:
        now = self._clock()
        tokens, then = self._buckets.pop(client, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        allowed = tokens >= least
        self._buckets[client] = (tokens - work if allowed else tokens, now)
        if len(self._buckets) > self._clients:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (least - tokens) / self._rate
