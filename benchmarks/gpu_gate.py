"""Which lists are right: the rule of `gpu.py`.

In every type a list has distinct items of the catalog, none that its request excludes, by
descending scores, and as many as eager beam search lists (`find_fault`).

In bfloat16 no two kernels round alike, so two right answers differ. What a way lists is therefore
scored again by the same weights in float32 (`Scorer`), without this project's caches, masks and
tries. Its error is its largest difference from these scores, and may be at most twice that of eager
beam search, or of Hugging Face's modules without beams, whichever is larger (`judge`).
Near ties may fall either way at every level, so that a right way may lose an item with all that
begins like it. But its search kept what its items begin with, or as many better beginnings. So it
is wrong if an item is missing whose beginning, at every level where no listed item has the same, is
better than the worst of these by more than this allowance (`shortfall`).
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
Integers = Sequence[int]
Beam = tuple[tuple[int, ...], float]  # tokens, and their score
Ranking = Sequence[Beam]
Scores = NDArray[np.float64]
Known = dict[tuple[int, ...], Scores]  # (L,) of an item, up to each of its tokens
MOST = 2.0  # times the larger error of the two that are trusted
SEVERAL = 5.0  # times the error of Hugging Face, with which eager beam search shares no code


def judge(error: float, shortfall: float, trusted: Mapping[str, float]) -> dict[str, Any]:
    """Whether an error and a shortfall are small enough.

    >>> judge(0.3, 0.1, {"eager": 0.1, "huggingface": 0.2})["passed"]
    True
    >>> judge(0.5, 0.1, {"eager": 0.1, "huggingface": 0.2})["passed"]
    False
    >>> judge(0.9, 0.1, {"eager": 0.9, "huggingface": 0.1})["passed"]  # they share a fault
    False

    Both are differences of log-probabilities (`Scorer`), as are the errors of the `trusted` ways on
    the same prompts. Returns all of them, and `passed`.
    """
    numbers = {"error": error, "shortfall": shortfall, **trusted}
    rounded = {name: float(f"{value:.3g}") for name, value in numbers.items()}
    most = allowance(trusted)
    shared = trusted["eager"] > SEVERAL * trusted["huggingface"]
    small = error <= most < float("inf") and shortfall <= most
    return {"passed": small and not shared, **rounded}


def allowance(trusted: Mapping[str, float]) -> float:
    """The largest error that passes."""
    return MOST * max(trusted.values())


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
        """Judge lists of `beams` of the (R, L) sorted `rows`, by the weights of a causal LM."""
        self._model, self._rows, self._beams = model, rows, beams
        self._known: dict[tuple[int, ...], Known] = {}
        self._found: dict[Any, tuple[Known, Scores]] = {}

    def error(self, prompts: Sequence[Integers], rankings: Sequence[Ranking]) -> float:
        """The largest difference of a listed score from the one in float32; NaN is infinite."""
        largest = 0.0
        for prompt, ranking in zip(prompts, rankings, strict=True):
            gaps = np.abs(self._exact(prompt, ranking)[:, -1] - [score for _, score in ranking])
            largest = max(largest, float(np.nan_to_num(gaps, nan=np.inf).max()))
        return largest

    def rounding(self, prompts: Sequence[Integers], rankings: Sequence[Ranking]) -> float:
        """The error on listed items of the model's modules in its own type, in one pass."""
        lists: list[Ranking] = []
        for prompt, ranking in zip(prompts, rankings, strict=True):
            items = [item for item, _ in ranking]
            scores = score(self._model, prompt, items, self._model.dtype)[:, -1].tolist()
            lists.append(list(zip(items, scores, strict=True)))
        return self.error(prompts, lists)

    def shortfall(
        self, prompts: Sequence[Integers], rankings: Sequence[Ranking], exclude: Sequence[Integers]
    ) -> float:
        """How much better a missing item is than what was kept in its place, at most.

        The items of a beam search in float32 are looked for. The difference of one is the least of
        all levels where it may have been lost, since no listed item begins like it: of its
        beginning there, and the worst one of listed items, or what is certainly kept there.
        """
        largest = 0.0
        for prompt, ranking, excluded in zip(prompts, rankings, exclude, strict=True):
            items, certain = self._search(prompt, excluded)
            worst = np.minimum(self._exact(prompt, ranking).min(0), certain)
            levels = range(1, len(worst) + 1)
            listed = {item[:level] for item, _ in ranking for level in levels}
            for item, exact in items.items():
                if item not in listed:
                    lost = [item[:level] not in listed for level in levels]
                    largest = max(largest, float((exact - worst)[lost].min()))
        return largest

    def _search(self, prompt: Integers, excluded: Integers) -> tuple[Known, Scores]:
        """The list of a beam search in float32, with the (L,) scores of its items' beginnings.

        Also (L,) scores above which a beginning is among the best of the whole catalog: of those
        that were found, and of all that begin with what was dropped before, which are no better.
        """
        key = tuple(map(int, prompt)), tuple(excluded)
        if key not in self._found:
            kept: list[Beam] = [((), 0.0)]
            certain: list[float] = []
            dropped = -np.inf
            for column in self._rows.T:
                beams = [prefix for prefix, _ in kept]
                steps = log_probabilities(self._model, prompt, beams)[:, -1]
                children: list[Beam] = []
                for (prefix, total), step in zip(kept, steps, strict=True):
                    low, high = find_rows(self._rows, prefix)
                    gone = [row - low for row in excluded if low <= row < high]
                    tokens = np.unique(np.delete(column[low:high], gone)).tolist()
                    values = (total + step[tokens]).tolist()
                    children += [((*prefix, t), v) for t, v in zip(tokens, values, strict=True)]
                children.sort(key=lambda beam: -beam[1])
                children += [((), -np.inf)] * (self._beams + 1 - len(children))
                certain.append(max(children[self._beams - 1][1], dropped))
                dropped = max(dropped, children[self._beams][1])
                kept = [beam for beam in children[: self._beams] if beam[0]]
            items, exact = [item for item, _ in kept], self._exact(prompt, kept)
            self._found[key] = dict(zip(items, exact, strict=True)), np.array(certain)
        return self._found[key]

    def _exact(self, prompt: Integers, ranking: Ranking) -> Scores:
        """(N, L) scores in float32 of the items of a list."""
        known = self._known.setdefault(tuple(int(token) for token in prompt), {})
        if new := [sequence for sequence, _ in ranking if sequence not in known]:
            known.update(zip(new, score(self._model, prompt, new), strict=True))
        return np.stack([known[sequence] for sequence, _ in ranking])


def score(
    model: Any, prompt: Integers, sequences: Sequences, dtype: torch.dtype = torch.float32
) -> Scores:
    """(N, L) log-probabilities of sequences behind a prompt, up to each of L tokens."""
    prefixes = [sequence[:-1] for sequence in sequences]
    steps = log_probabilities(model, prompt, prefixes, dtype)
    items = torch.tensor(sequences, device=steps.device)
    return steps.gather(-1, items[..., None])[..., 0].cumsum(1).cpu().numpy()


@torch.no_grad()
def log_probabilities(
    model: Any, prompt: Integers, prefixes: Sequences, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """(N, l + 1, vocabulary) of the tokens behind a prompt, and behind each of N prefixes' l.

    Prefixes are branches of one pass of the model's own modules in some type: a token sees the
    prompt, and the tokens before it in its own prefix.
    """
    first, count, length = len(prompt), len(prefixes), len(prefixes[0])
    device = model.device
    start = torch.as_tensor([int(token) for token in prompt], device=device)
    behind = torch.tensor(prefixes, dtype=torch.int64, device=device).flatten()
    branch = torch.arange(count, device=device).repeat_interleave(length)
    branch = torch.cat([torch.full((first,), -1, device=device), branch])
    within = torch.arange(first, first + length, device=device).repeat(count)
    positions = torch.cat([torch.arange(first, device=device), within])
    seen = (positions <= positions[:, None]) & ((branch == -1) | (branch == branch[:, None]))
    mask = torch.where(seen, 0.0, torch.finfo(dtype).min).to(dtype)[None, None]
    weights = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    inputs = {
        "input_ids": torch.cat([start, behind])[None],
        "attention_mask": mask,
        "position_ids": positions[None],
        "use_cache": False,
    }
    logits = functional_call(model, weights, kwargs=inputs).logits[0]
    root = logits[first - 1].expand(count, 1, -1)
    steps = torch.cat([root, logits[first:].view(count, length, root.shape[-1])], dim=1)
    return steps.double().log_softmax(-1)
