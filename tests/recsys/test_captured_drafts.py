"""A whole speculative decode as one graph: beam search's answers, accepted or patched."""

from copy import deepcopy

import numpy as np
import pytest
import torch
from captured_suite import (
    BATCH,
    BROKEN,
    CANDIDATES,
    COLD,
    LONGEST,
    SHAPES,
    TRIE,
    CapturedSuite,
    K,
    same,
    spoil,
    weights_of,
)
from captured_suite import NODES as EXTRA
from oracles import random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import (
    Engine,
    ModelDrafter,
    Search,
    SearchRequest,
    beam_search,
    speculative_beam_search,
)
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.planner import Plan
from recsys.decoding.speculative import Answers
from recsys.errors import NonFiniteError
from recsys.models.graphs import PassGraphs
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode

NODES = 30
DRAFTED = Plan(Mode.DRAFT, NODES)


def draft_of(weights, kind):
    """A draft that is always, often or rarely right."""
    if kind == "other":
        other = weights_of(vocabulary=weights.config.vocab_size, hidden=24, seed=9)
        return other.to(weights.device)
    draft = deepcopy(weights)
    if kind == "near":
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in draft.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(0.005 * noise.to(parameter.device))
    return draft


def captured(weights, draft, capture, trie=TRIE, shapes=COLD, *, kept=(False, False), **sizes):
    models = [TreeModel(weights), TreeModel(draft)]
    passes = []
    for model, keeps in zip(models, kept, strict=True):
        model._native = None
        if keeps:
            model.keep_prefixes(1 << 20)
        passes.append(PassGraphs.attach(model, batch=BATCH, slots=576, capture=capture))
    drafter = ModelDrafter(models[1], NODES)
    decodes = DraftGraphs(
        *passes, drafter, trie, prompt=LONGEST, num_beams=K, **{"excluded": 12, "masks": 2} | sizes
    )
    decodes.warm_up(shapes)
    return models, passes, decodes


class TestDrafts(CapturedSuite):
    kinds = (
        ("llama-gqa", "same"),
        ("llama-gqa", "near"),
        ("mistral-window", "near"),
        ("qwen3-mixed-window", "other"),
    )
    plan, most = DRAFTED, 8

    def capture(self, weights, kind, capture, trie=TRIE, shapes=COLD, *, kept=False, **sizes):
        draft = draft_of(weights, kind)
        return captured(weights, draft, capture, trie, shapes, kept=(kept, kept), **sizes)

    def check_work(self, weights, kind, request, found):
        drafter = ModelDrafter(draft_of(weights, kind), NODES)
        plain = speculative_beam_search(weights, drafter, request, TRIE, K)
        for mine, theirs in zip(found.stats, plain.stats, strict=True):
            for name in ("target_passes", "accepted_levels", "drafted_nodes", "draft_passes"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert mine.kv_slots == theirs.kv_slots
            assert mine.target_tokens + mine.cached_tokens == theirs.target_tokens

    def check_statistics(self, kind, statistics):
        if kind == "same":
            assert statistics.patched == 0
        else:
            assert 0 < statistics.patched < statistics.replays or kind == "other"

    @classmethod
    def engine(cls, weights):
        each = Engine(
            weights, TRIE, draft=draft_of(weights, "near"), draft_nodes=NODES,
            prefix_bytes=1 << 22, prompt_slots=LONGEST, graphs=True,
        )  # fmt: skip
        each.captures.capture_decodes(
            cls.most, LONGEST, K, plans=[Plan(), DRAFTED], candidates=[(0, 0), (CANDIDATES, EXTRA)]
        )
        each.captures.capture_passes(cls.most, LONGEST, K, [DRAFTED])
        return each

    def test_what_is_traced_is_decoded_as_before(self, captured_engine):
        before = captured_engine.captures.decodes[DRAFTED].statistics()
        found = captured_engine.decode([[1, 2, 3]], K, mode="draft", traced=True).beams
        assert found.traces
        same(found, beam_search(captured_engine.target._model, [[1, 2, 3]], TRIE, K))
        assert captured_engine.captures.decodes[DRAFTED].statistics().replays == before.replays

    def test_plans_that_cannot_be_captured_are_refused(self, captured_engine):
        with pytest.raises(ValueError, match="exhaustive cannot be captured"):
            captured_engine.captures.capture_decodes(1, 8, K, plans=[Plan(Mode.EXHAUSTIVE)])
        alone = Engine(tiny_model("llama", layers=1), TRIE, graphs=True)
        with pytest.raises(ValueError, match="draft-30 cannot be captured"):
            alone.captures.capture_decodes(1, 8, K, plans=[DRAFTED])

    @pytest.mark.parametrize("kept", [(True, False), (False, True), (True, True)])
    def test_both_models_begin_behind_what_both_have_stored(self, kept, recorded):
        weights = weights_of()
        draft = draft_of(weights, "near")
        (model, drafting), passes, decodes = captured(
            weights, draft, recorded, shapes=SHAPES, kept=kept
        )
        rng = np.random.default_rng(4)
        for batch in (1, 3):
            prompts = [rng.integers(1, 60, 21) for _ in range(batch)]
            for stored, ready in ((8, model), (16, drafting)):
                if ready.prefixes is not None:
                    beam_search(ready, [prompt[: stored + 1] for prompt in prompts], TRIE, K)
            for cached in (8, 20):
                spoil(decodes, passes)
                request = SearchRequest(prompts, exclude=[[1, 2]] * batch)
                found = decodes.run(Search.of(request, model, TRIE), K)
                same(found, beam_search(weights, request, TRIE, K))
                assert {s.cached_tokens for s in found.stats} == {cached if all(kept) else 0}

    def test_what_cannot_be_captured_is_refused(self, recorded):
        weights = weights_of()
        (model, drafting), _, decodes = captured(weights, weights, recorded, shapes=[])
        for ready in (model, drafting):
            with ready.pool.lend(1, 8, 8), pytest.raises(RuntimeError, match="before decoding"):
                decodes.warm_up(COLD)
        target, draft = (part.passes for part in decodes._parts)
        sizes = {"prompt": LONGEST, "num_beams": K}
        drafter = ModelDrafter(drafting, NODES)
        with pytest.raises(ValueError, match="one level"):
            DraftGraphs(target, draft, drafter, ItemTrie.build([[1], [2]]), **sizes)
        with pytest.raises(ValueError, match="the drafter's model"):
            DraftGraphs(target, target, drafter, TRIE, **sizes)
        small = PassGraphs.attach(drafting, batch=BATCH, slots=32)
        with pytest.raises(ValueError, match="4 requests with 32 slots; make it larger"):
            DraftGraphs(target, small, drafter, TRIE, **sizes).warm_up(COLD)

    def test_tokens_that_the_draft_does_not_know_are_refused(self, recorded):
        draft = weights_of(vocabulary=64)
        (model, _), _, decodes = captured(weights_of(vocabulary=80), draft, recorded)
        with pytest.raises(ValueError, match=r"the draft knows 0 \.\. 63"):
            decodes.run(Search.of([[1, 70]], model, TRIE), K)
        assert not decodes.statistics().fallbacks

    def test_a_draft_that_is_not_finite_drafts_nothing(self, recorded):
        """And its prompts are not kept."""
        weights = weights_of()
        draft = draft_of(weights, "other")
        with torch.no_grad():
            draft.model.embed_tokens.weight[BROKEN] = torch.nan
        (model, drafting), _, decodes = captured(
            weights, draft, recorded, shapes=SHAPES, kept=(True, True)
        )
        clean = [[1, 2, 3, 4, 5, 6], [4, 5]]
        mixed = [clean[0], [1, 2, 3, 4, BROKEN, 5, 6, 7, 8], [BROKEN]]
        for _ in range(2):
            for prompts in (mixed, clean):
                found = decodes.run(Search.of(prompts, model, TRIE), K)
                same(found, beam_search(weights, prompts, TRIE, K))
        assert drafting.prefixes.known(np.array(mixed[1:2]), [9]).tolist() == [4]
        assert model.pool.lent == model.prefixes.held == drafting.prefixes.held == 0

    def test_patch_passes_that_are_not_finite_are_reported(self, recorded):
        """Only a token of a beam that was not drafted is broken, so that the graph saw none."""
        weights = weights_of()
        draft = draft_of(weights, "other")
        prompts = random_prompts(np.random.default_rng(8), BATCH, 12)
        (model, _), _, decodes = captured(weights, draft, recorded)
        plain = speculative_beam_search(weights, ModelDrafter(draft, NODES), prompts, TRIE, K)
        assert max(s.target_passes for s in plain.stats) > 1

        def no_patch(*_):
            raise KeyboardInterrupt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Answers, "run_patches", no_patch)
            with pytest.raises(KeyboardInterrupt):
                decodes.run(Search.of(prompts, model, TRIE), K)
        assert model.pool.lent == 0
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            run = TreeModel.forward

            def broken(tree_model, *args, **kwargs):
                return run(tree_model, *args, **kwargs).fill_(torch.nan)

            patch.setattr(TreeModel, "forward", broken)  # a replay runs no Python
            with pytest.raises(NonFiniteError):
                decodes.run(Search.of(prompts, model, TRIE), K)
        same(
            decodes.run(Search.of(prompts, model, TRIE), K), beam_search(weights, prompts, TRIE, K)
        )
