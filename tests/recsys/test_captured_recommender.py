"""A recommender with captured decodes: the answers of one without graphs, while items change.

A replay runs the captured computation again, on a CPU (`recsys.models.graphs.run_again`).
"""

import gc
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from oracles import tiny_model
from scipy import sparse

from recsys import transfers
from recsys.artifacts import Manifest
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.decoding.planner import Plan
from recsys.live import NewItem
from recsys.models.graphs import run_again
from recsys.modes import Captured, Mode, check_capture
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender, RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval
from recsys.vocabulary import Vocabulary
from recsys.warm_up import warm_up

ITEMS, LEVELS = 80, (6, 5, 4)
VOCABULARY = Vocabulary.from_levels(LEVELS)
IDS = [f"id-{i}" for i in range(ITEMS)]
TABLE = pa.table(
    {
        "item_id": IDS,
        "title": [f"Thing {i}" for i in range(ITEMS)],
        "text": [""] * ITEMS,
        "even": [i % 2 == 0 for i in range(ITEMS)],
        "price": [i / 2 for i in range(ITEMS)],
    }
)
EVEN = {"must": [{"key": "even", "match": True}]}
CHEAP = {"must": [{"key": "price", "range": {"lt": 15}}]}


def make(mode, capture, *, blended=False, batch=1):
    codes = np.stack(np.unravel_index(np.arange(ITEMS), LEVELS), axis=1).astype(np.int32)
    catalog = Catalog(TABLE, codes)
    manifest = Manifest(kind="bundle", config={}, parents={}, files={}, info={})
    bundle = Bundle(Path("nowhere"), manifest, catalog, VOCABULARY, PromptConfig(4, 2))
    size = VOCABULARY.size
    model, draft = (
        tiny_model(vocabulary=size, layers=1, seed=s, dtype=torch.float64) for s in (0, 3)
    )
    retrieval = None
    if blended:
        after = sparse.diags_array([1.0, 0.5], offsets=[1, 2], shape=(ITEMS, ITEMS))
        item_item = ItemItem(sparse.csr_array(after).astype(np.float32), 0.6)
        retrieval = Retrieval(item_item, np.ones(ITEMS))
        weights = {"model": 1.0, "popularity": 0.1}
        retrieval = replace(retrieval, reranker=Reranker(weights, candidates=12, nodes=20))
    found = Recommender(
        bundle, model, draft=draft, mode=mode, prefix_bytes=1 << 20, max_batch=batch,
        capture=capture, retrieval=retrieval,
    )  # fmt: skip
    found.engine.draft_nodes = 24
    warm_up(found)
    return found


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Copies and selections take the way of a GPU, which never looks at a value."""
    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)


def random_requests(rng, items):
    """Up to four requests, some of which no graph can run."""
    found = []
    for _ in range(rng.integers(1, 5)):
        history = list(rng.choice(items, rng.integers(0, 6)))
        kinds = [
            {"filter": [EVEN, CHEAP][rng.integers(2)]},
            {"exclude_items": tuple(rng.choice(items, 5))},
            {"exclude_seen": False},
            {"k": 25},
            {"boosts": [{"filter": EVEN, "weight": 0.5}]},
            {"mode": "beam"},
            {},
        ]
        given = {"k": 10} | kinds[rng.integers(len(kinds))]
        found.append(RecommendRequest(history, **given))
    return found


def same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert one.recommendations == other.recommendations
        assert one.certificate == other.certificate
        assert one.eligible_items == other.eligible_items


@pytest.mark.parametrize(("mode", "blended"), [("beam", False), ("beam", True), ("draft", False)])
def test_answers_are_those_without_graphs(mode, blended):
    rng = np.random.default_rng(4)
    each = [make(mode, capture, blended=blended, batch=4) for capture in Captured]
    assert all(one.retrieval is None or one.blends(RecommendRequest([])) for one in each)
    items, added = list(IDS), 0
    for turn in range(12):
        requests = random_requests(rng, items)
        answers = [one.recommend_batch(requests) for one in each]
        same(answers[1], answers[0])
        again = [r.changed(history=[*r.history, items[turn]]) for r in requests]
        same(each[1].recommend_batch(again), each[0].recommend_batch(again))
        if turn % 4 == 1:
            more = [
                NewItem(f"new-{added + i}", "New", "", {"price": 3.0, "even": False}, tuple(codes))
                for i, codes in enumerate(rng.integers(0, LEVELS, (2, 3)).tolist())
            ]
            added += 2
            items += [item.item_id for item in more]
            for one in each:
                one.upsert(more)
        if turn % 4 == 3:
            gone = list(rng.choice(items, 3, replace=False))
            items = [item for item in items if item not in gone]
            for one in each:
                one.remove(gone)
    told = each[1].engine.captures.statistics()
    assert told.replays > 12
    assert set(told.fallbacks) <= {"beams", "kind", "shape"}
    assert {"beams", "kind"} <= set(told.fallbacks)
    assert each[0].engine.captures.statistics().decodes == 0


def test_what_is_captured_follows_the_mode():
    planned = make("planned", "decodes")
    assert {p.mode for p in planned.engine.captures.decodes} == {Mode.BEAM, Mode.DRAFT}
    assert len(planned.engine.captures.decodes) == len(planned.engine.plans) - 1  # not exhaustive
    told = planned.engine.captures.statistics()
    assert told.replays > 0  # the planner measured them
    assert set(told.eager_passes) <= {"cache"}  # those that it timed have storage of their own
    assert set(make("beam", "decodes").engine.captures.decodes) == {Plan()}
    drafting = make("draft", "decodes").engine
    assert set(drafting.captures.decodes) == {Plan(), Plan(Mode.DRAFT, 24)}


def test_closing_frees_the_graphs_without_collection(monkeypatch):
    """As after a change of models: a service excludes loaded objects from collection."""

    def capture(run):
        run_again(run)
        return lambda: None  # as a CUDA graph, it keeps no Python alive

    monkeypatch.setattr("recsys.models.graphs.run_again", capture)
    gc.collect()
    gc.disable()
    try:
        closing = make("draft", "decodes")
        kept = [
            weakref.ref(graphs.pool.storage.values) for graphs in closing.engine.captures.passes
        ]
        kept.append(weakref.ref(closing.engine.captures._catalog.trie.symbol))
        kept.append(weakref.ref(closing.engine.captures.decodes[Plan()]._inputs.masks.flags))
        closing.close()
        del closing
        assert [one() for one in kept] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (("decodes", "cpu", "auto"), "capture 'decodes' needs a GPU, and device is 'cpu'; set"),
        (("decodes", "cuda:0", "exhaustive"), "use mode 'auto', 'beam' or 'draft'"),
        (("everything", "cuda", "auto"), "not one of passes, decodes"),
    ],
)
def test_what_cannot_be_captured_is_refused(wanted, says):
    with pytest.raises(ValueError, match=says):
        check_capture(*wanted)
