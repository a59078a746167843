"""Warm-up: one-time work of a recommender, done before the first request instead of in it."""

from __future__ import annotations

import numpy as np

from recsys.decoding.planner import Plan
from recsys.interactions import Histories
from recsys.modes import Captured, Mode
from recsys.recommender import Recommender
from recsys.requests import MIN_BEAMS, RecommendRequest

_TYPICAL_PROMPTS = 8


def warm_up(recommender: Recommender) -> None:
    """Do the allocations and captures, and in mode `planned` the planner's measurements.

    The planner measures random histories; measurements of real requests replace them.
    """
    rng = np.random.default_rng(0)
    catalog, encoder = recommender.catalog, recommender.epoch.encoder
    items = rng.integers(0, len(catalog), (_TYPICAL_PROMPTS, encoder.config.max_items))
    if recommender.capture == Captured.DECODES:
        _capture_decodes(recommender)
    if recommender.mode == Mode.PLANNED:
        prompts, most = encoder.encode_all(Histories.of(items.tolist())), recommender.max_batch
        recommender.engine.warm_up(prompts, MIN_BEAMS, sorted({1, min(8, most), most}))
    recommender.recommend([catalog.item_ids[:1]], k=1)
    recommender.engine.forget()


def _capture_decodes(recommender: Recommender) -> None:
    """Capture the passes and decodes of all plans that the mode may follow.

    Decodes of ordinary requests: K is 20, and they are blended if that is the default.
    """
    engine, nodes = recommender.engine, 0
    plans = engine.plans
    if recommender.mode != Mode.PLANNED:
        own = Plan(recommender.mode, engine.draft_nodes)
        plans = [Plan(), *(plan for plan in plans if plan == own)]
    if recommender.reranker is not None and recommender.blends(RecommendRequest([])):
        nodes = recommender.reranker.nodes
    sizes = recommender.max_batch, recommender.epoch.encoder.max_tokens, MIN_BEAMS
    engine.captures.capture_passes(*sizes, plans, spare=nodes)
    whole = [plan for plan in plans if plan.mode != Mode.EXHAUSTIVE]
    engine.captures.capture_decodes(*sizes, [(nodes, nodes)], whole)
