import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from recsys.serving.diversity import diversify, pool

CODES = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0)]


def test_without_diversity_the_order_is_that_of_the_scores():
    assert diversify([-1.0, -2.0, -3.0, -4.0], CODES, 0.0, 3) == [0, 1, 2]


def test_full_diversity_chooses_the_least_similar_item_next():
    assert diversify([-1.0, -2.0, -3.0, -4.0], CODES, 1.0, 4) == [0, 3, 2, 1]


def test_half_of_it_weighs_relevance_against_likeness():
    # 1 and 0: relevance e^-0.1 = 0.905 less likeness 2/3; of 3: e^-2 = 0.135 less 0
    assert diversify([0.0, -0.1, -2.0], [CODES[0], CODES[1], CODES[3]], 0.5, 2) == [0, 1]
    assert diversify([0.0, -0.1, -0.9], [CODES[0], CODES[1], CODES[3]], 0.5, 2) == [0, 2]


@given(
    st.lists(st.tuples(st.floats(-50, 0), st.tuples(*[st.integers(0, 2)] * 3)), max_size=30),
    st.floats(0, 1),
    st.integers(1, 40),
)
def test_each_item_is_chosen_once_and_the_best_comes_first(found, diversity, k):
    found.sort(key=lambda one: -one[0])
    chosen = diversify([s for s, _ in found], [c for _, c in found], diversity, k)
    assert len(chosen) == len(set(chosen)) == min(k, len(found))
    if found and diversity < 1:
        assert chosen[0] == 0


def test_the_pool_is_larger_than_the_list_and_limited():
    assert [pool(k) for k in (1, 10, 50, 200)] == [21, 30, 150, 200]
    assert np.all(np.diff([pool(k) for k in range(1, 200)]) >= 0)
