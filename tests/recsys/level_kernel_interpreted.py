"""Kernels of a level against the tensor code; `test_level_kernel.py` runs this in the interpreter.

Triton's interpreter must be chosen before triton is imported, so these tests have a process of
their own, with TRITON_INTERPRET=1.
"""

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import assert_as_exact, random_catalog

from recsys.constraint import ItemTrie
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding import (
    level_kernel,
)
from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.transfers import Upload

assert os.environ["TRITON_INTERPRET"] == "1"
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of log(0)
TOKENS = 100
CPU = torch.device("cpu")


class Twin(Step):
    """The tensor code."""

    def _kernels(self, frontier, logits, depth):
        return None


def expanded(step, frontier, logits, depth, width):
    """The kernels' result, after it was found to have the same bits as the tensor code's."""
    assert step._kernels(frontier, logits, depth) is level_kernel
    found = step.expand(frontier, logits, depth, width)
    expected = Twin(step.trie, step.excluded, allowed=step.allowed).expand(
        frontier, logits, depth, width
    )
    for name, mine, theirs in zip(Frontier._fields, found, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name
    return found


@settings(max_examples=20)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(3, 3), (2, 70), (3, 16), (4, 2)]),
    st.integers(1, 200),
    st.lists(st.sampled_from([None, 0.0, 0.1, 0.6]), min_size=1, max_size=3),
    st.sampled_from([1, 2, 5, 20, 300]),
    st.booleans(),
)
def test_a_level_has_the_bits_of_the_tensor_code(seed, shape, items, shares, width, ties):
    """Any trie, restrictions and beams, and logits that tie, are infinite or are NaN."""
    (levels, codes), rng = shape, np.random.default_rng(seed)
    tokens = list(rng.integers(0, codes, (items, levels)))
    host = ItemTrie.build(tokens)
    trie, batch = DeviceTrie.of(host), len(shares)
    masks = [s if s is None else RowMask.of(host, rng.random(items) < s) for s in shares]
    gone = [rng.integers(0, host.num_rows, rng.integers(0, 12)) for _ in shares]
    upload = Upload("cpu")
    excluded = Excluded.of(host, upload, gone, masks)
    allowed = Allowed.of(host, upload, masks)
    if allowed is not None:  # in one array, as on a GPU
        start = allowed.line[:, None] * host.padded_states
        allowed = Allowed((torch.cat(allowed.alive),), 0 * allowed.line, start, allowed.masks)
    upload.send()
    depth, beams = int(rng.integers(0, host.num_levels)), int(rng.integers(1, 9))
    first, last = host.depth_start[depth : depth + 2]
    states = np.full((batch, beams), NO_STATE)
    for line in states:
        some = rng.permutation(np.arange(first, last))[: rng.integers(0, beams + 1)]
        line[: len(some)] = np.sort(some)
    sums = rng.choice([0.0, -1.0, -2.5], states.shape) if ties else -rng.random(states.shape)
    sums = np.where(states == NO_STATE, -np.inf, sums).astype(np.float32)
    values = rng.standard_normal((batch, beams, TOKENS)).astype(np.float32)
    if ties:
        values = rng.choice([-1.0, 0.0, 0.5, -np.inf, np.nan], values.shape).astype(np.float32)
    totals = rng.choice([1.0, 2.0], states.shape).astype(np.float32)
    rest = rng.choice([-np.inf, -1.5], (batch, 1)).astype(np.float32)
    states, sums, rest = (torch.from_numpy(a) for a in (states, sums, rest))
    frontier = Frontier(states, sums, states, states, sums, rest)
    chosen = torch.from_numpy(values)[..., host.alphabet]
    logits = TokenLogits(chosen, torch.from_numpy(totals))
    expanded(Step(trie, excluded, allowed=allowed), frontier, logits, depth, width)


@pytest.mark.parametrize(
    ("beams", "width", "equal"), [(1, 256, True), (20, 20, False), (36, 256, True)]
)
def test_wide_levels_have_the_bits_of_the_tensor_code(width, beams, equal):
    """256 codes below each of 256: several blocks of candidates, all of which may tie."""
    pairs = np.stack(np.divmod(np.arange(256 * 256), 256), axis=1)
    trie = DeviceTrie.of(ItemTrie.build(pairs))
    generator = torch.Generator().manual_seed(width)
    states = 1 + torch.randperm(256, generator=generator)[:beams].sort().values.expand(2, -1)
    sums = torch.randn((2, beams), generator=generator)
    values = torch.randn((2, beams, 256), generator=generator)
    if equal:
        sums, values = torch.zeros_like(sums), values.round()
    frontier = Frontier(states, sums, states, states, sums, sums[:, :1] - 50)
    logits = TokenLogits(values, torch.full_like(sums, 6.0))
    expanded(Step(trie), frontier, logits, 1, width)


def test_signed_zeros_tie_and_infinities_rank():
    trie = DeviceTrie.of(ItemTrie.build([[token] for token in range(8)]))
    inf, nan = torch.inf, torch.nan
    values = torch.tensor([[[-0.0, 0.0, nan, -0.0, inf, 0.0, -inf, 1e-45]]])
    root = Frontier.root(1, torch.float32, CPU)
    root = root._replace(log_probs=torch.tensor([[-0.0]]))
    for width, best in ((1, [4]), (2, [4, 7]), (3, [0, 4, 7]), (5, [0, 1, 3, 4, 7])):
        found = expanded(Step(trie), root, TokenLogits(values, torch.zeros(1, 1)), 0, width)
        assert found.tokens[0].tolist() == best


@pytest.mark.parametrize("size", [1, 100, 8192, 20_000])
def test_the_log_sum_exp_is_near_the_exact_one(size):
    generator = torch.Generator().manual_seed(size)
    whole = 20 * torch.randn((2, 6, size), generator=generator)
    logits = whole[:, ::2]
    exact = torch.from_numpy(np.logaddexp.reduce(logits.double().numpy(), axis=-1))
    found = level_kernel.log_sum_exp(logits)
    assert_as_exact(found, logits.logsumexp(-1), exact)


@pytest.mark.parametrize(
    ("logits", "total"),
    [
        ([0.0, torch.nan], torch.nan),
        ([0.0, torch.inf], torch.inf),
        ([torch.inf, torch.inf, torch.nan], torch.nan),
        ([-torch.inf, -torch.inf], -torch.inf),
        ([-torch.inf, 3.0], 3.0),
        ([3e38, 3e38], 3e38),
    ],
    ids=str,
)
def test_a_total_is_finite_where_torch_s_is(logits, total):
    logits = torch.tensor([[logits]])
    found = level_kernel.log_sum_exp(logits)
    torch.testing.assert_close(found, torch.tensor([[total]]), equal_nan=True)


RNG = np.random.default_rng(0)
TRIE = ItemTrie.build(random_catalog(RNG, 200, 4))


def test_samples_boosts_and_doubles_are_left_to_the_tensor_code():
    trie = DeviceTrie.of(TRIE)
    root = Frontier.root(1, torch.float64, CPU)
    logits = TokenLogits.of(torch.zeros((1, 1, 64), dtype=torch.float64), trie)
    assert Step(trie)._kernels(root, logits, 0) is None
    root = Frontier.root(1, torch.float32, CPU)
    logits = TokenLogits.of(torch.zeros((1, 1, 64)), trie)
    assert Step(trie)._kernels(root, logits, 0) is level_kernel
    assert Step(trie, normalize="allowed")._kernels(root, logits, 0) is None
