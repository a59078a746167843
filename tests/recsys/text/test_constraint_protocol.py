"""The protocol of constraints: titles and grammars by the same rules."""

import numpy as np
import pytest
from constraint_suite import ConstraintSuite, check_constraint
from oracles import byte_level_tokenizer

from recsys.text.constraint import DEAD
from recsys.text.grammar import json_schema
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.titles import Titles
from recsys.text.tokenizer import TextTokenizer

TITLES = ["Heat", "Heat 2", "Alien", "Aliens", "Häuser", "Heat"]
TOKENIZER = TextTokenizer(byte_level_tokenizer(TITLES, 290))
SCHEMA = {
    "type": "object",
    "properties": {
        "item": {"enum": TITLES[:4]},
        "why": {"type": "array", "items": {"enum": ["fast", "loud"]}, "maxItems": 2},
    },
    "required": ["item", "why"],
    "additionalProperties": False,
}
COMPILER = GrammarCompiler(TOKENIZER)


class TestTitles(ConstraintSuite):
    def make(self):
        return Titles(TITLES, TOKENIZER).constraint()


class TestSchema(ConstraintSuite):
    def make(self):
        return COMPILER.constraint(json_schema(SCHEMA))


class TestOwnAutomaton(ConstraintSuite):
    def make(self):
        return Automaton(GOOD)


class Automaton:
    """A constraint as a user may write it: states and tokens -> next state; token 0 ends."""

    vocabulary_size, end_tokens = 4, (0,)

    def __init__(self, arcs):
        self.arcs = arcs

    def initial(self):
        return 1

    def advance(self, states, tokens):
        return np.asarray([self.after(s, t) for s, t in zip(states, tokens, strict=True)])

    def after(self, state, token):
        return self.arcs.get((int(state), int(token)), DEAD)

    def allowed(self, states):
        rows = [[self.after(s, t) != DEAD for t in range(4)] for s in states]
        return np.asarray(rows, np.bool_).reshape(-1, 4)

    def forced(self, states):
        return [[] for _ in states]


GOOD = {(1, 2): 1, (1, 3): 2, (2, 0): 3}


class Forgetful(Automaton):
    """Its second walk goes another way: not deterministic."""

    asked = 0

    def initial(self):
        self.asked += 1
        return 1 if self.asked < 3 else 2


class Wide(Automaton):
    def allowed(self, states):
        return super().allowed(states) | (np.arange(4) == 1)


class Forcing(Automaton):
    def forced(self, states):
        return [[1] for _ in states]


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Automaton({**GOOD, (2, 1): 5}), r"no token may follow, after tokens \[.*1\]"),
        (Automaton({**GOOD, (3, 2): 2}), r"a token may follow an end token, .*0\]"),
        (Automaton({**GOOD, (DEAD, 1): 1}), "a token may follow the state DEAD"),
        (Wide(GOOD), r"a token may follow the state DEAD|differ for tokens \[1\]"),
        (Forcing(GOOD), r"Forcing: the forced token 1 may not follow, after tokens \[\]"),
        (Forgetful(GOOD), "the same tokens lead to another mask"),
    ],
)
def test_a_faulty_constraint_is_described(constraint, message):
    check_constraint(Automaton(GOOD))
    with pytest.raises(ValueError, match=message):
        check_constraint(constraint)
