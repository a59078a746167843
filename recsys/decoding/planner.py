"""Planner: which tree to draft for a batch, or none, by expected time.

A pass costs what it was measured to cost at start-up (`PassTimes`); how many passes a plan takes is
counted as it is used (`Passes`); what neither explains, the bookkeeping of search, is the median of
what was left over lately. The plan with the least sum is taken. Now and then another one that could
be better is tried, so that counts and left-overs stay current.

All numbers are seconds; nothing here knows tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from recsys.modes import Mode

_EXPLORE_EVERY = 64
_EXPLORE_WITHIN = 1.5
_RECENT = 15
_FORGET = 0.98
_GAIN = 0.1  # of plain search's time: estimates are not better than that
_KEEP_FOR = 16  # decodes
_LIKE_TOKENS = 16
_WIDEST = 1024  # first levels that are exhausted; a tree's masks grow with its square


@dataclass(frozen=True, order=True)
class Plan:
    """How a batch is decoded.

    Attributes:
        mode: `beam`, `exhaustive`, `draft`, or `relaxed`, which no planner chooses.
        nodes: of the draft tree, for `draft`.
    """

    mode: Mode = Mode.BEAM
    nodes: int = 0

    def __str__(self) -> str:
        return f"draft-{self.nodes}" if self.mode == Mode.DRAFT else self.mode.value


@dataclass(frozen=True)
class Load:
    """What a plan is made for.

    Attributes:
        batch: requests.
        tokens: prompt tokens to run, of the request with most.
        beams: K.
    """

    batch: int
    tokens: int
    beams: int


@dataclass(frozen=True)
class PassTimes:
    """Measured time of one forward by requests and new tokens a request.

    Between measured points time is linear in either; beyond the last, it grows in proportion.

    Attributes:
        points: requests -> ((new tokens, seconds), ...), both ascending.
    """

    points: dict[int, tuple[tuple[int, float], ...]]

    def __call__(self, batch: float, tokens: float) -> float:
        """Expected seconds."""
        return _between([(b, _between(line, tokens)) for b, line in self.points.items()], batch)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Linear between points, level before the first, through its own line beyond the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1] * max(1.0, x / points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)


class Passes:
    """How many passes requests take under one plan, as a fading count.

    Attributes:
        counts: requests that took 1, 2, ... L passes.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        """Start from `prior` counts."""
        self.counts = list(prior)

    def add(self, passes: int) -> None:
        """Count one request."""
        self.counts = [c * _FORGET for c in self.counts]
        self.counts[min(passes, len(self.counts)) - 1] += 1

    def more_than(self, passes: int) -> float:
        """Share of requests that take more than `passes`."""
        return sum(self.counts[passes:]) / sum(self.counts)


@dataclass
class _Record:
    """What is known of one (plan, batch size, beams)."""

    left_over: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    used: int = 0


class Planner:
    """Chooses a plan a batch, and learns from how it went.

    Attributes:
        plans: those to choose from; plain beam search is always one.
        levels: L.
        first_level: children of the catalog's root; may change with it.
    """

    def __init__(
        self,
        target: PassTimes,
        draft: PassTimes | None,
        *,
        levels: int,
        first_level: int,
        nodes: Sequence[int] = (64, 128, 256, 400),
    ) -> None:
        """Plan with these costs.

        Args:
            target: of the target's forward.
            draft: of the draft model's; None without one.
            levels: L of the catalog.
            first_level: children of its root, which exhaustion drafts.
            nodes: sizes of draft trees to consider.
        """
        self._target, self._draft = target, draft
        self.levels, self.first_level = levels, first_level
        self.plans = [Plan()]
        if levels > 1 and first_level <= _WIDEST:
            self.plans.append(Plan(Mode.EXHAUSTIVE))
        if levels > 1:
            self.plans += [Plan(Mode.DRAFT, n) for n in nodes] if draft is not None else []
        self._passes: dict[tuple[Plan, int], Passes] = {}
        self._records: dict[tuple[Plan, int, int], _Record] = {}
        self._chosen: dict[tuple[int, int, int], tuple[Plan, int]] = {}
        self._decodes = 0

    def choose(self, load: Load) -> Plan:
        """The plan to use now: the best one expected, or one that is worth another try."""
        self._decodes += 1
        if self._decodes % _EXPLORE_EVERY == 0:
            return min(self.near(load), key=lambda plan: self._record(plan, load).used)
        # Thinking costs as much as a small pass: what was best for like loads is so for a while.
        key = load.batch.bit_length(), load.tokens // _LIKE_TOKENS, load.beams
        plan, until = self._chosen.get(key, (None, 0))
        if plan is None or until < self._decodes:
            plan = self._best(load)
            self._chosen[key] = plan, self._decodes + _KEEP_FOR
        return plan

    def _best(self, load: Load) -> Plan:
        """Plain search, unless another plan is expected to be clearly quicker."""
        expected = {plan: self.expect(plan, load) for plan in self.plans}
        best = min(expected, key=lambda plan: (expected[plan], plan))
        plain = expected[Plan()]
        return best if expected[best] < plain - _GAIN * abs(plain) else Plan()

    def near(self, load: Load) -> list[Plan]:
        """Plans not far from the best one expected."""
        expected = {plan: self.expect(plan, load) for plan in self.plans}
        least = min(expected.values())  # what is left over may make it negative
        limit = least + (_EXPLORE_WITHIN - 1) * abs(least)
        return [plan for plan in self.plans if expected[plan] <= limit]

    def expect(self, plan: Plan, load: Load) -> float:
        """Expected seconds of a plan."""
        left_over = self._record(plan, load).left_over
        return self.forwards(plan, load) + (median(left_over) if left_over else 0.0)

    def learn(self, plan: Plan, load: Load, seconds: float, passes: Sequence[int]) -> None:
        """Take note of a batch that was decoded.

        Args:
            plan: how.
            load: what.
            seconds: it took.
            passes: of the target, a request.
        """
        record = self._record(plan, load)
        record.used += 1
        record.left_over.append(seconds - self.forwards(plan, load, passes))
        if plan.mode != Mode.BEAM:
            counts = self._counts(plan, load)
            for count in passes:
                counts.add(count)

    def forwards(self, plan: Plan, load: Load, passes: Sequence[int] | None = None) -> float:
        """Expected seconds of all forwards; for `passes` a request where they are known."""
        target, batch, beams = self._target, load.batch, load.beams
        if plan.mode == Mode.BEAM:
            return target(batch, load.tokens) + (self.levels - 1) * target(batch, beams)
        seconds = 0.0
        nodes = self.first_level
        if plan.mode == Mode.DRAFT and self._draft is not None:
            nodes, level = plan.nodes, plan.nodes / max(1, self.levels - 1)
            seconds += self._draft(batch, load.tokens)
            seconds += (self.levels - 2) * self._draft(batch, level)
        seconds += target(batch, load.tokens + nodes)
        counts = self._counts(plan, load)
        for done in range(1, self.levels):
            if passes is not None:
                going_on = sum(taken > done for taken in passes)
                seconds += target(going_on, 3 * beams) if going_on else 0.0
                continue
            share = counts.more_than(done)
            # a pass is needed if any request needs it, and runs only those that do
            seconds += (1 - (1 - share) ** batch) * target(max(1.0, batch * share), 3 * beams)
        return seconds

    def _counts(self, plan: Plan, load: Load) -> Passes:
        key = plan, load.beams
        if key not in self._passes:
            two = [0.0, 1.0] + [0.0] * (self.levels - 2)
            unknown = [0.25] * self.levels
            self._passes[key] = Passes(two if plan.mode == Mode.EXHAUSTIVE else unknown)
        return self._passes[key]

    def _record(self, plan: Plan, load: Load) -> _Record:
        """Batch sizes between two powers of two share a record."""
        key = plan, load.batch.bit_length(), load.beams
        return self._records.setdefault(key, _Record())

    def describe(self) -> list[dict[str, object]]:
        """What has been learned, a line for each plan, batch size and K."""
        return [
            {
                "plan": str(plan),
                "batch": f"{1 << (size - 1)}-{(1 << size) - 1}",
                "beams": beams,
                "used": record.used,
                "left_over_ms": round(1e3 * median(record.left_over), 3),
                "more_than_one_pass": round(self._share(plan, beams), 3),
            }
            for (plan, size, beams), record in self._records.items()
            if record.used
        ]

    def _share(self, plan: Plan, beams: int) -> float:
        counts = self._passes.get((plan, beams))
        return 1.0 if counts is None else counts.more_than(1)
