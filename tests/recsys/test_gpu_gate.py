"""The gate of benchmarks/gpu.py: right kernels pass in bfloat16, planted errors do not."""

import copy
from functools import cache

import gpu_gate as gate
import numpy as np
import pytest
import torch
from answers import Answer
from huggingface import huggingface_beam_search
from oracles import assert_as_exact, random_catalog, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import (
    ModelDrafter,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.models.tree_forward import TreeModel

BEAMS, REQUESTS, PROMPT = 5, 8, 12


class Judged:
    """A small model in bfloat16, its users, and the errors of those that are trusted."""

    def __init__(self, seed, catalog=None):
        rng = np.random.default_rng(seed)
        self.model = tiny_model("llama-gqa", seed=seed, dtype=torch.bfloat16)
        self.catalog = random_catalog(rng, 120, 4) if catalog is None else catalog
        self.trie = ItemTrie.build(self.catalog)
        self.prompts = list(rng.integers(1, 64, (REQUESTS, PROMPT)))
        self.scorer = gate.Scorer(self.model)
        self.huggingface = huggingface_beam_search(self.model, self.prompts, self.catalog, BEAMS)
        self.eager = self.search(own=False)
        rounding = self.scorer.rounding(self.prompts, self.eager)
        self.trusted = {"eager": self.error(self.eager), "huggingface": rounding}

    def search(self, *, own=True, drafted=False):
        """The lists of beam search, or of speculation with the model as its own draft."""
        target = TreeModel(self.model, own_forward=own)
        request = SearchRequest(self.prompts)
        if drafted:
            drafter = ModelDrafter(TreeModel(self.model, own_forward=own), 40)
            found = speculative_beam_search(target, drafter, request, self.trie, BEAMS)
        else:
            found = beam_search(target, request, self.trie, BEAMS)
        return Answer.of(found).rankings

    def error(self, rankings):
        return self.scorer.error(self.prompts, rankings)

    def fault(self, rankings):
        pairs = zip(rankings, self.eager, strict=True)
        return next(filter(None, (gate.find_fault(self.trie.rows, *p) for p in pairs)), "")

    def judge(self, rankings):
        return gate.judge(self.error(rankings), self.trusted)


SEEDS = (0, 2)
judge_of = cache(Judged)


def test_scores_are_those_of_plain_passes_in_float32():
    """One sequence at a time, by a float32 copy of the model; the weights are as before."""
    judged = judge_of(2)
    before = [(p.dtype, p.data_ptr()) for p in judged.model.parameters()]
    sequences = [tuple(row) for row in judged.catalog[[3, 50, 7]].tolist()]
    plain = [plain_scores(judged, 2, sequences, dtype) for dtype in (torch.float32, torch.float64)]
    assert_as_exact(gate.score(judged.model, judged.prompts[2], sequences), *plain)
    assert [(p.dtype, p.data_ptr()) for p in judged.model.parameters()] == before


def plain_scores(judged, number, sequences, dtype):
    """Scores behind a prompt by a copy of the model in a type, one sequence at a time."""
    wide, prompt = copy.deepcopy(judged.model).to(dtype), judged.prompts[number].tolist()
    scores = []
    for sequence in sequences:
        tokens = torch.tensor([[*prompt, *sequence]])
        with torch.no_grad():
            steps = wide(tokens).logits[0].double().log_softmax(-1)
        behind = range(len(prompt) - 1, tokens.shape[1] - 1)
        scores.append(sum(float(steps[i, tokens[0, i + 1]]) for i in behind))
    return scores


@pytest.mark.parametrize("seed", SEEDS)
def test_eager_passes_hugging_face_and_other_orders_of_sums_pass(seed):
    judged = judge_of(seed)
    others = judged.search(), judged.search(drafted=True)
    for rankings in (judged.eager, judged.huggingface, *others):
        assert not judged.fault(rankings)
        verdict = judged.judge(rankings)
        assert verdict["error"] > 0.01
        assert verdict["passed"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda ranking: ranking[:1] * BEAMS, "an item is listed twice"),
        (lambda ranking: ranking[-1:] * BEAMS, "an item is listed twice"),
        (lambda ranking: ranking[::-1], "scores do not descend"),
        (lambda ranking: ranking[1:], "lists have other lengths"),
        (lambda ranking: [*ranking[:-1], ((1, 1, 1, 1), ranking[-1][1])], "not in the catalog"),
        (lambda ranking: [*ranking[:-1], (ranking[0][0][:3], -99.0)], "not in the catalog"),
    ],
)
def test_a_list_that_is_none_is_refused_whatever_its_scores_are(change, fault):
    judged = judge_of(0)
    assert fault in judged.fault([change(ranking) for ranking in judged.eager])


def wrong_row(masks, cache, run):
    """Two beams of one request get each other's logits."""
    logits = run(masks).clone()
    logits[0, [0, 1]] = logits[0, [1, 0]]
    return logits


def wrong_mask(masks, cache, run):
    """Each beam of one request sees another beam's token in place of its own."""
    masks = {kind: mask.clone() for kind, mask in masks.items()}
    for mask in masks.values():
        mask[0, 0, :BEAMS] = mask[0, 0, :BEAMS].roll(1, dims=0)
    return run(masks)


def stale_key(masks, cache, run):
    """One request's key of one token is that of the token before it."""
    cache.buffer[:, 0, 0, PROMPT - 1] = cache.buffer[:, 0, 0, PROMPT - 2]
    return run(masks)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("plant", [wrong_row, wrong_mask, stale_key])
def test_one_planted_error_in_the_second_pass_fails(seed, plant, monkeypatch):
    right, calls, judged = TreeModel.run, [], judge_of(seed)

    def run(self, tokens, positions, masks, cache, rows):
        calls.append(tokens)
        if len(calls) != 2:
            return right(self, tokens, positions, masks, cache, rows)
        return plant(masks, cache, lambda m: right(self, tokens, positions, m, cache, rows))

    monkeypatch.setattr(TreeModel, "run", run)
    found = judged.search()
    assert len(calls) == 4
    assert judged.error(found) > gate.MOST * max(judged.trusted.values())
    assert not judged.judge(found)["passed"]


def test_scores_that_are_no_numbers_fail():
    nothing = {"eager": float("inf"), "huggingface": float("inf")}
    assert not gate.judge(float("inf"), nothing)["passed"]
    judged = judge_of(0)
    lists = [[(sequence, float("nan")) for sequence, _ in ranking] for ranking in judged.eager]
    assert not judged.judge(lists)["passed"]
