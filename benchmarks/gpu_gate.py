"""How far scores in bfloat16 may be from those in float32: the rule of `benchmarks/gpu.py`.

In bfloat16 no two kernels round alike, so two right answers differ. What a way lists is therefore
scored again by the same weights in float32 (`Scorer`), without this project's caches, masks and
tries. Its error is its largest difference from these scores, and may be at most twice that of eager
beam search, or of Hugging Face's `generate`, whichever is larger, on the same prompts (`judge`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Sequences = Sequence[tuple[int, ...]]
Ranking = Sequence[tuple[tuple[int, ...], float]]
MOST = 2.0  # times the larger error of the two that are trusted


def judge(error: float, trusted: Mapping[str, float]) -> dict[str, Any]:
    """Whether an error is small enough.

    >>> judge(0.3, {"eager": 0.1, "huggingface": 0.2})["passed"]
    True
    >>> judge(0.5, {"eager": 0.1, "huggingface": 0.2})["passed"]
    False

    Args:
        error: of a way, a difference of log-probabilities.
        trusted: errors of other ways on the same prompts.

    Returns:
        All of them, and `passed`.
    """
    rounded = {name: float(f"{value:.3g}") for name, value in {"error": error, **trusted}.items()}
    return {"passed": error <= MOST * max(trusted.values()) < float("inf"), **rounded}


class Scorer:
    """Scores in float32 of items that were listed for a prompt."""

    def __init__(self, model: Any) -> None:
        """Score with the weights of `model`, a Hugging Face decoder-only causal LM."""
        self._model = model
        self._known: dict[tuple[int, ...], dict[tuple[int, ...], float]] = {}

    def error(self, prompts: Sequence[Sequence[int]], rankings: Sequence[Ranking]) -> float:
        """The largest difference of a listed score from the one in float32; NaN is infinite."""
        largest = 0.0
        for prompt, ranking in zip(prompts, rankings, strict=True):
            known = self._known.setdefault(tuple(int(token) for token in prompt), {})
            if new := [sequence for sequence, _ in ranking if sequence not in known]:
                known.update(zip(new, score(self._model, prompt, new), strict=True))
            for sequence, found in ranking:
                gap = abs(found - known[sequence])
                largest = max(largest, gap if gap == gap else float("inf"))
        return largest


@torch.no_grad()
def score(model: Any, prompt: Sequence[int], sequences: Sequences) -> list[float]:
    """Log-probabilities of sequences of one length behind a prompt, in float32.

    They are branches of one pass of the model's own modules: a token sees the prompt, and the
    tokens before it in its own sequence.
    """
    first, count, levels = len(prompt), len(sequences), len(sequences[0])
    device = model.device
    items = torch.tensor(sequences, device=device)
    start = torch.as_tensor([int(token) for token in prompt], device=device)
    tokens = torch.cat([start, items[:, :-1].flatten()])
    branch = torch.arange(count, device=device).repeat_interleave(levels - 1)
    branch = torch.cat([torch.full((first,), -1, device=device), branch])
    within = torch.arange(first, first + levels - 1, device=device).repeat(count)
    places = torch.cat([torch.arange(first, device=device), within])
    seen = (places <= places[:, None]) & ((branch == -1) | (branch == branch[:, None]))
    mask = torch.zeros(seen.shape, device=device)
    mask = mask.masked_fill(~seen, torch.finfo(mask.dtype).min)[None, None]
    with widened(model):
        logits = model(
            tokens[None], attention_mask=mask, position_ids=places[None], use_cache=False
        ).logits[0]
    behind = logits[first:].view(count, levels - 1, -1)
    root = logits[first - 1].expand(count, 1, -1)
    steps = torch.cat([root, behind], dim=1).double().log_softmax(-1)
    scores: list[float] = steps.gather(-1, items[..., None]).sum((1, 2)).tolist()
    return scores


@contextmanager
def widened(model: Any) -> Iterator[None]:
    """The weights of a module are float32 while it runs, so one layer is held twice at a time."""
    decoder = model.get_decoder()
    modules = [decoder.embed_tokens, *decoder.layers, decoder.norm, model.get_output_embeddings()]
    kept: list[tuple[torch.nn.Parameter, torch.Tensor]] = []

    def widen(module: torch.nn.Module, _: Any) -> None:
        for parameter in module.parameters():
            kept.append((parameter, parameter.data))
            parameter.data = parameter.data.float()

    def restore(*_: Any) -> None:
        while kept:
            parameter, data = kept.pop()
            parameter.data = data

    handles = [module.register_forward_pre_hook(widen) for module in modules]
    handles += [module.register_forward_hook(restore) for module in modules]
    try:
        yield
    finally:
        restore()
        for handle in handles:
            handle.remove()
