import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recsys.serving.bodies import MAX_DEPTH, MalformedError, parse

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
).filter(lambda value: "Infinity" not in json.dumps(value))


@given(VALUES, st.booleans())
def test_every_json_value_is_parsed(value, ascii_only):
    assert parse(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"a": NaN}', "NaN is not a number"),
        (b"[-Infinity]", "-Infinity is not a number"),
        (b"[1e999]", "1e999 is too large"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "the name 'b' twice"),
        (b"\xff", "not UTF-8"),
        (b'["\\ud800"]', "half of a surrogate pair"),
        (b'{"\\uDFFF": 1}', "half of a surrogate pair"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "nested deeper than 64"),
        (b'{"a":' * 100 + b"1" + b"}" * 100, "nested deeper than 64"),
        (b"[" * 100_000, "nested deeper than 64"),
        (b"[" + b"9" * 5_000 + b"]", "too many digits"),
        (b"{'a': 1}", "at character 1"),
        (b"", "at character 0"),
    ],
)
def test_invalid_json_is_refused_with_the_reason(body, why):
    with pytest.raises(MalformedError, match=why):
        parse(body)


def test_the_deepest_that_is_allowed_is_read():
    assert parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH) is not None
    assert parse(b'["\\ud83d\\ude00"]') == ["\N{GRINNING FACE}"]
    assert parse(b'["' + b"[" * 1000 + b'"]') == ["[" * 1000]


def test_a_name_twice_among_very_many_is_found_in_linear_time():
    """Counting each name among all of them once took hours for a body like this one."""
    names = [f'"{i}":0' for i in range(300_000)]
    with pytest.raises(MalformedError, match="an object has the name '299999' twice"):
        parse(("{" + ",".join([*names, names[-1]]) + "}").encode())
