"""Titles in every tokenisation, against brute force and on real catalogs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer, tiny_model

from recsys.models.tree_forward import TreeModel
from recsys.text.constraint import DEAD
from recsys.text.stopping import StoppedError
from recsys.text.titles import TitleTrie, generate_titles
from recsys.text.token_trie import TextTokenizer, TokenTrie

words = st.binary(max_size=6).map(lambda b: bytes(97 + x % 3 for x in b))
spellings = st.lists(
    st.binary(max_size=3).map(lambda b: bytes(97 + x % 3 for x in b)), min_size=1, max_size=12
)


def segmentations(title, spelling, end):
    """Every way to write a title: token sequences with an end token."""
    ways = {0: [()]}
    for stop in range(1, len(title) + 1):
        ways[stop] = [
            (*way, token)
            for token, data in enumerate(spelling)
            if data and token != end and title[:stop].endswith(data)
            for way in ways[stop - len(data)]
        ]
    return [(*way, end) for way in ways[len(title)]]


def accepted(titles):
    """All that a title trie accepts: token sequence -> items."""
    found, stack = {}, [((), titles.initial())]
    while stack:
        prefix, state = stack.pop()
        mask = titles.allowed([state])[0]
        if not mask.any():
            found[prefix] = titles.items_of(state).tolist()
        for token in np.flatnonzero(mask).tolist():
            stack.append(((*prefix, token), int(titles.advance([state], [token])[0])))
    return found


# Vocabularies may lack bytes, so that titles and prefixes of titles cannot be written.
@given(catalog=st.lists(words, min_size=1, max_size=6), spelling=spellings)
@settings(max_examples=80, deadline=None)
def test_it_accepts_exactly_the_tokenisations_of_the_titles(catalog, spelling):
    end = len(spelling)
    expected: dict[tuple[int, ...], list[int]] = {}
    for item, title in enumerate(catalog):
        for way in segmentations(title, spelling, end) if title else []:
            expected.setdefault(way, []).append(item)
    tokens = TokenTrie.build([*spelling, b""], [end])
    if expected:
        assert accepted(TitleTrie.build(catalog, tokens)) == expected
    else:
        with pytest.raises(ValueError, match="titles: "):
            TitleTrie.build(catalog, tokens)


@given(catalog=st.lists(words.filter(len), min_size=1, max_size=8))
@settings(max_examples=40, deadline=None)
def test_a_text_merge_key_the_only_title_it_can_become(catalog):
    tokens = TokenTrie.build([b"a", b"b", b"c", b""], [3])
    titles = TitleTrie.build(catalog, tokens)

    def state(text):
        node = titles.initial()
        for byte in text:
            node = int(titles.advance([node], [byte - 97])[0])
        return node

    for prefix in {title[:n] for title in catalog for n in range(len(title) + 1)}:
        titles_below = {title for title in catalog if title.startswith(prefix)}
        merge_key = titles_below.pop() if len(titles_below) == 1 else prefix
        assert titles.merge_keys([state(prefix)]) == state(merge_key)
    ends = titles.advance([state(title) for title in catalog], [3] * len(catalog))
    assert titles.merge_keys(ends).tolist() == ends.tolist()
    assert titles.merge_keys([DEAD]) == DEAD


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
    spelling = tokenizer.tokens.spelling
    assert [spelling[i] for i in range(7)] == [b"", b"", b" ", b"H", b"e", b" He", b"He"]
    assert spelling[7 + 0xC3] == b"\xc3"
    assert set(spelling[263:]) == {b""}
    assert len(accepted(TitleTrie.build(["He"], tokenizer.tokens))) == 5


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


def test_a_tokenizer_without_an_end_token_needs_one_named():
    fast = byte_level_tokenizer([], 258)
    fast.eos_token = None
    with pytest.raises(ValueError, match="end_token: "):
        TextTokenizer(fast)
    assert TextTokenizer(fast, end_token=5).end_tokens == (5,)


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_a_search_stops_before_the_pass_at_which_it_is_told_to(passes):
    tokenizer, asked = TextTokenizer(byte_level_tokenizer(["Heat", "Hat"], 300)), []
    titles = TitleTrie.build(["Heat and cold", "Hat and coat"], tokenizer.tokens)
    model = TreeModel.of(tiny_model("llama", tokenizer.vocabulary_size))

    def stopped():
        asked.append(None)
        return len(asked) > passes

    with pytest.raises(StoppedError):
        generate_titles(model, [[0, 70]], titles, 2, stopped=stopped)
    assert len(asked) == passes + 1
    assert model.pool.lent == 0
