"""Sampling without replacement: the law of samples, and that speculation leaves them unchanged."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from recsys.constraint import ItemTrie
from recsys.decoding import ModelDrafter, SearchRequest, beam_search, speculative_beam_search
from recsys.decoding.sampling import Noise
from recsys.testing import random_catalog, random_prompts, tiny_model

TARGET = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
# finds likely what the target finds unlikely
ADVERSARY = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
ADVERSARY.lm_head.weight.data.neg_()
DRAFTS = {
    "perfect": TARGET,
    "unrelated": tiny_model("llama", hidden=16, layers=1, seed=9, dtype=torch.float64),
    "adversary": ADVERSARY,
}
UNLIKELY = 1e-3


def drafter_of(kind, nodes):
    return None if kind == "exhaustive" else ModelDrafter(DRAFTS[kind], nodes)


@given(
    seed=st.integers(0, 100_000),
    kind=st.sampled_from(["perfect", "unrelated", "adversary", "exhaustive"]),
    items=st.sampled_from([1, 2, 7, 40, 300]),
    levels=st.integers(1, 4),
    beams=st.integers(1, 22),
    nodes=st.integers(1, 60),
    patch=st.sampled_from([1, 5, 128]),
    batch=st.integers(1, 4),
    excluded=st.sampled_from([0.0, 0.1, 0.8, 1.0]),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
)
@settings(max_examples=500, deadline=None)
def test_speculation_draws_the_sample_of_plain_search(
    seed, kind, items, levels, beams, nodes, patch, batch, excluded, temperature
):
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, items, levels))
    prompts = random_prompts(rng, batch, 6)
    options = {
        "seeds": rng.integers(-(2**63), 2**63 - 1, batch).tolist(),
        "temperature": temperature,
        "exclude": [
            trie.excluded_rows(np.flatnonzero(rng.random(items) < excluded)) for _ in range(batch)
        ],
    }
    expected = beam_search(TARGET, SearchRequest(prompts, **options), trie, beams)
    found = speculative_beam_search(
        TARGET,
        drafter_of(kind, nodes),
        SearchRequest(prompts, **options),
        trie,
        beams,
        patch_nodes=patch,
    )
    assert torch.equal(found.rows, expected.rows)
    alive = expected.rows >= 0
    torch.testing.assert_close(found.scores[alive], expected.scores[alive], atol=1e-10, rtol=0)
    assert all(1 <= s.target_passes <= levels for s in found.stats)
    for rows, excluded_rows in zip(found.rows, options["exclude"], strict=True):
        drawn = [row for row in rows.tolist() if row >= 0]
        assert len(set(drawn)) == len(drawn) == min(beams, trie.num_rows - len(excluded_rows))
        assert not set(drawn) & set(excluded_rows.tolist())


# A slow twin: integers of Python, one prefix at a time, all leaves.

MASK = 2**64 - 1


def mix(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def gumbel(seed, state):
    uniform = ((mix((mix(seed & MASK) + state) & MASK) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def children_of(rows, prefix):
    return sorted({row[len(prefix)] for row in rows if row[: len(prefix)] == prefix})


def conditional(model, prompt, rows, prefix, temperature):
    """Log-probabilities of the tokens that may follow a prefix."""
    tokens = children_of(rows, prefix)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt.tolist(), *prefix]])).logits[0, -1].double()
    values = logits[tokens] / temperature
    return dict(zip(tokens, (values - values.logsumexp(-1)).tolist(), strict=True))


def perturbed_leaves(model, prompt, rows, every_row, seed, temperature):
    """(perturbed log-probability, sequence, log-probability) of every leaf, best first."""
    prefixes = {row[:depth] for row in every_row for depth in range(len(row) + 1)}
    state = {p: i for i, p in enumerate(sorted(prefixes, key=lambda p: (len(p), p)))}
    leaves = []

    def descend(prefix, log_prob, score):
        if len(prefix) == len(rows[0]):
            leaves.append((score, prefix, log_prob))
            return
        following = conditional(model, prompt, rows, prefix, temperature)
        noisy = {
            token: log_prob + value + gumbel(seed, state[(*prefix, token)])
            for token, value in following.items()
        }
        most = max(noisy.values())
        for token, value in following.items():
            # Gumbel noise given that the largest is the parent's (there, appendix B.3)
            inverse = math.exp(-score) - math.exp(-most) + math.exp(-noisy[token])
            descend((*prefix, token), log_prob + value, -math.log(inverse))

    descend((), 0.0, 0.0)
    return sorted(leaves, reverse=True)


@pytest.mark.parametrize("seed", range(12))
def test_a_sample_is_the_top_k_of_all_perturbed_leaves(seed):
    rng = np.random.default_rng(seed)
    catalog = random_catalog(rng, 30, 1 + seed % 4, 16)
    trie = ItemTrie.build(catalog)
    every_row = sorted({tuple(row) for row in catalog.tolist()})
    excluded = trie.excluded_rows(np.flatnonzero(rng.random(30) < 0.2))
    rows = [row for i, row in enumerate(every_row) if i not in excluded]
    [prompt] = random_prompts(rng, 1, 5)
    temperature = (1.0, 0.5, 3.0)[seed % 3]
    found = beam_search(
        TARGET,
        SearchRequest([prompt], exclude=[excluded], seeds=[seed - 5], temperature=temperature),
        trie,
        7,
    )
    leaves = perturbed_leaves(TARGET, prompt, rows, every_row, seed - 5, temperature)[:7]
    assert [tuple(row) for row in found.tokens[0].tolist()] == [row for _, row, _ in leaves]
    expected = torch.tensor([log_prob for *_, log_prob in leaves], dtype=torch.float64)
    torch.testing.assert_close(found.scores[0], expected, atol=1e-9, rtol=0)


# The law of the samples.

SMALL = sorted({(1, 2, 3), (1, 2, 4), (1, 5, 3), (2, 2, 2), (2, 6, 2), (7, 1, 1)})
PROMPT = np.array([3, 1, 4])


def law_of(model, temperature):
    """Probability of each leaf of SMALL, by enumeration."""
    return [
        math.exp(
            sum(
                conditional(model, PROMPT, SMALL, row[:d], temperature)[row[d]]
                for d in range(len(row))
            )
        )
        for row in SMALL
    ]


def draw(count, beams, temperature):
    """(count, beams) rows, each with a seed of its own."""
    trie = ItemTrie.build(np.array(SMALL))
    return torch.cat(
        [
            beam_search(
                TARGET,
                SearchRequest(
                    [PROMPT] * 2000, seeds=range(first, first + 2000), temperature=temperature
                ),
                trie,
                beams,
            ).rows
            for first in range(0, count, 2000)
        ]
    )


def without_replacement(law, beams):
    """Probability of every ordered sample."""
    found = {}
    for sample in itertools.permutations(range(len(law)), beams):
        left, probability = 1.0, 1.0
        for leaf in sample:
            probability *= law[leaf] / left
            left -= law[leaf]
        found[sample] = probability
    return found


@pytest.mark.parametrize(("beams", "temperature"), [(1, 1.0), (2, 2.0), (3, 4.0)])
def test_samples_are_drawn_without_replacement(beams, temperature):
    law = law_of(TARGET, temperature)
    samples = draw(20_000, beams, temperature)
    expected = without_replacement(law, beams)
    # ordered samples too rare for the test's approximation are counted together
    seen = Counter(map(tuple, samples.tolist()))
    counts = np.array([[seen[s], 20_000 * p] for s, p in expected.items()])
    rare = counts[:, 1] < 8
    counts = np.vstack([counts[~rare], counts[rare].sum(0)]) if rare.any() else counts
    assert chisquare(counts[:, 0], counts[:, 1]).pvalue > UNLIKELY


def test_noise_is_uniform_and_independent():
    seeds, states = torch.arange(-200, 200), torch.arange(500).expand(400, -1)
    noise = Noise(seeds)
    uniform = noise.uniform(states)
    assert uniform.min() > 0
    assert uniform.max() < 1
    assert kstest(uniform.flatten(), "uniform").pvalue > UNLIKELY
    lines = [
        (uniform[:-1], uniform[1:]),  # the next seed
        (uniform[:, :-1], uniform[:, 1:]),  # the next state
        (uniform[1:, :-1], uniform[:-1, 1:]),  # seed + state the same
        (uniform, noise.stream(1).uniform(states)),
        (noise.stream(1).uniform(states), noise.stream(2).uniform(states)),
    ]
    for a, b in lines:
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.numel())
    gumbel_ = noise.gumbel(states)
    torch.testing.assert_close(gumbel_.mean().item(), 0.5772, atol=0.02, rtol=0)
    torch.testing.assert_close(gumbel_.var().item(), math.pi**2 / 6, atol=0.05, rtol=0)
