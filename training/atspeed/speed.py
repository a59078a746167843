"""Walltime speedup of each draft over plain search, one request at a time.

Times are measured side by side within rounds (`recsys.benchmark.timing`), drafting included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.decoding import Beams, SearchRequest, beam_search
from recsys.models.tree_forward import TreeModel
from recsys.training.atspeed.measure import Question, Scene, ask

PLAIN = "plain search"


def measure_walltimes(
    scene: Scene,
    drafts: Mapping[str, TreeModel],
    questions: Sequence[Question],
    *,
    rounds: int,
    advance: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of each draft and question: milliseconds of a request, and the ratio to plain search.

    Args:
        scene: the target and the users; a round is one user.
        drafts: by name.
        questions: strict ones are compared with beam search, relaxed ones with plain sampling.
        rounds: users whose requests are timed.
        advance: called after each question.
    """
    order = np.random.default_rng(1).permutation(len(scene.prompts))

    def run(search: Callable[[list[Any], list[int]], object], number: int) -> None:
        user = int(order[number % len(order)])
        search([scene.prompts[user]], [user])
        if scene.target.device.type == "cuda":
            torch.cuda.synchronize()

    rows = []
    for question in questions:
        searches = {PLAIN: partial(_search, scene, question)}
        searches |= {name: partial(ask, scene, draft, question) for name, draft in drafts.items()}
        sides = {name: Side(partial(run, search)) for name, search in searches.items()}
        for side in sides.values():
            side.run(0)  # the first run allocates buffers
        times = time_interleaved(sides, rounds)
        plain = times.pop(PLAIN)
        rows += [
            {
                "draft": name,
                **question.row,
                "ms": summarize([1000 * s for s in taken.wall]),
                "plain_ms": summarize([1000 * s for s in plain.wall]),
                "speedup": compare_times(plain.wall, taken.wall),
                "speedup_cpu": compare_times(plain.cpu, taken.cpu),
            }
            for name, taken in times.items()
        ]
        advance()
    return rows


def _search(scene: Scene, question: Question, prompts: list[Any], seeds: list[int]) -> Beams:
    relaxed = question.verification == "relaxed"
    request = SearchRequest(prompts, seeds=seeds if relaxed else None)
    return beam_search(scene.target, request, scene.trie, question.beams)
