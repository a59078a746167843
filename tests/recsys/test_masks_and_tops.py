import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.mask import RowMask
from recsys.decoding.expand import stable_top


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 8),
    st.integers(1, 4000),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
def test_the_best_are_the_first_of_a_stable_sort(seed, count, size, distinct, unknown):
    rng = np.random.default_rng(seed)
    values = torch.from_numpy(rng.integers(0, distinct, (2, size))).float()
    values[values == 0] = -torch.inf
    broken = torch.from_numpy(rng.random((2, size)) < unknown)
    count = min(count, size)
    found, rest = stable_top(values.masked_fill(broken, torch.nan), count)
    values[broken] = -torch.inf
    order = values.sort(dim=-1, descending=True, stable=True)
    best = order.indices[:, :count].masked_fill(order.values[:, :count] == -torch.inf, size)
    assert torch.equal(found, best.sort(-1).values)
    assert rest.flatten().tolist() == (
        order.values[:, count].tolist() if count < size else [-torch.inf] * 2
    )


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 3), (3, 3), (2, 70), (4, 2)]),
    st.integers(1, 90),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
)
def test_a_mask_of_few_items_is_made_like_one_of_many(seed, shape, items, share):
    levels, codes = shape
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(rng.integers(0, codes, (items, levels)) + np.arange(levels) * codes)
    allowed = rng.random(items) < share
    found = []
    for most in (0, items + 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("recsys.constraint.mask._SPARSE", most)
            found.append(RowMask.of(trie, allowed))
    few, many = found
    assert few.alive.tolist() == many.alive.tolist()
    held = np.add.reduceat(allowed, trie.row_item_start[:-1]) > 0
    below = np.append(0, np.cumsum(held))
    alive = below[trie.row_stop] > below[trie.row_start]
    assert few.alive[: trie.num_states].tolist() == alive.tolist()
