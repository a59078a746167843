"""The pool of key and value storage: lent, reused, and cleaned where something is not finite."""

import pytest
import torch
import transformers

from recsys.models.cache import CachePool

CONFIG = transformers.LlamaConfig(
    hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
)


def pool():
    return CachePool(CONFIG, torch.float32, torch.device("cpu"))


def test_storage_that_came_back_is_lent_again():
    ours = pool()
    with ours.lend(2, 16, 16) as cache:
        first = cache.buffer.data_ptr()
        with ours.lend(2, 16, 64) as other:
            larger = other.buffer.data_ptr()
    assert ours.lent == 0
    with ours.lend(1, 16, 16) as cache:
        assert cache.buffer.data_ptr() == first  # the smallest that fits
    with ours.lend(2, 16, 40) as cache:
        assert cache.buffer.data_ptr() == larger


@pytest.mark.parametrize("finite", [True, False])
def test_storage_is_cleaned_where_something_was_not_finite(finite):
    ours = pool()
    with ours.lend(1, 16, 16) as cache:
        cache.buffer.fill_(7.0 if finite else float("nan"))
        cache.note(torch.tensor(finite))
        cache.note(torch.tensor(True))
    with ours.lend(1, 16, 16) as cache:
        assert (cache.buffer == (7.0 if finite else 0.0)).all()


def test_a_larger_cache_takes_over_what_was_noted():
    ours = pool()
    with ours.lend(1, 16, 16) as small, ours.lend(1, 16, 32) as large:
        small.buffer.fill_(float("nan"))
        small.note(torch.tensor(False))
        large.copy_from(small)
    for _ in range(2):
        with ours.lend(1, 16, 32) as cache:
            assert (cache.buffer == 0).all()
