"""Triton kernels of a layer against their twins; `test_level_kernel.py` runs this.

Triton's interpreter must be chosen before triton is imported, so these tests have a process of
their own, with TRITON_INTERPRET=1.
"""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact, tiny_model

from recsys.models import layer_kernels, layers, llama
from recsys.models.layers import Heads
from recsys.models.mask import prompt_mask
from recsys.models.tree_forward import TreeModel

assert os.environ["TRITON_INTERPRET"] == "1"
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 1000)
# A sum in another order may change the rounding of a value of 16 bits to the next one.
CLOSE = {
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 2e-2, "rtol": 2e-2},
}


def close(found, expected, exact):
    """Against the twin's values; those of 32 bits both against the twin's in float64."""
    if expected.dtype == torch.float32:
        assert_as_exact(found, expected, exact)
    else:
        torch.testing.assert_close(found, expected, **CLOSE[expected.dtype])


def doubles(*tensors):
    return [tensor.double() for tensor in tensors]


@given(st.integers(1, 5), st.integers(1, 80), DTYPES, SEEDS)
@settings(max_examples=6, deadline=None)
def test_norms_and_residuals(rows, size, dtype, seed):
    torch.manual_seed(seed)
    values, added = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    exact = doubles(values, added, weight)
    close(
        layer_kernels.norm(values, weight, 1e-5),
        layers.norm(values, weight, 1e-5),
        layers.norm(exact[0], exact[2], 1e-5),
    )
    mine, theirs = values.clone(), values.clone()
    found = layer_kernels.add_norm(mine, added, weight, 1e-5)
    expected = layers.add_norm(theirs, added, weight, 1e-5)
    close(found, expected, layers.add_norm(*exact, 1e-5))
    if dtype == torch.bfloat16:  # the interpreter truncates where a GPU rounds
        close(mine, theirs, None)
    else:
        assert torch.equal(mine, theirs)


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 5)),
    st.integers(1, 9),
    st.booleans(),
    DTYPES,
    SEEDS,
)
@settings(max_examples=8, deadline=None)
def test_rotated_queries_and_stored_pairs(tokens, groups, half, normed, dtype, seed):
    """Slots that are not written keep their values; the cache is a part of a larger storage."""
    torch.manual_seed(seed)
    (batch, new), (pairs, queries), size = tokens, (groups[0], groups[0] * groups[1]), 2 * half
    angles = torch.rand(20, half) * 7
    rotation = torch.cat([angles.cos(), angles.sin()], dim=-1).to(dtype)
    heads = Heads(queries, pairs, size, 1e-5, rotation)
    merged = torch.randn(batch * new, (queries + 2 * pairs) * size).to(dtype)
    positions = torch.randint(0, 20, (batch, new))
    slots = 8
    write = torch.stack([torch.randperm(slots)[:new] + b * slots for b in range(batch)]).flatten()
    norms = tuple(torch.randn(2, size).to(dtype)) if normed else None
    storage = torch.randn(3, 2, (batch + 1) * slots, pairs, size).to(dtype)
    both = storage.clone(), storage.clone()
    caches = [s[:, :, : batch * slots].view(3, 2, batch, slots, pairs, size)[1] for s in both]
    found = layer_kernels.rotate_and_store(merged, positions, write, caches[0], heads, norms)
    expected = layers.rotate_and_store(merged, positions, write, caches[1], heads, norms)
    exact = storage.double()
    cache = exact[:, :, : batch * slots].view(3, 2, batch, slots, pairs, size)[1]
    turned = Heads(queries, pairs, size, 1e-5, rotation.double())
    norms = None if norms is None else tuple(doubles(*norms))
    queries = layers.rotate_and_store(merged.double(), positions, write, cache, turned, norms)
    close(found, expected, queries)
    close(both[0], both[1], exact)
    untouched = torch.ones(batch * slots, dtype=torch.bool)
    untouched[write] = False
    assert torch.equal(both[0][[0, 2]], storage[[0, 2]])
    assert torch.equal(both[0][1, :, : batch * slots][:, untouched],
                       storage[1, :, : batch * slots][:, untouched])  # fmt: skip
    assert torch.equal(both[0][1, :, batch * slots :], storage[1, :, batch * slots :])
    assert torch.equal(caches[0][1], caches[1][1])  # values are moved as they are


@given(st.integers(1, 4), st.sampled_from([1, 7, 1024, 1030]), DTYPES, SEEDS)
@settings(max_examples=5, deadline=None)
def test_gated_activations(rows, size, dtype, seed):
    torch.manual_seed(seed)
    merged = (4 * torch.randn(rows, 2 * size)).to(dtype)
    functions = layer_kernels.silu_multiply, layers.silu_multiply
    close(*(f(merged) for f in functions), layers.silu_multiply(merged.double()))


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-sliding"])
def test_a_model_with_kernels_has_the_same_logits(name, monkeypatch):
    tokens = torch.randint(1, 60, (2, 6), generator=torch.Generator().manual_seed(0))
    places = torch.arange(6).expand(2, -1)
    found = []
    plain, kernel = (False, None, torch.float32), (True, layer_kernels, torch.float32)
    for own, kernels, dtype in (
        kernel,
        (True, None, torch.float32),
        plain,
        (*plain[:2], torch.float64),
    ):
        monkeypatch.setattr(llama, "find_kernels", lambda *_, kernels=kernels: kernels)
        ready = TreeModel(tiny_model(name, dtype=dtype), own_forward=own)
        with ready.pool.lend(2, 16, 0) as cache:
            found.append(
                ready.forward(
                    tokens,
                    places,
                    lambda window, dtype=ready.dtype: prompt_mask(
                        places, 16, window=window, dtype=dtype
                    ),
                    cache,
                    write=places,
                    view=16,
                )
            )
    for logits in found[:2]:
        assert_as_exact(logits, *found[2:])
