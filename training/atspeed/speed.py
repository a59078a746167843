"""Walltime speedup, one request at a time: each draft against own beam search and Hugging Face's.

Times are measured side by side within rounds (`recsys.benchmark.timing`), drafting included.
Hugging Face takes part in the first rounds only, since it is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from recsys.benchmark.timing import Side, Times, interleaved, ratio, spread
from recsys.decoding import SearchRequest, beam_search
from recsys.models.tree_forward import TreeModel
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.training.atspeed.measure import Question, Scene, ask

BEAM, HUGGING_FACE = "own beam search", "Hugging Face generate"


def walltimes(
    scene: Scene,
    causal: Any,
    drafts: Mapping[str, Any],
    questions: Sequence[Question],
    *,
    rounds: int,
    hf_rounds: int,
    advance: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of each draft and question: milliseconds of a request, and ratios to both baselines.

    Args:
        scene: the target and the users; a round is one user.
        causal: the target as Hugging Face loads it.
        drafts: by name.
        questions: relaxed ones are compared with plain sampling, and with Hugging Face's search.
        rounds: users whose requests are timed.
        hf_rounds: users whose requests are timed with Hugging Face, too.
        advance: called after each question.
    """
    order = np.random.default_rng(1).permutation(len(scene.prompts))
    allowed = allowed_tokens(scene.catalog)
    models = {name: TreeModel.of(draft) for name, draft in drafts.items()}

    def run(search: Callable[[list[Any], list[int]], object], number: int) -> None:
        user = int(order[number % len(order)])
        search([scene.prompts[user]], [user])
        if scene.target.device.type == "cuda":
            torch.cuda.synchronize()

    rows = []
    for question in questions:
        searches = _searches(scene, causal, allowed, models, question)
        sides = {
            name: Side(partial(run, search), rounds=hf_rounds if name == HUGGING_FACE else None)
            for name, search in searches.items()
            if hf_rounds or name != HUGGING_FACE
        }
        for side in sides.values():
            side.run(0)  # the first run allocates buffers
        times = interleaved(sides, rounds)
        own, theirs = times.pop(BEAM), times.pop(HUGGING_FACE, Times())
        rows += [
            {
                "draft": name,
                **question.row,
                "ms": spread([1000 * s for s in mine.wall]),
                "beam_ms": spread([1000 * s for s in own.wall]),
                "ws_beam": ratio(own.wall, mine.wall),
                "ws_huggingface": ratio(theirs.wall, mine.wall),
                "ws_beam_cpu": ratio(own.cpu, mine.cpu),
            }
            for name, mine in times.items()
        ]
        advance()
    return rows


def _searches(
    scene: Scene,
    causal: Any,
    allowed: dict[tuple[int, ...], list[int]],
    drafts: Mapping[str, TreeModel],
    question: Question,
) -> dict[str, Callable[[list[Any], list[int]], object]]:
    """Name -> a function of prompts and seeds, for both baselines and each draft."""
    k, relaxed = question.beams, question.verification == "relaxed"

    def beams(prompts: list[Any], seeds: list[int]) -> object:
        request = SearchRequest(prompts, seeds=seeds if relaxed else None)
        return beam_search(scene.target, request, scene.trie, k)

    def hugging_face(prompts: list[Any], _: list[int]) -> object:
        return huggingface_beam_search(causal, prompts, allowed, k)

    drafted = {name: partial(ask, scene, draft, question) for name, draft in drafts.items()}
    return {BEAM: beams, **drafted, HUGGING_FACE: hugging_face}
