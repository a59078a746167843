"""Hugging Face's constrained beam search, which all searches are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

Ranking = list[tuple[Any, float]]  # items or their tokens, and scores, best first


def allowed_tokens(catalog: NDArray[np.int64]) -> dict[tuple[int, ...], list[int]]:
    """Prefix -> tokens that may follow, ascending: the fastest constraint in plain Python."""
    children: dict[tuple[int, ...], set[int]] = {}
    for row in catalog.tolist():
        for depth, token in enumerate(row):
            children.setdefault(tuple(row[:depth]), set()).add(token)
    return {prefix: sorted(tokens) for prefix, tokens in children.items()}


def huggingface_beam_search(
    model: transformers.PreTrainedModel,
    prompts: Sequence[NDArray[np.int64]],
    catalog: NDArray[np.int64] | dict[tuple[int, ...], list[int]],
    num_beams: int,
) -> list[list[tuple[tuple[int, ...], float]]]:
    """Run `generate(num_beams=K, prefix_allowed_tokens_fn=...)`; one list per request, best first.

    Scores are sums of log-probabilities over the whole vocabulary. Padding rows, which `generate`
    adds if K exceeds the catalog, are dropped. The catalog is (items, L) token rows, or the result
    of `allowed_tokens`, which takes longer than a search and should not be part of a measured time.
    """
    allowed = catalog if isinstance(catalog, dict) else allowed_tokens(catalog)
    longest = max(len(p) for p in prompts)
    row: tuple[int, ...] = ()
    while row in allowed:
        row = (*row, allowed[row][0])
    levels = len(row)
    tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = torch.from_numpy(np.asarray(prompt))
        mask[i, longest - len(prompt) :] = 1

    def allow(_: int, sequence: torch.Tensor) -> list[int]:
        return allowed.get(tuple(sequence[longest:].tolist()), [0])

    with torch.inference_mode():
        output = model.generate(
            tokens.to(model.device),
            attention_mask=mask.to(model.device),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            max_new_tokens=levels,
            length_penalty=0.0,
            do_sample=False,
            prefix_allowed_tokens_fn=allow,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=num_beams == 1,
        )
    sequences = output.sequences[:, longest:].tolist()
    if num_beams == 1:  # greedy search reports no scores
        steps = torch.stack([step.log_softmax(-1) for step in output.logits], dim=1)
        scores = steps.gather(-1, output.sequences[:, longest:, None]).sum((1, 2)).tolist()
    else:
        scores = output.sequences_scores.tolist()
    answers: list[list[tuple[tuple[int, ...], float]]] = []
    for i in range(len(prompts)):
        here = range(i * num_beams, (i + 1) * num_beams)
        answers.append([(tuple(sequences[j]), scores[j]) for j in here if scores[j] > -1e8])
    return answers


def same_ranking(
    first: Ranking,
    second: Ranking,
    *,
    tolerance: float,
    tie: float = 1e-5,
) -> bool:
    """Whether two rankings agree: same items in the same order, scores within `tolerance`.

    The order may only differ among sequences whose scores differ by at most `tie`. The same holds
    for which sequences are on the list.
    """
    if len(first) != len(second):
        return False
    for (a, a_score), (b, b_score) in zip(first, second, strict=True):
        if abs(a_score - b_score) > tolerance:
            return False
        if a != b and abs(a_score - b_score) > tie:
            return False
    scores = dict(second)
    if any(abs(score - scores[s]) > tolerance for s, score in first if s in scores):
        return False
    inner = {s for s, score in first if score > first[-1][1] + tie} if first else set()
    return inner <= scores.keys()
