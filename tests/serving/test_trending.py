"""Trending scores, against counting by hand."""

import asyncio
import time
from collections import defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.serving import cached_results, event_columns
from recsys.serving import trending as module
from recsys.serving.event_columns import EventColumns
from recsys.serving.stores import open_store
from recsys.serving.stores.records import NOT_HISTORY, Act, Event
from recsys.serving.trending import Trending, trends_of

NOW = 10**12
DAY_MS = 86_400_000
BACK = ("return", "cancelled")
WEIGHTS = {"view": 1.0, "purchase": 5.0}
ACTS = st.lists(
    st.builds(
        Act,
        st.sampled_from(["a", "b", "s1:a", "s1:b", "s2:a", ":x"]),
        st.sampled_from(["p", "q", "r"]),
        st.sampled_from(["view", "purchase", "impression", "return", "cancelled"]),
        st.integers(NOW - 9 * DAY_MS, NOW + 50),
    ),
    max_size=30,
)


def weigh(name):
    return WEIGHTS.get(name, 0.0)


def by_hand(acts):
    best: defaultdict[tuple[str, str], float] = defaultdict(float)
    for user, item, kind, then, _ in acts:
        back = [act for act in acts if act[:2] == (user, item) and act.type in BACK]
        if any(act.time_ms >= then for act in back):
            continue
        value = weigh(kind) * 0.5 ** (max(0, NOW - then) / module.HALF_LIFE_MS)
        best[user, item] = max(best[user, item], value)
    scores: defaultdict[str, float] = defaultdict(float)
    for (_, item), value in best.items():
        scores[item] += value
    return {item: score for item, score in scores.items() if score > 0}


@given(pages=st.lists(ACTS, max_size=3))
def test_scores_are_those_of_counting_by_hand(pages):
    columns, names = EventColumns(sum(map(len, pages)), NOT_HISTORY), [*"pqr"]
    for page in pages:
        columns.add(page, lambda items: map(names.index, items))
    found = trends_of(columns, names, NOW, 0, weigh)
    expected = by_hand([act for page in pages for act in page])
    assert dict(zip(found.items, found.scores, strict=True)) == pytest.approx(expected)
    pairs = [(-score, item) for item, score in zip(found.items, found.scores, strict=True)]
    assert pairs == sorted(pairs)  # equal scores are in the order of ids


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "events.db")
    yield store
    store.close()


@pytest.fixture
def at(monkeypatch):
    """Sets the time, and reads without pauses."""
    monkeypatch.setattr(module, "MAX_AGE_S", 0.0)
    monkeypatch.setattr(cached_results, "REST", 0.0)
    monkeypatch.setattr(module, "now_ms", lambda: NOW)
    monkeypatch.setattr(module, "WINDOW_MS", 500)
    return monkeypatch


class NoTypes:
    """Models without retrieval."""

    recommender = SimpleNamespace(retrieval=None)

    def get(self):
        return self

    def knows(self, item):
        return True


def trending(off_loop):
    return Trending(NoTypes(), off_loop, ())


async def directly(function, *arguments):
    return function(*arguments)


def events(*times):
    return [Event(f"e{n}", f"u{n}", f"i{n}", "view", time) for n, time in enumerate(times)]


@pytest.mark.parametrize("page", [1, 2, 100])
async def test_the_newest_events_are_read_in_pages(store, at, page):
    at.setattr(event_columns, "PAGE", page)
    await store.history.append(events(NOW - 400, NOW - 600, NOW - 300, NOW - 200, NOW - 100))
    found = await trending(directly)(store)
    assert (sorted(found.items), found.since_ms) == (["i0", "i2", "i3", "i4"], NOW - 500)
    at.setattr(event_columns, "DEPTH", 3)
    found = await trending(directly)(store)
    assert (sorted(found.items), found.since_ms) == (["i2", "i3", "i4"], NOW - 300)


async def test_trends_are_kept_for_a_while_and_read_once(store, at):
    readings = 0

    async def counted(function, *arguments):
        nonlocal readings
        readings += function.__name__ == "trends_of"
        return function(*arguments)

    recent = trending(counted)
    recent.cached.kept_s = 1000.0
    leaving = asyncio.create_task(recent(store))
    await asyncio.sleep(0)
    leaving.cancel()  # what it began is made to the end, for the others
    first, *others = await asyncio.gather(*(recent(store) for _ in range(5)))
    assert all(other is first for other in others)
    assert (await recent(store), readings) == (first, 1)
    recent.cached._results["trends"] = time.monotonic(), first
    assert await recent(store) is first, "nobody waits for the next one"
    await recent.cached._making["trends"]
    second = await recent(store)
    assert (second is not first, readings) == (True, 2)
    recent.cached._results["trends"] = time.monotonic() - 1000.0, second
    assert await recent(store) is not second, "an old one is not used"
    await recent.cached.close()
