"""Walltime speedup of each draft over plain search, one request at a time, and tree attention's.

Times are measured side by side within rounds (`recsys.benchmark.timing`), drafting included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from atspeed_tables.measure import Question, Scene, ask
from recsys.benchmark.timing import Side, compare_times, summarize, time_interleaved
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import Beams, SearchRequest, beam_search
from recsys.decoding.tree import PromptBatch, TokenTree
from recsys.models.tree_forward import TreeModel
from recsys.training.alignment import TreeRows
from recsys.training.teacher import search_trees
from recsys.training.tree import causal_parts, descent, node_logits

PLAIN, PROMPT = "plain search", "prompt alone"


def measure_walltimes(
    scene: Scene,
    drafts: Mapping[str, TreeModel],
    questions: Sequence[Question],
    *,
    rounds: int,
    advance: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of each draft and question: milliseconds of a request, and the ratio to plain search.

    A row also has the time of the target's pass over the prompt alone, which every search makes.

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
        searches: dict[str, Callable[[list[Any], list[int]], object]] = {
            PLAIN: partial(_search, scene, question),
            PROMPT: partial(_prefill, scene),
        }
        searches |= {name: partial(ask, scene, draft, question) for name, draft in drafts.items()}
        sides = {name: Side(partial(run, search)) for name, search in searches.items()}
        for side in sides.values():
            side.run(0)  # the first run allocates buffers
        times = time_interleaved(sides, rounds)
        plain, prompt = times.pop(PLAIN), times.pop(PROMPT)
        rows += [
            {
                "draft": name,
                **question.row,
                "ms": summarize([1000 * s for s in taken.wall]),
                "plain_ms": summarize([1000 * s for s in plain.wall]),
                "prompt_ms": summarize([1000 * s for s in prompt.wall]),
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


@torch.inference_mode()
def _prefill(scene: Scene, prompts: list[Any], _: list[int]) -> torch.Tensor:
    with TokenTree(scene.target, PromptBatch.of(prompts, scene.target), 0) as tree:
        logits = tree.forward()
        tree.note(logits.amax(-1))
    return logits


@torch.inference_mode()
def time_tree_attention(
    target: Any, draft: TreeModel, scene: Scene, widths: Sequence[int], *, rounds: int
) -> list[dict[str, Any]]:
    """Rows for each N: milliseconds of a verification pass, with and without tree attention.

    The pass computes the target's logits at the N beams of each drafted level, 1 .. L - 1, of one
    request. With tree attention it is one row of prompt and nodes; without, each node is a row of
    prompt and path. Both are the model's stock forward without a cache, and give the same logits.

    Args:
        target: the Hugging Face model.
        draft: whose beams are verified.
        scene: the users; a round is one user.
        widths: the N.
        rounds: users whose passes are timed.
    """
    users = np.random.default_rng(1).permutation(len(scene.prompts))[:rounds]
    trees: list[TreeRows] = []  # of one width

    def one_row(number: int) -> torch.Tensor:
        decoder, head = causal_parts(target)
        tree = trees[number % len(trees)]
        return _finish(head(tree.ends(tree.run(decoder, head.weight.dtype))[:, 1:]))

    def row_a_node(number: int) -> torch.Tensor:
        tree = trees[number % len(trees)]
        return _finish(node_logits(target, tree.window, tree.lengths, tree.tokens, tree.seen))

    rows = []
    for width in widths:
        trees[:] = [_draft_tree(draft, scene, scene.prompts[user], width) for user in users]
        gap = float((one_row(0) - row_a_node(0)).abs().max())  # also allocates the buffers
        times = time_interleaved({"tree": Side(one_row), "rows": Side(row_a_node)}, rounds)
        rows.append(
            {
                "drafts": width,
                "nodes": trees[0].tokens.shape[1],
                "tree_ms": summarize([1000 * s for s in times["tree"].wall]),
                "rows_ms": summarize([1000 * s for s in times["rows"].wall]),
                "ratio": compare_times(times["rows"].wall, times["tree"].wall),
                "largest_difference": gap,
            }
        )
    return rows


def _draft_tree(draft: TreeModel, scene: Scene, prompt: Any, width: int) -> TreeRows:
    """The best `width` beams of the draft at each level but the last."""
    trie = DeviceTrie.of(scene.trie, draft.device)
    found = search_trees(draft, [prompt], trie, width)
    states, parents = (
        torch.from_numpy(part[:, :-1]).long().to(draft.device)
        for part in (found.states, found.parents)
    )
    return TreeRows(
        torch.from_numpy(prompt)[None].to(draft.device),
        torch.tensor([len(prompt)], device=draft.device),
        trie.tokens_of(states.clamp(min=0)).flatten(1),
        descent(parents),
        states.shape[1:],
    )


def _finish(logits: torch.Tensor) -> torch.Tensor:
    """The logits, once the device has computed them."""
    if logits.device.type == "cuda":
        torch.cuda.synchronize()
    return logits
