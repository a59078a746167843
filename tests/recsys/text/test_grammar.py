"""Grammars: what they accept, how they are kept, and what is said of bad ones."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer
from pydantic import BaseModel, Field

from recsys.text.grammar import (
    MAX_DEPTH,
    choice,
    delimited_list,
    delimited_subsequence,
    free_json,
    json_schema,
    lark,
    parse,
    regex,
    structured,
    substring_of,
    text_until,
)
from recsys.text.grammar_constraint import GrammarCompiler, Parser
from recsys.text.token_trie import TextTokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer(["the quick brown fox", '{"a":[1,2]}'] * 3, 290))
COMPILER = GrammarCompiler(TOKENIZER)

letters = st.text("ab ", max_size=8)


def accepts(grammar, text, rng=None):
    """Whether a constraint lets a text be written, in the tokenizer's way or a random one."""
    constraint = COMPILER.constraint(grammar)
    data, state = text.encode(), constraint.initial()
    spelling = TOKENIZER.tokens.spelling
    while data:
        fitting = [t for t, s in enumerate(spelling) if s and data.startswith(s)]
        token = max(fitting, key=lambda t: len(spelling[t])) if rng is None else rng.choice(fitting)
        data = data[len(spelling[token]) :]
        state = int(constraint.advance([state], [token])[0])
    return bool(constraint.allowed([state])[0, TOKENIZER.end_tokens[0]])


@given(text=letters, seed=st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_a_regex_accepts_what_pythons_does_in_any_tokenisation(text, seed):
    for pattern in (r"(a|b)+( b)?", r"a{2,3} ?b*", r"[^a]*"):
        expected = re.fullmatch(pattern, text) is not None
        assert accepts(regex(pattern), text, np.random.default_rng(seed)) is expected


@given(source=st.text('ab"\\é\n', max_size=12), text=st.text('ab"\\é\n', max_size=5))
@settings(max_examples=100, deadline=None)
def test_substring_of_accepts_the_parts_of_a_text(source, text):
    assert accepts(substring_of(source), text) is (text in source)


def test_parts_may_be_cut_between_words_only():
    part = substring_of("the quick brown fox", unit="words")
    assert accepts(part, "quick brown")
    assert not accepts(part, "uick")


@given(
    candidates=st.lists(st.text('ab"', min_size=1, max_size=3), min_size=1, max_size=5),
    chosen=st.lists(st.integers(0, 4), max_size=4),
    least=st.integers(0, 3),
    most=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_a_subsequence_keeps_the_order_and_repeats_none(candidates, chosen, least, most):
    least = min(least, most, len(candidates))
    slate = delimited_subsequence(candidates, "; ", least=least, most=most)
    written = [candidates[i % len(candidates)] for i in chosen]
    rest = iter(candidates)
    is_subsequence = all(c in rest for c in written)
    expected = is_subsequence and least <= len(written) <= most
    assert accepts(slate, "; ".join(written)) is expected


@given(
    parts=st.lists(st.text("abc", max_size=3), max_size=5),
    least=st.integers(0, 3),
    more=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_a_list_has_so_many_members(parts, least, more):
    most = max(least + more, 1)
    grammar = delimited_list("[ab]{1,2}", ", ", least=least, most=most)
    parts = [] if parts == [""] else parts  # written alike
    right = all(re.fullmatch("[ab]{1,2}", part) for part in parts) and least <= len(parts) <= most
    assert accepts(grammar, ", ".join(parts)) is bool(right)


OPTIONS = ["Heat", 'Say "Hi"', "Häuser \\ 🎬\n", "Heat 2", "He\x7fat"]


@pytest.mark.parametrize("text", [*OPTIONS, "Hea", "Heat 3", ""])
def test_choice(text):
    assert accepts(choice(OPTIONS), text) is (text in OPTIONS)


def test_a_context_free_grammar():
    nested = lark('start: "(" start ")" | /[a-z]/')
    assert accepts(nested, "((((x))))")
    assert not accepts(nested, "((((x)))")


class Inner(BaseModel):
    name: str = Field(max_length=5)


class Model(BaseModel):
    inner: list[Inner]
    score: int | None = None


@dataclass
class Record:
    name: str
    parts: list[int]


@given(stop=st.text("ab", min_size=1, max_size=3), text=st.text("ab\n", max_size=8))
def test_a_text_ends_with_the_first_occurrence_of_its_end(stop, text):
    expected = text.find(stop) == len(text) - len(stop) >= 0
    assert accepts(text_until(stop), text) is expected


@pytest.mark.parametrize(
    ("terminal", "good", "bad"),
    [
        (
            "QUOTED_TEXT",
            ['"a b"', "''", r'"a\"b"', "'say \"hi\"'"],
            ['"a', "a", '"a\nb"', '"a"b"', ""],
        ),
        ("UNQUOTED_TEXT", ["the fox", "a;b"], ['a"b', "it's", "a\nb", ""]),
    ],
)
def test_known_terminals_need_no_definition(terminal, good, bad):
    rule = f'start: "\\n" {terminal} "\\n"'
    assert [text for text in [*good, *bad] if accepts(lark(rule), f"\n{text}\n")] == good
    own = lark(f'{rule}\n{terminal}: "mine"')
    assert accepts(own, "\nmine\n")
    assert not accepts(own, f"\n{good[0]}\n")


def test_a_paragraph_is_bounded_by_its_tokens():
    grammar = lark('start: "a" paragraph_token{2,4} "\\n"')
    spelling = TOKENIZER.tokens.spelling
    some = next(t for t, data in enumerate(spelling) if len(data) > 2 and b"\n" not in data)
    break_, a = TOKENIZER.encode("\n")[0], TOKENIZER.encode("a")[0]
    for count in range(7):
        constraint = COMPILER.constraint(grammar)
        state = int(constraint.advance([constraint.initial()], [a])[0])
        for token in [some] * count + [break_]:
            (mask,) = constraint.allowed([state])
            assert not mask[list(TOKENIZER.end_tokens)].any()
            breaks = [t for t in np.flatnonzero(mask) if b"\n" in spelling[t]]
            assert breaks in ([], [break_])
            state = int(constraint.advance([state], [token])[0])
        assert (state >= 0) is (2 <= count <= 4)
    constraint = COMPILER.constraint(lark("start: text_token"))
    texts = [bool(data) for data in spelling]
    assert constraint.allowed([constraint.initial()])[0].tolist() == texts


def test_a_special_token_is_written_by_its_name():
    fast = byte_level_tokenizer(["the fox"] * 3, 290)
    fast.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
    tokenizer = TextTokenizer(fast)
    constraint = GrammarCompiler(tokenizer).constraint(lark('start: "a" image\nimage: <|image|>'))
    state = constraint.initial()
    for token in (tokenizer.encode("a")[0], fast.convert_tokens_to_ids("<|image|>")):
        assert np.flatnonzero(constraint.allowed([state])[0]).tolist() == [token]
        state = int(constraint.advance([state], [token])[0])
    assert np.flatnonzero(constraint.allowed([state])[0]).tolist() == list(tokenizer.end_tokens)


def test_models_and_dataclasses_are_read_back():
    text = '{"inner":[{"name":"abc"}],"score":null}'
    assert accepts(structured(Model), text)
    assert parse(Model, text) == Model(inner=[Inner(name="abc")])
    assert not accepts(structured(Model), '{"inner":[{"name":"abcdef"}],"score":1}')
    assert not accepts(structured(Model), '{"inner":[],"score":1,"other":2}')
    assert accepts(structured(Record), '{"name":"é","parts":[1,-2]}')
    assert parse(Record, '{"name":"é","parts":[1,-2]}') == Record("é", [1, -2])


def test_a_schema_may_come_as_text_and_leave_objects_open():
    assert accepts(json_schema('{"type": "object"}'), '{"a":[1,{"b":null}]}')
    assert not accepts(json_schema({"type": "object"}), '{ "a": 1 }')


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_free_json_is_as_deep_as_it_may_be(depth):
    grammar = free_json(depth)
    assert accepts(grammar, "[" * depth + "1.5" + "]" * depth)
    assert accepts(grammar, '{"k":' * depth + '"v"' + "}" * depth)
    assert not accepts(grammar, "[" * (depth + 1) + "1" + "]" * (depth + 1))


def test_forced_bytes_are_cut_as_the_tokenizer_would():
    constraint = COMPILER.constraint(choice(["the quick brown fox", "the quick brown dog"]))
    (run,) = constraint.forced([constraint.initial()])
    assert run == TOKENIZER.encode("the quick brown")
    state = constraint.initial()
    for token in [*run, *TOKENIZER.encode(" do")]:
        state = int(constraint.advance([state], [token])[0])
    assert constraint.forced([state]) == [[*TOKENIZER.encode("g"), *TOKENIZER.end_tokens]]
    end = constraint.advance([state], TOKENIZER.encode("g"))
    assert constraint.forced(constraint.advance(end, TOKENIZER.end_tokens)) == [[]]


def test_forced_bytes_may_be_the_name_of_a_special_token():
    constraint = COMPILER.constraint(choice(["the</s>fox"]))
    (run,) = constraint.forced([constraint.initial()])
    assert run == TOKENIZER.encode("the")
    state = constraint.initial()
    for token in [*run, *TOKENIZER.encode("<")]:
        state = int(constraint.advance([state], [token])[0])
    assert constraint.forced([state]) == [[*TOKENIZER.encode("/s>fox"), *TOKENIZER.end_tokens]]


def test_a_grammar_is_compiled_once(monkeypatch):
    compiler = GrammarCompiler(TOKENIZER, capacity=2)
    made = []
    compile_ = Parser.compile
    a, b, c = (choice([x]) for x in "abc")
    monkeypatch.setattr(Parser, "compile", lambda g, *more: made.append(g) or compile_(g, *more))
    compiler.constraint(a)
    compiler.constraint(b)
    compiler.constraint(a)
    assert made == [a, b]
    compiler.constraint(c)  # b goes
    compiler.constraint(a)
    assert len(compiler) == 2
    compiler.constraint(b)
    assert made == [a, b, c, b]


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


class NoModel:
    """Nothing that pydantic knows."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: regex("(ab"), r"^regex: .*unclosed group"),
        (lambda: regex(r"[^\s\S]"), "^regex: matches no text"),
        (lambda: regex("a(?=b)"), "^regex: .*look-around"),
        (lambda: lark("start: T\nT: /[a-z]+/ & /[0-9]+/"), "^lark: matches no text"),
        (lambda: lark("start: foo"), '^lark: .*unknown name: "foo"'),
        (lambda: lark('begin: "a"'), "^lark: no start rule"),
        (lambda: lark('start: "a'), "^lark: .*lexer error"),
        (
            lambda: lark('start: "ab" start'),
            "^lark: begins with a text of 4096 bytes or more, or never",
        ),
        (lambda: json_schema("{"), "^json_schema: not JSON"),
        (lambda: json_schema("[1]"), "^json_schema: must be an object, got list"),
        (lambda: json_schema({"type": "text"}), "^json_schema: Invalid type: text"),
        (lambda: json_schema({"$ref": "#/$defs/x"}), "^json_schema: .*does not exist"),
        (
            lambda: json_schema({"type": "string", "minLength": 5, "maxLength": 3}),
            r"^json_schema: .*minLength \(5\) is greater than maxLength",
        ),
        (
            lambda: json_schema({"type": "array", "uniqueItems": True}),
            "^json_schema: Unimplemented keys:.*uniqueItems",
        ),
        (lambda: json_schema(nested(80)), f"deeper than {MAX_DEPTH} levels at items/items"),
        (lambda: json_schema(nested(5000)), f"^json_schema: nested deeper than {MAX_DEPTH} levels"),
        (lambda: json_schema("[" * 200_000), f"^json_schema: nested deeper than {MAX_DEPTH}"),
        (lambda: free_json(99), "^free_json: depth must be in 0 .. 16, got 99"),
        (lambda: structured(NoModel), "^structured: NoModel has no JSON schema"),
        (lambda: choice([]), "^choice: there are no options"),
        (lambda: substring_of("a", unit="lines"), "^substring_of: unit must be one of"),
        (lambda: text_until(""), "^text_until: stop is empty"),
        (lambda: delimited_list("("), "^delimited_list: .*unclosed group"),
        (lambda: delimited_list("a", least=3, most=2), "^delimited_list: needs 0 <= least <= most"),
        (lambda: delimited_subsequence([]), "^delimited_subsequence: there are no candidates"),
        (lambda: delimited_subsequence(["a"], least=2, most=3), "least is 2 of 1 candidates"),
        (lambda: delimited_subsequence(["a"], most=0, least=0), "needs .* most >= 1"),
    ],
)
def test_bad_grammars_are_named(make, message):
    with pytest.raises(ValueError, match=message) as error:
        COMPILER.constraint(make())
    assert "<state>" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_bad_grammar_is_not_kept():
    compiler = GrammarCompiler(TOKENIZER)
    for _ in range(2):
        with pytest.raises(ValueError, match="regex"):
            compiler.constraint(regex("("))
    assert len(compiler) == 0


KEYWORDS = """
    type properties items required additionalProperties enum const anyOf allOf $ref minimum maximum
    multipleOf minLength maxLength minItems maxItems pattern format a
"""
keys = st.sampled_from(KEYWORDS.split())
values = st.recursive(
    st.sampled_from([None, True, 0, -1, 2.5, "", "string", "object", "array", "#", "(", "^a*$"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(
    schema=st.dictionaries(keys, values, max_size=4),
    pattern=st.text("ab|*+?()[]{}^$.\\-,&d\np12", max_size=12),
    rules=st.text('startXa:|"()*+?{}1\n%', max_size=30),  # no terminals that may touch
)
@settings(max_examples=100, deadline=None)
def test_anything_is_compiled_or_refused(schema, pattern, rules):
    for grammar, field in ((json_schema, schema), (regex, pattern), (lark, f"start: {rules}")):
        refused = ""
        try:
            constraint = COMPILER.constraint(grammar(field))
            assert constraint.allowed([constraint.initial()]).any()
        except ValueError as error:
            refused = str(error)
        assert not refused or refused.startswith(f"{grammar.__name__}: ")
