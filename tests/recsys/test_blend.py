"""Blended lists, exact scores, similar items and fallbacks of a bundle with retrieval."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, KIND, PROMPTS, RETRIEVAL, TARGET
from recsys.catalog import Catalog
from recsys.errors import ArtifactError, RequestError
from recsys.interactions import Histories
from recsys.listing import MODEL, Lists, Union
from recsys.live import NewItem
from recsys.models.checkpoint import save_model
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import Blend, ItemItem, Retrieval, VectorIndex, decayed_counts
from recsys.testing import tiny_model
from recsys.vocabulary import Vocabulary

ITEMS, LEVELS = 60, (5, 4, 4)
CODES = np.stack(np.unravel_index(np.arange(ITEMS), LEVELS), axis=1).astype(np.int32)
CODES[59] = CODES[58]  # two items of one leaf
IDS = [f"id-{i}" for i in range(ITEMS)]
TABLE = pa.table(
    {
        "item_id": IDS,
        "title": [f"Thing {i}" for i in range(ITEMS)],
        "text": [""] * ITEMS,
        "even": [i % 2 == 0 for i in range(ITEMS)],
    }
)
RNG = np.random.default_rng(0)
TRAINED = Histories.of([RNG.integers(0, ITEMS, 6) for _ in range(40)])
BLEND = Blend(0.6, 0.8, 1.5, candidates=12, nodes=200)
EVEN = {"must": [{"key": "even", "match": True}]}


def make_retrieval(blend: Blend | None = BLEND, items: int = ITEMS) -> Retrieval:
    return Retrieval(
        ItemItem.directional(TRAINED, items),
        decayed_counts(TRAINED.items, items),
        0.1,
        VectorIndex.of(np.random.default_rng(1).normal(size=(items, 5))),
        blend,
    )


def build(path, retrieval: Retrieval | None):
    with write_artifact(path, KIND) as folder:
        vocabulary = Vocabulary.from_levels(LEVELS)
        save_model(tiny_model(vocabulary=vocabulary.size, hidden=128), folder / TARGET)
        (folder / CATALOG).mkdir()
        Catalog(TABLE, CODES).save(folder / CATALOG)
        vocabulary.save(folder)
        (folder / PROMPTS).write_text('{"max_items": 6, "block": 2}')
        if retrieval is not None:
            (folder / RETRIEVAL).mkdir()
            retrieval.save(folder / RETRIEVAL)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build(tmp_path_factory.mktemp("blend") / "bundle", make_retrieval())


@pytest.fixture
def rec(folder):
    return Recommender.load(folder, dtype="float64")


def ids_of(result):
    return [r.item_id for r in result.recommendations]


def slow_blend(rec, request) -> list[tuple[str, float]]:
    """The formula, item by item, over the model's 20 beams and retrieval's candidates."""
    retrieval, blend = rec.retrieval, rec.retrieval.blend
    plain = rec.recommend_batch([replace(request, k=20, blend=False, boosts=())])[0]
    seen = [IDS.index(i) for i in request.history]
    asked = Histories.of([seen])
    hidden = [IDS.index(i) for i in request.exclude_items] + seen * request.exclude_seen
    allowed = np.array([request.filter is None or i % 2 == 0 for i in range(ITEMS)])
    found = retrieval.candidates(
        asked, blend.candidates, False, excluded=Histories.of([hidden]), allowed=[allowed]
    )
    names = dict.fromkeys([*ids_of(plain), *(IDS[i] for i in found.items[0] if i >= 0)])
    exact = rec.score([request.history], [list(names)])[0]
    weights = [math.exp(blend.sharpness * s) for s in exact]
    items = np.array([[IDS.index(name) for name in names]])
    retrieved = np.exp(retrieval.log_prob(retrieval.shares(asked), items)[0])
    near = retrieval.nearness(asked, items)[0]
    scores = []
    for name, w, p, a in zip(names, weights, retrieved, near, strict=True):
        mixed = (1 - blend.weight) * w / sum(weights) + blend.weight * p
        gain = sum(b["weight"] for b in request.boosts if IDS.index(name) % 2 == 0)
        scores.append((name, math.log(mixed) + blend.nearness * a + gain))
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
def test_blended_lists_follow_the_formula(rec, request_):
    if request_.boosts:  # beams are those of the boosted search; candidates are all there is to add
        rec.retrieval = replace(rec.retrieval, blend=replace(BLEND, candidates=ITEMS))
    found = rec.recommend_batch([request_])[0]
    wanted = slow_blend(rec, request_)
    assert ids_of(found) == [name for name, _ in wanted]
    scores = [r.score for r in found.recommendations]
    np.testing.assert_allclose(scores, [s for _, s in wanted], rtol=1e-5)
    assert found.certificate == "approximate"


def test_items_have_their_source_and_reason(rec):
    history = ["id-3", "id-9", "id-20"]
    request = RecommendRequest(history, 30)
    found = rec.recommend_batch([request])[0]
    beams = set(ids_of(rec.recommend_batch([replace(request, blend=False)])[0]))
    assert {r.source for r in found.recommendations} >= {"model"}
    for r in found.recommendations:
        assert (r.source == "model") == (r.item_id in beams)
        said = Histories.of([[IDS.index(i) for i in history]])
        reason = rec.retrieval.because(said, np.array([[IDS.index(r.item_id)]])).item()
        assert r.because == (IDS[reason] if reason >= 0 else None)
    assert any(r.because in history for r in found.recommendations)


def test_candidates_beyond_the_node_budget_are_left_out(rec):
    rec.retrieval = replace(rec.retrieval, blend=replace(BLEND, nodes=0))
    request = RecommendRequest(["id-3"], 20)
    found = rec.recommend_batch([request])[0]
    plain = rec.recommend_batch([replace(request, blend=False)])[0]
    assert sorted(ids_of(found)) == sorted(ids_of(plain))


def test_requests_for_the_models_own_list_are_not_blended(rec):
    plain = RecommendRequest(["id-3", "id-9"], 10, blend=False)
    whole = rec.recommend_batch([plain])[0]
    assert whole.certificate != "approximate"
    for special in ({"guarantee": "global"}, {"mode": "beam"}, {"mode": "strict"}, {"seed": 1}):
        found = rec.recommend_batch([RecommendRequest(["id-3", "id-9"], 10, **special)])[0]
        assert found.certificate != "approximate"
        assert {r.source for r in found.recommendations} == {"model"}
        if "mode" in special:
            assert ids_of(found) == ids_of(whole)
        with pytest.raises(ValueError, match="blend"):
            RecommendRequest(["id-3"], blend=True, **special)


def test_the_bundle_chooses_unless_the_request_does(tmp_path):
    request = RecommendRequest(["id-3"], 10)
    off = Recommender.load(build(tmp_path / "off", make_retrieval(replace(BLEND, weight=0))))
    assert off.recommend_batch([request])[0].certificate != "approximate"
    assert off.recommend_batch([replace(request, blend=True)])[0].certificate == "approximate"
    none = Recommender.load(build(tmp_path / "none", make_retrieval(None)))
    assert none.recommend_batch([request])[0].certificate != "approximate"
    bare = Recommender.load(build(tmp_path / "bare", None))
    assert bare.retrieval is None
    assert {r.because for r in bare.recommend_batch([request])[0].recommendations} == {None}
    for rec in (none, bare):
        for call in (rec.recommend_batch, lambda r, rec=rec: rec.eligible(r[0])):
            with pytest.raises(RequestError, match="retrieval"):
                call([replace(request, blend=True)])
    for call in (lambda: bare.similar("id-1", 3), lambda: bare.fallback(request)):
        with pytest.raises(RequestError, match="no part 'retrieval'"):
            call()


def test_retrieval_of_another_catalog_is_refused(tmp_path):
    path = build(tmp_path / "other", make_retrieval(items=ITEMS + 1))
    with pytest.raises(ArtifactError, match="61 items"):
        Recommender.load(path)


def test_blended_requests_get_the_same_bits_alone_and_in_a_batch(folder):
    rec = Recommender.load(folder)
    rec.retrieval = replace(rec.retrieval, blend=replace(BLEND, nodes=16))
    requests = [
        RecommendRequest([IDS[j] for j in RNG.integers(0, ITEMS, n)], k)
        for n, k in [(0, 10), (1, 5), (9, 20), (4, 7)]
    ]
    requests.append(replace(requests[2], blend=False))
    together = rec.recommend_batch(requests)
    for request, mine in zip(requests, together, strict=True):
        assert rec.recommend_batch([request])[0].recommendations == mine.recommendations


def test_scores_of_given_items_equal_the_searchs(rec):
    histories = [["id-3", "id-9"], [], ["id-1", "nobody"]]
    found = rec.recommend_batch([RecommendRequest(h, 20, blend=False) for h in histories])
    items = [[*ids_of(result)][: 5 + i] for i, result in enumerate(found)]
    scores = rec.score(histories, items)
    for line, result in zip(scores, found, strict=True):
        np.testing.assert_allclose(
            line, [r.score for r in result.recommendations][: len(line)], rtol=1e-6
        )
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
    names = [one.item_id for one in found]
    assert all(IDS.index(name) % 2 == 0 for name in names)
    assert not {"id-3", "id-9", "id-2"} & set(names)
    assert {one.source for one in found} == {"retrieval", "popular"}
    best = [IDS[i] for i in rec.retrieval.popular(3)[0]]
    unknown = rec.fallback(RecommendRequest(["nobody"], 3))
    assert ids_of(unknown) == best
    assert {one.source for one in unknown.recommendations} == {"popular"}
    assert unknown.unknown_items == ["nobody"]


def test_removed_items_vanish_and_new_items_have_neighbours(rec):
    request = RecommendRequest(["id-3", "id-9"], 20)
    before = ids_of(rec.recommend_batch([request])[0])
    rec.upsert([NewItem("new", "New thing", semantic_id=CODES[17].tolist())])
    near = rec.similar("new", 3)
    assert near[0] == ("id-17", 1.0)
    gone = {*before[:4], rec.similar("id-3", 1)[0][0], "id-17"} - {"id-3", "id-9"}
    rec.remove(sorted(gone))
    rec.remove(["id-9"])  # of the history: still understood, never listed
    after = rec.recommend_batch([request, RecommendRequest(["new", "id-3"], 20)])
    lists = [
        *(set(ids_of(result)) for result in after),
        set(ids_of(rec.fallback(replace(request, k=50)))),
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


def test_evaluation_ranks_the_lists_that_requests_get(rec):
    histories = Histories.of([[3, 9, 20], [1], [5, 6, 7, 8]])
    items, scores = rec.rank(histories, 10)
    plain, _ = rec.rank(histories, 10, blend=False)
    requests = [RecommendRequest([IDS[i] for i in h], 10) for h in histories]
    for line, score, result in zip(items, scores, rec.recommend_batch(requests), strict=True):
        assert [IDS[i] for i in line] == ids_of(result)
        np.testing.assert_allclose(score, [r.score for r in result.recommendations], rtol=1e-5)
    assert (plain != items).any()


def test_a_union_without_items_has_an_empty_list():
    none = np.full((1, 2), -1, np.int32)
    model = Lists.of_model(none, np.full((1, 2), -np.inf, np.float32))
    assert (model.source == MODEL).all()
    retrieval = make_retrieval()
    asked = Histories.of([[]])
    candidates = retrieval.candidates(asked, 3, allowed=[np.zeros(ITEMS, bool)])
    scores = np.zeros((1, 0))
    union = Union.of(model, candidates, scores, retrieval, asked, trie=None)
    best = union.best(BLEND, 4)
    assert best.items.tolist() == [[-1] * 4]
    assert (best.scores == -np.inf).all()
