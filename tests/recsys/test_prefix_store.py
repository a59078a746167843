"""The prefix store gives back what was put in, bit for bit, and neither mixes, breaks nor leaks."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from recsys.models.prefix_store import PrefixStore

LAYERS, HEADS, SIZE = 2, 3, 6
ROW = LAYERS * 2 * HEADS * SIZE * 4  # bytes of one token in float32
SLOTS = 24
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=HEADS, hidden_size=18)


def store_of(blocks, block=4):
    max_bytes = blocks * block * ROW + ROW - 1
    return PrefixStore(CONFIG, torch.float32, torch.device("cpu"), max_bytes, block)


def pad(prompts):
    tokens = np.zeros((len(prompts), max(map(len, prompts), default=0)), dtype=np.int64)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, np.array([len(prompt) for prompt in prompts], dtype=np.int64)


class Twin:
    """What a model would compute: one random row for each run of tokens."""

    def __init__(self, seed=0):
        self.rows, self.draw = {}, torch.Generator().manual_seed(seed)

    def row(self, prefix):
        if prefix not in self.rows:
            self.rows[prefix] = torch.randn(LAYERS, 2, HEADS, SIZE, generator=self.draw)
        return self.rows[prefix]

    def cache(self, prompts, slots=SLOTS):
        """The working cache after these prompts; slots behind a prompt are NaN."""
        cache = torch.full((LAYERS, 2, len(prompts), slots, HEADS, SIZE), torch.nan)
        for b, prompt in enumerate(prompts):
            for p in range(len(prompt)):
                cache[:, :, b, p] = self.row(tuple(prompt[: p + 1]))
        return cache

    def insert(self, store, prompts):
        store.insert(*pad(prompts), self.cache(prompts))

    def check(self, store, hit, prompts):
        """Load a hit and compare every slot: right rows in front, nothing touched behind."""
        cache = torch.full((LAYERS, 2, len(prompts), SLOTS, HEADS, SIZE), -7.0)
        store.load(hit, cache)
        for b, (prompt, cached) in enumerate(zip(prompts, hit.cached.tolist(), strict=True)):
            assert cached % store.block == 0
            assert cached <= max(0, len(prompt) - 1)
            for p in range(SLOTS):
                if p < cached:
                    assert torch.equal(cache[:, :, b, p], self.rows[tuple(prompt[: p + 1])])
                else:
                    assert (cache[:, :, b, p] == -7).all()


def cached(store, prompt):
    """Tokens found of one prompt. The lookup counts as use of what it finds."""
    with store.lookup(*pad([prompt])) as hit:
        return int(hit.cached[0])


def assert_sound(store):
    """Every block is in use or free; without holders it can be evicted, after its children."""
    stored = list(store._root.descendants())
    numbers = [block.number for block in stored] + store._free
    assert len(set(numbers)) == len(numbers)
    assert store.held or len(numbers) == store.blocks  # dropped blocks may still be held
    assert list(store._order) == [block for block in store._order if not block.holders]
    assert set(store._order) == {block for block in stored if not block.holders}
    age = {block: place for place, block in enumerate(store._order)}
    for block in stored:
        assert not block.dropped
        assert block.parent.children[block.tokens] is block
        assert block.holders >= sum(child.holders for child in block.children.values())
        assert all(age[child] < age[block] for child in block.children.values() if block in age)


def test_the_oldest_leaf_goes_first_and_a_used_path_stays():
    store, twin = store_of(5), Twin()
    old, new = [1] * 9, [2] * 9
    twin.insert(store, [old])
    twin.insert(store, [new])
    assert cached(store, old) == 8  # now `new` is the older one
    twin.insert(store, [[3] * 9])
    assert cached(store, old) == 8
    assert cached(store, [3] * 9) == 8
    assert cached(store, new) == 4  # its leaf went, its first block did not have to
    assert store.used == 5
    assert_sound(store)


def test_a_prompt_longer_than_the_pool_is_stored_in_part():
    store, twin = store_of(3), Twin()
    twin.insert(store, [range(21)])
    assert cached(store, range(21)) == 12
    # its own blocks are not given up for its own rest, nor for its batch mates
    twin.insert(store, [range(21), [9] * 8])
    assert cached(store, range(21)) == 12
    assert cached(store, [9] * 8) == 0
    assert_sound(store)


def test_tokens_of_any_integer_type_are_the_same_tokens():
    store, twin = store_of(4), Twin()
    tokens, lengths = pad([range(9)])
    store.insert(tokens.astype(np.int32), lengths, twin.cache([range(9)]))
    for kind in (np.uint8, np.int64):
        with store.lookup(np.asfortranarray(tokens.astype(kind)), [9]) as hit:
            assert hit.cached.tolist() == [8]


def test_a_failed_insert_stores_nothing(monkeypatch):
    store, twin = store_of(8), Twin()
    twin.insert(store, [range(5)])

    def fail(*_):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(store, "_send", fail)
        with pytest.raises(MemoryError):
            twin.insert(store, [range(13), range(13), [*range(8), 1, 1, 1, 1]])
        hit = store.lookup(*pad([range(13)]))
        with pytest.raises(MemoryError), hit:
            store.load(hit, twin.cache([range(13)]))
    assert store.held == 0
    assert store.used == 1
    assert cached(store, range(13)) == 4
    assert_sound(store)


def test_a_working_cache_may_be_the_front_of_a_larger_storage():
    store, twin = store_of(8), Twin()
    prompts = [list(range(9)), [4] * 6]
    storage = torch.full((LAYERS, 2, 5 * SLOTS, HEADS, SIZE), torch.nan)
    front = storage[:, :, : 3 * SLOTS].unflatten(2, (3, SLOTS))  # one request more than needed
    front[:, :, :2] = twin.cache(prompts)
    store.insert(*pad(prompts), front)
    storage.fill_(-7)
    with store.lookup(*pad(prompts)) as hit:
        twin.check(store, hit, prompts)
        store.load(hit, front)
    assert torch.equal(front[:, :, 0, :8], twin.cache(prompts)[:, :, 0, :8])
    assert (storage[:, :, 3 * SLOTS :] == -7).all()


def test_errors_name_the_value_and_the_way_out():
    with pytest.raises(ValueError, match=r"max_bytes is 1151.*takes 1152; give it more"):
        PrefixStore(CONFIG, torch.float32, torch.device("cpu"), max_bytes=1151)
    with pytest.raises(ValueError, match="block is 0"):
        store_of(2, block=0)
    store, twin = store_of(4), Twin()
    tokens, lengths = pad([range(9)])
    with pytest.raises(ValueError, match=r"lengths are \[10\]; give one integer from 0 to 9"):
        store.lookup(tokens, [10])
    with pytest.raises(ValueError, match="for each of the 1 prompts"):
        store.lookup(tokens, [9, 9])
    with pytest.raises(ValueError, match=r"give integers \(B, T\)"):
        store.lookup(tokens.astype(float), lengths)
    cache = twin.cache([range(9)])
    with pytest.raises(ValueError, match="slots >= 9"):
        store.insert(tokens, lengths, cache[:, :, :, :8])
    with pytest.raises(ValueError, match=r"torch\.float64 .* on cpu; .* need torch\.float32"):
        store.insert(tokens, lengths, cache.double())
    with pytest.raises(RuntimeError, match="stride"):
        store.insert(tokens, lengths, cache.repeat(1, 1, 2, 1, 1, 1)[:, :, :, :9])
    store.insert(tokens, lengths, cache)
    hit = store.lookup(tokens, lengths)
    with pytest.raises(ValueError, match="not held by this store"):
        store_of(4).load(hit, cache)
    store.release(hit)
    with pytest.raises(ValueError, match="inside `with"):
        store.load(hit, cache)
    assert store.held == 0


PROMPTS = st.lists(st.lists(st.integers(0, 1), max_size=SLOTS), min_size=1, max_size=4)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["insert", "lookup", "both"]), PROMPTS),
        st.tuples(st.just("release"), st.integers(0, 9)),
        st.tuples(st.just("clear")),
    ),
    max_size=30,
)


@given(steps=STEPS, block=st.integers(1, 5), blocks=st.sampled_from([1, 3, 8, 10_000]))
@settings(max_examples=150, deadline=None)
def test_loaded_values_are_those_inserted_for_the_same_tokens(steps, block, blocks):
    """Against a twin that remembers every prefix ever inserted; exact where the pool is large."""
    store, twin = store_of(blocks, block), Twin()
    known, live = set(), []
    for action, *arguments in steps:
        if action == "release" and live:
            hit = live.pop(arguments[0] % len(live))[0]
            store.release(hit)
            store.release(hit)  # counts once
        elif action == "clear":
            store.clear()
            known = set()
        if action in ("lookup", "both"):
            (prompts,) = arguments
            hit = store.lookup(*pad(prompts))
            live.append((hit, prompts))
            twin.check(store, hit, prompts)
            for prompt, found in zip(prompts, hit.cached.tolist(), strict=True):
                ends = range(0, len(prompt), block)
                best = max((n for n in ends if tuple(prompt[:n]) in known), default=0)
                assert found <= best
                if blocks == 10_000:
                    assert found == best
        if action in ("insert", "both"):
            (prompts,) = arguments
            twin.insert(store, prompts)
            for prompt in prompts:
                known |= {tuple(prompt[:n]) for n in range(block, len(prompt) + 1)}
        assert bool(store.held) == any(hit.cached.any() for hit, *_ in live)
        assert_sound(store)
    for held in live:
        twin.check(store, *held)
        store.release(held[0])
    assert store.held == 0
    assert_sound(store)


def test_threads_share_a_store():
    store, prompts = store_of(12), [[n // 4 % 3, *[n % 4] * (4 + n)] for n in range(18)]
    twin = Twin()
    twin.cache(prompts)  # every row is drawn before threads read them

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(120):
            mine = [prompts[i] for i in rng.integers(0, len(prompts), 2)]
            with store.lookup(*pad(mine)) as hit:
                twin.check(store, hit, mine)
                twin.insert(store, mine)
            if rng.random() < 0.05:
                store.clear()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert store.held == 0
    assert_sound(store)
