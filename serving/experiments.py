"""Experiments: users are divided among aliases, and what they do with the answers is compared.

Experiments are an object of the store, as rules are. One is never changed: other weights would move
users to other arms. The arm of a user is a keyed hash, so that every process finds the same one.

A user is one observation: the share of their answers that were followed, over the answers within
one window after the first. It is final two windows after the first answer, and users enter the
results in the order of their first answers, so what is counted stays as it is, which the confidence
sequence requires. Only an event that is delivered later, and the erasure of a user, change it.
"""

import asyncio
import bisect
import hmac
import itertools
import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import ValidationError

from recsys.serving import sequential
from recsys.serving.cached_results import CachedResults
from recsys.serving.errors import ProblemError
from recsys.serving.models import Models
from recsys.serving.off_loop import OffLoop
from recsys.serving.schemas.experiments import (
    ArmInfo,
    ArmResults,
    ExperimentBody,
    ExperimentInfo,
    ExperimentRef,
    ExperimentResults,
)
from recsys.serving.shared_changes import Change, SharedState
from recsys.serving.stores.records import Exposed, Exposure, now_ms
from recsys.serving.stores.store import Store

logger = logging.getLogger("recsys.serving.experiments")
NAME = "experiments"  # written in stores
RUNNING = "experiments"  # the part of the object that has them
MOST_EXPERIMENTS = 20
MOST_EXPOSURES = 500_000  # of one experiment; later answers are not counted
RETENTION_DAYS = 180  # from the start, until exposures are deleted; no experiment lasts that long
LEVEL = 0.95
RATIO_LIMIT = 0.001
PAGE = 500  # users that are read at once, with up to 100 answers each
LOOK_S = 60.0  # between two looks at the numbers of exposures
DAY_MS = 86_400_000


@dataclass(frozen=True)
class Experiment:
    """An experiment and when it was started."""

    id: str
    name: str
    body: ExperimentBody
    time_ms: int
    by: str | None

    @property
    def aliases(self) -> list[str]:
        """The aliases of the arms, the first arm's first."""
        return [arm.alias for arm in self.body.arms]

    @property
    def ends_ms(self) -> int:
        """When it ends, in unix milliseconds."""
        return self.time_ms + self.body.days * DAY_MS

    def arm_of(self, user: str, salt: bytes) -> str:
        """The alias that answers a user: a place among the shares, by a hash with the salt."""
        key = f"{self.id}\0{user}".encode("utf-8", "surrogatepass")
        digest = hmac.digest(salt, key, "sha256")
        position = (int.from_bytes(digest[:8], "big") >> 11) / 2**53  # 53 bits: below 1 in a float
        ends = [*itertools.accumulate(self.body.shares)]
        return self.aliases[bisect.bisect_right(ends[:-1], position)]

    def info(self) -> ExperimentInfo:
        """The experiment on the wire, with its present status."""
        shares = zip(self.aliases, self.body.shares, strict=True)
        return ExperimentInfo(
            name=self.name,
            arms=[ArmInfo(alias=alias, share=share) for alias, share in shares],
            event=self.body.event,
            window_s=self.body.window_s,
            status="ended" if now_ms() >= self.ends_ms else "running",
            started_ms=self.time_ms,
            ends_ms=self.ends_ms,
            by=self.by,
        )


@dataclass(frozen=True)
class Assignment:
    """The arm of a request; without an `exposure`, the answer does not count."""

    ref: ExperimentRef
    exposure: Exposure | None


class Experiments(SharedState[dict[str, Experiment]]):
    """The experiments of all processes that share a store."""

    def __init__(self, store: Store, models: Models, off_loop: OffLoop) -> None:
        """Without experiments; `start` reads them."""
        super().__init__(store, NAME, logger)
        self._models, self._off_loop = models, off_loop
        self._state = {}
        self._full: set[str] = set()  # ids of those with `MOST_EXPOSURES`
        self._compared: CachedResults[ExperimentResults] = CachedResults(0.0)
        self._bounding: asyncio.Task[None] | None = None

    def bound(self) -> None:
        """Start to bound the number of exposures, and to delete old ones."""
        self._bounding = asyncio.create_task(self._bound(), name="exposures")

    async def close(self) -> None:
        """Stop following and bounding."""
        if self._bounding is not None:
            self._bounding.cancel()
            await asyncio.gather(self._bounding, return_exceptions=True)
        await self._compared.close()
        await super().close()

    # Readers

    def all(self) -> list[ExperimentInfo]:
        """Describe all experiments, sorted by name."""
        return [self._state[name].info() for name in sorted(self._state)]

    def assign(self, name: str, user: str | None) -> Assignment | None:
        """The arm of a request to `name`; None if that is no experiment.

        Requests without a user, those after the end, and those whose arm has no model here are
        answered by the first arm, and do not count.
        """
        experiment = self._state.get(name)
        if experiment is None:
            return None
        first = ExperimentRef.model_construct(name=name, arm=experiment.aliases[0])
        uncounted = Assignment(first, None)
        if user is None or now_ms() >= experiment.ends_ms:
            return uncounted
        arm = experiment.arm_of(user, self._store.database.salt)
        if arm not in self._models.aliases:  # those of a process
            return uncounted
        window_ms = experiment.body.window_s * 1000
        exposure = None if experiment.id in self._full else Exposure(experiment.id, arm, window_ms)
        return Assignment(ExperimentRef.model_construct(name=name, arm=arm), exposure)

    async def results(self, name: str) -> ExperimentResults:
        """Compare the arms of an experiment over the users of the store.

        However many ask, it takes at most a tenth of the time: results are kept for a while.

        Raises:
            ProblemError: there is none of this name.
            StoreError: the store cannot be read.
        """
        experiment = self._find(name)
        return await self._compared.get(experiment.id, lambda: self._results(experiment))

    def check_name(self, alias: str) -> None:
        """Refuse a new alias that requests could not name.

        Raises:
            ProblemError: an experiment has this name.
        """
        if alias in self._state:
            raise ProblemError(
                "alias_conflict",
                f"There is an experiment {alias!r}, and requests name both by `model`; choose "
                "another name.",
            )

    def check_unused(self, alias: str) -> None:
        """Refuse to remove an alias that is an arm.

        Raises:
            ProblemError: an experiment that runs has it.
        """
        for name, experiment in self._state.items():
            if alias in experiment.aliases and now_ms() < experiment.ends_ms:
                raise ProblemError(
                    "alias_conflict",
                    f"The alias {alias!r} is an arm of the experiment {name!r}; delete that first.",
                )

    # Changes

    async def put(self, name: str, body: ExperimentBody, by: str | None) -> ExperimentInfo:
        """Start an experiment; putting the same again has no effect.

        Raises:
            ProblemError: there is another one of this name, an alias of this name, or the most
                that a service has; or an arm is no alias of this process.
            StoreError: it may not be kept; repeat the call.
        """

        async def check() -> Change | None:
            if name in self._state:
                return None
            self._check(name, body)
            value, ident = body.model_dump(mode="json"), uuid.uuid4().hex
            new = {"id": ident, "value": value, "time_ms": now_ms(), "by": by}
            return lambda state: state.setdefault(RUNNING, {}).update({name: new})

        async with self._changing.for_client():
            await self._change(check)
            experiment = self._find(name)
            if experiment.body != body:
                raise ProblemError(
                    "experiment_conflict",
                    f"The experiment {name!r} runs with other settings, and other weights would "
                    "move users between arms; delete it, or choose another name.",
                )
            return experiment.info()

    async def delete(self, name: str) -> None:
        """Delete an experiment; its exposures go soon after, since they may be many.

        Raises:
            ProblemError: there is none of this name.
            StoreError: as `put`.
        """

        async def check() -> Change:
            self._find(name)
            return lambda state: state[RUNNING].pop(name)

        async with self._changing.for_client():
            await self._change(check)

    # Internals

    def _find(self, name: str) -> Experiment:
        if name not in self._state:
            detail = f"There is no experiment {name!r}; /v1/models lists them."
            raise ProblemError("unknown_experiment", detail)
        return self._state[name]

    def _check(self, name: str, body: ExperimentBody) -> None:
        if len(self._state) >= MOST_EXPERIMENTS:
            raise ProblemError(
                "experiment_conflict",
                f"There are {MOST_EXPERIMENTS} experiments already, the most that a service has; "
                "delete one.",
            )
        aliases = sorted(self._models.aliases)
        if name in aliases:
            raise ProblemError(
                "experiment_conflict",
                f"There is an alias {name!r}, and requests name both by `model`; choose another "
                "name.",
            )
        for number, arm in enumerate(body.arms):
            if arm.alias not in aliases:
                raise ProblemError.at(
                    "invalid_request",
                    f"arms[{number}]: there is no alias {arm.alias!r}; /v1/models lists them",
                )

    def _read(self, stored: dict[str, Any]) -> dict[str, Experiment]:
        experiments = {}
        for name, fields in stored.get(RUNNING, {}).items():
            try:
                body = ExperimentBody.model_validate(fields["value"])
            except ValidationError as error:  # of another version of the service
                logger.error("experiment %s of the store cannot be read: %s", name, error)
                continue
            experiments[name] = Experiment(
                fields["id"], name, body, fields["time_ms"], fields["by"]
            )
        return experiments

    async def _results(self, experiment: Experiment) -> ExperimentResults:
        body, rows, after, last = experiment.body, [], "", PAGE
        while last == PAGE:
            page = await self._store.served.exposed(
                experiment.id, body.event, body.window_s * 1000, after, PAGE
            )
            rows.append(page)
            last, after = len(page), page[-1].user if page else after
        users = [*itertools.chain.from_iterable(rows)]
        return await self._off_loop(analyse, experiment, users, now_ms())

    async def _bound(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self._look()
            except Exception as error:  # the next look may succeed
                logger.warning("exposures were not counted or deleted: %s", error)

    async def _look(self) -> None:
        """Note which experiments are full, and drop the exposures of deleted and of old ones.

        All processes write exposures, also of an experiment that another one has just deleted.
        """
        counts = await self._store.served.count_exposures()
        self._full = {ident for ident, count in counts.items() if count >= MOST_EXPOSURES}
        # It is read after the counts, so each experiment that they have is there unless deleted.
        stored = await self._store.state.get(NAME) or {}
        since_ms = now_ms() - RETENTION_DAYS * DAY_MS
        running = stored.get(RUNNING, {}).values()
        current = {fields["id"] for fields in running if fields["time_ms"] >= since_ms}
        await self._store.served.drop_exposures(counts.keys() - current)


def analyse(experiment: Experiment, users: Sequence[Exposed], time_ms: int) -> ExperimentResults:
    """Compare the arms with the first, over the users who are observed to the end at a time."""
    aliases, body = experiment.aliases, experiment.body
    observed_ms = 2 * body.window_s * 1000
    known = (user for user in users if user.arm in aliases)
    ordered = sorted(known, key=lambda user: (user.first_ms, user.user))
    arm = np.array([aliases.index(user.arm) for user in ordered], dtype=np.int64)
    first_ms = np.array([user.first_ms for user in ordered], dtype=np.int64)
    shown = np.array([user.shown for user in ordered], dtype=np.int64)
    followed = np.array([user.followed for user in ordered], dtype=np.int64)
    values = followed / np.maximum(shown, 1)
    alpha = (1 - LEVEL) / (len(aliases) - 1)
    done = first_ms + observed_ms <= time_ms
    arms = []
    for number, alias in enumerate(aliases):
        own = done & (arm == number)
        compared: dict[str, Any] = {"verdict": "no_users" if number else "first"}
        pair = done & ((arm == 0) | (arm == number))
        if number and pair.any():
            weight = body.shares[number] / (body.shares[0] + body.shares[number])
            looks = [int(pair.sum())]
            comparison = sequential.compare(values[pair], arm[pair] == number, weight, alpha, looks)
            difference, low, high = (float(value[-1]) for value in comparison)
            verdict = "better" if low > 0 else "worse" if high < 0 else "undecided"
            compared = {"difference": difference, "low": low, "high": high, "verdict": verdict}
        arms.append(
            ArmResults(
                alias=alias,
                observed=int(own.sum()),
                waiting=int((arm == number).sum() - own.sum()),
                exposures=int(shown[own].sum()),
                followed=int(followed[own].sum()),
                rate=float(values[own].mean()) if own.any() else None,
                **compared,
            )
        )
    counts = np.bincount(arm, minlength=len(aliases)).tolist()
    p_value = sequential.ratio_p_value(counts, body.shares)
    return ExperimentResults(
        name=experiment.name,
        level=LEVEL,
        arms=arms,
        ratio_p_value=p_value,
        verdict=" ".join(_sentence(arm, aliases[0]) for arm in arms[1:])
        + (_UNEVEN if p_value < RATIO_LIMIT else ""),
    )


_UNEVEN = (
    " The numbers of users do not fit the shares of the arms: find out which answers are missing "
    "before you trust the differences."
)


def _sentence(arm: ArmResults, first: str) -> str:
    """The verdict on an arm, in words."""
    if arm.low is None or arm.high is None:
        return f"{arm.alias}: no user has been observed to the end yet."
    low, high = 100 * arm.low, 100 * arm.high
    if arm.verdict == "undecided":
        return (
            f"{arm.alias}: no difference from {first} is shown yet; it is between {low:+.2f} and "
            f"{high:+.2f} percentage points."
        )
    near, far = sorted((abs(low), abs(high)))
    return (
        f"{arm.alias} is {arm.verdict} than {first} by {near:.2f} to {far:.2f} percentage points."
    )
