"""Rules: lists with them against a plain reference, and against the same filters inline."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_bundle import counted_codes, items_table, log_probs, write_bundle

from recsys.errors import FilterError, RuleError
from recsys.interactions import Histories
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval, decayed_counts
from recsys.rules import Rule, apply_rules

ITEMS, LEVELS = 60, (5, 4, 3)
CODES = counted_codes(ITEMS, LEVELS)
SHARED = CODES.copy()
SHARED[[58, 59]] = CODES[[0, 0]]  # three items of one leaf
IDS = [f"i{n}" for n in range(ITEMS)]
BRANDS = [None if n % 11 == 10 else "ABCD"[n * n % 7 % 4] for n in range(ITEMS)]
TAGS = [["new", "red", "hot"][n % 4 : n % 4 + n % 3] for n in range(ITEMS)]
PRICES = [float(n % 9) for n in range(ITEMS)]
SOLD_OUT = {4, 17, 30}
HISTORY = [3, 20, 41]
BLEND = {"model": 1.0, "item_item": 0.7}

# A filter, and the same in plain Python.
FILTERS = [
    ({"must": [{"key": "price", "range": {"lt": 6}}]}, lambda n: PRICES[n] < 6),
    ({"must_not": [{"key": "tags", "match": "red"}]}, lambda n: "red" not in TAGS[n]),
    (
        {"should": [{"key": "brand", "any": ["A", "B"]}, {"key": "tags", "match": "hot"}]},
        lambda n: BRANDS[n] in ("A", "B") or "hot" in TAGS[n],
    ),
    (
        {"should": {"key": "brand", "exists": False}, "must": {"key": "price", "match": 1}},
        lambda n: BRANDS[n] is None and PRICES[n] == 1,
    ),
    (
        {"should": [{"key": "price", "range": {"gte": 3}}, {"key": "brand", "match": "C"}]},
        lambda n: PRICES[n] >= 3 or BRANDS[n] == "C",
    ),
]
VALUES = {
    "brand": lambda n: {BRANDS[n]} - {None},
    "tags": lambda n: set(TAGS[n]),
    "price": lambda n: {PRICES[n]},
}


def build(path, codes, reranker=None):
    table = items_table(
        IDS,
        brand=BRANDS,
        tags=pa.array(TAGS, pa.list_(pa.string())),
        price=PRICES,
        available=[n not in SOLD_OUT for n in range(ITEMS)],
    )
    walks = Histories.of([np.random.default_rng(n).integers(0, ITEMS, 8) for n in range(30)])
    retrieval = Retrieval(
        ItemItem.count(walks, ITEMS), decayed_counts(walks.items, ITEMS), reranker=reranker
    )
    write_bundle(path, table, codes, LEVELS, retrieval=retrieval)
    return Recommender.load(path, mode="beam")


@pytest.fixture(scope="module")
def recommender(tmp_path_factory):
    return build(tmp_path_factory.mktemp("rules") / "bundle", CODES)


@pytest.fixture(scope="module")
def sharing(tmp_path_factory):
    return build(tmp_path_factory.mktemp("rules") / "bundle", SHARED)


@pytest.fixture(scope="module")
def blending(tmp_path_factory):
    reranker = Reranker(BLEND, candidates=12, nodes=24)
    return build(tmp_path_factory.mktemp("rules") / "bundle", CODES, reranker)


def blended(recommender):
    """The score of every item after the history: `BLEND` of log(1 + p / .001) and of its share."""
    weights = recommender.retrieval.item_item.weights.toarray()[HISTORY]
    evidence = 0.6 ** np.arange(len(HISTORY))[::-1] @ weights
    probability = np.log1p(1000 * np.exp(log_probs(recommender, HISTORY).tolist()))
    return probability + BLEND["item_item"] * evidence / evidence.sum()


def listed(scores, order, k, *, filters, boosts, pins, caps, excluded):
    """The k items of a request with rules, in plain Python."""

    def allowed(n):
        return n not in SOLD_OUT and n not in excluded and all(FILTERS[f][1](n) for f in filters)

    def score(n):
        return scores[n] + sum(weight for f, weight in boosts if FILTERS[f][1](n))

    ranked = sorted((n for n in order if allowed(n)), key=lambda n: -score(n))
    found = []
    for n in [*(n for n in pins if allowed(n)), *ranked]:
        fits = all(
            sum(value in VALUES[name](other) for other in found) < count
            for name, count in caps.items()
            for value in VALUES[name](n)
        )
        if len(found) < k and n not in found and fits:
            found.append(n)
    return found


def inline(boosts):
    return [{"filter": FILTERS[f][0], "weight": weight} for f, weight in boosts]


numbers = st.lists(st.integers(0, ITEMS - 1), max_size=4)
filters = st.none() | st.integers(0, len(FILTERS) - 1)
boosts = st.lists(
    st.tuples(st.integers(0, len(FILTERS) - 1), st.sampled_from([-20.0, -0.75, 0.5, 9.0])),
    max_size=2,
)
caps = st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(1, 3), max_size=2)
drawn_rules = st.lists(st.tuples(filters, boosts, numbers, caps), max_size=3)
drawn = given(
    case=st.tuples(drawn_rules, filters, boosts, numbers, st.integers(1, 25), st.booleans())
)


def as_request(rules, own_filter, own_boosts, excluded, k, exclude_seen, **options):
    """A request with rules, all of them drawn."""
    made = [
        Rule(None if f is None else FILTERS[f][0], inline(weights), [f"i{n}" for n in pins], most)
        for f, weights, pins, most in rules
    ]
    request = RecommendRequest(
        [f"i{n}" for n in HISTORY],
        k,
        exclude_seen,
        [f"i{n}" for n in excluded],
        filter=None if own_filter is None else FILTERS[own_filter][0],
        boosts=inline(own_boosts),
        **options,
    )
    return apply_rules(request, made)


def as_listed(recommender, rules, own_filter, own_boosts, excluded, k, exclude_seen, scores=None):
    """The items of the same request, in plain Python."""
    smallest = {}
    for *_, most in rules:
        for name, count in most.items():
            smallest[name] = min(count, smallest.get(name, count))
    if scores is None:
        scores = log_probs(recommender, HISTORY).tolist()
        if recommender.reranker is not None:
            scores = blended(recommender)
    return listed(
        scores,
        recommender.epoch.trie.row_items.tolist(),
        k,
        filters=[f for f in (own_filter, *(rule[0] for rule in rules)) if f is not None],
        boosts=[*own_boosts, *(boost for rule in rules for boost in rule[1])],
        pins=[n for _, _, pins, _ in rules for n in pins],
        caps=smallest,
        excluded={*excluded, *(HISTORY if exclude_seen else ())},
    )


def ids(result):
    return [int(one.item_id[1:]) for one in result.recommendations]


@settings(max_examples=60, deadline=None)
@drawn
def test_rules_give_the_list_of_plain_python(recommender, blending, case):
    request = as_request(*case, guarantee="global")
    for one in (recommender, blending):
        (result,) = one.recommend_batch([request])
        assert ids(result) == as_listed(one, *case)
        assert result.certificate == "global-exact"


@settings(max_examples=30, deadline=None)
@drawn
def test_a_proven_list_is_right_with_shared_leaves(sharing, case):
    (result,) = sharing.recommend_batch([as_request(*case, guarantee="global")])
    if result.certificate == "global-exact":
        assert ids(result) == as_listed(sharing, *case)


def test_later_searches_that_find_better_items_are_sorted_in(tmp_path):
    """A search of few beams misses items that the next, constrained one finds."""
    levels, names = (8, 8, 8), [f"i{n}" for n in range(400)]
    brands = ["ABCDEFGHIJ"[n % 10] for n in range(400)]
    codes = counted_codes(512, levels)[np.random.default_rng(0).permutation(512)[:400]]
    write_bundle(tmp_path / "wide", items_table(names, brand=brands), codes, levels)
    wide = Recommender.load(tmp_path / "wide", mode="beam")
    for name in names[:40]:
        request = RecommendRequest([name], 20, max_per={"brand": 2})
        (result,) = wide.recommend_batch([request])
        scores = [one.score for one in result.recommendations]
        assert len(scores) == 20
        assert scores == sorted(scores, reverse=True), name


def assert_keeps(request, result):
    """No list breaks a filter, an exclusion, availability or a cap, whatever is pinned."""
    found = ids(result)
    hidden = {*request.exclude_items, *(() if request.exclude_seen is False else request.history)}
    assert len(set(found)) == len(found) <= request.k
    assert not {f"i{n}" for n in found} & hidden
    assert not set(found) & SOLD_OUT
    for name, count in request.max_per.items():
        for value in set().union(*(VALUES[name](n) for n in found)):
            assert sum(value in VALUES[name](n) for n in found) <= count
    sources = [one.source == "pinned" for one in result.recommendations]
    assert sources == sorted(sources, reverse=True)
    pinned = [one.item_id for one in result.recommendations if one.source == "pinned"]
    assert pinned == [name for name in request.pin if name in pinned]


@settings(max_examples=30, deadline=None)
@drawn
def test_no_way_of_answering_breaks_a_rule(blending, case):
    requests = [
        as_request(*case, **options)
        for options in ({}, {"blend": False}, {"mode": "strict"}, {"seed": 3})
        if not ("seed" in options and case[2])
    ]
    results = blending.recommend_batch(requests)
    for request, result in zip(requests, results, strict=True):
        assert_keeps(request, result)
        if request.max_per:
            assert result.certificate in ("approximate", "global-exact")
    alone = [blending.recommend_batch([request])[0] for request in requests]
    assert [ids(one) for one in alone] == [ids(one) for one in results]
    assert_keeps(requests[0], blending.fallback(requests[0]))


@settings(max_examples=30, deadline=None)
@drawn
def test_a_fallback_takes_rules_over_its_own_order(blending, case):
    rules, own_filter, _, excluded, k, exclude_seen = case
    every = as_request([], None, [], [], ITEMS, False)
    order = ids(blending.fallback(every))
    rank = {n: -float(place) for place, n in enumerate(order)}
    rules = [(wanted, [], pins, most) for wanted, _, pins, most in rules]
    asked = rules, own_filter, [], excluded, k, exclude_seen
    assert ids(blending.fallback(as_request(*asked))) == as_listed(blending, *asked, scores=rank)


OPTIONS = [{}, {"guarantee": "global"}, {"mode": "strict"}, {"blend": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_behind_pins_comes_the_list_without_them(blending, options):
    request = RecommendRequest(["i3"], 8, filter=FILTERS[0][0], **options)
    pins = ["i40", "i17", "i3", "i6", "i40", "gone", "i7"]  # 17 is sold out, 3 seen, 6 and 7 dear
    (result,) = blending.recommend_batch([request.changed(pin=pins)])
    assert [r.item_id for r in result.recommendations if r.source == "pinned"] == ["i40"]
    rest = request.changed(k=7, exclude_items=["i40"])
    (expected,) = blending.recommend_batch([rest])
    assert result.recommendations[1:] == expected.recommendations
    assert result.certificate == expected.certificate
    assert result.eligible_items == expected.eligible_items + 1


@pytest.mark.parametrize("options", [{}, {"guarantee": "global"}, {"mode": "strict"}])
def test_a_pin_that_fills_a_cap_leaves_room_for_others(recommender, options):
    """Although the brand of the pinned item leads the search, which would find nothing else."""
    lead = [{"filter": {"must": [{"key": "brand", "match": "A"}]}, "weight": 50.0}]
    pinned = IDS[BRANDS.index("A")]
    request = RecommendRequest([], 4, boosts=lead, pin=[pinned], max_per={"brand": 1}, **options)
    (result,) = recommender.recommend_batch([request])
    assert len(ids(result)) == 4
    assert [BRANDS[n] for n in ids(result)].count("A") == 1


def test_python_takes_rules_for_all_histories(recommender):
    lists = recommender.recommend([["i3"], []], 4, rules=[Rule(pin=["i9"], max_per={"brand": 1})])
    for found in lists:
        assert (found[0].item_id, found[0].source) == ("i9", "pinned")
        brands = [b for one in found if (b := BRANDS[int(one.item_id[1:])])]
        assert len(set(brands)) == len(brands)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"filter": {"musst": []}}, r"filter: unknown key 'musst'; want must, should or must_not"),
        ({"boosts": [{"filter": {}, "weight": 1e9}]}, r"boosts\[0\].weight: want -1000 .. 1000"),
        ({"pin": "i3"}, "pin"),
        ({"pin": ["i"] * 201}, "pin: want at most 200, got 201"),
        ({"max_per": ["brand"]}, r"max_per: must map names to whole numbers, got \['brand'\]"),
        ({"max_per": {"brand": 0}}, "max_per.brand: must be at least 1, got 0"),
        ({"max_per": {"brand": True}}, "max_per.brand: must be a whole number"),
        ({"max_per": dict.fromkeys("abcdefghi", 1)}, "max_per: want at most 8, got 9"),
    ],
)
def test_a_malformed_rule_is_refused_by_its_field(fields, message):
    with pytest.raises(RuleError, match=message):
        Rule(**fields)


def test_an_unknown_attribute_of_a_cap_is_refused(recommender):
    request = RecommendRequest([], max_per={"brnd": 2})
    for ask in (recommender.eligible, lambda one: recommender.recommend_batch([one])):
        with pytest.raises(FilterError, match=r"max_per\.brnd: no attribute 'brnd'; items have"):
            ask(request)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"filter": {"must": [{"key": "brnd", "match": "A"}]}},
            r"must\[0\].key: no attribute",
        ),
        (
            {"boosts": [{"filter": {"must": [{"key": "brand", "match": 3}]}, "weight": 1}]},
            r"boosts\[0\].filter.must\[0\].*: 3 is a number, but attribute 'brand' is a text",
        ),
        ({"max_per": {"brnd": 2}}, r"max_per.brnd: no attribute 'brnd'; items have item_id, title"),
    ],
)
def test_a_rule_is_checked_against_the_items(recommender, fields, message):
    rule = Rule(**fields)
    with pytest.raises(RuleError, match=message):
        rule.check(recommender.epoch.filters.attributes)
