"""A short run of the hot catalog's benchmark: no wrong answer, and wrong ones are seen."""

from __future__ import annotations

import importlib.util
import sys
from collections import deque
from pathlib import Path

import numpy as np
import pytest

FILE = Path(__file__).parent.parent / "benchmarks" / "hot_catalog.py"


@pytest.fixture(scope="module")
def hot():
    spec = importlib.util.spec_from_file_location("hot_catalog", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hot_catalog"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["hot_catalog"]


def test_every_answer_is_right_while_items_come_and_go(hot):
    recommender = hot.synthetic(400, (16, 8, 16), hidden=32)
    result = hot.measure(recommender, 2.0, rate=200, callers=2, kept=6)
    assert result["wrong_answers"] == result["decoded_again_wrong"] == 0
    assert result["answers"] >= 8
    assert result["decoded_again"] >= 8
    assert result["inserts_per_second"] > 0 < result["removals_per_second"]
    assert result["items_now"] < result["rows_now"]


def test_a_wrong_answer_is_seen(hot):
    recommender = hot.synthetic(400, (16, 8, 16), hidden=32)
    recommender.__class__ = hot.Watched
    catalog = recommender.catalog
    lives = {
        n: hot.Life(tuple(c)) for n, c in zip(catalog.item_ids, catalog.codes.tolist(), strict=True)
    }
    run = hot.Run(recommender, lives, list(catalog.item_ids), deque())
    asked = hot.ask(run, np.random.default_rng(0), True)
    assert hot.wrong(run, asked) == hot.decoded_again(run, asked) == []
    shown = asked.results[0].recommendations[0].item_id
    lives[shown].gone = 0
    assert f"{shown} was gone" in hot.wrong(run, asked)
    lives[shown].gone, lives[shown].born = None, 5
    assert f"{shown} before its time" in hot.wrong(run, asked)
    asked.begun = 3
    assert "epoch 0 when 3 had been seen" in hot.wrong(run, asked)
    asked.results[0].recommendations.pop(0)
    assert hot.decoded_again(run, asked)
