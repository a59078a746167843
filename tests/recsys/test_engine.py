"""The engine: whatever it plans, keeps or is asked, it answers as beam search; nothing leaks."""

import numpy as np
import pytest
import torch
from oracles import random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import SearchRequest, beam_search
from recsys.decoding.engine import Engine

TARGET = tiny_model("llama-gqa", dtype=torch.float64)
DRAFT = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)
RNG = np.random.default_rng(3)
TRIE = ItemTrie.build(random_catalog(RNG, 300, 4))
PROMPTS = random_prompts(RNG, 12, 24)


def engine(**settings_):
    return Engine(TARGET, TRIE, draft=DRAFT, **settings_)


def same(found, expected):
    assert torch.equal(found.rows, expected.rows)
    alive = expected.scores > -torch.inf
    torch.testing.assert_close(found.scores[alive], expected.scores[alive], atol=1e-10, rtol=0)


def test_stored_prompts_change_no_bit_and_are_not_run_again():
    """float32: a kept key is the key that would have been computed."""
    target = tiny_model("llama", hidden=64)
    rng = np.random.default_rng(0)
    history = rng.integers(1, 64, 64)
    keeping = Engine(target, TRIE, prefix_bytes=1 << 22, prompt_slots=64)
    plain = Engine(target, TRIE, prompt_slots=64)
    for length in (20, 36, 40, 44, 64, 64, 21):
        mates = [history[:length], rng.integers(1, 64, 30)]
        found = keeping.decode(mates, 10).beams
        expected = plain.decode(mates, 10).beams
        assert torch.equal(found.scores, expected.scores)
        assert torch.equal(found.rows, expected.rows)
    cached = [s.cached_tokens for s in keeping.decode([history], 10).beams.stats]
    assert cached == [60]  # whole blocks, and the last token is always run
    assert keeping.decode([history], 10).beams.stats[0].target_tokens < 64
    keeping.forget()
    assert keeping.decode([history], 10).beams.stats[0].cached_tokens == 0


def test_thousands_of_mixed_decodes_leave_nothing_lent_or_pinned():
    """Plain, drafted, sampled, refused and broken ones, over prompts that come back."""
    small = ItemTrie.build(random_catalog(np.random.default_rng(1), 30, 3))
    model = tiny_model("llama", layers=1, hidden=16)
    each = Engine(model, small, draft=model, draft_nodes=12, prefix_bytes=20_000)
    rng = np.random.default_rng(2)
    forward = each.target.forward
    decoded = failed = 0

    def breaks(*args, **kwargs):
        if rng.random() < 0.5:
            raise KeyboardInterrupt  # as a cancelled worker
        return forward(*args, **kwargs)

    prompts = random_prompts(rng, 200, 16)
    while decoded < 4_000:
        size = 50
        group = [prompts[i] for i in rng.integers(0, len(prompts), size)]
        mode = ("beam", "exhaustive", "draft")[rng.integers(3)]
        kind = rng.integers(4)
        each.target.forward = breaks if kind == 0 else forward
        seeds = rng.integers(0, 100, size).tolist() if kind == 1 else None
        try:
            if kind == 2:
                group[7] = np.array([64])  # not a token
            each.decode(SearchRequest(group, seeds=seeds), 3, mode=mode)
        except (ValueError, KeyboardInterrupt):
            failed += 1
        decoded += size
    assert failed > 10
    for side in (each.target, each.draft):
        assert side.pool.lent == 0
        assert side.prefixes.held == 0


@pytest.mark.parametrize("mode", ["beam", "exhaustive", "draft"])
def test_a_trace_has_every_node_and_its_fate(mode):
    found = engine(draft_nodes=40).decode(PROMPTS[:3], 6, mode=mode, traced=True)
    same(found.beams, beam_search(TARGET, PROMPTS[:3], TRIE, 6))
    for request, trace in enumerate(found.beams.traces):
        prompt, nodes = PROMPTS[request], trace.nodes
        stats = found.beams.stats[request]
        assert max(node.target_pass for node in nodes) == stats.target_passes
        beams = {}
        for node in nodes:
            path, at = [], node
            while True:
                path.insert(0, at.token)
                if at.parent < 0:
                    break
                assert nodes[at.parent].depth == at.depth - 1
                at = nodes[at.parent]
            assert len(path) == node.depth
            with torch.inference_mode():
                logits = TARGET(torch.tensor([[*prompt.tolist(), *path]])).logits[0]
            log_p = logits.log_softmax(-1)[len(prompt) - 1 :]
            expected = sum(float(log_p[i, token]) for i, token in enumerate(path))
            assert node.target_log_prob == pytest.approx(expected, abs=1e-9)
            if node.fate != "rejected":
                beams.setdefault(node.depth, set()).add(tuple(path))
            assert (node.draft_log_prob is None) == (
                node.target_pass > 1
            )  # all that is drafted runs in the first pass
            assert (node.fate == "patched") <= (node.target_pass > 1)
        # the beams of level 1 are the best first tokens
        assert len(beams[1]) == 6
        for depth in (2, 3):
            assert {path[:-1] for path in beams[depth]} <= beams[depth - 1]
    assert found.plan.mode == ("draft" if mode == "draft" else "exhaustive")


def test_models_that_lack_tokens_of_the_catalog_are_refused():
    small = tiny_model("llama", vocabulary=20)
    with pytest.raises(ValueError, match=r"the catalog has token 63; the model knows 0 \.\. 19"):
        beam_search(small, [[1]], TRIE)
    with pytest.raises(ValueError, match="the catalog has token 63"):
        Engine(TARGET, TRIE, draft=small).decode([[1]], mode="draft")


def test_a_failing_prompt_store_leaves_no_cache_lent():
    each = Engine(TARGET, TRIE, prefix_bytes=1 << 20)

    def broken(*_):
        raise OSError("gone")

    each.target.prefixes.load = broken
    with pytest.raises(OSError, match="gone") as caught:
        each.decode(PROMPTS[:1])
    assert caught.value is not None  # held, and with it the frames
    assert each.target.pool.lent == 0
    assert each.target.prefixes.held == 0


def test_mode_draft_needs_a_draft_and_warm_up_a_prompt():
    alone = Engine(TARGET, TRIE)
    with pytest.raises(ValueError, match="needs a draft model; the engine has none"):
        alone.decode(PROMPTS[:1], mode="draft")
    with pytest.raises(ValueError, match="want at least one to measure with"):
        alone.warm_up([])
    assert alone.decode([], 3).beams.rows.shape == (0, 3)
