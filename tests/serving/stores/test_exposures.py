"""Results that are read from a store against those of the simulated users themselves."""

import random

import pytest

from recsys.serving.experiments import Experiment, analyse
from recsys.serving.schemas.experiments import ExperimentBody
from recsys.serving.stores.records import SKEW_MS, Exposure, Served

WINDOW_MS = 60_000
BODY = {
    "arms": [{"alias": "a", "weight": 2.0}, {"alias": "b", "weight": 1.0}],
    "window_s": WINDOW_MS // 1000,
    "event": "cart",
}
START = 10 * SKEW_MS


def simulated(draw, users):
    """Answers (id, user, time) and events (id, user, type, time, answer) of random users."""
    answers, events = [], []
    for u in range(users):
        first = START + draw.randrange(4 * WINDOW_MS)
        times = [first] + [
            first + draw.choice([1, WINDOW_MS - 1, WINDOW_MS, draw.randrange(3 * WINDOW_MS)])
            for _ in range(draw.randrange(4))
        ]
        for n, time_ms in enumerate(times):
            answers.append((f"r{u}-{n}", f"user-{u}", time_ms))
            for m in range(draw.choice([0, 0, 1, 2])):
                edges = (-SKEW_MS - 1, -SKEW_MS, 0, WINDOW_MS, WINDOW_MS + 1)
                later = draw.choice([*edges, draw.randrange(2 * WINDOW_MS)])
                kind = draw.choice(["cart", "cart", "view"])
                user = draw.choice([f"user-{u}"] * 4 + ["user-0"])
                link = draw.choice([f"r{u}-{n}"] * 4 + [None, "r0-0"])
                events.append((f"e{u}-{n}-{m}", user, kind, time_ms + later, link))
    return answers, events


def expected(answers, events, experiment, now):
    """Per arm: users observed to the end, their answers, those followed, and the mean share."""
    times = {}
    for name, user, time_ms in answers:
        times.setdefault(user, []).append((time_ms, name))
    shares = {"a": [], "b": []}
    for user, given in times.items():
        first = min(given)[0]
        if first + 2 * WINDOW_MS > now:
            continue
        counted = [one for one in given if one[0] < first + WINDOW_MS]
        followed = [
            any(
                (who, kind, link) == (user, "cart", name) and -SKEW_MS <= at - time_ms <= WINDOW_MS
                for _, who, kind, at, link in events
            )
            for time_ms, name in counted
        ]
        arm = experiment.arm_of(user, b"salt")
        shares[arm].append((len(counted), sum(followed)))
    return [
        (
            len(found),
            sum(shown for shown, _ in found),
            sum(followed for _, followed in found),
            sum(followed / shown for shown, followed in found) / len(found) if found else None,
        )
        for found in shares.values()
    ]


@pytest.mark.parametrize("seed", range(3))
async def test_a_store_has_the_results_of_its_users(store, event, seed):
    draw = random.Random(seed)
    experiment = Experiment("e", "homepage", ExperimentBody.model_validate(BODY), 0, None)
    answers, events = simulated(draw, 60)
    for name, user, time_ms in sorted(answers, key=lambda answer: answer[2]):
        exposure = Exposure("e", experiment.arm_of(user, b"salt"), WINDOW_MS)
        store.served.remember(Served(name, user, "m", ("x",), time_ms, exposure))
    await store.history.append(
        [
            event(name, user, time_ms=time_ms, type=kind, recommendation_id=link)
            for name, user, kind, time_ms, link in events
        ]
    )
    users = await store.served.exposed("e", "cart", WINDOW_MS, "", 1_000)
    assert [user.user for user in users] == sorted({user for _, user, _ in answers})
    for now in range(START, START + 8 * WINDOW_MS, WINDOW_MS // 2):
        found = analyse(experiment, users, now).arms
        rows = [(arm.observed, arm.exposures, arm.followed, arm.rate) for arm in found]
        for row, wanted in zip(rows, expected(answers, events, experiment, now), strict=True):
            assert row == pytest.approx(wanted)
