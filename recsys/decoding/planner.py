"""Planner: chooses whether to draft a tree for a batch, and of which size, by expected time.

The expected time of a plan is the sum of three parts: the time of a pass, measured at start-up
(`PassTimes`), times the number of passes, counted while the plan is used (`Passes`), plus the
median of the recent time that these two do not explain, the bookkeeping of the search. The plan
with the smallest sum is chosen. One decode in 64 tries another plan whose expected time is close,
so that counts and medians stay current.

All numbers are seconds; this module uses no tensors.
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
_GAIN = 0.1  # of plain search's time: the accuracy of the estimates
_KEEP_FOR = 16  # decodes
_LIKE_TOKENS = 16
_WIDEST = 1024  # states of a first level that is exhausted; masks grow with its square
# Trees are worth drafting while a pass costs its launch and the reading of the weights. On an H200
# a right tree of 120 nodes halves the time of one request to a 7B model, and 32 such trees take
# longer than the passes that they save (docs/gpu.md). The limit in between is an estimate.
MOST_TREE_TOKENS = 2048


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


def list_plans(levels: int, first_level: int, nodes: Sequence[int]) -> list[Plan]:
    """The plans that are possible, plain beam search first.

    Args:
        levels: L.
        first_level: children of the catalog's root, which mode `exhaustive` drafts.
        nodes: sizes of draft trees; empty without a draft.
    """
    if levels == 1:
        return [Plan()]
    exhaustive = [Plan(Mode.EXHAUSTIVE)] if first_level <= _WIDEST else []
    return [Plan(), *exhaustive, *(Plan(Mode.DRAFT, n) for n in nodes)]


def is_worth_trying(plan: Plan, batch: int, first_level: int) -> bool:
    """Whether the trees of a batch are small enough to save time."""
    nodes = first_level if plan.mode == Mode.EXHAUSTIVE else plan.nodes
    return batch == 1 or batch * nodes <= MOST_TREE_TOKENS


@dataclass(frozen=True)
class Load:
    """The size of a batch to plan for: requests, K, and most prompt tokens that one has to run."""

    batch: int
    tokens: int
    beams: int


@dataclass(frozen=True)
class PassTimes:
    """Measured time of one pass, by number of requests and of new tokens a request.

    The time is interpolated linearly between measured points, and extrapolated beyond the last.

    >>> times = PassTimes({1: ((10, 1.0), (20, 2.0))})
    >>> times(batch=1, tokens=15)
    1.5

    Attributes:
        points: requests -> ((new tokens, seconds), ...), both ascending.
    """

    points: dict[int, tuple[tuple[int, float], ...]]

    def __call__(self, batch: float, tokens: float) -> float:
        """Expected seconds."""
        return _between([(b, _between(line, tokens)) for b, line in self.points.items()], batch)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Interpolate between points; extrapolate in proportion beyond the last."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1] * max(1.0, x / points[0][0])
    for (x0, y0), (x1, y1) in pairwise(points):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    (x0, y0), (x1, y1) = points[-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (x - x1)


class Passes:
    """How many passes requests take under one plan, counted with exponential decay.

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
    """Measurements of one (plan, batch size, beams)."""

    left_over: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    used: int = 0


class Planner:
    """Chooses a plan for each batch, and learns from its measured time.

    Attributes:
        plans: those to choose from; plain beam search is always one.
        levels: L.
        first_level: children of the catalog's root; changes with the catalog.
    """

    def __init__(
        self,
        target: PassTimes,
        draft: PassTimes | None,
        *,
        levels: int,
        first_level: int,
        nodes: Sequence[int] = (),
    ) -> None:
        """List the plans that are possible for a catalog of L `levels`.

        Draft trees have sizes `nodes`; without times of a draft model there are none. Mode
        `exhaustive` drafts the `first_level` children of the root.
        """
        self._target, self._draft = target, draft
        self.levels, self.first_level = levels, first_level
        self.plans = list_plans(levels, first_level, () if draft is None else nodes)
        self._passes: dict[tuple[Plan, int], Passes] = {}
        self._records: dict[tuple[Plan, int, int], _Record] = {}
        self._chosen: dict[tuple[int, int, int], tuple[Plan, int]] = {}
        self._decodes = 0

    def choose(self, load: Load) -> Plan:
        """The plan to use now: the one expected fastest, or sometimes one that is close to it."""
        self._decodes += 1
        if self._decodes % _EXPLORE_EVERY == 0:
            return min(self.near(load), key=lambda plan: self._record(plan, load).used)
        # Choosing costs as much as a small pass: a choice is kept for similar loads for a while.
        key = load.batch.bit_length(), load.tokens // _LIKE_TOKENS, load.beams
        plan, until = self._chosen.get(key, (None, 0))
        if plan is None or until < self._decodes or plan not in self.possible(load):
            plan = self._best(load)
            self._chosen[key] = plan, self._decodes + _KEEP_FOR
        return plan

    def _best(self, load: Load) -> Plan:
        """Plain search, unless another plan is expected to be clearly faster."""
        expected = {plan: self.expect(plan, load) for plan in self.possible(load)}
        best = min(expected, key=lambda plan: (expected[plan], plan))
        plain = expected[Plan()]
        return best if expected[best] < plain - _GAIN * abs(plain) else Plan()

    def near(self, load: Load) -> list[Plan]:
        """Plans whose expected time is close to the best."""
        expected = {plan: self.expect(plan, load) for plan in self.possible(load)}
        least = min(expected.values())  # the unexplained time may make it negative
        limit = least + (_EXPLORE_WITHIN - 1) * abs(least)
        return [plan for plan, seconds in expected.items() if seconds <= limit]

    def possible(self, load: Load) -> list[Plan]:
        """The plans to choose from for a load."""
        return [p for p in self.plans if is_worth_trying(p, load.batch, self.first_level)]

    def expect(self, plan: Plan, load: Load) -> float:
        """Expected seconds of a plan."""
        left_over = self._record(plan, load).left_over
        return self.forwards(plan, load) + (median(left_over) if left_over else 0.0)

    def learn(self, plan: Plan, load: Load, seconds: float, passes: Sequence[int]) -> None:
        """Record a batch that took `seconds`, and the target's passes for each request."""
        record = self._record(plan, load)
        record.used += 1
        record.left_over.append(seconds - self.forwards(plan, load, passes))
        if plan.mode != Mode.BEAM:
            counts = self._counts(plan, load)
            for count in passes:
                counts.add(count)

    def forwards(self, plan: Plan, load: Load, passes: Sequence[int] | None = None) -> float:
        """Expected seconds of all passes; their number a request may be given."""
        target, batch, beams = self._target, load.batch, load.beams
        if plan.mode == Mode.BEAM:
            return target(batch, load.tokens) + (self.levels - 1) * target(batch, beams)
        seconds, nodes = 0.0, self.first_level
        if plan.mode == Mode.DRAFT and self._draft is not None:
            nodes = plan.nodes
            level = nodes / max(1, self.levels - 1)
            seconds = self._draft(batch, load.tokens)
            seconds += (self.levels - 2) * self._draft(batch, level)
        seconds += target(batch, load.tokens + nodes)
        counts = self._counts(plan, load)
        for done in range(1, self.levels):
            if passes is not None:
                going_on = sum(taken > done for taken in passes)
                seconds += target(going_on, 3 * beams) if going_on else 0.0
                continue
            share = counts.more_than(done)
            # a pass is run if any request needs it, for the requests that do
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
        """The record of a load; batch sizes between two powers of two share one."""
        key = plan, load.batch.bit_length(), load.beams
        return self._records.setdefault(key, _Record())
