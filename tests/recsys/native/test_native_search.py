"""The native search against the search over torch's steps: answers, work, restrictions, bits."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import ARCHITECTURES, random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.mask import RowMask
from recsys.decoding import SearchRequest, beam_search, complete
from recsys.decoding import beam as plain
from recsys.decoding.native import native_decoder, native_search
from recsys.decoding.request import Search
from recsys.models.graphs import PassGraphs
from recsys.models.tree_forward import TreeModel
from recsys.native import library

pytestmark = pytest.mark.skipif(
    isinstance(library.find_library(), str), reason=f"{library.find_library()}"
)
MODELS = {name: TreeModel(tiny_model(name)) for name in ARCHITECTURES}


def by_steps(monkeypatch, *arguments):
    """The same search over native passes and torch's steps."""
    with monkeypatch.context() as patch:
        patch.setattr(plain, "native_decoder", lambda search: None)
        return beam_search(*arguments)


def check_equal(found, expected):
    """Passes and sums have the same bits in both, so nothing may differ."""
    assert torch.equal(found.rows, expected.rows)
    assert torch.equal(found.scores, expected.scores)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.is_global, expected.is_global)
    assert found.stats == expected.stats
    if expected.candidate_scores is not None:
        assert torch.equal(found.candidate_scores, expected.candidate_scores)


@st.composite
def searches(draw):
    """A trie, a request with exclusions, masks, boosts and candidates, and K."""
    seed, levels = draw(st.integers(0, 10_000)), draw(st.integers(1, 5))
    rng = np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, draw(st.sampled_from([1, 3, 40, 700])), levels))
    prompts = random_prompts(rng, draw(st.integers(1, 5)), draw(st.sampled_from([2, 12, 40])))
    request = SearchRequest(prompts)
    share = draw(st.sampled_from([0, 0.1, 0.9]))
    if share:
        excluded = [np.flatnonzero(rng.random(trie.num_rows) < share) for _ in prompts]
        request = replace(request, exclude=excluded)
    share = draw(st.sampled_from([0, 0.02, 0.5]))
    if share:
        masks = [RowMask.of(trie, rng.random(trie.num_items) < share) for _ in prompts]
        request = replace(request, masks=[m if rng.random() < 0.7 else None for m in masks])
    scale = draw(st.sampled_from([0, 0, 0.5, 30]))  # 30: boosts decide, and many scores are equal
    if scale:
        given = [np.round(rng.random(trie.num_items) * 2) * scale - scale for _ in prompts]
        boosts = [Boost.of(trie, g.astype(np.float32)) for g in given]
        request = replace(request, boosts=[b if rng.random() < 0.7 else None for b in boosts])
    if draw(st.booleans()):
        rows = [rng.integers(0, trie.num_rows, rng.integers(0, 30)) for _ in prompts]
        nodes = draw(st.sampled_from([None, 0, 5, 60]))
        request = replace(request, candidates=rows, candidate_nodes=nodes)
    return trie, request, draw(st.sampled_from([1, 2, 8, 50]))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_answers_and_work_are_those_of_the_steps(architecture, monkeypatch):
    @settings(max_examples=40)
    @given(searches())
    def check(drawn):
        trie, request, num_beams = drawn
        model = MODELS[architecture]
        assert native_decoder(Search.of(request, model, trie)) is not None
        found = beam_search(model, request, trie, num_beams)
        check_equal(found, by_steps(monkeypatch, model, request, trie, num_beams))

    check()


def test_kept_histories_are_read_and_stored(monkeypatch):
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 200, 4))
    prompts = random_prompts(np.random.default_rng(3), 4, 40)
    begun = [prompt[: 1 + len(prompt) // 2] for prompt in prompts]
    answers, used = [], []
    for native in (True, False):
        ready = TreeModel(tiny_model("qwen3-mixed-window"))
        ready.keep_prefixes(1 << 20)
        with monkeypatch.context() as patch:
            if not native:
                patch.setattr(plain, "native_decoder", lambda search: None)
            beam_search(ready, begun, trie, 8)
            answers.append(beam_search(ready, prompts, trie, 8))
        used.append(ready.prefixes.used)
    check_equal(*answers)
    assert sum(s.cached_tokens for s in answers[0].stats) > 0
    assert used[0] == used[1]


@given(
    seed=st.integers(0, 10_000),
    items=st.sampled_from([1, 5, 60, 700]),
    levels=st.integers(1, 5),
    beams=st.integers(1, 12),
    batch=st.integers(1, 4),
    excluded=st.sampled_from([0.0, 0.5, 1.0]),
    strength=st.sampled_from([0.0, 0.0, 0.5, 5.0]),
)
@settings(max_examples=100, deadline=None)
def test_completed_lists_are_those_of_a_search_that_prunes_nothing(
    seed, items, levels, beams, batch, excluded, strength
):
    model, rng = MODELS["llama"], np.random.default_rng(seed)
    trie = ItemTrie.build(random_catalog(rng, items, levels))
    prompts = random_prompts(rng, batch, 12)
    exclude = [np.flatnonzero(rng.random(trie.num_rows) < excluded) for _ in prompts]
    boosts = None
    if strength:
        gains = (strength * rng.normal(size=(batch, trie.num_items))).astype(np.float32)
        boosts = [Boost.of(trie, line) for line in gains]
    request = SearchRequest(prompts, exclude=exclude, boosts=boosts)
    expected = beam_search(model, request, trie, trie.num_rows)
    found = beam_search(model, request, trie, beams)
    best = complete(model, found, request, trie, max_nodes=4096)
    width = min(beams, trie.num_rows)
    assert best.certificates == ["global-exact"] * batch
    assert torch.equal(best.rows[:, :width], expected.rows[:, :width])
    assert torch.equal(best.scores[:, :width], expected.scores[:, :width])
    for before, after, known in zip(found.stats, best.stats, found.is_global, strict=True):
        assert (before == after) == bool(known)
        assert after.target_tokens <= before.target_tokens + 4096 + 12


@pytest.mark.parametrize("native", [True, False])
def test_a_completion_without_room_leaves_the_answer(monkeypatch, native):
    if not native:
        monkeypatch.setattr("recsys.decoding.completion.native_decoder", lambda search: None)
    model, rng = MODELS["llama"], np.random.default_rng(3)
    trie = ItemTrie.build(random_catalog(rng, 700, 4))
    prompts = random_prompts(rng, 6, 12)
    found = beam_search(model, prompts, trie, 2)
    assert not found.is_global.all()
    with pytest.raises(ValueError, match="max_nodes: want at least 6 for 2 beams"):
        complete(model, found, prompts, trie, max_nodes=5)
    same = complete(model, found, prompts, trie, max_nodes=6)
    still = ~same.is_global
    assert still.any()
    assert torch.equal(same.rows[still], found.rows[still])
    assert torch.equal(same.scores[still], found.scores[still])


def test_several_threads_change_no_bit():
    model = TreeModel(tiny_model("llama", hidden=256, layers=3))
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 500, 4))
    prompts = random_prompts(np.random.default_rng(1), 8, 250)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(beam_search(model, prompts, trie, 30))
    finally:
        torch.set_num_threads(before)
    check_equal(*found)


@pytest.mark.parametrize("change", [{"seeds": [1]}, {"normalize": "allowed"}])
def test_other_searches_are_left_to_the_steps(change):
    trie = ItemTrie.build([[5, 20], [5, 21], [8, 20]])
    request = SearchRequest([[1, 2]], **change)
    assert native_decoder(Search.of(request, MODELS["llama"], trie)) is None


def test_captured_passes_are_left_to_the_steps():
    trie, model = ItemTrie.build([[5, 20], [5, 21]]), TreeModel(tiny_model("llama"))
    PassGraphs.attach(model, batch=1, slots=64)
    assert native_decoder(Search.of([[1, 2]], model, trie)) is None


def test_a_prompt_without_room_is_refused():
    trie = ItemTrie.build([[5, 20], [5, 21]])
    search = Search.of([[1, 2]], MODELS["llama"], trie)
    search.prompts.host_lengths[0] = 40
    with pytest.raises(IndexError, match="request 0"):
        native_search(search, native_decoder(search), [1, 2], 2)
