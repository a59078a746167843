"""The gate of benchmarks/gpu.py: what right kernels do in bfloat16 passes, planted errors fail."""

import copy
import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from recsys.benchmark.decode import Answer
from recsys.constraint import ItemTrie
from recsys.decoding import ModelDrafter, SearchRequest, beam_search, speculative_beam_search
from recsys.models.tree_forward import TreeModel
from recsys.testing import huggingface_beam_search, random_catalog, tiny_model

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_gate.py"
SPEC = importlib.util.spec_from_file_location("gpu_gate_of_tests", SCRIPT)
gate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gate)

BEAMS, REQUESTS, PROMPT = 5, 8, 12


class Judged:
    """A small model in bfloat16, its users, and the errors of the two that are trusted."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.model = tiny_model("llama-gqa", seed=seed, dtype=torch.bfloat16)
        self.catalog = random_catalog(rng, 120, 4)
        self.trie = ItemTrie.build(self.catalog)
        self.prompts = list(rng.integers(1, 64, (REQUESTS, PROMPT)))
        self.scorer = gate.Scorer(self.model)
        theirs = huggingface_beam_search(self.model, self.prompts, self.catalog, BEAMS)
        self.trusted = {"eager": self.error(own=False), "huggingface": self._error(theirs)}

    def error(self, *, own=True, drafted=False):
        """Of beam search, or of speculation with the model as its own draft."""
        target = TreeModel(self.model, own_forward=own)
        request = SearchRequest(self.prompts)
        if drafted:
            drafter = ModelDrafter(TreeModel(self.model, own_forward=own), 40)
            found = speculative_beam_search(target, drafter, request, self.trie, BEAMS)
        else:
            found = beam_search(target, request, self.trie, BEAMS)
        return self._error(Answer.of(found).rankings)

    def _error(self, rankings):
        return self.scorer.error(self.prompts, rankings)

    def passes(self, error):
        return gate.judge(error, self.trusted)["passed"]


@pytest.fixture(scope="module", params=[0, 2, 3])
def judged(request):
    return Judged(request.param)


def test_scores_are_those_of_plain_passes_in_float32(judged):
    """One sequence at a time, by a float32 copy of the model; the weights are as before."""
    before = [(p.dtype, p.data_ptr()) for p in judged.model.parameters()]
    sequences = [tuple(row) for row in judged.catalog[[3, 50, 7]].tolist()]
    wide, prompt = copy.deepcopy(judged.model).float(), judged.prompts[2]
    expected = []
    for sequence in sequences:
        tokens = torch.tensor([[*prompt.tolist(), *sequence]])
        with torch.no_grad():
            steps = wide(tokens).logits[0].double().log_softmax(-1)
        behind = range(len(prompt) - 1, tokens.shape[1] - 1)
        expected.append(sum(float(steps[i, tokens[0, i + 1]]) for i in behind))
    assert gate.score(judged.model, prompt, sequences) == pytest.approx(expected, abs=1e-4)
    assert [(p.dtype, p.data_ptr()) for p in judged.model.parameters()] == before


def test_the_weights_come_back_if_a_pass_raises(judged):
    before = [(p.dtype, p.data_ptr()) for p in judged.model.parameters()]
    with pytest.raises(RuntimeError), gate.widened(judged.model):
        judged.model(torch.ones(1, 2, dtype=torch.int64), attention_mask=torch.ones(1, 1, 3, 7))
    assert [(p.dtype, p.data_ptr()) for p in judged.model.parameters()] == before


def test_eager_passes_hugging_face_and_other_orders_of_sums_pass(judged):
    for error in (*judged.trusted.values(), judged.error(), judged.error(drafted=True)):
        assert error > 0.01
        assert judged.passes(error)


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


@pytest.mark.parametrize("plant", [wrong_row, wrong_mask, stale_key])
def test_one_planted_error_in_the_second_pass_fails(judged, plant, monkeypatch):
    right, calls = TreeModel.run, []

    def run(self, tokens, positions, masks, cache, rows):
        calls.append(tokens)
        if len(calls) != 2:
            return right(self, tokens, positions, masks, cache, rows)
        return plant(masks, cache, lambda m: right(self, tokens, positions, m, cache, rows))

    monkeypatch.setattr(TreeModel, "run", run)
    error = judged.error()  # at least five times those of the trusted ways, with these seeds
    assert len(calls) == 4
    assert not judged.passes(error)


def test_scores_that_are_no_numbers_fail():
    assert not gate.judge(float("inf"), {"eager": float("inf")})["passed"]
    model = tiny_model("llama", dtype=torch.bfloat16)
    nan = gate.Scorer(model).error([[1, 2, 3]], [[((1, 2), float("nan"))]])
    assert not gate.judge(nan, {"eager": 1.0})["passed"]
