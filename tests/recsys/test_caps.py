"""Caps: what they admit and close, against counting in plain Python."""

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from recsys.constraint.attributes import Attributes
from recsys.constraint.caps import Caps

MOST = 8
VALUES = {
    "word": st.sampled_from([None, "a", "b", "ä"]),
    "number": st.sampled_from([None, 0, 1, 2**62, -3]),
    "share": st.sampled_from([None, 0.0, 0.5, float("nan"), 1e300]),
    "flag": st.sampled_from([None, True, False]),
    "words": st.none() | st.lists(st.sampled_from(["a", "b", "c", None]), max_size=3),
    "numbers": st.none() | st.lists(st.sampled_from([1, 2, 3, None]), max_size=3),
}
TYPES = {
    "word": pa.string(), "number": pa.int64(), "share": pa.float64(), "flag": pa.bool_(),
    "words": pa.list_(pa.string()), "numbers": pa.list_(pa.int64()),
}  # fmt: skip


def values_of(row, name):
    value = row[name]
    listed = value if isinstance(value, list) else [value]
    return {one for one in listed if one is not None and one == one}


@given(
    st.lists(st.fixed_dictionaries(VALUES), min_size=1, max_size=MOST),
    st.dictionaries(st.sampled_from(sorted(VALUES)), st.integers(1, 2), max_size=3),
    st.randoms(use_true_random=False),
)
def test_admission_is_that_of_counting(rows, most, random):
    table = pa.table({n: pa.array([r[n] for r in rows], t) for n, t in TYPES.items()})
    order = np.array(random.sample(range(len(rows)), len(rows)), np.int32)
    caps = Caps(Attributes(table, order), most)
    held = []

    def fits(row):
        return all(
            sum(value in values_of(other, name) for other in held) < count
            for name, count in most.items()
            for value in values_of(row, name)
        )

    for place in random.sample(range(len(rows)), len(rows)):
        assert caps.closed().tolist() == [not fits(rows[i]) for i in order]
        row = rows[order[place]]
        expected = fits(row)
        assert caps.admit(place) == expected
        if expected:
            held.append(row)
