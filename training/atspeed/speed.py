"""Walltime speedup, one request at a time: each draft against own beam search and Hugging Face's.

Clocks are read side by side within rounds (`recsys.benchmark.timing`), drafting included. Hugging
Face takes part in the first rounds only; it is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from recsys.benchmark.timing import Side, Times, interleaved, ratio, spread
from recsys.decoding import beam_search
from recsys.models.tree_forward import TreeModel
from recsys.testing import allowed_tokens, huggingface_beam_search
from recsys.training.atspeed.measure import Question, Scene, ask

BEAM, HUGGING_FACE = "own beam search", "Hugging Face generate"


def walltimes(
    scene: Scene,
    causal: Any,
    drafts: Mapping[str, TreeModel],
    questions: Sequence[Question],
    *,
    rounds: int,
    hf_rounds: int,
    advance: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of each draft and question: milliseconds a request, and ratios to both baselines.

    Args:
        scene: the target and who asks; a round is one user.
        causal: the target as Hugging Face loads it.
        drafts: by name.
        questions: relaxed ones are compared with plain sampling, and with Hugging Face's search.
        rounds: users whose requests are timed.
        hf_rounds: how many of them Hugging Face is asked.
        advance: called after each question.
    """
    finish = torch.cuda.synchronize if scene.target.device.type == "cuda" else _nothing
    order = np.random.default_rng(1).permutation(len(scene.prompts))
    allowed = allowed_tokens(scene.catalog)
    rows = []
    for question in questions:
        relaxed = question.verification == "relaxed"

        def group(number: int) -> tuple[list[Any], list[int]]:
            user = int(order[number % len(order)])
            return [scene.prompts[user]], [user]

        def beams(number: int, k: int = question.beams, sampled: bool = relaxed) -> object:
            prompts, seeds = group(number)
            found = beam_search(
                scene.target, prompts, scene.trie, k, seeds=seeds if sampled else None
            )
            finish()
            return found

        def drafted(draft: TreeModel, asked: Question = question) -> Callable[[int], object]:
            def run(number: int) -> object:
                found = ask(scene, draft, asked, *group(number))
                finish()
                return found

            return run

        def hugging_face(number: int, k: int = question.beams) -> object:
            found = huggingface_beam_search(causal, group(number)[0], allowed, k)
            finish()
            return found

        sides = {BEAM: Side(beams)}
        sides |= {name: Side(drafted(draft)) for name, draft in drafts.items()}
        if hf_rounds:
            sides[HUGGING_FACE] = Side(hugging_face, rounds=hf_rounds)
        for side in sides.values():
            side.run(0)  # whatever is made once
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


def _nothing() -> None:
    """A CPU has nothing left to finish when a call returns."""
