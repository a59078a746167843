"""Sampled text under a constraint: valid, reproducible, and the model's own law."""

import json
import re
from typing import Literal

import numpy as np
import pytest
import torch
from oracles import byte_level_tokenizer, random_prompts, tiny_model
from pydantic import BaseModel, ConfigDict, Field

from recsys.models.tree_forward import TreeModel
from recsys.text import sample
from recsys.text.grammar import choice, json_schema, lark, regex
from recsys.text.grammar_constraint import GrammarCompiler
from recsys.text.sample import sample_text
from recsys.text.tokenizer import TextTokenizer

TEXTS = [
    '{"item":"Toy Story","reason":"because it is fast","score":3}',
    "the quick brown fox jumps over the lazy dog; (a + b) * 2",
    "Heat, Alien, Toy Story",
]
TOKENIZER = TextTokenizer(byte_level_tokenizer(TEXTS * 3, 330), 352)
COMPILER = GrammarCompiler(TOKENIZER)
MODEL = tiny_model("llama-gqa", 352)
SOURCE = 'He said: "Über alles 🎬, the quick\nbrown fox".'
DRAWS = 300
SUBSTRING = lark(f"start: %regex {json.dumps({'substring_chars': SOURCE})}")


class Explanation(BaseModel):
    model_config = ConfigDict(extra="forbid")
    item: Literal["Heat", "Alien"]
    reason: str = Field(max_length=24)
    tags: list[Literal["fast", "loud", "long"]] = Field(max_length=3)
    stars: int = Field(ge=1, le=5)


# sums inside brackets inside brackets: bounded, so that a random model comes to an end
EXPRESSION = """
start: t ("+" t){0,3}
t: "a" | "b" | "(" u ("+" u){0,3} ")"
u: "a" | "b" | "(" v ")"
v: "a" | "b"
"""


def balanced(text):
    while (shorter := re.sub(r"\([ab](\+[ab])*\)", "a", text)) != text:
        text = shorter
    return re.fullmatch(r"[ab](\+[ab])*", text) is not None


def is_schema(text):
    value = Explanation.model_validate_json(text)
    assert json.loads(text) == value.model_dump()
    return True


CASES = {
    "schema": (json_schema(Explanation.model_json_schema()), is_schema),
    "grammar": (lark(EXPRESSION), balanced),
    "substring": (SUBSTRING, lambda text: text in SOURCE),
}


def generate(grammar, count, *, batch=32, **options):
    found = []
    rng = np.random.default_rng(0)
    while len(found) < count:
        prompts = random_prompts(rng, min(batch, count - len(found)), 9, 352)
        constraints = [COMPILER.constraint(grammar) for _ in prompts]
        found += sample_text(MODEL, prompts, constraints, 400, seed=len(found), **options)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_text_of_a_random_model_is_valid(case):
    grammar, is_valid = CASES[case]
    found = generate(grammar, 80)
    for text in found:
        assert text.finished
        assert is_valid(TOKENIZER.decode(text.tokens)), TOKENIZER.decode(text.tokens)


def test_forced_tokens_need_no_forward():
    prompts = random_prompts(np.random.default_rng(1), 8, 9, 352)
    for skip in (True, False):
        constraints = [COMPILER.constraint(CASES["schema"][0]) for _ in prompts]
        for text in sample_text(MODEL, prompts, constraints, 400, skip_forced=skip):
            assert text.forced + text.stats.target_passes == len(text.tokens)
            # {"item":" and ","reason":" and ","tags":[ and so on
            assert text.forced > 10 if skip else text.forced == 0


def test_a_text_without_a_choice_needs_no_model():
    broken = TreeModel(MODEL)
    broken.forward = None
    (text,) = sample_text(broken, [np.array([3])], COMPILER.constraint(choice(["Heat"])))
    assert text.finished
    assert TOKENIZER.decode(text.tokens) == "Heat"
    assert (text.forced, text.stats.target_passes, text.log_prob) == (len(text.tokens), 0, 0.0)
    with pytest.raises(TypeError):
        sample_text(broken, [np.array([3])], COMPILER.constraint(choice(["Heat", "Alien"])))
    assert broken.pool.lent == 0


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-window", "qwen3-mixed-window"])
@pytest.mark.parametrize(("skip", "at_once"), [(True, 99), (False, 99), (True, 3), (False, 1)])
def test_the_best_text_equals_a_loop_without_a_cache(architecture, skip, at_once, monkeypatch):
    monkeypatch.setattr(sample, "PROMPT_TOKENS", at_once)
    model = tiny_model(architecture, 352, dtype=torch.float64)
    prompts = random_prompts(np.random.default_rng(2), 5, 12, 352)
    grammar = CASES["schema"][0]
    found = sample_text(
        model,
        prompts,
        [COMPILER.constraint(grammar) for _ in prompts],
        60,
        temperature=0,
        skip_forced=skip,
    )
    for prompt, text in zip(prompts, found, strict=True):
        constraint = COMPILER.constraint(grammar)
        state, tokens, total = constraint.initial(), [], 0.0
        whole = torch.tensor([[*prompt.tolist(), *text.tokens]])
        with torch.inference_mode():  # the logits behind each token are those of what precedes it
            logits = model(whole).logits[0, len(prompt) - 1 :]
        while len(tokens) < 60 and (not tokens or tokens[-1] != TOKENIZER.end_tokens[0]):
            assert tokens == text.tokens[: len(tokens)]
            run = constraint.forced([state])[0] if skip else []
            if not run:
                mask = torch.from_numpy(constraint.allowed([state])[0])
                log_probs = logits[len(tokens)].masked_fill(~mask, -torch.inf).log_softmax(-1)
                run = [int(log_probs.argmax())]
                total += float(log_probs.max())
            for token in run:
                tokens.append(token)
                state = int(constraint.advance([state], [token])[0])
        assert text.tokens == tokens[:60]
        assert text.log_prob == pytest.approx(total, abs=1e-9)


def test_draws_follow_the_model_over_what_is_allowed():
    tokenizer = TextTokenizer(byte_level_tokenizer(["ab"] * 3, 259))
    titles = GrammarCompiler(tokenizer).constraint(choice(["ab", "b", "cab"]))
    model = tiny_model("llama", 259, dtype=torch.float64)
    prompt = np.array([3, 2])
    expected, stack = {}, [((), titles.initial(), 0.0)]
    while stack:
        text, state, log_prob = stack.pop()
        mask = torch.from_numpy(titles.allowed([state])[0])
        if not mask.any():
            expected[text] = np.exp(log_prob)
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt.tolist(), *text]])).logits[0, -1]
        log_probs = logits.masked_fill(~mask, -torch.inf).log_softmax(-1).tolist()
        for token in torch.nonzero(mask)[:, 0].tolist():
            after = int(titles.advance([state], [token])[0])
            stack.append(((*text, token), after, log_prob + log_probs[token]))
    assert sum(expected.values()) == pytest.approx(1)
    counts = dict.fromkeys(expected, 0)
    for text in sample_text(model, [prompt] * DRAWS, titles, 8, seed=3, skip_forced=False):
        counts[tuple(text.tokens)] += 1
        assert text.log_prob == pytest.approx(np.log(expected[tuple(text.tokens)]), abs=1e-9)
    for text, probability in expected.items():
        sigma = np.sqrt(probability * (1 - probability) / DRAWS)
        assert abs(counts[text] / DRAWS - probability) < 5 * sigma + 1e-9


def test_the_seed_decides_and_a_low_temperature_takes_the_best():
    prompts = random_prompts(np.random.default_rng(4), 4, 9, 352)

    def texts(**options):
        constraints = [COMPILER.constraint(CASES["schema"][0]) for _ in prompts]
        return [text.tokens for text in sample_text(MODEL, prompts, constraints, **options)]

    assert texts(seed=1) == texts(seed=1) != texts(seed=2)
    assert texts(seed=1, temperature=1e-4) == texts(temperature=0)


def test_a_text_is_cut_at_its_limit():
    constraint = COMPILER.constraint(regex("[a-z]{40,50}"))
    (text,) = sample_text(MODEL, [np.array([3])], constraint, 3)
    assert not text.finished
    assert len(text.tokens) == 3
    long = COMPILER.constraint(choice(["abababababababababab"]))
    (text,) = sample_text(MODEL, [np.array([3])], long, 7)
    assert not text.finished
    assert (text.forced, text.stats.target_passes) == (7, 0)
