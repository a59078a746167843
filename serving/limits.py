"""Rate limit: a token bucket for each client, in bounded memory."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

CLIENTS = 10_000


class RateLimit:
    """Lets each client make `burst` requests at once and `rate` a second on average."""

    def __init__(
        self,
        rate: float,
        burst: int,
        *,
        clients: int = CLIENTS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Remember the last `clients` clients; one that is forgotten starts with a full bucket.

        Args:
            rate: tokens a second that flow into a bucket.
            burst: tokens that it holds.
            clients: buckets kept, the least recently used is let go.
            clock: seconds, never going back.
        """
        self._rate, self._burst, self._clients, self._clock = rate, burst, clients, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Buckets kept."""
        return len(self._buckets)

    def take(self, client: str) -> float:
        """Take a token.

        Returns:
            0 if there was one, otherwise the seconds until there will be.
        """
        now = self._clock()
        tokens, then = self._buckets.pop(client, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        allowed = tokens >= 1
        self._buckets[client] = (tokens - allowed, now)
        if len(self._buckets) > self._clients:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1 - tokens) / self._rate


def network(address: str) -> str:
    """Who is behind an address: itself, or the /64 that one IPv6 subscriber has."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if found.version == 6:
        if found.ipv4_mapped:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
