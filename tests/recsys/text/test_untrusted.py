"""Hostile schemas end the process that follows them, and nothing else."""

import os
import signal

import numpy as np
import psutil
import pytest

from recsys.testing import PATIENCE_S, byte_level_tokenizer
from recsys.text import parser_process
from recsys.text.grammar import json_schema, substring_of
from recsys.text.grammar_constraint import GrammarCompiler, explained
from recsys.text.token_trie import TextTokenizer
from recsys.text.untrusted import UntrustedCompiler, untrusted_schema

TOKENIZER = TextTokenizer(byte_level_tokenizer(["one", "two", "note"], 290))
INTEGER = {"type": "integer"}
NAMES = [chr(0x4E00 + number) for number in range(400)]


@pytest.fixture(scope="module")
def compiler():
    made = UntrustedCompiler(TOKENIZER)
    yield made
    made.close()


def patterns(count):
    """The union of each one's states is multiplied with the others'."""
    each = [{"pattern": f"[ab]*a[ab]{{{number}}}c"} for number in range(5, 5 + count)]
    return {"type": "string", "allOf": each}


def copies(levels, count):
    """Each level holds copies of the level below."""
    parts = {"a0": {"type": "array"}}
    for level in range(1, levels + 1):
        below = {"$ref": f"#/$defs/a{level - 1}", "type": "array"}
        parts[f"a{level}"] = {"type": "array", "prefixItems": [below] * count}
    return {"$defs": parts, "$ref": f"#/$defs/a{levels}"}


def choices(number, count):
    """Schemas that must hold together, each with alternatives."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{i}{j}": INTEGER}} for j in range(count)]}
            for i in range(number)
        ]
    }


HOSTILE = {
    "patterns, minutes": patterns(20),
    "patterns, gigabytes": patterns(55),
    "copies of references": copies(12, 4),
    "choices": choices(11, 2),
    "choices below a property": {"type": "object", "properties": {"$defs": choices(11, 2)}},
    "a multiple of 999,983": {"type": "integer", "multipleOf": 999_983},
    "many multiples": {"anyOf": [{"multipleOf": 99_900 + number} for number in range(80)]},
    "types twice": {"allOf": [{"type": ["array"] * 100}] * 2},
    "types in types": {
        "type": ["array"] * 150,
        "items": {"type": ["array"] * 150, "minItems": 1},
    },
    "large alternatives": {
        "$defs": {"O": {"type": "object", "properties": {name: {} for name in NAMES[:200]}}},
        "anyOf": [{"$ref": "#/$defs/O", "minProperties": 0}] * 60,
    },
    "pairs of names": {
        "type": "object",
        "patternProperties": {f"^.{{9}}{name}$": {} for name in NAMES[:270]},
    },
    "no number": {"minimum": "\u00e9" * 98},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_refused_and_the_next_one_is_not(compiler, name):
    here = psutil.Process()
    memory, spent = here.memory_info().rss, here.cpu_times()
    try:
        constraint = compiler.constraint(untrusted_schema(HOSTILE[name]))
        constraint.allowed([constraint.initial()])
    except ValueError as error:
        said = str(error)
        assert said.startswith("json_schema: ")
        assert len(said) < 400
        assert "panic" not in said
        assert "backtrace" not in said
    after = here.cpu_times()
    assert after.user + after.system - spent.user - spent.system < 0.3, "it is the other process's"
    assert here.memory_info().rss - memory < 16 << 20
    constraint = compiler.constraint(untrusted_schema(INTEGER))
    assert constraint.allowed([constraint.initial()]).any()


ORDINARY = [
    INTEGER,
    {"type": "object", "properties": {"one": INTEGER, "two": {"type": "string"}}},
    {"enum": ["one", "two", {"id": "note"}], "examples": [{"id": "one"}]},
    {
        "$defs": {"Base": {"type": "object", "properties": {"one": INTEGER}}},
        "allOf": [{"$ref": "#/$defs/Base"}, {"properties": {"two": INTEGER}}],
    },
    {
        "type": "object",
        "properties": {f"field{i}": {"anyOf": [INTEGER, {"type": "null"}]} for i in range(40)},
    },
]


@pytest.mark.parametrize(
    "grammar", [*map(json_schema, ORDINARY), substring_of("note one, note two", "words")], ids=str
)
def test_the_other_process_says_what_the_parser_here_says(compiler, grammar):
    rng = np.random.default_rng(0)
    theirs, ours = compiler.constraint(grammar), GrammarCompiler(TOKENIZER).constraint(grammar)
    for _ in range(3):
        states = [theirs.initial()], [ours.initial()]
        for _ in range(12):
            masks = theirs.allowed(states[0]), ours.allowed(states[1])
            assert np.array_equal(*masks)
            assert theirs.forced(states[0]) == ours.forced(states[1])
            token = [rng.choice(np.flatnonzero(masks[0][0]))]
            if token[0] in TOKENIZER.end_tokens:
                break
            states = theirs.advance(states[0], token), ours.advance(states[1], token)


def test_a_constraint_of_the_grammar_before_is_of_no_use(compiler):
    before = compiler.constraint(json_schema(INTEGER))
    compiler.constraint(json_schema({"type": "null"}))
    with pytest.raises(ValueError, match=r"json_schema: .* follows another grammar since"):
        before.allowed([before.initial()])


def test_a_process_that_is_killed_is_replaced(compiler):
    constraint = compiler.constraint(json_schema(INTEGER))
    os.kill(compiler._process._process.pid, signal.SIGKILL)
    with pytest.raises(ValueError, match="takes too much to follow"):
        constraint.allowed([constraint.initial()])
    assert compiler.constraint(json_schema(INTEGER))


def test_a_process_that_cannot_start_is_no_fault_of_the_grammar(monkeypatch, tmp_path):
    monkeypatch.setattr(parser_process, "WORKER", tmp_path / "nothing.py")
    with pytest.raises(RuntimeError, match=r"nothing\.py does not start"):
        UntrustedCompiler(TOKENIZER).constraint(json_schema(INTEGER))


def test_the_process_ends_with_its_compiler():
    made = UntrustedCompiler(TOKENIZER)
    made.constraint(json_schema(INTEGER))
    process = made._process._process
    del made
    assert process.wait(PATIENCE_S) is not None


def test_a_schema_with_very_many_levels_is_refused():
    schema = INTEGER
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(ValueError, match=r"json_schema: .*levels"):
        untrusted_schema(schema)


def test_an_assertion_of_the_library_is_no_part_of_the_message():
    message = "panic: assertion failed: grammar.symbols.len() < MAX <backtrace> /tmp/python/x.c:9"
    assert explained(message) == "is too large for the library that compiles it"
