"""Every source of the blend passes the suite of sources."""

import math
from itertools import chain

from source_suite import (
    IS_TARGET,
    ITEMS,
    RECENT,
    SASREC,
    TABLE,
    VECTORS,
    VIEW,
    WALKS,
    WORDS,
    SourceSuite,
)

from recsys.interactions import Histories

COUNTS = [sum(walk.count(item) for walk in WALKS) for item in range(ITEMS)]


def known(history):
    """(age, item) of the items of the catalog, the last event having age 0."""
    return [(age, item) for age, item in enumerate(reversed(history)) if item < ITEMS]


def pairs():
    """(first, second, gap, whether the second event is of a target) of events near each other."""
    for walk, targets in zip(WALKS, IS_TARGET, strict=True):
        for i, first in enumerate(walk):
            for gap, second in enumerate(walk[i + 1 : i + 6], start=1):
                yield first, second, gap, targets[i + gap]


def shares(weights, history, item):
    """Share of an item in the evidence of a history; `weights` are those of pairs of items."""
    evidence = [
        sum(0.6**age * weights.get((seen, other), 0.0) for age, seen in known(history))
        for other in range(ITEMS)
    ]
    return evidence[item] / sum(evidence) if sum(evidence) else 0.0


DIRECTIONAL: dict[tuple[int, int], float] = {}
TO_TARGETS: dict[tuple[int, int], float] = {}
for a, b, gap, is_target in pairs():
    for pair, weight in (((a, b), 1 / gap), ((b, a), 0.5 / gap)):
        DIRECTIONAL[pair] = DIRECTIONAL.get(pair, 0.0) + weight / COUNTS[pair[0]] ** 0.5
    if is_target:
        TO_TARGETS[a, b] = TO_TARGETS.get((a, b), 0.0) + 1 / gap / COUNTS[a] ** 0.5


def cosine(one, other):
    """Cosine of two rows of numbers by name; 0 for an empty one."""
    dot = sum(weight * other.get(name, 0.0) for name, weight in one.items())
    lengths = [math.hypot(*row.values()) for row in (one, other)]
    return dot / lengths[0] / lengths[1] if all(lengths) else 0.0


def of_history(rows, history):
    """Decayed sum of the unit rows of a history."""
    whole: dict[object, float] = {}
    for age, seen in known(history):
        length = math.hypot(*rows[seen].values())
        for name, value in rows[seen].items():
            whole[name] = whole.get(name, 0.0) + 0.6**age * value / length
    return whole


def term_rows():
    """TF-IDF of words and of brands that two items share, each scaled to length 1."""
    rows: list[dict[str, float]] = [{} for _ in range(ITEMS)]
    for documents in (WORDS, TABLE["tags"].to_pylist()):
        documents = [document or [] for document in documents]
        for row, terms in zip(rows, documents, strict=True):
            items = {term: sum(term in other for other in documents) for term in terms}
            own = {t: math.log((1 + ITEMS) / (1 + n)) + 1 for t, n in items.items() if n > 1}
            row |= {term: weight / math.hypot(*own.values()) for term, weight in own.items()}
    return rows


TERMS = term_rows()
NUMBERS = [dict(enumerate(row)) for row in VECTORS.tolist()]


class TestItemItem(SourceSuite):
    source, proposed = "item_item", 1.0

    def value(self, history, types, item):
        return shares(DIRECTIONAL, history, item)


class TestToTargets(SourceSuite):
    source, proposed = "to_targets", 0.5

    def value(self, history, types, item):
        return shares(TO_TARGETS, history, item)


class TestPopularity(SourceSuite):
    source = "popularity"

    def value(self, history, types, item):
        return math.log1p(COUNTS[item])


class TestRecent(SourceSuite):
    source, proposed = "recent", 0.25

    def value(self, history, types, item):
        return math.log1p(RECENT[item])


class TestTargetPopularity(SourceSuite):
    source = "target_popularity"

    def value(self, history, types, item):
        events = zip(chain(*WALKS), chain(*IS_TARGET), strict=True)
        return math.log1p(sum(taken == item and is_target for taken, is_target in events))


class TestSeenType(SourceSuite):
    source = "seen:view"

    def value(self, history, types, item):
        ages = range(len(history) - 1, -1, -1)
        events = zip(ages, history, types, strict=True)
        return sum(0.8**age for age, seen, kind in events if seen == item and kind == VIEW)


class TestVectors(SourceSuite):
    source, beyond = "vectors", math.nan

    def value(self, history, types, item):
        return cosine(of_history(NUMBERS, history), NUMBERS[item])


class TestContent(SourceSuite):
    source, beyond, proposed = "content", math.nan, 0.5

    def value(self, history, types, item):
        return cosine(of_history(TERMS, history), TERMS[item])


class TestSasRec(SourceSuite):
    source, proposed = "sasrec", 0.5

    def value(self, history, types, item):
        return float(SASREC.states(Histories.of([history]))[0] @ SASREC.vectors[item])

    def unknown(self, history):
        """The least of the 50 largest logits of items that are not in the history."""
        others = [self.value(history, [], i) for i in range(ITEMS) if i not in history]
        return sorted(others, reverse=True)[:50][-1]
