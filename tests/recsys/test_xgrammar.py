"""Grammars by xgrammar: the masks of llguidance where both know a grammar, else a plain refusal."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from recsys.constraint.grammar import (
    GrammarCompiler,
    choice,
    delimited_list,
    delimited_subsequence,
    free_json,
    json_schema,
    lark,
    regex,
    structured,
    substring_of,
)
from recsys.constraint.parser import MOST_FORCED, backend_of, installed_backends
from recsys.constraint.protocol import ROOT, tree_states
from recsys.constraint.token_trie import TextTokenizer
from recsys.testing import byte_level_tokenizer

pytest.importorskip("xgrammar", reason="extra xgrammar is not installed")

TEXTS = ["the quick brown fox", '{"name":"Warrior","a":[1,2]}', "-12.5e+3 Red Orange Yellow"]
TOKENIZER = TextTokenizer(byte_level_tokenizer(TEXTS * 3, 310))
LLGUIDANCE = GrammarCompiler(TOKENIZER)
XGRAMMAR = GrammarCompiler(TOKENIZER, backend="xgrammar")
IP = r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
WARRIOR = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Häuser", 'Say "Hi"']},
        "life": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/rank", "title": "a rank"}]},
    },
    "required": ["name", "life"],
    "additionalProperties": False,
    "$defs": {"rank": {"type": "number", "description": "any"}},
}
BOTH = {
    "choice of a regex": regex("Red|Orange|Yellow|Green|Blue|Indigo|Violet"),
    "date-time": regex(r"\d{4}-[01]\d-[0-3]\dT[0-2]\d:[0-5]\d:[0-5]\d([+-][0-2]\d:[0-5]\d|Z)"),
    "address": regex(IP),
    "words and dots": regex(r"\w{1,2}.[.]\."),
    "letters of several bytes": regex("(ä|ö|🎬|ab)*"),
    "brackets": lark('start: "(" start ")" | /[a-z]/'),
    "sums": lark('start: t ("+" t){0,3}\nt: "a" | "b" | "(" u ("+" u){0,3} ")"\nu: "a" | "b"'),
    "choice": choice(["Heat", 'Say "Hi"', "Häuser \\ 🎬\n", "Heat 2", ""]),
    "substring": substring_of("the quick brown fox"),
    "list": delimited_list("[ab]{1,2}", ", ", least=0, most=3),
    "slate": delimited_subsequence(["Heat", "Heat 2", "Alien"], "; ", most=2),
    "schema": json_schema(WARRIOR),
    "constant": json_schema({"const": {"a": [1, "x"]}}),
}


def random_tree(constraint, rng, size):
    """Tokens and parents of a tree whose nodes are allowed."""
    tokens, parents, states = [], [], [constraint.initial()]
    while len(tokens) < size:
        parent = int(rng.integers(0, len(states))) if rng.random() < 0.3 else len(states) - 1
        options = np.flatnonzero(constraint.allowed([states[parent]])[0])
        if not len(options):
            parent = 0
            options = np.flatnonzero(constraint.allowed([states[0]])[0])
        token = int(rng.choice(options))
        tokens.append(token)
        parents.append(parent - 1 if parent else ROOT)
        states.append(int(constraint.advance([states[parent]], [token])[0]))
    return np.asarray(tokens), np.asarray(parents)


@pytest.mark.parametrize("name", BOTH)
def test_both_libraries_allow_the_same_at_every_node_of_a_draft_tree(name):
    rng = np.random.default_rng(0)
    for _ in range(4):
        one, other = LLGUIDANCE.constraint(BOTH[name]), XGRAMMAR.constraint(BOTH[name])
        tokens, parents = random_tree(one, rng, 40)
        ours, theirs = (tree_states(c, tokens, parents) for c in (one, other))
        np.testing.assert_array_equal(one.allowed(ours), other.allowed(theirs))
        assert one.forced(ours) == other.forced(theirs)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (regex("(ab"), "^regex: xgrammar: Regex parsing error .*not closed"),
        (regex("a(?=b)"), "^regex: xgrammar: .*Lookahead is not supported"),
        (regex(r"[^\s\S]"), "^regex: matches no text"),
        (lark("start: foo"), "^lark: xgrammar: .*unknown name 'foo'"),
        (lark('start: "ab" start'), "^lark: begins with a text of 4096 bytes or more, or never"),
        (lark('%llguidance {"no_forcing": true}\nstart: "a"'), "^lark: xgrammar: .*not supported"),
        (substring_of("a b", unit="words"), "^substring_of: xgrammar: .*not supported"),
        (free_json(1), "^free_json: .*'maxLength', at #/.defs/value0/anyOf/0; take backend llg"),
        (json_schema({"type": "text"}), "^json_schema: xgrammar: Unsupported type"),
        (json_schema({"type": "number", "multipleOf": 2}), "'multipleOf', at #; take"),
        (json_schema({"type": "string", "pattern": "a"}), "'pattern', at #"),
        (json_schema({}), "^json_schema: xgrammar cannot hold .* values of any kind, at #;"),
        (json_schema({"type": "array"}), "values of any kind, at #/items"),
        (json_schema({"type": "object"}), "values of any kind, at #/additionalProperties"),
        (json_schema({"$ref": "#/$defs/x", "$defs": {"x": {}}}), "any kind, at #/.defs/x"),
        (json_schema({"enum": [1, 20], "maximum": 5}), "'maximum' beside 'enum', at #"),
        (json_schema({"enum": ["a", 1], "type": "string"}), "'type' beside 'enum', at #"),
        (
            json_schema({"type": "object", "required": ["z"], "additionalProperties": False}),
            "'required' property 'z' that is no property, at #",
        ),
    ],
)
def test_what_it_does_not_know_is_refused_by_name_and_place(grammar, message):
    with pytest.raises(ValueError, match=message) as error:
        XGRAMMAR.constraint(grammar)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


def test_a_search_that_gets_where_no_text_ends_is_told():
    constraint = XGRAMMAR.constraint(regex(r"(a|b[^\s\S])c"))
    b = constraint.advance([constraint.initial()], TOKENIZER.encode("b"))
    with pytest.raises(ValueError, match=r"^regex: a text has begun"):
        constraint.allowed(b)
    # llguidance sees it coming
    ours = LLGUIDANCE.constraint(regex(r"(a|b[^\s\S])c"))
    assert ours.forced([ours.initial()]) == [[*TOKENIZER.encode("ac"), *TOKENIZER.end_tokens]]


def test_a_long_run_of_forced_text_is_found_in_parts():
    text = "a" * (MOST_FORCED + 10)
    constraint = XGRAMMAR.constraint(choice(["b", text]))
    state = constraint.advance([constraint.initial()], TOKENIZER.encode("a"))
    (run,) = constraint.forced(state)
    assert TOKENIZER.decode(run) == "a" * len(TOKENIZER.decode(run))
    assert MOST_FORCED - 10 <= len(TOKENIZER.decode(run)) <= MOST_FORCED


def test_its_grammars_are_kept_too():
    compiler = GrammarCompiler(TOKENIZER, backend="xgrammar")
    compiler.warm_up([BOTH["schema"], BOTH["address"]])
    compiler.constraint(BOTH["schema"])
    assert (compiler.statistics.hits, compiler.statistics.misses) == (1, 2)


def test_a_library_that_is_not_there_is_named_with_the_way_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ValueError, match=r"backend: xgrammar .* pip install 'recsys\[xgrammar\]'"):
        GrammarCompiler(TOKENIZER, backend="xgrammar")


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend: 'outlines' is not one of llguidance, xgrammar"):
        backend_of("outlines", TOKENIZER)
    assert installed_backends() == ["llguidance", "xgrammar"]


def test_pydantic_models_pass_if_their_fields_do():
    from typing import Literal

    from pydantic import BaseModel, Field

    class Verdict(BaseModel):
        item: Literal["Heat", "Alien"]
        stars: int = Field(ge=1, le=5)
        tags: list[Literal["fast", "loud"]] = Field(max_length=2)

    grammar = structured(Verdict)
    ours, theirs = LLGUIDANCE.constraint(grammar), XGRAMMAR.constraint(grammar)
    tokens, parents = random_tree(ours, np.random.default_rng(1), 60)
    np.testing.assert_array_equal(
        ours.allowed(tree_states(ours, tokens, parents)),
        theirs.allowed(tree_states(theirs, tokens, parents)),
    )
