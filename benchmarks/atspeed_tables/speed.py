"""Walltime speedup of each draft over plain search, one request at a time, drafting included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from measuring import Row, Side, compare_times, milliseconds, time_interleaved

from atspeed_tables.measure import Question, Scene, ask
from recsys.decoding import SearchRequest, beam_search
from recsys.models.tree_forward import TreeModel
from recsys.progress import say

PLAIN = "plain search"

Search = Callable[[list[Any], list[int]], object]
"""Of prompts, and a seed for each."""


def measure_walltimes(
    scene: Scene, drafts: Mapping[str, TreeModel], questions: Sequence[Question], rounds: int
) -> list[Row]:
    """Rows of each draft and question: milliseconds of a request, and the ratio to plain search.

    Strict questions are compared with beam search, relaxed ones with plain sampling.

    Args:
        scene: the target and the users; a round is one user.
        drafts: by name.
        questions: that are asked.
        rounds: users whose requests are timed.
    """
    order = np.random.default_rng(1).permutation(len(scene.prompts))

    def run(search: Search, number: int) -> None:
        user = int(order[number % len(order)])
        search([scene.prompts[user]], [user])
        if scene.target.device.type == "cuda":
            torch.cuda.synchronize()

    rows = []
    for question in questions:
        say(f"times, {question.verification}, K = {question.beams} ...")
        searches: dict[str, Search] = {PLAIN: partial(_search, scene, question)}
        searches |= {name: partial(ask, scene, draft, question) for name, draft in drafts.items()}
        sides = {name: Side(partial(run, search)) for name, search in searches.items()}
        for side in sides.values():
            side.run(0)  # the first run allocates buffers
        times = time_interleaved(sides, rounds)
        plain = times.pop(PLAIN)
        rows += [
            {
                "objective": name,
                **question.row,
                "ms": milliseconds(taken),
                "plain_ms": milliseconds(plain),
                "speedup": compare_times(plain, taken),
            }
            for name, taken in times.items()
        ]
    return rows


def _search(scene: Scene, question: Question, prompts: list[Any], seeds: list[int]) -> None:
    relaxed = question.verification == "relaxed"
    request = SearchRequest(prompts, seeds=seeds if relaxed else None)
    beam_search(scene.target, request, scene.trie, question.beams)
