"""Free text with beams against its slow twin, against Hugging Face, and against itself."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles import ARCHITECTURES, assert_as_exact, random_prompts, tiny_model

from recsys.models.prefix_store import PrefixStore
from recsys.models.tree_forward import TreeModel
from recsys.text import beam as text
from recsys.text.beam import BeamSettings, generate_text

MODELS = {name: tiny_model(name) for name in ARCHITECTURES}
DOUBLES = {name: tiny_model(name, dtype=torch.float64) for name in ARCHITECTURES}
DOUBLE = DOUBLES["llama-gqa"]
PROMPTS = [np.arange(1, 12), np.array([5, 9, 2]), np.array([40])]

rules = st.fixed_dictionaries(
    {
        "num_beams": st.integers(1, 7),
        "max_new_tokens": st.integers(1, 14),
        "eos_token_id": st.sampled_from(
            [None, 3, 14, 50, [20], [7, 60], [*range(8)], [*range(24)], [*range(20, 60)]]
        ),
        "length_penalty": st.sampled_from([1.0, 0.0, -0.5, 0.6, 2.0, 5.0]),
    }
)


def generate(model, prompts, *sizes, constraint=None, **settings):
    return generate_text(model, prompts, BeamSettings(*sizes, **settings), constraint=constraint)


def answers(found, prompt):
    lengths = found.lengths[prompt].tolist()
    tokens = found.tokens[prompt].tolist()
    assert all(not any(t[n:]) for t, n in zip(tokens, lengths, strict=True))
    return [t[:n] for t, n in zip(tokens, lengths, strict=True)], found.scores[prompt].tolist()


def slow(model, prompt, num_beams, max_new_tokens, *, eos_token_id=None, length_penalty=1.0):
    """Beam search in plain Python that recomputes everything: K texts and scores, best first."""
    ends = [] if eos_token_id is None else np.atleast_1d(eos_token_id).tolist()
    live, finished = [([], 0.0)], []
    for depth in range(1, max_new_tokens + 1):
        candidates = []
        texts = torch.tensor([[*prompt.tolist(), *tokens] for tokens, _ in live])
        with torch.inference_mode():
            rows = model(texts).logits[:, -1].double().log_softmax(-1).tolist()
        for (tokens, score), log_probs in zip(live, rows, strict=True):
            candidates += [([*tokens, t], score + log_prob) for t, log_prob in enumerate(log_probs)]
        candidates.sort(key=lambda c: -c[1])
        for tokens, score in candidates[:num_beams]:
            if tokens[-1] in ends or depth == max_new_tokens:
                finished.append((tokens, score / depth**length_penalty))
        finished = sorted(finished, key=lambda f: -f[1])[:num_beams]
        live = [c for c in candidates if c[0][-1] not in ends][:num_beams]
        full = len(finished) == num_beams
        # greedy search does not look further
        if full and (num_beams == 1 or live[0][1] / depth**length_penalty <= finished[-1][1]):
            break
    return [t for t, _ in finished], [s for _, s in finished]


def huggingface(model, prompts, num_beams, max_new_tokens, **rules_):
    """`generate`: (B, K, longest) tokens, with 0 behind each text, and (B, K) scores if K > 1."""
    longest = max(len(p) for p in prompts)
    tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        tokens[i, longest - len(prompt) :] = torch.from_numpy(prompt)
        mask[i, longest - len(prompt) :] = 1
    if num_beams == 1:
        rules_ = {k: v for k, v in rules_.items() if k == "eos_token_id"}
    found = model.generate(
        tokens,
        attention_mask=mask,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **rules_,
    )
    shape = (len(prompts), num_beams)
    scores = found.sequences_scores.view(shape) if num_beams > 1 else None
    return found.sequences[:, longest:].view(*shape, -1), scores


@given(seed=st.integers(0, 10_000), every=st.integers(1, 6), rules=rules)
@example(  # some texts are final before the longest depth
    seed=1748,
    every=2,
    rules={
        "num_beams": 3,
        "max_new_tokens": 6,
        "eos_token_id": [14, 16, 17, 26, 28, 29, 30, 31, 33, 34, 36, 39, 42, 43, 44, 58],
        "length_penalty": 2.0,
    },
)
@settings(max_examples=40, deadline=None)
def test_it_equals_a_plain_python_beam_search_in_float64(seed, every, rules):
    prompts = random_prompts(np.random.default_rng(seed), 2, 9)
    found = generate(
        DOUBLE, prompts, num_return_sequences=rules["num_beams"], collect_every=every, **rules
    )
    for i, prompt in enumerate(prompts):
        texts, scores = slow(DOUBLE, prompt, **rules)
        assert answers(found, i)[0] == texts
        np.testing.assert_allclose(answers(found, i)[1], scores, rtol=1e-9, atol=1e-9)


@given(
    architecture=st.sampled_from(ARCHITECTURES),
    seed=st.integers(0, 10_000),
    batch=st.integers(1, 3),
    every=st.integers(1, 6),
    rules=rules,
)
@settings(max_examples=60, deadline=None)
def test_it_equals_hugging_face_generate(architecture, seed, batch, every, rules):
    """In float64, which tells scores apart on any processor."""
    model, K = DOUBLES[architecture], rules["num_beams"]
    prompts = random_prompts(np.random.default_rng(seed), batch, 12)
    found = generate(model, prompts, num_return_sequences=K, collect_every=every, **rules)
    tokens, scores = huggingface(model, prompts, **rules)
    assert found.tokens.shape == tokens.shape
    # Hugging Face fills up with an end token where the padding is token 0
    inside = torch.arange(tokens.shape[-1]) < found.lengths.unsqueeze(-1)
    assert torch.equal(found.tokens, tokens * inside)
    if scores is not None:
        # `generate` rounds logits to float32, once a token.
        torch.testing.assert_close(found.scores, scores.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("architecture", ["llama-gqa", "mistral-window", "qwen3-mixed-window"])
def test_a_long_text_equals_hugging_face_and_its_slots_stay_few(architecture):
    model = MODELS[architecture]
    found = generate(model, PROMPTS, 6, 120, eos_token_id=7, num_return_sequences=2)
    tokens, scores = huggingface(model, PROMPTS, 6, 120, eos_token_id=7)
    inside = torch.arange(found.tokens.shape[-1]) < found.lengths.unsqueeze(-1)
    assert torch.equal(found.tokens, (tokens[:, :2, : inside.shape[-1]] * inside))
    _, exact = huggingface(DOUBLES[architecture], PROMPTS, 6, 120, eos_token_id=7)
    assert_as_exact(found.scores, scores[:, :2], exact[:, :2])
    for prompt, live, stats in zip(PROMPTS, found.live, found.stats, strict=True):
        assert len(prompt) + 111 <= live
        # the prompt, and 120 + 6 * (6 + 8) in whole blocks; then a quarter more
        assert stats.kv_slots == 16 + (208 if live < 150 else 272)


@given(seed=st.integers(0, 10_000), every=st.integers(1, 9), rules=rules, budget=st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_collection_does_not_change_answers(seed, every, rules, budget):
    prompts = random_prompts(np.random.default_rng(seed), 3, 9)
    model = TreeModel.of(DOUBLE)
    kept = generate(model, prompts, collect_every=None, **rules)
    with pytest.MonkeyPatch.context() as patch:
        # just enough for the steps before the first collection: the cache has to grow
        patch.setattr(text, "node_budget", lambda K, _, g: K * g + budget)
        found = generate(model, prompts, collect_every=every, **rules)
    assert torch.equal(found.tokens, kept.tokens)
    torch.testing.assert_close(found.scores, kept.scores, atol=1e-9, rtol=1e-9)
    assert model.pool.lent == 0


def test_a_cached_prompt_is_not_run_again():
    store = PrefixStore(DOUBLE.config, DOUBLE.dtype, DOUBLE.device, 1 << 20)
    model = TreeModel(DOUBLE)
    model.prefixes = store
    first = generate(model, [np.arange(1, 40)], 3, 12)
    again = generate(model, [np.arange(1, 40)], 3, 12)
    assert first.stats[0].cached_tokens == 0 < again.stats[0].cached_tokens
    assert first.stats[0].target_tokens == 39 + 3 * 11
    assert torch.equal(first.tokens, again.tokens)


@pytest.mark.parametrize("after", [0, 1, 5, 20])
def test_an_interrupted_search_returns_its_cache(monkeypatch, after):
    model = TreeModel(DOUBLE)
    forward, calls = model.forward, iter(range(after))

    def broken(*args, **kwargs):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    monkeypatch.setattr(text, "node_budget", lambda K, _, g: K * g)  # it also moves on the way
    monkeypatch.setattr(model, "forward", broken)
    with pytest.raises(KeyboardInterrupt):
        generate(model, PROMPTS, 4, 30)
    assert model.pool.lent == 0


def test_a_cache_that_cannot_grow_is_returned(monkeypatch):
    model = TreeModel(DOUBLE)
    lend, calls = model.pool.lend, []

    def scarce(*args):
        calls.append(args)
        if len(calls) > 1:
            raise MemoryError
        return lend(*args)

    monkeypatch.setattr(text, "node_budget", lambda K, _, g: K * g)
    monkeypatch.setattr(model.pool, "lend", scarce)
    with pytest.raises(MemoryError):
        generate(model, PROMPTS, 4, 60)
    assert model.pool.lent == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_beams": 0}, "num_beams must be at least 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"num_return_sequences": 6}, r"\(6\) must be at most num_beams \(5\)"),
        ({"collect_every": 0}, "collect_every must be at least 1"),
        ({"length_penalty": float("nan")}, "length_penalty must be finite"),
        ({"eos_token_id": 64}, "eos_token_id 64 is outside the vocabulary 0 .. 63"),
        ({"num_beams": 63, "eos_token_id": [1, 2]}, "at most the 62 tokens"),
    ],
)
def test_arguments_out_of_range_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        generate(DOUBLE, PROMPTS, **wrong)
