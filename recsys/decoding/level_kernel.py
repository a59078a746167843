"""One level of a constrained search as two Triton kernels; `recsys.decoding.expand` is their twin.

`score_children` computes the score of every child of every beam, on as many programs as there are
blocks of children. `choose_best` chooses among them as `stable_top` does, one program a request,
and looks the chosen children up. Only the scores pass between the two. A third kernel computes the
log-sum-exp of a row of logits.

The children of a state are contiguous, so all depths are read by `first_child`. Candidate c of beam
w has the place w * C + c: a lower place is a lower row, as in the tensor code.

No kernel depends on the values of a batch for its shape, and none synchronises, so a level can be
captured in a CUDA graph. Sizes are arguments and no constants of the compiled code: a catalog of
another size compiles nothing.

Shapes: B requests, W beams, C children a beam at most, A tokens of the trie, D dead states, V
vocabulary, K beams of the result. This module imports triton; see `recsys.kernels`.
"""

# The arguments of kernels have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import inspect
from typing import Any

import torch
import triton
import triton.language as tl

from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.kernels import launch

MOST_CANDIDATES = 1 << 18
"""W * C from which on the tensor code is used: one program would read them for too long."""
_SCORED = 256  # children that one program scores
_COMPARED = 4096  # scores that one program compares at a time, at most
_SUMMED = 8192  # logits that one program adds up at a time
_NO_KEY = tl.constexpr(-2139095041)  # the key of -inf
_NO_STATE = tl.constexpr(NO_STATE)


def try_out(device: torch.device) -> None:
    """Launch a kernel; an error where triton cannot compile."""
    log_sum_exp(torch.zeros((1, 1, 1), device=device))


def covers(
    trie: DeviceTrie,
    depth: int,
    scores: torch.Tensor,
    logits: tuple[torch.Tensor, torch.Tensor],
    allowed: Allowed | None,
) -> bool:
    """Whether the kernels can do the level: float32, one array of masks, not too many children."""
    return (
        all(part.dtype == torch.float32 for part in (scores, *logits))
        and (allowed is None or len(allowed.alive) == 1)
        and scores.shape[1] * trie.source.branching[depth] <= MOST_CANDIDATES
    )


def expand_level(
    trie: DeviceTrie,
    depth: int,
    width: int,
    beams: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    logits: tuple[torch.Tensor, torch.Tensor],
    excluded: Excluded | None,
    allowed: Allowed | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `width` best children of beams at `depth`, as `Step.expand` without noise and boosts.

    Args:
        trie: the catalog.
        depth: of the beams.
        width: K.
        beams: (B, W) int64 states, (B, W) sums of log-probabilities, and (B, 1) best score of what
            was pruned, as in `Frontier`.
        logits: (B, W, A) and (B, W), as in `TokenLogits`.
        excluded: states that must not be reached, or None.
        allowed: states that may be reached, in one array, or None.

    Returns:
        (B, K) int64 states, float32 scores, int64 tokens and int64 parents, and (B, 1) float32 best
        score of what was pruned.
    """
    states, log_probs, rest = beams
    values, total = logits
    source = trie.source
    batch, count = states.shape
    most = source.branching[depth]
    size, device = count * most, states.device
    states, log_probs = states.contiguous(), log_probs.contiguous()
    dead = states[:, :0] if excluded is None else excluded.dead[depth].contiguous()
    flags, start = trie.symbol, dead  # read only with `allowed`
    if allowed is not None:
        flags, start = allowed.alive[0].view(torch.uint8), allowed.start.contiguous()
    scores = torch.empty((batch, size), dtype=torch.float32, device=device)
    tables = (trie.first_child, trie.symbol)
    launch(
        score_children,
        (triton.cdiv(size, _SCORED), batch),
        *(scores, states, log_probs, *tables, values, *values.stride(), total, *total.stride()),
        *(dead, dead.shape[1], flags, start, *source.depth_start[depth : depth + 2]),
        *(count, most),
        MASKED=allowed is not None,
        BLOCK=_SCORED,
        num_warps=4,
    )
    outputs = [torch.empty((batch, width), dtype=torch.int64, device=device) for _ in range(3)]
    best = torch.empty((batch, width), dtype=torch.float32, device=device)
    left = torch.empty((batch, 1), dtype=torch.float32, device=device)
    block = min(_COMPARED, max(512, triton.next_power_of_2(size)))
    launch(
        choose_best,
        (batch,),
        *(*outputs, best, left, scores, states, rest, rest.stride(0), *tables, trie.alphabet),
        *(count, most, width),
        BLOCK=block,
        num_warps=max(4, block // 256),
    )
    pruned = rest if depth + 1 == source.num_levels else left
    return outputs[0], best, outputs[1], outputs[2], pruned


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """(B, W) `logits.logsumexp(-1)` of (B, W, V) float32 logits.

    Each row is added up in the same order, whatever the batch. The sum may differ from torch's in
    its last bits. It is finite if and only if no logit is NaN or +inf and not all are -inf.
    """
    batch, count, size = logits.shape
    total = torch.empty((batch, count), dtype=torch.float32, device=logits.device)
    launch(
        sum_exponentials,
        (count, batch),
        *(total, logits, *logits.stride(), size),
        BLOCK=_SUMMED,
        num_warps=16,
    )
    return total


def compile_once(function: Any) -> Any:
    """A kernel that is compiled for its constants and types only, not for values and alignment."""
    names = inspect.signature(function).parameters
    sizes = [name for name in names if name not in function.__annotations__]
    return triton.jit(function, do_not_specialize=sizes)


@compile_once
def score_children(
    scores,
    states,
    log_probs,
    first_child,
    symbols,
    values,
    values_request,
    values_beam,
    values_symbol,
    total,
    total_request,
    total_beam,
    dead,
    dead_count,
    flags,
    flags_start,
    first_state,
    behind,
    beams,
    most,
    MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(B, W * C) scores of the children of (B, W) states; -inf for those that are not alive.

    Program (i, b) computes block i of request b. `first_state` .. `behind` are the states of the
    depth, `most` is C.
    """
    request = tl.program_id(1).to(tl.int64)
    size = beams * most
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    beam = offsets // most
    at = request * beams + beam
    state = tl.load(states + at, mask=inside, other=_NO_STATE)
    here = (state >= first_state) & (state < behind)
    first = tl.load(first_child + state, mask=here, other=0)
    child = first + offsets % most
    alive = here & (child < tl.load(first_child + state + 1, mask=here, other=0))
    symbol = tl.load(symbols + child, mask=alive, other=0).to(tl.int64)
    if MASKED:
        start = tl.load(flags_start + request)
        alive &= tl.load(flags + start + child, mask=alive, other=0) != 0
    # Binary search: how many dead states of the request are lower than the child.
    lower = tl.zeros((BLOCK,), tl.int32)
    step = tl.zeros((), tl.int32) + 1
    while step <= dead_count // 2:
        step *= 2
    mine = dead + request * dead_count
    while (step > 0) & (dead_count > 0):
        probed = lower + step - 1
        below = tl.load(mine + probed, mask=alive & (probed < dead_count), other=_NO_STATE) < child
        lower = tl.where(below, lower + step, lower)
        step = step // 2
    alive &= tl.load(mine + lower, mask=alive & (lower < dead_count), other=_NO_STATE) != child
    value = tl.load(
        values
        + request * values_request
        + beam * values_beam.to(tl.int64)
        + symbol * values_symbol,
        mask=alive,
        other=-float("inf"),
    )
    sums = tl.load(total + request * total_request + beam * total_beam, mask=alive, other=0.0)
    log_prob = value - sums
    score = tl.load(log_probs + at, mask=inside, other=0.0) + log_prob
    score = tl.where(alive, score, -float("inf"))
    tl.store(scores + request * size + offsets, score, mask=inside)


@triton.jit
def order_key(score):
    """int32 in the order of float32 scores; equal ones have the same key, NaN has that of -inf."""
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where(key == -1, 0, key)  # -0.0 equals 0.0
    return tl.where(score == score, key, _NO_KEY)


@triton.jit
def count_from(scores, size, least, BLOCK: tl.constexpr):
    """How many of `size` scores have a key of at least `least`."""
    count = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        key = order_key(tl.load(scores + offsets, mask=offsets < size, other=-float("inf")))
        count += tl.sum((key >= least).to(tl.int32), 0)
    return count


@compile_once
def choose_best(
    found_states,
    found_tokens,
    found_parents,
    found_scores,
    found_rest,
    all_scores,
    states,
    rest,
    rest_request,
    first_child,
    symbols,
    alphabet,
    beams,
    most,
    width,
    BLOCK: tl.constexpr,
):
    """The best `width` of (B, W * C) scores, ascending by place, and what belongs to them.

    Program b works on request b. The key of the last score that is chosen is found by bisection:
    all above it are chosen, and the first of those equal to it. Scores that are -inf or NaN are
    never chosen; beams that do not exist stand in their place, behind the others.
    """
    request = tl.program_id(0).to(tl.int64)
    size = beams * most
    scores = all_scores + request * size
    least = tl.full((), 0x7FFFFFFF, tl.int32)
    greatest = tl.full((), _NO_KEY, tl.int32)
    alive = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        key = order_key(tl.load(scores + offsets, mask=offsets < size, other=-float("inf")))
        least = tl.minimum(least, tl.min(tl.where(key == _NO_KEY, 0x7FFFFFFF, key), 0))
        greatest = tl.maximum(greatest, tl.max(key, 0))
        alive += tl.sum((key > _NO_KEY).to(tl.int32), 0)
    # The key of the last score is in least .. greatest. With room for all, all are above it.
    least = tl.where(alive <= width, _NO_KEY, least).to(tl.int64)
    greatest = tl.where(alive <= width, _NO_KEY, greatest).to(tl.int64)
    while least < greatest:
        middle = greatest - ((greatest - least) >> 1)
        count = count_from(scores, size, middle.to(tl.int32), BLOCK)
        least = tl.where(count >= width, middle, least)
        greatest = tl.where(count >= width, greatest, middle - 1)
        greatest = tl.where(count == width, least, greatest)
    last = least.to(tl.int32)
    room = width - count_from(scores, size, last + 1, BLOCK)  # for those equal to the last
    taken = tl.zeros((), tl.int32)
    equals = tl.zeros((), tl.int32)
    best_left = tl.full((), -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        score = tl.load(scores + offsets, mask=offsets < size, other=-float("inf"))
        key = order_key(score)
        equal = ((key == last) & (key > _NO_KEY)).to(tl.int32)
        chosen = (key > last) | ((equal > 0) & (equals + tl.cumsum(equal, 0) <= room))
        slot = request * width + taken + tl.cumsum(chosen.to(tl.int32), 0) - 1
        beam = offsets // most
        state = tl.load(states + request * beams + beam, mask=chosen, other=0)
        child = tl.load(first_child + state, mask=chosen, other=0) + offsets % most
        symbol = tl.load(symbols + child, mask=chosen, other=0).to(tl.int64)
        tl.store(found_states + slot, child.to(tl.int64), mask=chosen)
        tl.store(found_scores + slot, score, mask=chosen)
        tl.store(found_tokens + slot, tl.load(alphabet + symbol, mask=chosen), mask=chosen)
        tl.store(found_parents + slot, beam.to(tl.int64), mask=chosen)
        left = tl.where(chosen | (key == _NO_KEY), -float("inf"), score)
        best_left = tl.maximum(best_left, tl.max(left, 0))
        taken += tl.sum(chosen.to(tl.int32), 0)
        equals += tl.sum(equal, 0)
    for start in range(0, width, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        slot = request * width + offsets
        missing = (offsets >= taken) & (offsets < width)
        nothing = tl.zeros((BLOCK,), tl.int64)
        tl.store(found_states + slot, nothing + _NO_STATE, mask=missing)
        tl.store(found_scores + slot, -float("inf"), mask=missing)
        tl.store(found_tokens + slot, nothing - 1, mask=missing)
        tl.store(found_parents + slot, nothing, mask=missing)
    before = tl.load(rest + request * rest_request)
    tl.store(found_rest + request, tl.where(best_left > before, best_left, before))


@compile_once
def sum_exponentials(
    total, logits, logits_request, logits_beam, logits_token, size, BLOCK: tl.constexpr
):
    """(B, W) log-sum-exp of (B, W, V) logits; program (w, b) adds up one row, `size` is V."""
    beam, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    mine = logits + request * logits_request + beam * logits_beam
    most = tl.full((BLOCK,), -float("inf"), tl.float32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(mine + offsets * logits_token, mask=offsets < size, other=-float("inf"))
        most = tl.maximum(most, value)
    greatest = tl.max(most, 0)
    greatest = tl.where(tl.abs(greatest) < float("inf"), greatest, 0.0)  # inf - inf is NaN
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        value = tl.load(mine + offsets * logits_token, mask=offsets < size, other=-float("inf"))
        sums += tl.exp(value - greatest)
    tl.store(total + request * tl.num_programs(0) + beam, greatest + tl.log(tl.sum(sums, 0)))
