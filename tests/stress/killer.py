"""A killer of processes that write; it imports no more than they do, for it forks them."""

from __future__ import annotations

import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any

from recsys.serving.stores.records import Event, content_digest

# Kinds of random lines: of all (a bit more than writing an artifact executes), and of the functions
# that `move` files.
ALL_LINES, MOVES = 800, 40
LIFE_S = 0.3

Report = Callable[..., None]


def event(event_id: str, user: str, item: str = "item") -> Event:
    """An event at time 1."""
    return Event(event_id, user, item, "view", 1, digest=content_digest(event_id))


def events_of(user: str, number: int) -> list[Event]:
    """So many events of a user."""
    return [event(f"{user}/{i}", user, f"item-{i}") for i in range(number)]


class Killer:
    """Starts writers in processes of their own and kills each by SIGKILL.

    A writer is killed at a random time, or at a random line of the code that writes.
    """

    def __init__(self, modules: Collection[Any], moves: Collection[str]) -> None:
        """Lines count in these modules; half of the times in functions of these names only."""
        self.files = {module.__file__ for module in modules}
        self.moves = moves

    def run(
        self,
        work: Callable[[str, Report], None],
        round_: int,
        writers: int,
        by_line: Collection[int] = range(3),
    ) -> list[list[str]]:
        """Run writers and kill each; returns the words that they reported, in order.

        Args:
            work: called with the writer's name, and a function that reports words.
            round_: number of the round.
            writers: number of processes.
            by_line: writers, by number, of which some are killed at a line: those whose work is in
                the main thread.
        """
        receiving, sending = os.pipe()
        children = []
        for number in range(writers):
            at_line, seed = number in by_line and random.random() < 0.5, random.random()
            child = os.fork()
            if child == 0:
                os.close(receiving)
                try:
                    random.seed(seed)
                    if at_line:
                        self._die_at_some_line()
                    work(
                        f"{round_}-{number}",
                        lambda *words: os.write(sending, (" ".join(words) + "\n").encode()),
                    )
                finally:
                    os._exit(1)  # an error, which the statuses show
            children.append((child, at_line))
        os.close(sending)
        text, end = b"", time.monotonic() + random.uniform(0.0, LIFE_S)
        while (left := end - time.monotonic()) > 0:
            if select.select([receiving], [], [], left)[0]:
                more = os.read(receiving, 65536)
                text += more
                if not more:  # all have died
                    break
        for child, at_line in children:
            if not at_line:
                os.kill(child, signal.SIGKILL)
        while more := os.read(receiving, 65536):
            text += more
        os.close(receiving)
        for child, _ in children:
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
                raise AssertionError(f"a writer ended by itself: {status}")
        return [line.split() for line in text.decode().splitlines()]

    def _die_at_some_line(self) -> None:
        """Have this process killed after a random number of lines."""
        moves = random.random() < 0.5
        left = random.randrange(1, MOVES if moves else ALL_LINES)

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            code = frame.f_code
            if code.co_filename not in self.files or (moves and code.co_name not in self.moves):
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)


def run_rounds(kinds: dict[str, Any], rounds: int) -> int:
    """Let the kinds of rounds take turns and print a table; 1 if anything was lost or left.

    `kinds` are objects whose `round` kills once and counts `acknowledged`, `unanswered`, `lost` and
    `left`.
    """
    totals: dict[str, Counter[str]] = {}
    for number in range(rounds):
        name = list(kinds)[number % len(kinds)]
        totals.setdefault(name, Counter())["rounds"] += 1
        totals[name] += kinds[name].round(number)
    columns = ("rounds", "acknowledged", "unanswered", "lost", "left")
    print(f"{'':12}", *(f"{column:>13}" for column in columns))
    for name, counts in totals.items():
        print(f"{name:12}", *(f"{counts[column]:13,}" for column in columns))
    return int(any(counts["lost"] or counts["left"] for counts in totals.values()))
