"""The protocol of constraints: titles and grammars by the same rules."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recsys.testing import byte_level_tokenizer
from recsys.text.constraint import DEAD, check_constraint
from recsys.text.grammar import json_schema
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.titles import TitleTrie
from recsys.text.token_trie import TextTokenizer

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
KINDS = ("titles", "grammar")
ROOT = -1


def make(kind):
    if kind == "titles":
        return TitleTrie.build(TITLES, TOKENIZER.tokens)
    return COMPILER.constraint(json_schema(SCHEMA))


def random_tree(constraint, rng, size):
    """A tree whose nodes are mostly allowed: tokens, parents and states."""
    tokens, parents, states = [], [], []
    for _ in range(size):
        parent = int(rng.integers(ROOT, len(tokens)))
        state = constraint.initial() if parent == ROOT else states[parent]
        options = np.flatnonzero(constraint.allowed([state])[0])
        if not len(options) or rng.random() < 0.15:
            options = np.arange(constraint.vocabulary_size)
        token = int(rng.choice(options))
        tokens.append(token)
        parents.append(parent)
        states.append(int(constraint.advance([state], [token])[0]))
    return tokens, parents, np.asarray(states, np.int64)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000), size=st.integers(0, 25))
@settings(max_examples=60, deadline=None)
def test_masks_in_any_order_equal_a_replay_from_the_root(kind, seed, size):
    rng = np.random.default_rng(seed)
    constraint = make(kind)
    tokens, parents, states = random_tree(constraint, rng, size)
    order = rng.permutation(size)
    masks = np.empty((size, constraint.vocabulary_size), np.bool_)
    masks[order] = constraint.allowed(states[order])
    assert masks.shape == (size, constraint.vocabulary_size)
    for node in range(size):
        path, at = [], node
        while at != ROOT:
            path.append(tokens[at])
            at = parents[at]
        fresh = make(kind)
        state = fresh.initial()
        for token in path[::-1]:
            state = int(fresh.advance([state], [token])[0])
        np.testing.assert_array_equal(masks[node], fresh.allowed([state])[0])


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
        return np.asarray([[self.after(s, t) != DEAD for t in range(4)] for s in states])

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


@pytest.mark.parametrize("kind", KINDS)
def test_constraints_of_the_package_pass_the_check(kind):
    check_constraint(make(kind))


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


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_allowed_at_a_dead_state(kind):
    constraint = make(kind)
    assert not constraint.allowed([DEAD]).any()
    assert constraint.advance([DEAD, DEAD], [3, constraint.end_tokens[0]]).tolist() == [DEAD, DEAD]
    assert constraint.forced([DEAD]) == [[]]
    assert constraint.allowed([]).shape == (0, constraint.vocabulary_size)


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_allowed_and_forced_tokens_lead_to_a_text(kind, seed):
    constraint, rng = make(kind), np.random.default_rng(seed)
    everything, state = np.arange(constraint.vocabulary_size), constraint.initial()
    while True:
        for token in constraint.forced([state])[0]:
            assert constraint.allowed([state])[0, token]
            state = int(constraint.advance([state], [token])[0])
        mask = constraint.allowed([state])[0]
        found = constraint.advance(np.full(len(everything), state), everything)
        np.testing.assert_array_equal(found != DEAD, mask)
        if not mask.any():
            break
        assert mask.sum() > 1 or kind == "grammar"
        token = int(rng.choice(np.flatnonzero(mask)))
        state = int(found[token])
    assert token in constraint.end_tokens  # nothing but an end leads to where nothing follows
