"""Scores of given rows: equal to teacher forcing, to beam search's, and free of their company."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    SearchRequest,
    beam_search,
    score_rows,
)
from recsys.decoding.row_tree import RowTree
from recsys.transfers import Upload

ARCHITECTURES = ["llama-gqa", "mistral-window"]
MODELS = {name: tiny_model(name, dtype=torch.float64) for name in ARCHITECTURES}
TARGET = MODELS["llama-gqa"]
VOCABULARY = 64


def teacher_forced(model, prompt, tokens) -> float:
    """One row alone: prompt and tokens in one plain forward, no tree, no cache."""
    whole = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        steps = model(whole).logits[0].log_softmax(-1)
    total = 0.0
    for i, token in enumerate(tokens):
        total += float(steps[len(prompt) + i - 1, int(token)])
    return total


def random_case(seed, levels=None):
    rng = np.random.default_rng(seed)
    levels = levels or int(rng.integers(1, 5))
    catalog = random_catalog(rng, int(rng.integers(1, 40)), levels, VOCABULARY)
    trie = ItemTrie.build(catalog)
    prompts = random_prompts(rng, int(rng.integers(1, 5)), 12)
    rows = [rng.integers(0, trie.num_rows, int(rng.integers(0, 12))) for _ in prompts]
    return rng, trie, prompts, rows


@given(st.integers(0, 10**6), st.sampled_from(ARCHITECTURES))
@settings(max_examples=25, deadline=None)
def test_scores_equal_teacher_forcing(seed, architecture):
    _, trie, prompts, rows = random_case(seed)
    model = MODELS[architecture]
    scores = score_rows(model, prompts, trie, rows)
    assert scores.shape == (len(prompts), max(map(len, rows)))
    for line, prompt, mine in zip(scores.tolist(), prompts, rows, strict=True):
        wanted = [teacher_forced(model, prompt, trie.rows[r].tolist()) for r in mine]
        np.testing.assert_allclose(line[: len(mine)], wanted, rtol=0, atol=1e-9)
        assert all(s == -np.inf for s in line[len(mine) :])


@given(st.integers(0, 10**6), st.integers(0, 12))
@settings(max_examples=30, deadline=None)
def test_a_budget_takes_rows_in_order_while_their_prefixes_fit(seed, nodes):
    _, trie, prompts, rows = random_case(seed)
    upload = Upload(torch.device("cpu"))
    tree = RowTree.of(DeviceTrie.of(trie), rows, nodes, upload)
    upload.send()
    assert tree.states.shape == (len(prompts), nodes)
    for request, mine in enumerate(rows):
        prefixes: set[tuple[int, ...]] = set()
        fits = True
        for place, row in enumerate(mine):
            tokens = trie.rows[row].tolist()
            more = prefixes | {tuple(tokens[:d]) for d in range(1, trie.num_levels)}
            fits = fits and len(more) <= nodes
            prefixes = more if fits else prefixes
            assert bool(tree.known[request, place]) == fits
        assert int(tree.real[request].sum()) == len(prefixes)
    full = score_rows(TARGET, prompts, trie, rows)
    request = SearchRequest(prompts, candidates=rows, candidate_nodes=nodes)
    scores = beam_search(TARGET, request, trie, 3).candidate_scores
    torch.testing.assert_close(scores[tree.known], full[tree.known], rtol=0, atol=1e-9)
    assert (scores[~tree.known] == -torch.inf).all()


def test_candidate_scores_have_the_same_bits_in_any_batch():
    rng = np.random.default_rng(0)
    model = tiny_model(hidden=128)  # float32, as wide as the smallest preset
    trie = ItemTrie.build(random_catalog(rng, 200, 4, VOCABULARY))
    prompts = random_prompts(rng, 6, 24)
    rows = [rng.permutation(trie.num_rows)[: 10 + i] for i in range(6)]

    request = SearchRequest(prompts, candidates=rows, candidate_nodes=24, prompt_slots=32)
    together = beam_search(model, request, trie, 5)
    for i in range(6):
        own = replace(request, prompts=prompts[i : i + 1], candidates=rows[i : i + 1])
        alone = beam_search(model, own, trie, 5)
        assert torch.equal(alone.scores[0], together.scores[i])
        mine = alone.candidate_scores[0]
        assert torch.equal(mine, together.candidate_scores[i, : len(mine)])
