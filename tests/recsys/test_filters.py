"""Filters: a slow twin over plain rows, messages, decoding under a filter, the cache, and fuzz."""

import json
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.attributes import Attributes
from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.filters import MOST_PARTS, ItemBoosts, ItemFilter
from recsys.constraint.mask import RowMask
from recsys.errors import FilterError

ITEMS = [
    {"brand": "Acme", "price": 5.0, "year": 2001, "stock": True, "tags": ["a", "b"], "sizes": [1]},
    {"brand": "Bolt", "price": None, "year": 2002, "stock": False, "tags": [], "sizes": [2, 9]},
    {"brand": None, "price": 20.0, "year": None, "stock": None, "tags": None, "sizes": None},
    {"brand": "Acme", "price": math.nan, "year": 2004, "stock": True, "tags": ["b"], "sizes": []},
    {"brand": "Coil", "price": 2.5, "year": 2005, "stock": True, "tags": ["c", "a"], "sizes": [3]},
]
TABLE = pa.table(
    {
        "brand": pa.array([i["brand"] for i in ITEMS]).dictionary_encode(),
        "price": pa.array([i["price"] for i in ITEMS], pa.float64()),
        "year": pa.array([i["year"] for i in ITEMS], pa.int16()),
        "stock": pa.array([i["stock"] for i in ITEMS], pa.bool_()),
        "tags": pa.array([i["tags"] for i in ITEMS], pa.list_(pa.string())),
        "sizes": pa.array([i["sizes"] for i in ITEMS], pa.list_(pa.int32())),
        "nothing": pa.nulls(5),
        "when": pa.array([0] * 5, pa.timestamp("s")),
    }
)
ORDER = np.array([3, 1, 0, 4, 2], np.int32)
COLUMNS = Attributes(TABLE, ORDER)


def allowed(expression, columns=COLUMNS):
    return sorted(columns.order[ItemFilter.parse(expression).evaluate(columns)].tolist())


def clause(key, **test):
    return {"must": [{"key": key, **test}]}


@pytest.mark.parametrize(
    ("expression", "items"),
    [
        ({}, [0, 1, 2, 3, 4]),
        (clause("brand", match="Acme"), [0, 3]),
        (clause("nothing", exists=True), []),
        (clause("nothing", match="x"), []),
        ({"must_not": {"key": "brand", "match": "Acme"}}, [1, 2, 4]),
        (
            {
                "should": [{"key": "year", "match": 2002}, {"key": "tags", "match": "c"}],
                "must": [{"must_not": [{"key": "sizes", "match": 9}]}],
            },
            [4],
        ),
    ],
)
def test_filters_by_hand(expression, items):
    assert allowed(expression) == items


def twin(expression, item):
    """The same said of one item in plain Python."""

    def holds(part):
        if "key" not in part:
            return twin(part, item)
        value = item[part["key"]]
        values = value if isinstance(value, list) else [] if value is None else [value]
        values = [v for v in values if not (isinstance(v, float) and math.isnan(v))]
        if "exists" in part:
            return bool(values) == part["exists"]
        if "range" in part:
            tests = {
                "gt": lambda a, b: a > b,
                "gte": lambda a, b: a >= b,
                "lt": lambda a, b: a < b,
                "lte": lambda a, b: a <= b,
            }
            return any(all(tests[k](v, b) for k, b in part["range"].items()) for v in values)
        wanted = part["any"] if "any" in part else [part["match"]]
        return any(v in wanted for v in values)

    should = expression.get("should", [])
    return (
        all(holds(p) for p in expression.get("must", []))
        and (not should or any(holds(p) for p in should))
        and not any(holds(p) for p in expression.get("must_not", []))
    )


WORDS = st.sampled_from(["Acme", "Bolt", "Coil", "a", "b", "x", ""])
NUMBERS = st.one_of(st.integers(-3, 12), st.sampled_from([0.5, 2.0, 7.25]))


def clauses_of(key, values):
    test = st.one_of(
        st.fixed_dictionaries({"match": values}),
        st.fixed_dictionaries({"any": st.lists(values, max_size=7)}),
        st.fixed_dictionaries({"exists": st.booleans()}),
    )
    if values is NUMBERS:
        bounds = st.dictionaries(st.sampled_from(["gt", "gte", "lt", "lte"]), values, min_size=1)
        test = test | st.fixed_dictionaries({"range": bounds})
    return test.map(lambda t: {"key": key, **t})


KEYS = {
    "brand": WORDS,
    "tags": WORDS,
    "price": NUMBERS,
    "year": NUMBERS,
    "sizes": NUMBERS,
    "stock": st.booleans(),
}
CLAUSES = st.one_of(*(clauses_of(k, v) for k, v in KEYS.items()))
GROUPS = st.recursive(
    st.dictionaries(st.sampled_from(["must", "should", "must_not"]), st.lists(CLAUSES, max_size=3)),
    lambda inner: st.dictionaries(
        st.sampled_from(["must", "should", "must_not"]), st.lists(CLAUSES | inner, max_size=3)
    ),
    max_leaves=4,
)


def item_of(rng):
    def maybe(value):
        return None if rng.random() < 0.2 else value

    words, numbers = ["Acme", "Bolt", "Coil", "a", "b", ""], [-1, 0, 2, 7, 12]
    return {
        "brand": maybe(rng.choice(words)),
        "price": maybe(rng.choice([0.5, 2.0, 7.25, math.nan, 3.0])),
        "year": maybe(rng.choice(numbers)),
        "stock": maybe(rng.random() < 0.5),
        "tags": maybe(rng.choices(words, k=rng.randrange(3))),
        "sizes": maybe(rng.choices(numbers, k=rng.randrange(3))),
    }


SCHEMA = pa.schema([(n, TABLE.schema.field(n).type) for n in KEYS if n != "brand"])
SCHEMA = SCHEMA.append(pa.field("brand", pa.string()))


@given(GROUPS, st.integers(0, 1 << 30), st.integers(1, 12))
@settings(max_examples=250, deadline=None)
def test_a_filter_says_of_many_items_what_its_twin_says_of_one(expression, seed, count):
    rng = random.Random(seed)
    items = [item_of(rng) for _ in range(count)]
    order = np.array(rng.sample(range(count), count), np.int32)
    columns = Attributes(pa.Table.from_pylist(items, SCHEMA), order)
    assert allowed(expression, columns) == [i for i in range(count) if twin(expression, items[i])]


def test_many_items_are_looked_at_in_parts(monkeypatch):
    wanted = {
        "must": [{"key": "tags", "any": ["a", "b"]}],
        "must_not": [clause("year", match=2002)],
    }
    whole = allowed(wanted)
    for size in (1, 2, 3):
        monkeypatch.setattr("recsys.constraint.filters._PART", size)
        assert allowed(wanted) == whole


@given(GROUPS, st.randoms(use_true_random=False))
def test_order_and_repetition_do_not_change_the_key(expression, rng):
    def shuffled(part):
        part = dict(part)
        for name in ("must", "should", "must_not"):
            if name in part:
                parts = [shuffled(p) for p in part[name]]
                part[name] = rng.sample(parts, len(parts)) + parts[:1]
        if "any" in part:
            part["any"] = rng.sample(part["any"], len(part["any"])) + part["any"][:1]
        return dict(rng.sample(sorted(part.items(), key=lambda kv: kv[0]), len(part)))

    other = shuffled(expression)
    assert ItemFilter.parse(other).key == ItemFilter.parse(expression).key
    assert allowed(other) == allowed(expression)


def nested(depth):
    return {} if not depth else {"must": [nested(depth - 1)]}


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ([], "filter: want an object with must, should or must_not, got a list"),
        ({"musst": []}, "filter: unknown key 'musst'; want must, should or must_not"),
        ({"must": 3}, "filter.must: want a list of clauses, got 3"),
        ({"must": [None]}, r"filter.must\[0\]: want an object .*got null"),
        (clause("brand"), r"filter.must\[0\]: want exactly one of match, any, range or exists"),
        (clause("brand", match="a", any=["b"]), "want exactly one of .* got 2"),
        (clause("brand", like="a"), "unknown key 'like'; want key, match, any, range or exists"),
        ({"must": [{"key": 7, "match": "a"}]}, r"filter.must\[0\].key: want an attribute's name"),
        (clause("brand", match=["a"]), r"filter.must\[0\].match: want text, .* got a list"),
        (clause("brand", match=None), "want text, a number, true or false, got null"),
        (clause("brand", any="a"), r"filter.must\[0\].any: want a list of values, got 'a'"),
        (clause("brand", match="x" * 1001), "longer than 1000 characters"),
        (clause("price", range={}), "want an object with gt, gte, lt or lte"),
        (clause("price", range={"gt": "3"}), r"range.gt: want a number, got '3'"),
        (clause("price", range={"gt": True}), r"range.gt: want a number, got true"),
        (clause("price", range={"gt": math.nan}), "want a number that fits 64 bits"),
        (clause("price", match=10**400), "want a number that fits 64 bits"),
        (clause("price", exists=1), "want true or false, got 1"),
        (nested(16), "nested deeper than 16 groups"),
        ({"must": [{}] * 1001}, "more than 1,000 clauses, or 10,000 values; list values in one"),
        (clause("brand", any=["x"] * MOST_PARTS), "more than 1,000 clauses, or 10,000 values"),
        (clause("colour", match="red"), "no attribute 'colour'; items have brand, price, year"),
        (clause("brand", match=3), r"\.match: 3 is a number, but attribute 'brand' is a text"),
        (
            clause("year", any=[2, "2002"]),
            r"\.any: '2002' is a text, but attribute 'year' is a num",
        ),
        (clause("stock", match=1), "1 is a number, but attribute 'stock' is a truth value"),
        (clause("tags", range={"lt": 3}), "range compares numbers, but attribute 'tags' is a text"),
        (clause("when", exists=True), r"'when' is of type timestamp\[s\], which filters do not"),
    ],
)
def test_errors_name_the_place_and_the_reason(expression, says):
    with pytest.raises(FilterError, match=says):
        allowed(expression)


def test_an_excluded_item_takes_the_row_that_it_alone_held_open():
    trie = ItemTrie.build(np.array([[1, 2], [1, 2], [1, 3]]))
    mask = RowMask.of(trie, np.array([True, False, True]))
    assert trie.excluded_rows([0]).tolist() == []
    assert mask.excluded_rows([0]).tolist() == [0]
    assert mask.excluded_rows([2]).tolist() == [1]


@pytest.fixture
def cache():
    trie = ItemTrie.build(np.arange(5)[:, None] + np.array([0, 1]))
    return FilterCache(trie, Attributes(TABLE, trie.row_items), max_bytes=5 * 40)


def test_the_cache_keeps_what_was_used_last_within_its_bytes(cache):
    first, second, third = (clause("year", match=y) for y in (2001, 2002, 2004))
    mask = cache.mask(first)
    assert mask.eligible == 1
    assert mask.nbytes == 6 * 4 + 11 + 5
    assert cache.mask(json.loads(json.dumps(first))) is mask
    for expression in (second, first, third):
        cache.mask(expression)
    stats = cache.stats
    assert (stats.hits, stats.misses) == (2, 3)
    assert stats.bytes == 3 * mask.nbytes
    for year in range(3):
        cache.mask(clause("year", match=year))
    assert cache.mask(first) is mask
    assert cache.stats.bytes <= 5 * 40 < cache.stats.bytes + mask.nbytes
    assert cache.stats.misses == 6
    cache.mask(second)  # which was used longest ago
    assert cache.stats.misses == 7


def test_threads_share_one_cache(cache):
    def ask(seed):
        rng = random.Random(seed)
        for _ in range(200):
            year = rng.choice([2001, 2002, 2003, 2004, 2005])
            items = cache.trie.row_items[cache.mask(clause("year", match=year)).items]
            assert items.tolist() == [i for i in range(5) if ITEMS[i]["year"] == year]

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
    stats = cache.stats
    assert stats.hits + stats.misses == 800
    assert 0 < stats.bytes <= 5 * 40


def test_a_deep_filter_has_a_key_as_long_as_itself():
    """Each level once quoted the level below again: 2 KB became a key of 132 million characters."""
    wanted = clause("title", match='"\\' * 400)
    for _ in range(15):
        wanted = {"must": [wanted]}
    parsed = ItemFilter.parse(wanted)
    assert len(parsed.key) <= 2 * len(json.dumps(wanted))
    assert json.loads(parsed.key)  # JSON itself
    boosts = ItemBoosts.parse([{"filter": wanted, "weight": 0.5}] * 3)
    assert len(boosts.key) <= 8 * len(json.dumps(wanted))


def test_a_cache_keeps_no_text_of_a_filter(cache):
    """Keys of a megabyte each, which no limit counted, took gigabytes."""
    cache.mask(clause("brand", any=[f"{n}" + "x" * 900 for n in range(900)]))
    ((_, key),) = cache._kept
    assert len(key) == 32


def test_other_filters_have_other_keys():
    red, blue = clause("color", match="red"), clause("color", match="blue")
    parts = [red], [blue], [red, blue], [{"should": [red, blue]}], [red, {"must": [red, blue]}]
    found = {ItemFilter.parse({name: part}).key for name in ("must", "should") for part in parts}
    assert len(found) == 2 * len(parts)


@pytest.mark.parametrize("wanted", [["f"], list("abcdef"), list("bdf"), ["f", "x", "y", "z", "w"]])
def test_an_item_without_a_value_is_none_of_many_values(wanted):
    """More than four values are looked up in a table; a missing one has a place of its own."""
    values = ["a", "b", None, "c", "d", "e", "f", None]
    column = Attributes(pa.table({"word": pa.array(values)}), np.arange(len(values)))
    expected = [place for place, value in enumerate(values) if value in wanted]
    assert allowed(clause("word", any=wanted), column) == expected
