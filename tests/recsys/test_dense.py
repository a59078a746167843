import gc

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.mask import MaskRoom, RowMask
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding.expand import Frontier, Step, TokenLogits, stable_top
from recsys.transfers import Upload

CPU = torch.device("cpu")


class _Listed(Step):
    """Expands by way of `children`, which is what `candidates` must agree with."""

    def candidates(self, states, depth):
        return self.children(states, depth)


def _masks(trie, rng, shares, room):
    return [
        None if share is None else RowMask.of(trie, rng.random(trie.num_items) < share, room)
        for share in shares
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(3, 3), (2, 70), (3, 16), (4, 2), (2, 150)]),
    st.integers(1, 400),
    st.lists(st.sampled_from([None, 0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=4),
    st.integers(1, 12),
    st.booleans(),
    st.booleans(),
)
# Each of these once gave a beam that does not exist the state of a live beam.
@example(62995222, (3, 3), 7, [0.0, 0.0, 0.0, None], 2, False, False)
@example(63659, (4, 2), 8, [0.0, None], 6, False, False)
@example(2367967116, (4, 2), 11, [1.0], 11, False, False)
def test_dense_and_listed_steps_agree_exactly(seed, shape, items, shares, beams, own_tokens, roomy):
    levels, codes = shape
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, codes, (items, levels)) + own_tokens * np.arange(levels) * codes
    trie = ItemTrie.build(tokens)
    device = DeviceTrie.of(trie)
    masks = _masks(trie, rng, shares, MaskRoom(trie, 2) if roomy else None)
    gone = [rng.permutation(trie.num_rows)[: rng.integers(0, 20)] for _ in shares]
    limits = {
        "excluded": Excluded.of(trie, Upload("cpu"), gone, masks),
        "allowed": Allowed.of(trie, Upload("cpu"), masks),
    }
    step, listed = Step(device, **limits), _Listed(device, **limits)
    ours = theirs = Frontier.root(len(shares), torch.float32, CPU)
    # few distinct values, so that there are ties
    said = torch.from_numpy(rng.integers(-3, 4, (levels * codes + 1,) * 2)).float()
    for depth in range(trie.num_levels):
        ours = step.expand(ours, TokenLogits.of(said[ours.tokens], device), depth, beams)
        theirs = listed.expand(theirs, TokenLogits.of(said[theirs.tokens], device), depth, beams)
        missing = ours.scores == -torch.inf
        assert torch.equal(ours.states == NO_STATE, missing)
        for name in ("states", "scores", "log_probs", "rest"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        for name in ("tokens", "parents"):
            assert torch.equal(getattr(ours, name)[~missing], getattr(theirs, name)[~missing]), name
        for states in (line[line != NO_STATE].tolist() for line in ours.states):
            assert states == sorted(set(states))
        assert (missing.long().diff() >= 0).all()  # beams that do not exist come last


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 8),
    st.integers(1, 4000),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.001, 0.3, 1.0]),
)
def test_the_best_of_parts_are_the_best(seed, count, size, distinct, unknown):
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


def test_a_depth_is_dense_where_an_eighth_of_its_pairs_exist():
    tokens = np.stack(np.meshgrid(np.arange(4), [4, 36]), -1).reshape(-1, 2)
    trie = ItemTrie.build(tokens)  # four states with two children each, of symbols 4 and 5
    assert [dense.width for dense in trie.dense] == [4, 2]
    sparse = ItemTrie.build([[i, 100 + 9 * i + j] for i in range(20) for j in range(2)])
    assert [dense is None for dense in sparse.dense] == [False, True]


def test_room_is_given_back_when_nothing_holds_the_mask():
    trie = ItemTrie.build([[0, 1], [0, 2], [1, 3]])
    room = MaskRoom(trie, 1)
    one = RowMask.of(trie, np.array([True, False, False]), room)
    other = RowMask.of(trie, np.array([False, False, True]), room)
    assert one.room is not None
    assert other.room is None
    allowed = Allowed.of(trie, Upload("cpu"), [one, None])
    place = one.room[1]
    del one
    gc.collect()
    assert RowMask.of(trie, np.array([True, True, True]), room).room is None
    del allowed
    gc.collect()
    again = RowMask.of(trie, np.array([True, True, True]), room)
    assert again.room == (room, place)


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
