"""Beam search against its slow twin, against Hugging Face, and against itself in other company."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from huggingface import huggingface_beam_search
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ARCHITECTURES, exact_twin, random_catalog, random_prompts, same_list, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search

MODELS = {name: tiny_model(name) for name in ARCHITECTURES}


def as_list(beams, i):
    """One request's answer as the references give it."""
    alive = beams.scores[i] > -torch.inf
    return list(
        zip(
            (tuple(row) for row in beams.tokens[i][alive].tolist()),
            beams.scores[i][alive].tolist(),
            strict=True,
        )
    )


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("beams", "levels"), [(1, 3), (5, 4), (20, 2), (50, 6)])
def test_equals_hugging_face_generate(architecture, beams, levels):
    rng = np.random.default_rng(beams * 10 + levels)
    catalog = random_catalog(rng, 80, levels)
    prompts = random_prompts(rng, 3, 20)
    found = beam_search(MODELS[architecture], prompts, ItemTrie.build(catalog), beams)
    theirs, exact = (
        huggingface_beam_search(model, prompts, catalog, beams)
        for model in (MODELS[architecture], exact_twin(MODELS[architecture]))
    )
    for i in range(len(prompts)):
        assert same_list(as_list(found, i), theirs[i], exact[i])


@given(seed=st.integers(0, 10_000), beams=st.sampled_from([1, 2, 3, 7, 20]))
@settings(max_examples=25, deadline=None)
def test_scores_have_the_same_bits_alone_and_in_a_batch(seed, beams):
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, 200, 4))
    prompts = random_prompts(rng, int(rng.integers(2, 7)), 40)
    exclude = [trie.excluded_rows(rng.integers(0, 200, 5)) for _ in prompts]
    model = MODELS["llama-gqa"]
    request = SearchRequest(prompts, exclude=exclude, prompt_slots=40)
    together = beam_search(model, request, trie, beams)
    for i in range(len(prompts)):
        own = replace(request, prompts=prompts[i : i + 1], exclude=exclude[i : i + 1])
        alone = beam_search(model, own, trie, beams)
        assert torch.equal(alone.scores[0], together.scores[i])
        assert torch.equal(alone.rows[0], together.rows[i])


def test_a_cache_holds_the_prompt_once_and_one_slot_a_node():
    rng = np.random.default_rng(0)
    trie = ItemTrie.build(random_catalog(rng, 500, 4))
    beams = beam_search(MODELS["llama"], [np.arange(1, 31), np.array([1])], trie, 20)
    assert [s.kv_slots for s in beams.stats] == [30 + 20 * 3, 1 + 20 * 3]
    assert [s.target_passes for s in beams.stats] == [4, 4]


def test_bfloat16_agrees_with_float32_up_to_its_rounding():
    rng = np.random.default_rng(3)
    trie = ItemTrie.build(random_catalog(rng, 100, 3))
    prompts = random_prompts(rng, 4, 15)
    exact = beam_search(tiny_model(seed=5), prompts, trie, 10)
    rough = beam_search(tiny_model(seed=5, dtype=torch.bfloat16), prompts, trie, 10)
    shared = [
        len(set(a) & set(b)) for a, b in zip(exact.rows.tolist(), rough.rows.tolist(), strict=True)
    ]
    assert np.mean(shared) >= 7
