"""Beam search under a constraint: against a slow twin, and on real titles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import byte_level_tokenizer, random_prompts, tiny_model

from recsys.text import BeamSettings, generate_text
from recsys.text.titles import Titles, generate_titles
from recsys.text.tokenizer import TextTokenizer

TOKENIZER = TextTokenizer(byte_level_tokenizer(["abcabc", "bcabca", "aabb"] * 3, 264))
SPELLING = TOKENIZER.spelling  # 1 ends
WIDE = TextTokenizer(byte_level_tokenizer(["abc"], 258), 300)
DOUBLE = tiny_model("llama-gqa", 264, dtype=torch.float64)

titles_ = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=6, unique=True)


def generate(model, prompts, *sizes, constraint=None, **settings):
    return generate_text(model, prompts, BeamSettings(*sizes, **settings), constraint=constraint)


def log_probs(model, prompt, text):
    """(len(text),) log-probabilities of a text's tokens."""
    tokens = torch.tensor([[*prompt.tolist(), *text]])
    with torch.inference_mode():
        steps = model(tokens).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return steps.gather(1, tokens[0, len(prompt) :, None])[:, 0]


def tokenisations(titles):
    """All token sequences that spell a title, with the end token."""
    ways, stack = [], [((), title.encode()) for title in titles]
    while stack:
        prefix, rest = stack.pop()
        if not rest:
            ways.append((*prefix, 1))
        for token, data in enumerate(SPELLING):
            if data and rest.startswith(data):
                stack.append(((*prefix, token), rest[len(data) :]))
    return ways


def spelled(text):
    return b"".join(SPELLING[t] for t in text).decode()


def answers(found, request=0):
    """Texts of a request that exist, with their scores."""
    lengths, scores = found.lengths[request].tolist(), found.scores[request].tolist()
    texts = found.tokens[request].tolist()
    assert all((n == 0) == (s == -np.inf) for n, s in zip(lengths, scores, strict=True))
    return [(tuple(t[:n]), s) for t, n, s in zip(texts, lengths, scores, strict=True) if n]


def slow(prompt, titles, num_beams, longest, length_penalty):
    """Beam search over all tokenisations in plain Python; of one title the best goes on."""
    ways = tokenisations(titles)
    live, finished = [((), 0.0)], {}
    for depth in range(1, longest + 1):
        candidates = []
        for text, score in live:
            options = sorted(
                {w[depth - 1] for w in ways if len(w) >= depth and w[: depth - 1] == text}
            )
            for token in options:
                step = float(log_probs(DOUBLE, prompt, (*text, token))[-1])
                candidates.append(((*text, token), score + step))
        best = {}
        for text, score in sorted(candidates, key=lambda c: -c[1]):
            only = [t for t in titles if t.startswith(spelled(text))]
            key = only[0] if len(only) == 1 else spelled(text)
            best.setdefault((key, text[-1] == 1), (text, score))
        ranked = list(best.values())
        for text, score in ranked[:num_beams]:
            if text[-1] == 1:
                score /= depth**length_penalty
                if score > finished.get(spelled(text), ((), -np.inf))[1]:
                    finished[spelled(text)] = (text, score)
        kept = sorted(finished.values(), key=lambda f: -f[1])[:num_beams]
        finished = {spelled(text): (text, score) for text, score in kept}
        live = [c for c in ranked if c[0][-1] != 1][:num_beams]
        full = len(kept) == num_beams
        if not live or (
            full and (num_beams == 1 or live[0][1] / depth**length_penalty <= kept[-1][1])
        ):
            break
    return kept


@given(
    titles=titles_,
    seed=st.integers(0, 10_000),
    num_beams=st.integers(1, 6),
    longest=st.integers(1, 6),
    penalty=st.sampled_from([0.0, 1.0]),
)
@settings(max_examples=40, deadline=None)
def test_it_equals_a_plain_python_search_over_all_tokenisations(
    titles, seed, num_beams, longest, penalty
):
    prompts = random_prompts(np.random.default_rng(seed), 2, 5, 264)
    found = generate(
        DOUBLE,
        prompts,
        num_beams,
        longest,
        constraint=Titles(titles, TOKENIZER).constraint(),
        length_penalty=penalty,
        num_return_sequences=num_beams,
        collect_every=2,
    )
    for request, prompt in enumerate(prompts):
        expected = slow(prompt, titles, num_beams, longest, penalty)
        mine = answers(found, request)
        assert [text for text, _ in mine] == [text for text, _ in expected]
        np.testing.assert_allclose([s for _, s in mine], [s for _, s in expected], rtol=1e-9)


def test_requests_may_have_their_own_constraints():
    prompts = random_prompts(np.random.default_rng(1), 3, 6, 264)
    catalogs = (["a"], ["abcabcabcabc", "cab"], ["bb", "cc"])
    own = [Titles(catalog, TOKENIZER).constraint() for catalog in catalogs]
    together = generate(DOUBLE, prompts, 3, 15, constraint=own, num_return_sequences=3)
    for request, (prompt, titles) in enumerate(zip(prompts, own, strict=True)):
        alone = generate(DOUBLE, [prompt], 3, 15, constraint=titles, num_return_sequences=3)
        for a, b in zip(answers(alone), answers(together, request), strict=True):
            assert a[0] == b[0]
            assert a[1] == pytest.approx(b[1], abs=1e-9)


def test_texts_that_are_not_whole_in_time_are_no_answers():
    titles = Titles(["qrstuvwx", "a"], TOKENIZER).constraint()
    found = generate(DOUBLE, [np.array([3])], 4, 3, constraint=titles, num_return_sequences=4)
    assert [spelled(text) for text, _ in answers(found)] == ["a"]
    assert found.scores[0, 1:].tolist() == [-np.inf] * 3
    nothing = generate(DOUBLE, [np.array([3])], 4, 1, constraint=titles)
    assert answers(nothing) == []
    assert nothing.tokens.shape == (1, 1, 0)


CATALOG = [
    f"{first} {second}{end}"
    for first in ("Heat", "Alien", "Häuser", "Toy", "Über", "Star 🎬", "The Night")
    for second in ("Story", "Wars", "of the Night", "& Co.", "II")
    for end in ("", " 2", " 2", ": Part One", " (1995)")  # some titles have two items
]


def test_generated_titles_are_in_the_catalog_and_distinct():
    catalog = CATALOG
    tokenizer = TextTokenizer(byte_level_tokenizer(catalog, 400))
    every = Titles(catalog, tokenizer)
    model = tiny_model("llama-gqa", 400, initializer_range=0.05)
    prompts = [np.asarray(tokenizer.encode(" ; ".join(catalog[i : i + 4]))) for i in range(12)]
    found = generate_titles(model, prompts, every, 10)
    written = 0
    for request in range(12):
        titles = [tokenizer.decode(text) for text, _ in answers(found.texts, request)]
        assert len(titles) == len(set(titles))
        assert set(titles) <= set(catalog)
        written += len(titles)
        for title, items in zip(titles, found.items[request], strict=True):
            assert items.tolist() == [i for i, t in enumerate(catalog) if t == title]
    assert written > 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"constraint": [], "eos_token_id": None}, "0 constraints for 1 prompts"),
        ({"eos_token_id": 3}, "eos_token_id: the constraint has end tokens of its own"),
        (
            {"constraint": Titles(["a"], WIDE).constraint()},
            "the constraint has 300 tokens, the model 264",
        ),
    ],
)
def test_constraints_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(
            DOUBLE,
            [np.array([3])],
            2,
            5,
            **{"constraint": Titles(["a"], TOKENIZER).constraint(), **arguments},
        )
