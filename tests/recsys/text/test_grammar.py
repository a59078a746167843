"""Grammars: what they accept, how they are kept, and what is said of bad ones."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer

from recsys.text.grammar import MAX_DEPTH, choice, json_schema, lark, regex
from recsys.text.grammar_constraint import GrammarCompiler, Parser
from recsys.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer(["the quick brown fox", '{"a":[1,2]}'] * 3, 290))
COMPILER = GrammarCompiler(TOKENIZER)

letters = st.text("ab ", max_size=8)


def accepts(grammar, text, rng=None):
    """Whether a constraint lets a text be written, in the tokenizer's way or a random one."""
    constraint = COMPILER.constraint(grammar)
    data, state = text.encode(), constraint.initial()
    spelling = TOKENIZER.spelling
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


OPTIONS = ["Heat", 'Say "Hi"', "Häuser \\ 🎬\n", "Heat 2", "He\x7fat"]


@pytest.mark.parametrize("text", [*OPTIONS, "Hea", "Heat 3", ""])
def test_choice(text):
    assert accepts(choice(OPTIONS), text) is (text in OPTIONS)


def test_a_context_free_grammar():
    nested = lark('start: "(" start ")" | /[a-z]/')
    assert accepts(nested, "((((x))))")
    assert not accepts(nested, "((((x)))")


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
    spelling = TOKENIZER.spelling
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


def test_a_schema_may_come_as_text_and_leave_objects_open():
    assert accepts(json_schema('{"type": "object"}'), '{"a":[1,{"b":null}]}')
    assert not accepts(json_schema({"type": "object"}), '{ "a": 1 }')


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
    compiler.constraint(b)
    assert made == [a, b, c, b]


def nested(depth):
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


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
        (lambda: choice([]), "^choice: there are no options"),
    ],
)
def test_bad_grammars_are_named(make, message):
    with pytest.raises(ValueError, match=message) as error:
        COMPILER.constraint(make())
    assert "<state>" not in str(error.value)
    assert len(str(error.value)) < 600


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
