"""FairQueue: waiting work of several clients, of which each gets an equal share.

Start-time fair queueing (Goyal, Vin & Cheng 1996): each client has a line, first come, first
served. Next is the line that has received the least work since it began. A client that was away
starts where the others are, so it neither waits behind the backlog of another nor gets back the
time that it did not use.
"""

import asyncio
import math
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from recsys.serving.meter import Meter

T = TypeVar("T")
REMEMBERED = 1_000  # clients without waiting work
IN_A_ROUND = 4  # requests that begin in a round of the event loop
ALONE_S = 1.0
REST, SAVED_S = 3.0, 0.02
MEMORY = 0.2  # weight of the last request in the mean, at least
FIRST_S = 0.005  # what requests of a new client are expected to compute until the first has ended


class FairQueue(Generic[T]):
    """Lines of clients, in which each entry has an amount of work (any unit).

    >>> queue = FairQueue()
    >>> for n in range(3):
    ...     queue.push(f"a{n}", "a", 1.0)
    >>> queue.push("b0", "b", 1.0)
    >>> [queue.pop() for _ in range(4)]
    ['a0', 'b0', 'a1', 'a2']
    """

    def __init__(self) -> None:
        self._lines: dict[str, deque[tuple[T, float]]] = {}
        self._received: dict[str, float] = {}
        self._now = 0.0
        self._size = 0

    def __len__(self) -> int:
        """Number of entries."""
        return self._size

    def heads(self) -> Iterator[T]:
        """The first entry of each line, which is the oldest of its client."""
        return (line[0][0] for line in self._lines.values())

    def push(self, entry: T, client: str, work: float) -> None:
        """Add an entry to the end of the client's line."""
        line = self._lines.get(client)
        if line is None:
            line = self._lines[client] = deque()
            self._received[client] = max(self._now, self._received.get(client, 0.0))
            if len(self._received) > len(self._lines) + REMEMBERED:
                self._forget()
        line.append((entry, work))
        self._size += 1

    def pop(self, fits: Callable[[T], bool] = lambda entry: True) -> T | None:
        """Take the next entry, among the heads of lines that fit; None if there is none."""
        fitting = [client for client, line in self._lines.items() if fits(line[0][0])]
        if not fitting:
            return None
        client = min(fitting, key=self._received.__getitem__)
        entry, work = self._lines[client].popleft()
        self._now = max(self._now, self._received[client])
        self._received[client] += work
        self._left(client)
        return entry

    def remove(self, entry: T, client: str) -> None:
        """Take an entry out of a client's line, if it is there."""
        for place in self._lines.get(client, ()):
            if place[0] is entry:
                self._lines[client].remove(place)
                self._left(client)
                return

    def crowd_out(self, client: str, work: float) -> T | None:
        """Take the newest entry of the line with the most work, to make room for a client's work.

        None if that line would be no longer than the client's own.
        """
        waiting = {name: sum(w for _, w in line) for name, line in self._lines.items()}
        longest = max(waiting, key=waiting.__getitem__, default=client)
        if waiting.get(longest, 0.0) <= waiting.get(client, 0.0) + work:
            return None
        entry, _ = self._lines[longest].pop()
        self._left(longest)
        return entry

    def _left(self, client: str) -> None:
        self._size -= 1
        if not self._lines[client]:
            del self._lines[client]

    def _forget(self) -> None:
        """Forget most of the clients that have no entries: those that received the least."""
        away = sorted(self._received.keys() - self._lines.keys(), key=self._received.__getitem__)
        for client in away[: -REMEMBERED // 2]:
            del self._received[client]


class Clients:
    """Whether a client is the only one of late, by the last two clients.

    >>> clients = Clients()
    >>> for time, name in enumerate(["a", "b", "a", "a"]):
    ...     clients.sent(name, float(time))
    >>> clients.is_alone("a", 1.5), clients.is_alone("a", 2.5), clients.is_alone("b", 2.5)
    (False, True, False)
    """

    def __init__(self) -> None:
        self._last = self._other = ("", -math.inf)  # the last client and the last other one

    def sent(self, client: str, now: float) -> None:
        """Note a request."""
        if client != self._last[0]:
            self._other = self._last
        self._last = (client, now)

    def is_alone(self, client: str, now: float) -> bool:
        """Whether no other client sent a request within `ALONE_S`."""
        _, latest = self._other if client == self._last[0] else self._last
        return latest < now - ALONE_S


class Turns:
    """Lets clients begin requests in turns, a few in each round of the event loop.

    Whatever a request does on the event loop, all others wait for it. A client with very many
    connections would fill each round with its requests, and an answer takes several rounds.

    While other clients send requests too, a client therefore rests after each request that it
    begins: `REST` times as long as its requests compute in Python on average, on the event loop or
    on other threads, which share Python's global lock. The difference is made up when a request has
    ended, and a client may save up a rest of `SAVED_S`. Of a new client, `FIRST_S` is expected.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[_Turn] = FairQueue()
        self._begun = 0  # requests of this round
        self._ends_soon = False  # whether the end of the round is scheduled
        self._clients = Clients()
        self._shares: OrderedDict[str, _Share] = OrderedDict()  # the least recently used first
        self._timer: asyncio.TimerHandle | None = None

    def sent(self, client: str) -> None:
        """Note an accepted request of the client."""
        self._clients.sent(client, asyncio.get_running_loop().time())

    def is_alone(self, client: str) -> bool:
        """Whether no other client has sent accepted requests of late."""
        return self._clients.is_alone(client, asyncio.get_running_loop().time())

    @asynccontextmanager
    async def turn(self, client: str, meter: Meter) -> AsyncIterator[None]:
        """Run the block when it is the client's turn: at once if few have begun in this round.

        The block is a request or a part of one, and `meter` counts what it computes.
        """
        expected = await self._begin(client)
        try:
            yield
        finally:
            share, seconds = self._share(client), meter.take()
            share.learn(seconds)
            share.rest(asyncio.get_running_loop().time(), seconds - expected)

    async def _begin(self, client: str) -> float:
        """Wait for the client's turn; the seconds that it is expected to compute then."""
        loop = asyncio.get_running_loop()
        if self._begun < IN_A_ROUND and self._may_begin(client, loop.time()):
            self._begun += 1
            self._end_soon(loop)
            return self._expect(client, loop.time())
        turn = _Turn(client, loop.create_future())
        self._waiting.push(turn, client, 1.0)
        self._end_soon(loop)
        return await turn.begins

    def _expect(self, client: str, now: float) -> float:
        share = self._share(client)
        share.rest(now, share.mean)
        return share.mean

    def _share(self, client: str) -> "_Share":
        share = self._shares.get(client)
        if share is None:
            share = self._shares[client] = _Share()
            if len(self._shares) > REMEMBERED:
                self._shares.popitem(last=False)
        else:
            self._shares.move_to_end(client)
        return share

    def _may_begin(self, client: str, now: float) -> bool:
        share = self._shares.get(client)
        return share is None or share.rests_until <= now or self._clients.is_alone(client, now)

    def _end_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._ends_soon:
            self._ends_soon = True
            loop.call_soon(self._end_round, loop)

    def _end_round(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        self._begun, self._ends_soon = 0, False
        while self._begun < IN_A_ROUND:
            turn = self._waiting.pop(lambda turn: self._may_begin(turn.client, now))
            if turn is None:
                break
            if not turn.begins.done():  # its request was not cancelled
                turn.begins.set_result(self._expect(turn.client, now))
                self._begun += 1
        if self._begun:
            self._end_soon(loop)
        elif self._waiting:  # all of these clients rest
            if self._timer is not None:
                self._timer.cancel()
            first = min(self._shares[turn.client].rests_until for turn in self._waiting.heads())
            self._timer = loop.call_at(first, self._end_soon, loop)


@dataclass(frozen=True, eq=False)
class _Turn:
    """A request that waits."""

    client: str
    begins: asyncio.Future[float]


@dataclass
class _Share:
    """What a client computed.

    Attributes:
        mean: seconds of a request, a moving average.
        ended: requests that have ended.
        rests_until: on the event loop's clock.
    """

    mean: float = FIRST_S
    ended: int = 0
    rests_until: float = -math.inf

    def learn(self, seconds: float) -> None:
        """Note what a request computed."""
        self.ended += 1
        self.mean += max(MEMORY, 1 / self.ended) * (seconds - self.mean)

    def rest(self, now: float, seconds: float) -> None:
        """Rest for what was computed; less, if it is less than was expected."""
        self.rests_until = max(self.rests_until, now - SAVED_S) + REST * seconds
