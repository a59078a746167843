"""The hot catalog: any road to a catalog gives the answers of that catalog, at any time."""

import gc
import random
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import PATIENCE_S, assert_as_exact, exact_twin, tiny_model

from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.constraint import ItemTrie
from recsys.errors import ItemError, RequestError
from recsys.live import Epochs, NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.vocabulary import Vocabulary

LEVELS = (4, 3, 4)
VOCABULARY = Vocabulary.from_levels(LEVELS)
PROMPT = PromptConfig(max_items=4, block=2)
MODEL = tiny_model(vocabulary=VOCABULARY.size, hidden=128, layers=1)
DOUBLE = exact_twin(MODEL)
DRAFT = tiny_model(vocabulary=VOCABULARY.size, hidden=128, layers=1, seed=3)
NAMES = [f"id-{i}" for i in range(20)]
COLORS = ("red", "green", None)
SCHEMA = pa.schema(
    {
        "item_id": pa.string(),
        "title": pa.string(),
        "text": pa.string(),
        "color": pa.string(),
        "price": pa.int64(),
        "weight": pa.float64(),
        "tags": pa.list_(pa.string()),
        "stock": pa.bool_(),
    }
)


def attributes(i):
    given = {"color": COLORS[i % 3], "price": i, "tags": [f"t{i % 2}", f"t{i % 5}"]}
    given |= {"weight": i / 2, "stock": i % 2 == 0}
    return {k: v for k, v in given.items() if v is not None}


def bundle_of(items):
    rows = [{"item_id": i.item_id, "title": i.title, "text": i.text, **i.attributes} for i in items]
    table = pa.Table.from_pylist(rows, SCHEMA)
    codes = np.array([i.semantic_id for i in items], np.int32).reshape(-1, len(LEVELS))
    catalog = Catalog(table, codes)
    manifest = Manifest(kind="bundle", config={}, parents={}, files={}, info={})
    return Bundle(Path("nowhere"), manifest, catalog, VOCABULARY, PROMPT)


def first_items():
    rng = np.random.default_rng(0)
    return [
        NewItem(name, f"Thing {i}", "", attributes(i), tuple(rng.integers(0, LEVELS).tolist()))
        for i, name in enumerate(NAMES[:12])
    ]


FIRST = first_items()
BUNDLE = bundle_of(FIRST)


def make(**options):
    return Recommender(BUNDLE, MODEL, **options)


def ids(result):
    return [r.item_id for r in result.recommendations]


def agree(answer, expected, exact, k):
    """Check that answers are the same, but for what equal scores leave open.

    Which of the items of one leaf comes first is settled by their dense numbers, and those depend
    on the road.
    """
    one, other = answer.recommendations, expected.recommendations
    assert_as_exact(*([r.score for r in each] for each in (one, other, exact.recommendations)))
    if len(one) < k:  # nothing was cut off
        shown = [{(r.item_id, r.title, r.semantic_id) for r in each} for each in (one, other)]
        assert shown[0] == shown[1]
    assert answer.unknown_items == expected.unknown_items
    assert answer.eligible_items == expected.eligible_items


codes_of = st.tuples(*(st.integers(0, size - 1) for size in LEVELS))
new_items = st.builds(
    lambda n, i, codes: NewItem(n, f"New {i}", "", attributes(i), codes),
    st.sampled_from(NAMES),
    st.integers(0, 30),
    codes_of,
)
changes = st.lists(
    st.one_of(
        st.lists(new_items, min_size=1, max_size=4, unique_by=lambda i: i.item_id),
        st.lists(st.sampled_from(NAMES), min_size=1, max_size=6),
        st.just("compact"),
    ),
    max_size=8,
)
FILTERS = [
    None,
    {"must": [{"key": "color", "match": "red"}]},
    {"must": [{"key": "price", "range": {"gte": 5}}], "must_not": [{"key": "tags", "match": "t1"}]},
    {"must": [{"key": "stock", "match": True}]},
    {"must": [{"key": "weight", "exists": False}]},
    {"must": [{"key": "item_id", "any": NAMES[::3]}]},
]


def apply(recommender, wanted, change):
    """One change, to the recommender and to a plain dictionary of what it should have."""
    if change == "compact":
        recommender._epochs.compact()
    elif isinstance(change[0], NewItem):
        recommender.upsert(change)
        wanted |= {item.item_id: item for item in change}
    else:
        there = recommender.remove(change)
        assert there == [name for name in dict.fromkeys(change) if name in wanted]
        for name in change:
            wanted.pop(name, None)


@given(changes=changes, data=st.data())
@settings(max_examples=25, deadline=None)
def test_changes_equal_the_final_catalog_built_anew(changes, data):
    hot, wanted = make(), {item.item_id: item for item in FIRST}
    for change in changes:
        apply(hot, wanted, change)
    history = data.draw(st.lists(st.sampled_from([*wanted, "?"]), max_size=4))
    excluded = data.draw(st.lists(st.sampled_from(NAMES), max_size=3))
    requests = [
        RecommendRequest(history, k, True, excluded, filter=f, boosts=boosts, mode=mode)
        for f in FILTERS
        for k, boosts, mode in (
            (25, (), "auto"),
            (4, (), "auto"),
            (25, (), "strict"),
            (25, [{"filter": FILTERS[1], "weight": 2.0}], "auto"),
        )
    ]
    answers = hot.recommend_batch(requests)
    assert {a.epoch_number for a in answers} == {hot.epoch.number}
    assert hot.epoch.num_items == len(wanted)
    assert {name for name in NAMES if hot.catalog.find(name) >= 0} == set(wanted)
    if not wanted:
        assert all(not answer.recommendations for answer in answers)
        return
    bundle = bundle_of(list(wanted.values()))
    cold = [Recommender(bundle, model).recommend_batch(requests) for model in (MODEL, DOUBLE)]
    for r, answer, expected, exact in zip(requests, answers, *cold, strict=True):
        agree(answer, expected, exact, r.k)
    for name, item in wanted.items():
        assert hot.epoch.item(name) == replace(item, semantic_id=tuple(item.semantic_id))


@given(changes=changes)
@settings(max_examples=25, deadline=None)
def test_an_old_epoch_does_not_change(changes):
    hot, wanted = make(), {item.item_id: item for item in FIRST}
    known = []
    for change in changes:
        apply(hot, wanted, change)
        known.append((hot.epoch, dict(wanted)))
    for epoch, had in known:
        assert {n for n in NAMES if epoch.catalog.find(n) >= 0} == set(had)
        for name, item in had.items():
            assert epoch.item(name) == item
        assert epoch.catalog.items.num_rows == len(epoch.catalog) == len(epoch.catalog.item_ids)
        rows = epoch.catalog.items.to_pylist()
        for name in had:
            dense = epoch.catalog.find(name)
            assert rows[dense]["title"] == had[name].title == epoch.catalog.titles[dense]
            assert epoch.catalog.item_ids[dense] == epoch.catalog.item_id(dense) == name
        if had:
            mask = epoch.filters.mask(FILTERS[1])
            places = epoch.trie.row_items[mask.items]
            red = {epoch.catalog.item_id(i) for i in places}
            assert red == {n for n, i in had.items() if i.attributes.get("color") == "red"}


def test_compaction_renumbers_added_items_only(monkeypatch):
    monkeypatch.setattr("recsys.live_catalog.LEAST_WASTE", 0)
    hot = make()
    before = hot.epoch
    hot.upsert([NewItem(f"n{i}", f"New {i}", "", attributes(i), (1, 1, 1)) for i in range(10)])
    middle = hot.epoch
    hot.remove([f"n{i}" for i in range(8)])
    hot.upsert([NewItem("last", semantic_id=(0, 0, 0))])
    after = hot.epoch
    assert [len(e.catalog) for e in (before, middle, after)] == [12, 22, 15]
    assert after.catalog.item_ids == [*NAMES[:12], "n8", "n9", "last"]
    assert middle.catalog.item_ids[12:] == [f"n{i}" for i in range(10)]
    assert after.item("n9") == middle.item("n9")
    assert after.filters.mask({"must": [{"key": "price", "any": [8, 9]}]}).eligible == 4


def test_replaced_records_are_forgotten(monkeypatch):
    monkeypatch.setattr("recsys.live_catalog.LEAST_WASTE", 0)
    hot = make()
    for price in range(20):
        hot.upsert([NewItem(f"n{i}", f"{price}", "", {"price": price}, (1, 1, 1)) for i in (0, 1)])
        hot.upsert([NewItem(NAMES[0], f"{price}", "", {"price": price}, FIRST[0].semantic_id)])
        assert hot.catalog.title(0) == hot.catalog.title(12) == hot.catalog.title(13) == f"{price}"
        wanted = {"must": [{"key": "price", "any": [price]}]}
        assert hot.epoch.filters.mask(wanted).eligible >= 3
        assert len(hot.epoch.catalog.added.titles) <= 2 * 2 + 2 + 3
    assert hot.catalog.item_ids == [*NAMES[:12], "n0", "n1"]


def test_hidden_items_are_compacted_in_the_background(monkeypatch):
    monkeypatch.setattr("recsys.live._FORGET", 2)
    hot = make()
    hot.remove(NAMES[:6])
    for thread in threading.enumerate():
        if thread.name == "compaction":
            thread.join()
    assert hot.epoch.left is None
    assert len(hot.epoch.trie.row_items) == 6
    assert hot.epoch.number == 2


def test_removed_bundle_items_stay_known_in_histories():
    hot = make()
    item = NAMES[3]
    expected = hot.recommend_batch([RecommendRequest([item], 20)])
    scores = hot.score([[item]], [[NAMES[0]]])
    hot.remove([item])
    assert hot.score([[item]], [[NAMES[0]]]) == scores
    for _ in range(2):
        (answer,) = hot.recommend_batch([RecommendRequest([item], 20)])
        assert answer.recommendations == expected[0].recommendations
        assert answer.unknown_items == []
        hot._epochs.compact()
    assert hot.catalog.index([item]).tolist() == [-1]
    assert hot.catalog.known([item]).tolist() == [3]


def test_looking_up_many_ids_equals_looking_up_each():
    hot = make()
    hot.upsert([NewItem(name, semantic_id=(1, 1, i)) for i, name in enumerate(["a", "b", "c"])])
    earlier = hot.catalog
    hot.remove(["b", NAMES[3]])
    hot.upsert([NewItem("d", semantic_id=(1, 2, 0))])
    wanted = ["a", NAMES[3], "b", "", "d", NAMES[0], "unknown", "a", "c"]
    for catalog in (earlier, hot.catalog):
        assert catalog.index(wanted).tolist() == [catalog.find(name) for name in wanted]
        known = [hot.catalog.added.base.find(n) for n in wanted]
        expected = [k if k >= 0 else catalog.find(n) for k, n in zip(known, wanted, strict=True)]
        assert catalog.known(wanted).tolist() == expected
        assert [catalog.knows_any([n]) for n in wanted] == [n >= 0 for n in expected]
    assert earlier.index(["d", "b"]).tolist() == [-1, earlier.find("b")]
    assert not earlier.knows_any(["d", "unknown"])
    assert hot.catalog.index([]).tolist() == []
    assert not hot.catalog.knows_any([])


def test_updated_and_returning_items_keep_their_codes():
    hot = make()
    codes = FIRST[2].semantic_id
    hot.upsert([NewItem(NAMES[2], "Renamed")])
    assert hot.epoch.item(NAMES[2]) == NewItem(NAMES[2], "Renamed", semantic_id=codes)
    hot.upsert([NewItem(NAMES[2], semantic_id=(3, 2, 3))])
    hot.remove([NAMES[2]])
    hot.upsert([NewItem(NAMES[2], "Back")])
    assert hot.epoch.item(NAMES[2]).semantic_id == codes


def test_like_places_an_item_on_the_nearest_free_code():
    items = [NewItem("a", semantic_id=(0, 0, 1)), NewItem("b", semantic_id=(0, 0, 2))]
    epochs = Epochs(bundle_of(items))
    epochs.upsert([NewItem("c", like="a"), NewItem("d", like="c"), NewItem("e", like="d")])
    codes = [epochs.current.item(name).semantic_id for name in "cde"]
    assert codes == [(0, 0, 3), (0, 0, 0), (0, 0, 0)]  # the last one shares the leaf of `d`
    epochs.remove(["b"])
    epochs.upsert([NewItem("f", like="a")])
    assert epochs.current.item("f").semantic_id == (0, 0, 2)  # what was removed is free again


class Coder:
    """Codes from a title of three digits; a code is as far as its number."""

    def __init__(self):
        self.calls = 0

    def encode(self, items):
        self.calls += 1
        codes = [[int(c) for c in t] for t in items["title"].to_pylist()]
        last = np.array(codes)[:, -1:]
        return np.array(codes, np.int32), np.abs(np.arange(LEVELS[-1]) - last).astype(np.float32)

    def beside(self, code):
        return np.abs(np.arange(LEVELS[-1]) - code).astype(np.float32)


def test_new_items_get_the_nearest_free_code_of_the_last_level():
    coder = Coder()
    epochs = Epochs(bundle_of([NewItem("a", semantic_id=(1, 1, 2))]), coder=coder)
    epochs.upsert([NewItem(str(i), "112") for i in range(4)])
    placed = [epochs.current.item(str(i)).semantic_id for i in range(4)]
    assert placed == [(1, 1, 1), (1, 1, 3), (1, 1, 0), (1, 1, 2)]
    assert coder.calls == 1
    epochs.upsert([NewItem("0", "300")])  # it has its place
    assert epochs.current.item("0").semantic_id == (1, 1, 1)
    assert coder.calls == 1


@pytest.mark.parametrize(
    ("item", "says"),
    [
        (NewItem("", semantic_id=(0, 0, 0)), r"items\[1\]: item_id"),
        (NewItem("x" * 600, semantic_id=(0, 0, 0)), r"items\[1\]: item_id.*512"),
        (NewItem(7, semantic_id=(0, 0, 0)), r"items\[1\]: item_id.*7"),
        (NewItem("x", title=None, semantic_id=(0, 0, 0)), "item 'x': title: want text"),
        (NewItem("x", semantic_id=(0, 3, 0)), "item 'x': semantic_id: want 0 to 2 at level 2"),
        (NewItem("x", semantic_id=(0, -1, 0)), "semantic_id.*got -1"),
        (NewItem("x", semantic_id=(0, True, 0)), "semantic_id.*got True"),
        (NewItem("x", semantic_id=(0, 0)), "item 'x': semantic_id: want 3 codes"),
        (NewItem("x", semantic_id=5), "item 'x': semantic_id: want 3 codes"),
        (NewItem("x", semantic_id=(0, 0, 0), like="id-1"), "semantic_id and like"),
        (NewItem("x", like="nobody"), "item 'x': like: .*'nobody'"),
        (NewItem("x", like=3), "item 'x': like: want the id"),
        (NewItem("x"), "item 'x': semantic_id: this bundle has no item encoder"),
        (NewItem("x", "", "", {"colour": "red"}, (0, 0, 0)), "'colour'; this catalog has color"),
        (NewItem("x", "", "", {"title": "t"}, (0, 0, 0)), "item 'x': attributes: .*'title'"),
        (NewItem("x", "", "", {"color": 4}, (0, 0, 0)), r"'x': attributes\.color: want text"),
        (NewItem("x", "", "", {"price": "4"}, (0, 0, 0)), r"attributes\.price: want a whole"),
        (NewItem("x", "", "", {"price": 1.5}, (0, 0, 0)), r"attributes\.price.*1\.5"),
        (NewItem("x", "", "", {"price": True}, (0, 0, 0)), r"attributes\.price.*True"),
        (NewItem("x", "", "", {"price": 2**70}, (0, 0, 0)), r"attributes\.price"),
        (NewItem("x", "", "", {"stock": "no"}, (0, 0, 0)), r"stock: want true or false"),
        (NewItem("x", "", "", {"tags": "t1"}, (0, 0, 0)), r"tags: want a list of text"),
        (NewItem("x", "", "", ["red"], (0, 0, 0)), "item 'x': attributes: want an object"),
        (NewItem("id-1", semantic_id=(0, 0, 0)), "'id-1': item_id is given twice"),
    ],
)
def test_a_malformed_item_is_named_and_none_is_added(item, says):
    hot = make()
    with pytest.raises(ItemError, match=says):
        hot.upsert([NewItem("id-1", "Renamed", semantic_id=(0, 0, 0)), item])
    assert hot.epoch.number == 0
    assert hot.epoch.item("id-1").title == "Thing 1"


def test_an_empty_call_changes_nothing():
    hot = make()
    assert hot.upsert([]) is hot.epoch
    assert hot.remove([]) == hot.remove(["nobody"]) == []
    assert hot.epoch.number == 0


def test_concurrent_calls_wait_for_each_other_and_removals_do_not(monkeypatch):
    hot = make()
    building, go_on = threading.Event(), threading.Event()
    real = ItemTrie.build

    def slow(tokens):
        building.set()
        go_on.wait(PATIENCE_S)
        return real(tokens)

    monkeypatch.setattr(ItemTrie, "build", slow)
    outcomes = {}

    def add(name, **fields):
        try:
            outcomes[name] = hot.upsert([NewItem(name, **fields)]).number
        except ItemError as error:
            outcomes[name] = str(error)

    threads = [
        threading.Thread(target=add, args=(f"n{i}",), kwargs={"semantic_id": (0, 1, i)})
        for i in range(3)
    ]
    threads.append(threading.Thread(target=add, args=("bad",), kwargs={"like": "nobody"}))
    for thread in threads:
        thread.start()
    assert building.wait(PATIENCE_S)
    assert hot.remove(["id-0"]) == ["id-0"]  # at once, though a trie is being built
    assert hot.epoch.item("id-0") is None
    go_on.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert outcomes.pop("bad").startswith("item 'bad': like")
    assert sorted(outcomes.values()) == [2, 3, 4]
    assert hot.epoch.item("id-0") is None
    assert "id-0" not in ids(hot.recommend_batch([RecommendRequest([], 30)])[0])


def test_counts_of_the_filter_cache_go_on_with_the_next_epoch():
    hot = make()
    blue = RecommendRequest([], filter={"must": [{"key": "color", "match": "blue"}]})
    hot.upsert([NewItem("n", "", "", {"color": "blue"}, (2, 2, 2))])
    assert hot.eligible(blue) == 1
    misses = hot.epoch.filters.stats.misses
    hot.remove(["n"])
    assert hot.epoch.filters.stats.misses == misses > 0
    assert hot.eligible(blue) == 0


def test_a_batch_sees_one_epoch_to_its_end():
    hot = make()
    real, seen = hot.engine.decode, []

    def decode(*args, **kwargs):
        if not seen:  # between the groups of one batch everything changes
            hot.remove(NAMES[:6])
            hot.upsert([NewItem("new", semantic_id=(3, 2, 3))])
        found = real(*args, **kwargs)
        seen.append(kwargs)
        return found

    expected = make().recommend_batch([RecommendRequest([], 12), RecommendRequest([], 30)])
    hot.engine.decode = decode
    answers = hot.recommend_batch([RecommendRequest([], 12), RecommendRequest([], 30)])
    assert len(seen) == 2
    assert [a.epoch_number for a in answers] == [0, 0]
    assert [a.recommendations for a in answers] == [e.recommendations for e in expected]
    (after,) = hot.recommend_batch([RecommendRequest([], 30)])
    assert after.epoch_number == 2
    assert set(ids(after)) == {*NAMES[6:12], "new"}


def test_a_relaxed_request_needs_a_seed_and_a_draft():
    history = NAMES[:2]
    relaxed = RecommendRequest(history, mode="relaxed", seed=1)
    one, again = make(draft=DRAFT).recommend_batch([relaxed, relaxed])
    assert one == again
    assert one.certificate == "approximate"
    for fields, says in (
        ({"mode": "relaxed"}, "give it a seed"),
        ({"mode": "relaxed", "seed": 1, "trace": True}, "only a strict decode can be traced"),
        ({"mode": "fast"}, "mode: .* found 'fast'"),
    ):
        with pytest.raises(ValueError, match=says):
            RecommendRequest(history, **fields)
    plain = make()
    for ask in (plain.eligible, lambda request: plain.recommend_batch([request])):
        with pytest.raises(RequestError, match="needs a draft model"):
            ask(relaxed)


@pytest.mark.parametrize("removed", [[], NAMES[:4]])
def test_a_trace_counts_items_and_closed_codes(removed):
    hot = make()
    hot.remove(removed)
    wanted = {"must": [{"key": "price", "range": {"lt": 9}}]}
    plain, traced, filtered = hot.recommend_batch(
        [
            RecommendRequest([]),
            RecommendRequest([], trace=True),
            RecommendRequest([], filter=wanted, trace=True),
        ]
    )
    assert plain.trace is None
    assert ids(plain) == ids(traced)
    for answer, most in ((traced, 12), (filtered, 9)):
        there = [i for i in FIRST[:most] if i.item_id not in removed]
        paths: list[tuple[int, ...]] = []
        for node in answer.trace.nodes:
            assert node.code == node.token - VOCABULARY.level_offsets[node.depth - 1]
            paths.append((*(paths[node.parent] if node.parent >= 0 else ()), node.code))
            below = [i for i in there if i.semantic_id[: node.depth] == paths[-1]]
            assert node.items == len(below)
        beams = [p for p, n in zip(paths, answer.trace.nodes, strict=True) if n.fate != "rejected"]
        for level, size in enumerate(LEVELS, 1):
            above = [p for p in [(), *beams] if len(p) == level - 1]
            open_ = {i.semantic_id[:level] for i in there if i.semantic_id[: level - 1] in above}
            assert answer.trace.blocked[level] == size * len(above) - len(open_)


def bytes_of(start):
    """Bytes of all objects, arrays and Arrow buffers that can be reached from an object."""
    total, seen, buffers, waiting = 0, set(), {}, [start]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        if isinstance(one, np.ndarray):
            waiting.append(one.base)  # its own bytes are in its size
        elif isinstance(one, pa.Table):
            chunks = [chunk for column in one.columns for chunk in column.chunks]
            while chunks:
                chunk = chunks.pop()
                buffers |= {b.address: b.size for b in chunk.buffers() if b is not None}
                if pa.types.is_dictionary(chunk.type):
                    chunks.append(chunk.dictionary)
        waiting += gc.get_referents(one)
    return total + sum(buffers.values())


def random_item(rng, name):
    """An item whose size is anything up to some kilobytes, and most of whose words are new."""
    words = [f"w{rng.randrange(10**9)}" for _ in range(rng.randrange(1, 8))]
    text = "é" * rng.choice([0, 10, 1_000, 4_000])
    given = {"color": f"c{rng.randrange(10**9)}", "tags": words, "price": rng.randrange(100)}
    given["shade"] = f"s{rng.randrange(10**9)}"
    codes = tuple(rng.randrange(size) for size in LEVELS)
    return NewItem(name, f"Thing {words[0]}", text, given, codes)


def test_memory_is_that_of_a_fresh_load_after_any_changes():
    rng = random.Random(0)
    names = [f"n{i}" for i in range(600)]
    table = pa.Table.from_pylist([{"item_id": n, "title": n, "text": n} for n in names[:300]])
    for column, of in {"color": pa.string(), "tags": pa.list_(pa.string()), "price": pa.int64(),
                       "shade": pa.dictionary(pa.int32(), pa.string())}.items():  # fmt: skip
        table = table.append_column(column, pa.nulls(300, of))
    codes = np.array([random_item(rng, n).semantic_id for n in names[:300]], np.int32)
    bundle = replace(BUNDLE, catalog=Catalog(table, codes))

    def used(epochs):
        for thread in threading.enumerate():
            if thread.name == "compaction":
                thread.join()
        for name in ("color", "tags", "shade"):
            epochs.current.filters.mask({"must_not": [{"key": name, "match": "w"}]})
        return bytes_of(epochs)

    hot, there = Epochs(bundle), {}
    hot._rested = float("-inf")
    for number in range(1_000):
        some = rng.sample(names, 20)
        if number % 3:
            items = [random_item(rng, name) for name in some]
            hot.upsert(items)
            hot._rested = float("-inf")  # no pauses
            there |= {item.item_id: item for item in items}
        else:
            hot.remove(some)
            there |= dict.fromkeys(some)
        if number % 50 == 0:
            used(hot)
    fresh = Epochs(bundle)
    fresh.upsert([item for item in there.values() if item is not None])
    fresh.remove([name for name, item in there.items() if item is None])
    assert hot.current.num_items == fresh.current.num_items
    assert used(hot) == pytest.approx(used(fresh), rel=0.05)


def test_a_large_record_that_is_replaced_takes_memory_once():
    """Most records are small and live: their number says little of the bytes that are wasted."""
    hot = Epochs(BUNDLE)
    codes = tuple(0 for _ in LEVELS)
    hot.upsert([NewItem(f"small-{i}", "", "", {}, codes) for i in range(2_000)])
    for number in range(40):
        hot._rested = float("-inf")  # no pauses
        hot.upsert([NewItem("large", "", f"{number}" * 20_000, {}, codes)])
        for thread in threading.enumerate():
            if thread.name == "compaction":
                thread.join()
    hot._rested = float("-inf")
    hot.upsert([NewItem("small-0", "", "", {}, codes)])
    assert len(hot.current.catalog.added.rows) < 2_001 + 10
