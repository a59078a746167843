"""Which lists are right: the rule of `gpu.py`.

In every type a list has distinct items of the catalog, none that its request excludes, by
descending scores, and as many as eager beam search lists (`find_fault`).

In bfloat16 no two kernels round alike, so two right answers differ. What a way lists is therefore
scored again by the same weights in float32 (`Scorer`), without this project's caches, masks and
tries. Its error is its largest difference from these scores, and may be at most twice that of eager
beam search, or of Hugging Face's `generate`, whichever is larger, on the same prompts (`judge`).
Near ties may fall either way at every level, so that a right way may lose an item with all that
begins like it. An item that a beam search in float32 keeps at every level by more than twice this
allowance, by which two scores may move apart, may only be missing if all listed items are as good,
up to the allowance (`shortfall`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import functional_call

Sequences = Sequence[tuple[int, ...]]
Ranking = Sequence[tuple[tuple[int, ...], float]]
Beam = tuple[tuple[int, ...], float, float]  # sequence, score, the least margin of its prefixes
MOST = 2.0  # times the larger error of the two that are trusted


def judge(error: float, shortfall: float, trusted: Mapping[str, float]) -> dict[str, Any]:
    """Whether an error and a shortfall are small enough.

    >>> judge(0.3, 0.1, {"eager": 0.1, "huggingface": 0.2})["passed"]
    True
    >>> judge(0.5, 0.1, {"eager": 0.1, "huggingface": 0.2})["passed"]
    False

    Both are differences of log-probabilities (`Scorer`), as are the errors of the `trusted` ways on
    the same prompts. Returns all of them, and `passed`.
    """
    numbers = {"error": error, "shortfall": shortfall, **trusted}
    rounded = {name: float(f"{value:.3g}") for name, value in numbers.items()}
    most = allowance(trusted)
    return {"passed": error <= most < float("inf") and shortfall <= most, **rounded}


def allowance(trusted: Mapping[str, float]) -> float:
    """The largest error that passes."""
    return MOST * max(trusted.values())


def find_fault(
    rows: NDArray[np.integer],
    ranking: Ranking,
    expected: Ranking,
    excluded: Sequence[int] = (),
) -> str | None:
    """What is wrong with a list in any type; None if nothing is.

    The catalog has the (R, L) sorted sequences `rows`, of which the request excludes some;
    `expected` is the list of eager beam search.
    """
    if len(ranking) != len(expected):
        return "lists have other lengths"
    found = [find_row(rows, sequence) for sequence, _ in ranking]
    if None in found:
        return "an item is not in the catalog"
    if len(set(found)) < len(found):
        return "an item is listed twice"
    if not set(found).isdisjoint(excluded):
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
    low, high = find_rows(rows, sequence)
    return low if low < high and len(sequence) == rows.shape[1] else None


def find_rows(rows: NDArray[np.integer], prefix: Sequence[int]) -> tuple[int, int]:
    """The first row that begins with a prefix, and the one behind the last."""
    low, high = 0, len(rows)
    for column, token in zip(rows.T, prefix, strict=False):
        low, high = bisect_left(column, token, low, high), bisect_right(column, token, low, high)
    return low, high


class Scorer:
    """Scores in float32 of items that were listed for a prompt, and what should be listed."""

    def __init__(self, model: Any, rows: NDArray[np.integer], beams: int) -> None:
        """Judge lists of `beams` items, by the weights of a Hugging Face causal LM.

        The catalog has the (R, L) sorted sequences `rows`.
        """
        self._model, self._rows, self._beams = model, rows, beams
        self._known: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}
        self._found: dict[Any, list[Beam]] = {}

    def error(self, prompts: Sequence[Sequence[int]], rankings: Sequence[Ranking]) -> float:
        """The largest difference of a listed score from the one in float32; NaN is infinite."""
        largest = 0.0
        for prompt, ranking in zip(prompts, rankings, strict=True):
            exact = self._exact(prompt, ranking)
            for (_, found), expected in zip(ranking, exact, strict=True):
                gap = abs(found - expected)
                largest = max(largest, gap if gap == gap else float("inf"))
        return largest

    def shortfall(
        self,
        prompts: Sequence[Sequence[int]],
        rankings: Sequence[Ranking],
        exclude: Sequence[Sequence[int]],
        most: float,
    ) -> float:
        """How much better a missing item is than the worst listed one, in float32, at most.

        Only those count that a beam search in float32 keeps at every level by more than twice
        `most`, the allowance.
        """
        largest = 0.0
        for prompt, ranking, excluded in zip(prompts, rankings, exclude, strict=True):
            worst, listed = min(self._exact(prompt, ranking)), {item for item, _ in ranking}
            for item, exact, kept_by in self._search(prompt, excluded):
                if kept_by > 2 * most and item not in listed:
                    largest = max(largest, exact - worst)
        return largest

    def _search(self, prompt: Sequence[int], excluded: Sequence[int]) -> list[Beam]:
        """The list of a beam search in float32."""
        key = tuple(map(int, prompt)), tuple(excluded)
        if key not in self._found:
            beams: list[Beam] = [((), 0.0, float("inf"))]
            for column in self._rows.T:
                steps = log_probabilities(self._model, prompt, [prefix for prefix, *_ in beams])
                found = []
                for (prefix, total, margin), step in zip(beams, steps[:, -1], strict=True):
                    low, high = find_rows(self._rows, prefix)
                    gone = [row - low for row in excluded if low <= row < high]
                    tokens = np.unique(np.delete(column[low:high], gone)).tolist()
                    values = step[tokens].tolist()
                    found += [
                        ((*prefix, token), total + value, margin)
                        for token, value in zip(tokens, values, strict=True)
                    ]
                found.sort(key=lambda beam: -beam[1])
                first = found[self._beams][1] if len(found) > self._beams else -float("inf")
                beams = [(p, s, min(m, s - first)) for p, s, m in found[: self._beams]]
            self._found[key] = beams
        return self._found[key]

    def _exact(self, prompt: Sequence[int], ranking: Ranking) -> list[float]:
        """The scores in float32 of the items of a list."""
        known = self._known.setdefault(tuple(int(token) for token in prompt), {})
        if new := [sequence for sequence, _ in ranking if sequence not in known]:
            known.update(zip(new, score(self._model, prompt, new), strict=True))
        return [known[sequence] for sequence, _ in ranking]


def score(model: Any, prompt: Sequence[int], sequences: Sequences) -> list[float]:
    """Log-probabilities of sequences of one length behind a prompt, in float32."""
    steps = log_probabilities(model, prompt, [sequence[:-1] for sequence in sequences])
    items = torch.tensor(sequences, device=steps.device)
    scores: list[float] = steps.gather(-1, items[..., None]).sum((1, 2)).tolist()
    return scores


@torch.no_grad()
def log_probabilities(model: Any, prompt: Sequence[int], prefixes: Sequences) -> torch.Tensor:
    """(N, l + 1, vocabulary) of the tokens behind a prompt, and behind each of N prefixes' l.

    Prefixes are branches of one pass of the model's own modules in float32: a token sees the
    prompt, and the tokens before it in its own prefix.
    """
    first, count, length = len(prompt), len(prefixes), len(prefixes[0])
    device = model.device
    start = torch.as_tensor([int(token) for token in prompt], device=device)
    behind = torch.tensor(prefixes, dtype=torch.int64, device=device).flatten()
    branch = torch.arange(count, device=device).repeat_interleave(length)
    branch = torch.cat([torch.full((first,), -1, device=device), branch])
    within = torch.arange(first, first + length, device=device).repeat(count)
    places = torch.cat([torch.arange(first, device=device), within])
    seen = (places <= places[:, None]) & ((branch == -1) | (branch == branch[:, None]))
    mask = torch.zeros(seen.shape, device=device)
    mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[None, None]
    weights = {name: parameter.float() for name, parameter in model.named_parameters()}
    inputs = {
        "input_ids": torch.cat([start, behind])[None],
        "attention_mask": mask,
        "position_ids": places[None],
        "use_cache": False,
    }
    logits = functional_call(model, weights, kwargs=inputs).logits[0]
    root = logits[first - 1].expand(count, 1, -1)
    steps = torch.cat([root, logits[first:].view(count, length, root.shape[-1])], dim=1)
    return steps.double().log_softmax(-1)
