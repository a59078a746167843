"""Rotary embeddings whose frequencies depend on the length of a pass: exact up to their limit."""

import numpy as np
import pytest
import torch
from oracles import random_catalog, reference_beam_search, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search
from recsys.models.tree_forward import TreeModel

TRAINED = 24  # positions
LEVELS = 3
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 5.0, 8.0],
}
KINDS = {
    "longrope": {**LONGROPE, "original_max_position_embeddings": TRAINED},
    "dynamic": {"rope_type": "dynamic", "factor": 8.0},
}
LIMITS = {"longrope": TRAINED, "dynamic": TRAINED - 1}
CATALOGUE = random_catalog(np.random.default_rng(0), 60, LEVELS)
TRIE = ItemTrie.build(CATALOGUE)


def model_of(kind, architecture="llama"):
    """A model in float64 with this kind of rotary embedding; the same weights each time."""
    values = {"rope_parameters": {"rope_theta": 100.0, **KINDS[kind]}}
    if kind == "dynamic":
        values["max_position_embeddings"] = TRAINED
    if architecture == "phi3":
        values["original_max_position_embeddings"] = TRAINED
    return tiny_model(architecture, dtype=torch.float64, **values)


def prompt_of(length, seed=1):
    return np.random.default_rng(seed).integers(1, 64, length)


def search(model, prompts, **options):
    beams = beam_search(model, SearchRequest(prompts, **options), TRIE, 5)
    return list(zip(beams.tokens.tolist(), beams.scores.tolist(), strict=True))


def check_alone(found, kind, prompts, architecture="llama"):
    """Each request against a search by plain forwards of a model that has seen nothing else."""
    for (tokens, scores), prompt in zip(found, prompts, strict=True):
        expected = reference_beam_search(model_of(kind, architecture), prompt, CATALOGUE, 5)
        assert [tuple(row) for row in tokens] == [row for row, _ in expected]
        np.testing.assert_allclose(scores, [score for _, score in expected], atol=1e-9)


def longest_prompt(kind):
    """Tokens of a prompt whose last level but one is run at the limit."""
    return LIMITS[kind] - (LEVELS - 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_scores_as_alone_beside_a_long_one(kind):
    prompts = [prompt_of(3), prompt_of(longest_prompt(kind))]
    check_alone(search(model_of(kind), prompts), kind, prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_history_scores_as_a_new_one(kind):
    model = TreeModel(model_of(kind))
    model.keep_prefixes(1 << 20)
    long = prompt_of(longest_prompt(kind))
    search(model, [long[:8]])
    assert model.prefixes.known([long], [len(long)]).all()
    check_alone(search(model, [long]), kind, [long])


def test_phi3_with_its_own_field_for_the_length():
    prompts = [prompt_of(3), prompt_of(longest_prompt("longrope"))]
    model = model_of("longrope", "phi3")
    assert TreeModel(model).max_positions == TRAINED
    check_alone(search(model, prompts), "longrope", prompts, "phi3")


@pytest.mark.parametrize("kind", LIMITS)
def test_a_longer_pass_elsewhere_leaves_nothing_behind(kind):
    model, prompt = model_of(kind), prompt_of(longest_prompt(kind))
    with torch.inference_mode():
        model(torch.ones((1, 3 * TRAINED), dtype=torch.int64))
    check_alone(search(model, [prompt]), kind, [prompt])


@pytest.mark.parametrize("kind", LIMITS)
def test_a_prompt_beyond_the_limit_is_refused(kind):
    model = TreeModel(model_of(kind))
    too_long = LIMITS[kind] + 1
    with pytest.raises(ValueError, match=f"need {too_long} positions.* at most {LIMITS[kind]}"):
        model.check_positions(too_long)
    with pytest.raises(ValueError, match=r"shorten the prompt .*docs/architectures\.md"):
        search(model, [prompt_of(3), prompt_of(too_long)])
    assert model.pool.lent == 0


@pytest.mark.parametrize("kind", LIMITS)
def test_levels_beyond_the_limit_are_refused(kind):
    model = TreeModel(model_of(kind))
    with pytest.raises(ValueError, match=f"need {LIMITS[kind] + 1} positions"):
        search(model, [prompt_of(longest_prompt(kind) + 1)])


def test_the_least_limit_of_all_layer_types_counts():
    rope = {"rope_theta": 100.0, "rope_type": "default"}
    values = {"sliding_attention": rope, "full_attention": {**rope, **KINDS["longrope"]}}
    model = tiny_model("qwen3-mixed-window")
    model.config.rope_parameters = values
    assert TreeModel(model).max_positions == TRAINED
