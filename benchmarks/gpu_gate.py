"""Which lists are right: the rule of `gpu.py`.

In every type a list has distinct items of the catalog, none that its request excludes, by
descending scores, and as many as eager beam search lists (`find_fault`).

In bfloat16 no two kernels round alike, so two right answers differ. What a way lists is therefore
scored again by the same weights in float32 (`Scorer`), without this project's caches, masks and
tries. Its error is its largest difference from these scores, and may be at most twice that of eager
beam search, or of Hugging Face's modules without beams, whichever is larger (`judge`). A way that
loses an item and scores the others right is noticed in float32 alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from huggingface import Ranking
from numpy.typing import NDArray
from torch.func import functional_call

Integers = Sequence[int]
Scores = NDArray[np.float64]
MOST = 2.0  # times the larger error of the two that are trusted
SEVERAL = 5.0  # times the error of Hugging Face, with which eager beam search shares no code


def judge(error: float, trusted: Mapping[str, float]) -> dict[str, Any]:
    """Whether an error is small enough.

    >>> judge(0.3, {"eager": 0.1, "huggingface": 0.2})["passed"]
    True
    >>> judge(0.5, {"eager": 0.1, "huggingface": 0.2})["passed"]
    False
    >>> judge(0.9, {"eager": 0.9, "huggingface": 0.1})["passed"]  # they share a fault
    False

    It is a difference of log-probabilities (`Scorer`), as are the errors of the `trusted` ways on
    the same prompts. Returns all of them, and `passed`.
    """
    rounded = {name: float(f"{value:.3g}") for name, value in {"error": error, **trusted}.items()}
    shared = trusted["eager"] > SEVERAL * trusted["huggingface"]
    allowed = MOST * max(trusted.values())
    return {"passed": error <= allowed < float("inf") and not shared, **rounded}


def find_fault(
    rows: NDArray[np.integer],
    ranking: Ranking,
    expected: Ranking,
    excluded: Integers = (),
) -> str | None:
    """What is wrong with a list in any type; None if nothing is.

    The catalog has the (R, L) sorted sequences `rows`, of which the request excludes some;
    `expected` is the list of eager beam search.
    """
    if len(ranking) != len(expected):
        return "lists have other lengths"
    found_rows = [find_row(rows, sequence) for sequence, _ in ranking]
    if None in found_rows:
        return "an item is not in the catalog"
    if len(set(found_rows)) < len(found_rows):
        return "an item is listed twice"
    if not set(found_rows).isdisjoint(excluded):
        return "an excluded item is listed"
    scores = [score for _, score in ranking]
    if any(second > first for first, second in pairwise(scores)):
        return "scores do not descend"
    return None


def find_row(rows: NDArray[np.integer], sequence: Sequence[int]) -> int | None:
    """The row of a sequence; None if there is none.

    >>> rows = np.array([[1, 3], [1, 5], [2, 3]])
    >>> find_row(rows, (1, 5)), find_row(rows, (2, 5))
    (1, None)
    """
    low, high = 0, len(rows)
    for column, token in zip(rows.T, sequence, strict=False):
        low, high = bisect_left(column, token, low, high), bisect_right(column, token, low, high)
    return low if low < high and len(sequence) == rows.shape[1] else None


class Scorer:
    """Scores in float32 of items that were listed for a prompt."""

    def __init__(self, model: Any) -> None:
        """Judge by the weights of a causal LM."""
        self._model = model
        self._known: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}

    def error(self, prompts: Sequence[Integers], rankings: Sequence[Ranking]) -> float:
        """The largest difference of a listed score from the one in float32; NaN is infinite."""
        largest = 0.0
        for prompt, ranking in zip(prompts, rankings, strict=True):
            known = self._known.setdefault(tuple(map(int, prompt)), {})
            if new := [item for item, _ in ranking if item not in known]:
                known.update(zip(new, score(self._model, prompt, new).tolist(), strict=True))
            gaps = np.abs([known[item] - listed for item, listed in ranking])
            largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf).max()))
        return largest

    def rounding(self, prompts: Sequence[Integers], rankings: Sequence[Ranking]) -> float:
        """The error on listed items of the model's modules in its own type, in one pass."""
        lists: list[Ranking] = []
        for prompt, ranking in zip(prompts, rankings, strict=True):
            items = [item for item, _ in ranking]
            scores = score(self._model, prompt, items, self._model.dtype).tolist()
            lists.append(list(zip(items, scores, strict=True)))
        return self.error(prompts, lists)


@torch.no_grad()
def score(
    model: Any,
    prompt: Integers,
    sequences: Sequence[tuple[int, ...]],
    dtype: torch.dtype = torch.float32,
) -> Scores:
    """(N,) log-probabilities of sequences of one length behind a prompt.

    They are branches of one pass of the model's own modules in some type: a token sees the prompt,
    and the tokens before it in its own sequence.
    """
    first, device = len(prompt), model.device
    items = torch.tensor(sequences, device=device)
    count, length = len(items), items.shape[1] - 1
    start = torch.as_tensor([int(token) for token in prompt], device=device)
    branch = torch.arange(count, device=device).repeat_interleave(length)
    branch = torch.cat([torch.full((first,), -1, device=device), branch])
    within = torch.arange(first, first + length, device=device).repeat(count)
    positions = torch.cat([torch.arange(first, device=device), within])
    seen = (positions <= positions[:, None]) & ((branch == -1) | (branch == branch[:, None]))
    mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
    weights = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    inputs = {
        "input_ids": torch.cat([start, items[:, :-1].flatten()])[None],
        "attention_mask": mask,
        "position_ids": positions[None],
        "use_cache": False,
    }
    logits = functional_call(model, weights, kwargs=inputs).logits[0]
    root = logits[first - 1].expand(count, 1, -1)
    steps = torch.cat([root, logits[first:].view(count, length, root.shape[-1])], dim=1)
    chosen = steps.double().log_softmax(-1).gather(-1, items[..., None])
    return chosen.sum((1, 2)).cpu().numpy()
