"""Vocabulary: codes to tokens, by hand and by property."""

import json

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from recsys.errors import ArtifactError
from recsys.vocabulary import FILE, Vocabulary

# A pretrained vocabulary of 100 tokens, two levels added at its end, padded to 112.
ADDED = Vocabulary((4, 6), (100, 104), 112, pad=99, prefix=(5, 17, 5))


@st.composite
def vocabularies(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    return Vocabulary.from_levels(sizes, first=draw(st.integers(2, 50)))


def test_levels_follow_pad_and_bos_by_hand():
    vocabulary = Vocabulary.from_levels([3, 2, 4])
    assert vocabulary == Vocabulary((3, 2, 4), (2, 5, 7), 16, pad=0, prefix=(1,))
    assert vocabulary.num_levels == 3
    assert vocabulary.encode(np.array([[0, 0, 0], [2, 1, 3]])).tolist() == [[2, 5, 7], [4, 6, 10]]
    assert ADDED.encode(np.array([3, 5])).tolist() == [103, 109]


@given(vocabularies(), st.data())
def test_codes_are_counted_from_their_level_and_levels_are_disjoint(vocabulary, data):
    rows = st.tuples(*(st.integers(0, size - 1) for size in vocabulary.level_sizes))
    codes = np.array(data.draw(st.lists(rows, min_size=1, max_size=5)))
    tokens = vocabulary.encode(codes)
    assert tokens.dtype == np.int64
    assert (tokens - vocabulary.level_offsets == codes).all()
    assert (vocabulary.encode(codes[0]) == tokens[0]).all()
    every = [
        offset + code
        for offset, size in zip(vocabulary.level_offsets, vocabulary.level_sizes, strict=True)
        for code in range(size)
    ]
    assert len({vocabulary.pad, *vocabulary.prefix, *every}) == 2 + sum(vocabulary.level_sizes)
    assert max(every) < vocabulary.size


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[0, 0], [3, 6]], r"code 6 at level 2 is outside \[0, 6\)"),
        ([[4, 0], [0, 9]], r"code 4 at level 1 is outside \[0, 4\)"),
        ([[0, -1]], r"code -1 at level 2 is outside"),
        ([[0, 0, 0]], "codes have 3 levels, the vocabulary 2"),
        ([[0]], "codes have 1 levels, the vocabulary 2"),
    ],
)
def test_codes_outside_their_level_are_refused_by_place(codes, message):
    with pytest.raises(ValueError, match=message):
        ADDED.encode(np.array(codes))


@pytest.mark.parametrize(
    "values",
    [
        ((), (), 8),
        ((4, 4), (0,), 8),
        ((4, 0), (0, 4), 8),
        ((4, 4), (0, 5), 8),
        ((4, 4), (-1, 4), 8),
        ((4,), (2,), 8, 8),
        ((4,), (2,), 8, 0, (1, 8)),
        ((4,), (2,), 8, 0, (-1,)),
    ],
)
def test_a_vocabulary_that_contradicts_itself_is_refused(values):
    with pytest.raises(ValueError, match="Vocabulary"):
        Vocabulary(*values)


@given(vocabularies())
@example(ADDED)
def test_what_is_saved_is_loaded(tmp_path_factory, vocabulary):
    folder = tmp_path_factory.mktemp("vocabulary", numbered=True)
    vocabulary.save(folder)
    assert Vocabulary.load(folder) == vocabulary


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        "{}",
        '{"level_sizes": [4], "level_offsets": [2], "prefix": [1]}',
        '{"level_sizes": 4, "level_offsets": [2], "prefix": [1], "size": 8}',
        '{"level_sizes": [4], "level_offsets": [2], "prefix": [1], "size": "8"}',
        '{"level_sizes": [4], "level_offsets": [2], "prefix": [1], "size": 8, "colour": 1}',
        json.dumps({**ADDED.__dict__, "size": 109}),
    ],
)
def test_a_file_that_does_not_fit_is_refused_by_name(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    with pytest.raises(ArtifactError, match=r"vocabulary\.json: "):
        Vocabulary.load(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path):
    with pytest.raises(ArtifactError, match=r"vocabulary\.json: .*No such file"):
        Vocabulary.load(tmp_path)
