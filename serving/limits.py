"""Rate limit: one token bucket per client, in bounded memory."""

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

CLIENTS = 10_000


class RateLimit:
    """Allows each client `burst` requests at once and `rate` per second on average.

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

    def __len__(self) -> int:
        """Number of buckets."""
        return len(self._buckets)

    def take(self, client: str) -> float:
        """Take a token of a client; returns 0, or the seconds until there is one."""
        now = self._clock()
        tokens, then = self._buckets.pop(client, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > self._clients:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self._rate


def network(address: str) -> str:
    """The client behind an address: the address itself, or the /64 network of IPv6."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6:
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
