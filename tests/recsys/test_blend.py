"""Blended lists, exact scores, similar items and fallbacks of a bundle with retrieval."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact, tiny_model
from scipy import sparse
from toy_bundle import counted_codes, items_table, write_bundle

from recsys import global_lists
from recsys.bundle import EVAL
from recsys.errors import ArtifactError, RequestError
from recsys.evaluation.rankings import rank_histories
from recsys.interactions import Histories
from recsys.live import NewItem
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval, VectorIndex, decayed_counts
from recsys.retrieval.again import Chosen, Repeats
from recsys.retrieval.content import ContentIndex, Terms
from recsys.retrieval.evidence import Evidence
from recsys.retrieval.reranker import FEATURES, Network
from recsys.retrieval.rows import blocked_items
from recsys.training.sasrec import SasRecConfig, SasRecModel
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS = 60, (5, 4, 4)
CODES = counted_codes(ITEMS, LEVELS)
CODES[59] = CODES[58]  # two items of one leaf
IDS = [f"id-{i}" for i in range(ITEMS)]
TABLE = items_table(
    IDS, [f"Thing {i}" for i in range(ITEMS)], even=[i % 2 == 0 for i in range(ITEMS)]
)
RNG = np.random.default_rng(0)
TRAINED = Histories.of([RNG.integers(0, ITEMS, 6) for _ in range(40)])
VECTORS = np.random.default_rng(1).normal(size=(ITEMS, 5))
CONTENT = np.random.default_rng(2).normal(size=(ITEMS, 3))
UNIT = CONTENT / np.linalg.norm(CONTENT, axis=1, keepdims=True)
TERMS = Terms(["first", "second", "third"], np.ones(3, np.float32))
with torch.random.fork_rng():
    torch.manual_seed(0)
    SASREC = SasRecModel(ITEMS, SasRecConfig(1, hidden=8, window=PromptConfig(6, 2)), None).frozen()
WEIGHTS = {
    name: float(weight)
    for name, weight in zip(
        sorted(FEATURES), np.random.default_rng(3).normal(size=len(FEATURES)), strict=True
    )
}
INPUTS = (
    "popularity",
    "sasrec",
    "sasrec.rank",
    "content.above_0.3",
    "item_item.rank",
)
UNITS = np.random.default_rng(4).normal(size=(5, len(INPUTS) + 2))
BLEND = Reranker(WEIGHTS, candidates=12, nodes=400, network=Network(INPUTS, UNITS))
EVEN = {"must": [{"key": "even", "match": True}]}


def make_retrieval(reranker: Reranker | None = BLEND, items: int = ITEMS) -> Retrieval:
    return Retrieval(
        ItemItem.count(TRAINED, items),
        decayed_counts(TRAINED.items, items),
        0.1,
        VectorIndex.of(np.resize(VECTORS, (items, 5))),
        ContentIndex(sparse.csr_array(np.resize(UNIT, (items, 3)).astype(np.float32)), TERMS),
        repeats=Repeats.count(TRAINED, items),
        reranker=reranker,
    )


def build(path, retrieval: Retrieval | None):
    def with_sasrec(folder):
        (folder / EVAL).mkdir()
        SASREC.save(folder / EVAL)

    target = tiny_model(vocabulary=Vocabulary.from_levels(LEVELS).size, hidden=128)
    return write_bundle(
        path, TABLE, CODES, LEVELS, target=target, retrieval=retrieval, extra=with_sasrec
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("blend") / "bundle", make_retrieval())


@pytest.fixture
def rec(folder):
    return Recommender.load(folder, dtype="float64")


def ids_of(result):
    return [r.item_id for r in result.recommendations]


def slow_features(source, values, others) -> list[dict[str, float]]:
    """Features of items from a source's values, and from those of all items outside the history."""
    features = []
    for v in values:
        row = {source: math.log(1 + 1000 * math.exp(v)) if source == "model" else v}
        if source in ("item_item", "sasrec"):
            row[f"{source}.rank"] = math.log(1 + min(50, sum(other > v for other in others)))
        if source in ("vectors", "content"):
            row |= {f"{source}.above_{knee}": max(0.0, v - knee) for knee in (0.3, 0.6)}
        features.append(row)
    return features


def slow_blend(rec, request) -> list[tuple[str, float]]:
    """The definition of the score, over the model's 20 beams and the candidates, or all items."""
    retrieval, reranker = rec.retrieval, rec.retrieval.reranker
    plain = rec.recommend_batch([request.changed(k=20, blend=False, boosts=())])[0]
    seen = [IDS.index(i) for i in request.history]
    asked = Histories.of([seen])
    hidden = [IDS.index(i) for i in request.exclude_items]
    hidden += seen * (request.exclude_seen is not False)
    allowed = np.array([request.filter is None or i % 2 == 0 for i in range(ITEMS)])
    blocked = blocked_items(ITEMS, Histories.of([hidden]), [allowed])
    found = retrieval.propose(Evidence(retrieval, asked), max(20, reranker.candidates), blocked)
    names = list(dict.fromkeys([*ids_of(plain), *(IDS[i] for i in found.items[0] if i >= 0)]))
    if request.guarantee == "global":
        names = [IDS[i] for i in np.flatnonzero(~blocked[0])]
    items = [IDS.index(name) for name in names]
    values = {"model": list(rec.score([request.history], [names])[0])}
    evidence, others = Evidence(retrieval, asked), {}
    for source in ("item_item", "vectors", "content", "sasrec"):
        column = evidence.values(np.arange(ITEMS)[None], [source])[source][0]
        values[source] = column[items].tolist()
        others[source] = np.delete(column, np.unique(seen).astype(int)).tolist()
    counts = np.bincount(TRAINED.items, minlength=ITEMS)
    values["popularity"] = [math.log(1 + counts[i]) for i in items]
    totals, of_history = [0.0] * len(items), [0.0] * len(items)
    inputs = [{} for _ in items]
    for source, column in values.items():
        for place, row in enumerate(slow_features(source, column, others.get(source))):
            inputs[place] |= row
            totals[place] += sum(reranker.weights.get(n, 0.0) * f for n, f in row.items())
            if counts[items[place]] == 0 and f"new.{source}" in reranker.weights:
                totals[place] += reranker.weights[f"new.{source}"] * row[source]
            if f"again.{source}" in reranker.weights:
                of_history[place] += reranker.weights[f"again.{source}"] * row[source]
    for name, (column,) in retrieval.repeats.values(Chosen.of(asked), np.array([items])).items():
        weighted = (reranker.weights[name] * value for value in column)
        of_history = [t + v for t, v in zip(of_history, weighted, strict=True)]
    totals = [
        t + reranker.weights["new"] * (counts[i] == 0) for t, i in zip(totals, items, strict=True)
    ]
    if reranker.network is not None:
        for *weights, bias, out in reranker.network.units.tolist():
            for place, row in enumerate(inputs):
                unit = sum(w * row[n] for w, n in zip(weights, INPUTS, strict=True)) + bias
                totals[place] += out * max(unit, 0.0)
    scores = []
    places = zip(items, of_history, totals, strict=True)
    totals = [again if item in seen else total for item, again, total in places]
    for name, total in zip(names, totals, strict=True):
        gain = sum(b["weight"] for b in request.boosts if IDS.index(name) % 2 == 0)
        scores.append((name, total + gain))
    return sorted(scores, key=lambda pair: -pair[1])[: request.k]


@pytest.mark.parametrize(
    "request_",
    [
        RecommendRequest(["id-3", "id-9", "id-20"], 10),
        RecommendRequest(["id-3", "id-9"], 10, exclude_seen=False, exclude_items=["id-0"]),
        RecommendRequest([], 5),
        RecommendRequest(["id-58"], 15, filter=EVEN),
        RecommendRequest(["id-8", "id-1"], 10, boosts=[{"filter": EVEN, "weight": 0.4}]),
    ],
    ids=["plain", "seen", "empty", "filter", "boost"],
)
def test_blended_lists_follow_the_definition(rec, request_):
    if request_.boosts:  # beams are those of the boosted search; candidates are all there is to add
        rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, candidates=ITEMS))
    requests = [request_, request_.changed(guarantee="global")]
    for request, found in zip(requests, rec.recommend_batch(requests), strict=True):
        wanted = slow_blend(rec, request)
        assert ids_of(found) == [name for name, _ in wanted]
        scores = [r.score for r in found.recommendations]
        np.testing.assert_allclose(scores, [s for _, s in wanted], rtol=1e-5)
        assert (found.certificate == "global-exact") == (request.guarantee == "global")


@pytest.mark.parametrize("listed", [False, True])
def test_the_bundle_says_whether_items_of_the_history_are_listed(rec, listed):
    reranker = replace(BLEND, weights=WEIGHTS | {"again": 50.0}, lists_seen=listed)
    rec.retrieval = replace(rec.retrieval, reranker=reranker)
    assert rec.exclude_seen is not listed
    request = RecommendRequest(["id-3", "id-9", "id-3"], 20)
    ours, without, with_seen = rec.recommend_batch(
        [request, *(request.changed(exclude_seen=value) for value in (True, False))]
    )
    assert ours == (with_seen if listed else without)
    assert not {"id-3", "id-9"} & set(ids_of(without))
    assert {"id-3", "id-9"} == set(ids_of(with_seen)[:2])
    assert rec.fallback(request) == rec.fallback(request.changed(exclude_seen=not listed))


def test_items_have_their_source_and_reason(rec):
    history = ["id-3", "id-9", "id-20"]
    request = RecommendRequest(history, 20)
    found = rec.recommend_batch([request])[0]
    beams = set(ids_of(rec.recommend_batch([request.changed(blend=False)])[0]))
    assert {r.source for r in found.recommendations} >= {"model"}
    for r in found.recommendations:
        assert (r.source == "model") == (r.item_id in beams)
        said = Histories.of([[IDS.index(i) for i in history]])
        reason = rec.retrieval.because(said, np.array([[IDS.index(r.item_id)]])).item()
        assert r.because == (IDS[reason] if reason >= 0 else None)
    assert any(r.because in history for r in found.recommendations)
    for own in ({"guarantee": "global", "blend": False}, {"seed": 1}):
        (found,) = rec.recommend_batch([request.changed(**own)])
        assert {r.source for r in found.recommendations} == {"model"}


def test_candidates_beyond_the_node_budget_are_not_listed(rec, monkeypatch):
    request = RecommendRequest(["id-3"], 20)
    beams = set(ids_of(rec.recommend_batch([request.changed(blend=False)])[0]))
    rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, nodes=0))
    assert set(ids_of(rec.recommend_batch([request])[0])) == beams
    rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, nodes=2))  # one more item fits
    assert len(set(ids_of(rec.recommend_batch([request])[0])) - beams) <= 1
    monkeypatch.setattr(global_lists, "MOST_NODES", 1)
    usual, whole = rec.recommend_batch([request, request.changed(guarantee="global")])
    assert (whole.certificate, whole.recommendations) == ("approximate", usual.recommendations)


def scored(result):
    return {r.item_id: r.score for r in result.recommendations}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_item_has_one_score_whatever_else_is_asked(folder, dtype):
    rec = Recommender.load(folder, dtype=dtype)
    rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, candidates=6, nodes=24))
    some = st.lists(st.sampled_from(IDS), max_size=8)

    @settings(max_examples=25, deadline=None)
    @given(some, some, st.integers(1, 49), st.booleans(), st.booleans())
    def check(history, excluded, k, filtered, exclude_seen):
        plain = RecommendRequest(history, k, exclude_seen=exclude_seen)
        limits = {"exclude_items": excluded, "filter": EVEN if filtered else None}
        asked = [plain, plain, plain.changed(k=k + 1), plain.changed(**limits)]
        first, again, longer, fewer = rec.recommend_batch(asked)
        assert first.recommendations == again.recommendations
        if k not in (20, 50):  # the next pool begins behind these
            assert first.recommendations == longer.recommendations[: len(first.recommendations)]
        ours, theirs = scored(first), scored(fewer)
        both = [item for item in ours if item in theirs]
        assert both == [item for item in theirs if item in ours]
        assert [ours[item] for item in both] == pytest.approx([theirs[i] for i in both], rel=1e-5)
        (given_scores,) = rec.rank([plain], [list(ours)])
        assert given_scores == pytest.approx(list(ours.values()), rel=1e-5)

    check()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_certificate_is_true_by_enumeration(folder, dtype):
    rec = Recommender.load(folder, dtype=dtype)
    new = [NewItem(f"id-{n}", "", "", {"even": n % 2 == 0}, CODES[n - 60]) for n in range(60, 75)]
    rec.upsert([*new, NewItem("id-4", "Replaced", "", {"even": True}, CODES[40])])
    live = [f"id-{n}" for n in range(75) if n not in (5, 8)]
    before = rec.rank([RecommendRequest(["id-5", "id-9"])], [live])
    rec.remove(["id-5", "id-8"])  # which leaves the scores of the rest
    assert rec.rank([RecommendRequest(["id-5", "id-9"])], [live]) == before
    some, sign = st.lists(st.sampled_from(live), max_size=8), st.sampled_from([-2.0, 0.0, 3.0])

    @settings(max_examples=25, deadline=None)
    @given(
        some, some, st.integers(1, 70), st.booleans(), st.booleans(), st.tuples(sign, sign, sign)
    )
    def check(history, excluded, k, exclude_seen, filtered, signs):
        weights = WEIGHTS | dict(zip(("model", "new.model", "again.model"), signs, strict=True))
        reranker = replace(BLEND, weights=weights, candidates=6, nodes=24)
        rec.retrieval = replace(rec.retrieval, reranker=reranker)
        wanted = EVEN if filtered else None
        request = RecommendRequest(history, k, exclude_seen, excluded, filter=wanted)
        hidden = {*excluded, *(history if exclude_seen else ())}
        names = [n for n in live if n not in hidden and (int(n[3:]) % 2 == 0 or not filtered)]
        best = sorted(rec.rank([request], [names])[0], reverse=True)[:k]
        usual, whole = rec.recommend_batch([request, request.changed(guarantee="global")])
        assert whole.certificate == "global-exact"
        assert set(ids_of(usual)) | set(ids_of(whole)) <= set(names)
        for result in (usual, whole):
            if result.certificate == "global-exact":
                assert list(scored(result).values()) == pytest.approx(best, rel=1e-5, abs=1e-5)

    check()


def test_boosts_that_cancel_the_scores_leave_a_global_list(rec):
    weights = {name: 100 * weight for name, weight in WEIGHTS.items()}
    rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, weights=weights, network=None))
    requests = [RecommendRequest([name], 10, guarantee="global") for name in IDS[:15]]
    lists = rec.recommend_batch(requests)
    weights = [-whole.recommendations[-1].score for whole in lists]
    boosted = [
        request.changed(boosts=[{"filter": {}, "weight": weight}])
        for request, weight in zip(requests, weights, strict=True)
    ]
    assert list(map(ids_of, rec.recommend_batch(boosted))) == list(map(ids_of, lists))


def test_the_bundle_chooses_unless_the_request_does(tmp_path):
    request = RecommendRequest(["id-3"], 10)
    unused = replace(BLEND, weights={}, network=None)
    off = Recommender.load(build(tmp_path / "off", make_retrieval(unused)))
    assert off.recommend_batch([request])[0].certificate != "approximate"
    assert off.recommend_batch([request.changed(blend=True)])[0].certificate == "approximate"
    none = Recommender.load(build(tmp_path / "none", make_retrieval(None)))
    assert none.recommend_batch([request])[0].certificate != "approximate"
    bare = Recommender.load(build(tmp_path / "bare", None))
    assert bare.retrieval is None
    assert {r.because for r in bare.recommend_batch([request])[0].recommendations} == {None}
    for rec in (none, bare):
        for call in (rec.recommend_batch, lambda r, rec=rec: rec.eligible(r[0])):
            with pytest.raises(RequestError, match="retrieval"):
                call([request.changed(blend=True)])
    for call in (lambda: bare.similar("id-1", 3), lambda: bare.fallback(request)):
        with pytest.raises(RequestError, match="no part 'retrieval'"):
            call()


def test_retrieval_of_another_catalog_is_refused(tmp_path):
    path = build(tmp_path / "other", make_retrieval(items=ITEMS + 1))
    with pytest.raises(ArtifactError, match="61 items"):
        Recommender.load(path)


def test_blended_requests_get_the_same_bits_alone_and_in_a_batch(folder):
    rec = Recommender.load(folder)
    rec.retrieval = replace(rec.retrieval, reranker=replace(BLEND, nodes=16))
    requests = [
        RecommendRequest([IDS[j] for j in RNG.integers(0, ITEMS, n)], k)
        for n, k in [(0, 10), (1, 5), (9, 20), (4, 7)]
    ]
    requests.append(requests[2].changed(blend=False))
    together = rec.recommend_batch(requests)
    for request, mine in zip(requests, together, strict=True):
        assert rec.recommend_batch([request])[0].recommendations == mine.recommendations


def test_scores_of_given_items_equal_the_searchs(rec):
    histories = [["id-3", "id-9"], [], ["id-1", "nobody"]]
    found = rec.recommend_batch([RecommendRequest(h, 20, blend=False) for h in histories])
    items = [[*ids_of(result)][: 5 + i] for i, result in enumerate(found)]
    scores = rec.score(histories, items)
    for line, result in zip(scores, found, strict=True):
        np.testing.assert_allclose(line, list(scored(result).values())[: len(line)], rtol=1e-6)
    assert rec.score([["id-3"]], [[]]) == [[]]
    with pytest.raises(RequestError, match="'nothing'"):
        rec.score([["id-3"]], [["id-1", "nothing"]])


def test_a_fallback_lists_related_then_popular_items(rec):
    request = RecommendRequest(["id-3", "id-9"], 12, filter=EVEN, exclude_items=["id-2"])
    result = rec.fallback(request)
    found = result.recommendations
    assert len(found) == 12
    assert (result.certificate, result.epoch) == ("approximate", rec.epoch)
    assert result.eligible_items == ITEMS // 2 - 1  # the even ones but id-2
    scores = [one.score for one in found]
    assert scores == sorted(scores, reverse=True)
    assert {one.source for one in found} == {"retrieval", "popular"}
    best = [IDS[i] for i in rec.retrieval.popular_order[:3]]
    unknown = rec.fallback(RecommendRequest(["nobody"], 3))
    assert ids_of(unknown) == best
    assert {one.source for one in unknown.recommendations} == {"popular"}
    assert unknown.unknown_items == ["nobody"]


def test_removed_items_vanish_and_new_items_have_neighbours(rec):
    request = RecommendRequest(["id-3", "id-9"], 20)
    before = ids_of(rec.recommend_batch([request])[0])
    rec.upsert([NewItem("new", "New thing", semantic_id=CODES[17].tolist())])
    near = rec.similar("new", 50)
    assert near[0] == ("id-17", 1.0)
    assert "new" not in dict(near)
    gone = {*before[:4], rec.similar("id-3", 1)[0][0], "id-17"} - {"id-3", "id-9"}
    rec.remove(sorted(gone))
    rec.remove(["id-9"])  # of the history: still understood, never listed
    after = rec.recommend_batch([request, RecommendRequest(["new", "id-3"], 20)])
    lists = [
        *(set(ids_of(result)) for result in after),
        set(ids_of(rec.fallback(request.changed(k=50)))),
        set(ids_of(rec.fallback(RecommendRequest([], 50)))),
        {name for name, _ in rec.similar("id-3", 50)},
        {name for name, _ in rec.similar("new", 50)},
    ]
    for names in lists:
        assert names
        assert not names & (gone | {"id-9"})
    with pytest.raises(RequestError, match="not in the catalog"):
        rec.similar("id-17", 3)
    assert len(rec.score([["new"]], [["new", "id-3"]])[0]) == 2


def test_new_items_are_listed_where_items_have_no_content(tmp_path, monkeypatch):
    folder = build(tmp_path / "bundle", replace(make_retrieval(), content=None))
    request = RecommendRequest(["id-3", "id-9"], 60)
    lists = []
    for native, dtype in (("1", "float32"), ("0", "float32"), ("0", "float64")):
        monkeypatch.setenv("RECSYS_NATIVE", native)
        rec = Recommender.load(folder, dtype=dtype)
        rec.upsert([NewItem(f"new-{i}", semantic_id=CODES[i].tolist()) for i in (17, 30)])
        lists.append(scored(rec.recommend_batch([request])[0]))
    assert {"new-17", "new-30"} <= set(lists[0])
    assert list(lists[0]) == list(lists[1])
    assert_as_exact(*([scores[item] for item in lists[0]] for scores in lists))


@pytest.mark.parametrize("k", [10, 21])
def test_evaluation_ranks_the_lists_that_requests_get(rec, k):
    histories = Histories.of([[3, 9, 20], [1], [5, 6, 7, 8]])
    (((items, scores), (plain, _)),) = rank_histories(rec, histories, k)
    requests = [RecommendRequest([IDS[i] for i in h], k) for h in histories]
    for line, score, result in zip(items, scores, rec.recommend_batch(requests), strict=True):
        assert [IDS[i] for i in line] == ids_of(result)
        np.testing.assert_allclose(score, [r.score for r in result.recommendations], rtol=1e-5)
    assert (plain != items).any()
