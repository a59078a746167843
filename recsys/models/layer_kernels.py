"""The functions of `recsys.models.layers` as Triton kernels, one launch each.

No kernel depends on values for its shape, and none synchronises, so a pass can be captured. What
differs between passes is no constant of the compiled code, so another shape compiles nothing. Sums
are float32. This module imports triton; see `recsys.kernels`.
"""

# The arguments of kernels have no Python types:
# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from recsys.kernels import launch
from recsys.models.layers import Heads, Norms
from recsys.models.low_precision import FLOAT8

_HEADS = 8  # that one program rotates
_MULTIPLIED = 1024  # values that one program multiplies
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of an int8 product that one program computes
_OUTPUTS, _INPUTS = 32, 128  # the same; inputs at a time


def try_out(device: torch.device) -> None:
    """Launch a kernel; an error where triton cannot compile."""
    silu_multiply(torch.ones((1, 2), device=device))


def norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """As `layers.norm`, of contiguous (T, n) values."""
    return _norm(values, values, weight, epsilon, added=False)


def add_norm(
    residual: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> torch.Tensor:
    """As `layers.add_norm`."""
    return _norm(residual, added.contiguous(), weight, epsilon, added=True)


def _norm(
    residual: torch.Tensor,
    values: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    added: Any,
) -> torch.Tensor:
    result, size = torch.empty_like(residual), residual.shape[1]
    block = triton.next_power_of_2(size)
    launch(
        norm_rows,
        (len(residual),),
        *(result, residual, values, weight, size, epsilon),
        ADDED=added,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return result


def rotate_and_store(
    merged: torch.Tensor,
    positions: torch.Tensor,
    write: torch.Tensor,
    cache: torch.Tensor,
    heads: Heads,
    norms: Norms | None,
) -> torch.Tensor:
    """As `layers.rotate_and_store`."""
    batch, new = positions.shape
    queries = merged.new_empty((batch, heads.queries, new, heads.size))
    all_heads = heads.queries + 2 * heads.pairs
    launch(
        rotate_heads,
        (len(merged), triton.cdiv(all_heads, _HEADS)),
        *(queries, cache, merged, positions.contiguous(), write, heads.rotation),
        *((heads.rotation, heads.rotation) if norms is None else norms),
        *(new, cache.stride(0), heads.queries, heads.pairs, heads.size // 2, heads.epsilon),
        NORMED=norms is not None,
        HEADS=_HEADS,
        HALF=triton.next_power_of_2(heads.size // 2),
        num_warps=4,
    )
    return queries


def silu_multiply(merged: torch.Tensor) -> torch.Tensor:
    """As `layers.silu_multiply`."""
    size = merged.shape[1] // 2
    result = merged.new_empty((len(merged), size))
    grid = (len(merged), triton.cdiv(size, _MULTIPLIED))
    launch(multiply_gates, grid, result, merged, size, BLOCK=_MULTIPLIED, num_warps=4)
    return result


def quantize_float8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `layers.quantize_float8`."""
    values = values.contiguous()
    small = torch.empty_like(values, dtype=FLOAT8)
    scale = values.new_empty((len(values), 1), dtype=torch.float32)
    block = triton.next_power_of_2(values.shape[1])
    launch(
        quantize_rows,
        (len(values),),
        *(small, scale, values, values.shape[1]),
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return small, scale


def multiply_int8(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As `layers.multiply_int8`; rounded once."""
    (count, inputs), outputs = values.shape, len(weight)
    result = values.new_empty((count, outputs))
    rows = min(_MOST_ROWS, max(_LEAST_ROWS, triton.next_power_of_2(count)))
    launch(
        multiply_codes,
        (triton.cdiv(outputs, _OUTPUTS), triton.cdiv(count, rows)),
        *(result, values.contiguous(), weight, scale, count, outputs, inputs),
        ROWS=rows,
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS,
        num_warps=4,
    )
    return result


@triton.jit(do_not_specialize=["size", "epsilon"])
def norm_rows(
    result, residual, values, weight, size, epsilon, ADDED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program t: the norm of row t, to whose residual `values` are added first if ADDED."""
    row = tl.program_id(0).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    inside = place < size
    exact = tl.load(residual + row + place, mask=inside, other=0.0).to(tl.float32)
    if ADDED:
        exact += tl.load(values + row + place, mask=inside, other=0.0).to(tl.float32)
        rounded = exact.to(residual.dtype.element_ty)
        tl.store(residual + row + place, rounded, mask=inside)
        exact = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(exact * exact, 0) / size + epsilon)
    normed = (exact * scale).to(result.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + row + place, (normed * factor).to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["new", "values_from", "queries", "pairs", "half", "epsilon"])
def rotate_heads(
    rotated,
    cache,
    merged,
    positions,
    write,
    rotation,
    query_weight,
    key_weight,
    new,
    values_from,
    queries,
    pairs,
    half,
    epsilon,
    NORMED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (t, i): block i of the heads of token t, as two (HEADS, HALF) halves.

    Values are moved as they are. `half` is D / 2, `values_from` where the cache's values begin.
    """
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    place = tl.arange(0, HALF)[None, :]
    size = 2 * half
    inside = (head < queries + 2 * pairs) & (place < half)
    kind = rotated.dtype.element_ty
    source = merged + token * (queries + 2 * pairs) * size + head * size + place
    plain_first = tl.load(source, mask=inside, other=0.0)
    plain_second = tl.load(source + half, mask=inside, other=0.0)
    first, second = plain_first.to(tl.float32), plain_second.to(tl.float32)
    is_query = head < queries
    is_key = (head >= queries) & (head < queries + pairs)
    if NORMED:
        squares = tl.sum(first * first + second * second, 1)[:, None]
        scale = tl.rsqrt(squares / size + epsilon)
        used = inside & is_query
        weight = tl.load(query_weight + place + head * 0, mask=used, other=0.0)
        weight += tl.load(key_weight + place + head * 0, mask=inside & is_key, other=0.0)
        normed = (first * scale).to(kind).to(tl.float32) * weight.to(tl.float32)
        first = normed.to(kind).to(tl.float32)
        weight = tl.load(query_weight + half + place + head * 0, mask=used, other=0.0)
        weight += tl.load(key_weight + half + place + head * 0, mask=inside & is_key, other=0.0)
        normed = (second * scale).to(kind).to(tl.float32) * weight.to(tl.float32)
        second = normed.to(kind).to(tl.float32)
    angle = rotation + tl.load(positions + token) * size + place
    cosine = tl.load(angle, mask=place < half, other=0.0).to(tl.float32)
    sine = tl.load(angle + half, mask=place < half, other=0.0).to(tl.float32)
    # As in torch, products are rounded to the model's dtype before they are added.
    low = (first * cosine).to(kind).to(tl.float32) - (second * sine).to(kind).to(tl.float32)
    high = (second * cosine).to(kind).to(tl.float32) + (first * sine).to(kind).to(tl.float32)
    low, high = low.to(kind), high.to(kind)
    batch, step = token // new, token % new
    to = rotated + ((batch * queries + head) * new + step) * size + place
    tl.store(to, low, mask=inside & is_query)
    tl.store(to + half, high, mask=inside & is_query)
    slot = tl.load(write + token)
    to = cache + (slot * pairs + head - queries) * size + place
    tl.store(to, low, mask=inside & is_key)
    tl.store(to + half, high, mask=inside & is_key)
    to += values_from - pairs * size
    is_value = head >= queries + pairs
    tl.store(to, plain_first, mask=inside & is_value)
    tl.store(to + half, plain_second, mask=inside & is_value)


@triton.jit(do_not_specialize=["size"])
def multiply_gates(result, merged, size, BLOCK: tl.constexpr):
    """Program (t, i): block i of row t."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    kind = result.dtype.element_ty
    gate = tl.load(merged + 2 * row * size + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(merged + (2 * row + 1) * size + place, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(result + row * size + place, (silu * up).to(kind), mask=inside)


@triton.jit(do_not_specialize=["size"])
def quantize_rows(small, scales, values, size, BLOCK: tl.constexpr):
    """Program t: row t in float8, whose largest value is 448, and its scale, at least 2^-126."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    inside = place < size
    exact = tl.load(values + row * size + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(exact), 0), 448.0), 1.1754943508222875e-38)
    scale += tl.sum(exact * 0.0, 0)  # NaN if a value is not finite, which `maximum` may lose
    tl.store(scales + row, scale)
    tl.store(small + row * size + place, tl.div_rn(exact, scale).to(tl.float8e4nv), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def multiply_codes(
    result,
    values,
    weight,
    scale,
    rows,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (j, i): block j of the outputs of block i of the rows. Sizes of models specialise."""
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    output = (tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)[None, :]
    inner = tl.arange(0, INPUTS)
    left = values + row * inputs + inner[None, :]
    right = weight + output * inputs + inner[:, None]
    sums = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for start in range(0, inputs, INPUTS):
        inside = inner < inputs - start
        some = tl.load(left + start, mask=(row < rows) & inside[None, :], other=0.0)
        codes = tl.load(right + start, mask=(output < outputs) & inside[:, None], other=0)
        sums += tl.dot(some, codes.to(some.dtype), input_precision="ieee")
    factor = tl.load(scale + output, mask=output < outputs, other=0.0)
    place = result + row * outputs + output
    inside = (row < rows) & (output < outputs)
    tl.store(place, (sums * factor).to(result.dtype.element_ty), mask=inside)
