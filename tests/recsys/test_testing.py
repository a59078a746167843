"""The comparison in float64 by which the tests judge results in float32."""

import numpy as np
import pytest
import torch
from oracles import assert_as_exact, same_list

EXACT = np.array([100.0, -2.0, -np.inf, np.nan])
OTHER = EXACT + 1e-4  # the error of the other way


@pytest.mark.parametrize("error", [0, 3.9e-4, -3.9e-4])
def test_four_times_the_error_of_the_other_way_is_allowed(error):
    assert_as_exact(torch.from_numpy(EXACT + error), OTHER, EXACT.tolist())


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (EXACT + 6e-4, "the largest error is 0.0006, that of the other way 0.0001"),
        (EXACT[:2], "shapes differ"),
        ([100, -2, -np.inf, 0], "infinite or NaN at other places"),
        ([100, -2, np.inf, np.nan], "infinite or NaN at other places"),
        ([100, np.nan, -np.inf, np.nan], "infinite or NaN at other places"),
    ],
)
def test_what_is_wrong_is_said(found, words):
    with pytest.raises(AssertionError, match=words):
        assert_as_exact(found, OTHER, EXACT)


def test_lists_may_differ_where_float32_cannot_tell():
    exact = [("a", -1.0), ("b", -2.0), ("c", -2.0001), ("d", -3.0)]
    other = [("a", -1.0), ("b", -2.0), ("c", -2.0002), ("d", -3.0)]
    near = [("a", -1.0), ("c", -2.0), ("b", -2.0), ("d", -3.0)]
    assert same_list(near, other, exact)
    assert not same_list(near, exact, exact)
    assert not same_list([*exact[:3], ("d", -3.001)], other, exact)
    assert not same_list([*exact[:3], ("e", -2.5)], other, exact)
