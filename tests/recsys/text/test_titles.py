"""Titles in every tokenisation, against brute force; and tokenizers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer

from recsys.text.constraint import DEAD
from recsys.text.titles import Titles
from recsys.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer(["abcab", "bcaab", "ca ab", "Über"], 268))
END = TOKENIZER.end_tokens[0]
titles_ = st.lists(st.text("abcÜ", max_size=6), min_size=1, max_size=6)


def segmentations(title, spelling, end):
    """Every way to write a title: token sequences with an end token."""
    ways = {0: [()]}
    for stop in range(1, len(title) + 1):
        ways[stop] = [
            (*way, token)
            for token, data in enumerate(spelling)
            if data and token != end and title[:stop].endswith(data)
            for way in ways.get(stop - len(data), ())
        ]
    return [(*way, end) for way in ways[len(title)]]


def accepted(titles):
    """All that titles accept: token sequence -> items."""
    constraint = titles.constraint()
    found, stack = {}, [((), constraint.initial())]
    while stack:
        prefix, state = stack.pop()
        mask = constraint.allowed([state])[0]
        if not mask.any():
            found[prefix] = titles.items_of(prefix).tolist()
        for token in np.flatnonzero(mask).tolist():
            stack.append(((*prefix, token), int(constraint.advance([state], [token])[0])))
    return found


@given(catalog=titles_)
@settings(max_examples=80, deadline=None)
def test_it_accepts_exactly_the_tokenisations_of_the_titles(catalog):
    expected: dict[tuple[int, ...], list[int]] = {}
    for item, title in enumerate(catalog):
        ways = segmentations(title.encode(), TOKENIZER.spelling, END) if title else []
        for way in ways:
            expected.setdefault(way, []).append(item)
    if expected:
        assert accepted(Titles(catalog, TOKENIZER)) == expected
    else:
        with pytest.raises(ValueError, match="titles: no item has one"):
            Titles(catalog, TOKENIZER)


def state_of(constraint, tokens):
    state = constraint.initial()
    for token in tokens:
        state = int(constraint.advance([state], [token])[0])
    return state


@given(catalog=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_text_merges_with_the_only_title_it_can_become(catalog):
    """In whatever tokenisation; whole titles with an end token merge with each other alone."""
    constraint, by_key = Titles(catalog, TOKENIZER).constraint(), {}
    for prefix in {title[:n] for title in catalog for n in range(1, len(title) + 1)}:
        below = {title for title in catalog if title.startswith(prefix)}
        merged = below.pop() if len(below) == 1 else prefix
        for way in segmentations(prefix.encode(), TOKENIZER.spelling, END):
            states = [state_of(constraint, way[:-1])]
            if prefix in catalog:
                states.append(state_of(constraint, way))
            for text, key in zip(
                ((merged, False), (prefix, True)), constraint.merge_keys(states), strict=False
            ):
                assert by_key.setdefault(int(key), text) == text
    assert len(set(by_key.values())) == len(by_key)
    assert constraint.merge_keys([DEAD]) == DEAD


def test_a_tokenizer_of_another_kind_is_read_too():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "H": 3, "e": 4, "▁He": 5, "He": 6}
    vocabulary |= {f"<0x{byte:02X}>": 7 + byte for byte in range(256)}
    bpe = Tokenizer(
        models.BPE(vocabulary, [("H", "e"), ("▁", "He")], unk_token="<unk>", byte_fallback=True)
    )
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    bpe.add_special_tokens(["<unk>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>", unk_token="<unk>")
    tokenizer = TextTokenizer(fast, 300)
    spelling = tokenizer.spelling
    assert [spelling[i] for i in range(7)] == [b"", b"", b" ", b"H", b"e", b" He", b"He"]
    assert spelling[7 + 0xC3] == b"\xc3"
    assert set(spelling[263:]) == {b""}
    assert len(accepted(Titles(["He"], tokenizer))) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokenizer": object()}, "tokenizer: object is not a fast"),
        ({"vocabulary_size": 10}, "vocabulary_size: 10 is less than the tokenizer's 258 tokens"),
    ],
)
def test_tokenizers_that_cannot_serve_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        TextTokenizer(**{"tokenizer": byte_level_tokenizer([], 258), **arguments})


def test_a_catalog_may_have_more_titles_than_the_library_allows_strangers():
    rng = np.random.default_rng(0)
    letters = rng.choice(list("abcdefghij "), (120_000, 40))
    titles = ["".join(line) for line in letters]
    found = Titles(titles, TOKENIZER)
    first = sorted({title[0] for title in titles})
    allowed = found.constraint().allowed([0])[0]
    spelt = {TOKENIZER.spelling[token][:1].decode() for token in np.flatnonzero(allowed)}
    assert sorted(spelt) == first
