"""Sampling without replacement: a slow twin, and the law of its noise."""

import math

import numpy as np
import pytest
import torch
from oracles import random_catalog, random_prompts, tiny_model
from scipy.stats import kstest

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search
from recsys.decoding.sampling import Noise

TARGET = tiny_model("llama-gqa", hidden=16, layers=1, dtype=torch.float64)
UNLIKELY = 1e-3


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
