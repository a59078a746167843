"""Every search passes the suite of searches, whoever drafts and whatever is planned."""

import numpy as np
import torch
from oracles import tiny_model
from search_suite import DrafterSuite, SearchSuite

from recsys.decoding import (
    Engine,
    ModelDrafter,
    Proposal,
    beam_search,
    complete,
)
from recsys.decoding.expand import Frontier
from recsys.decoding.planner import Plan
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode

UNRELATED = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)
ADVERSARY = tiny_model("llama-gqa", dtype=torch.float64)  # finds likely what the target does not
ADVERSARY.lm_head.weight.data.neg_()
NAN = tiny_model("llama", layers=1, seed=9, dtype=torch.float64)
NAN.model.embed_tokens.weight.data.fill_(torch.nan)


class TestBeamSearch(SearchSuite):
    level_by_level = True

    def search(self, model, request, trie, num_beams):
        return beam_search(model, request, trie, num_beams)


class TestOwnForward(SearchSuite):
    def search(self, model, request, trie, num_beams):
        if not isinstance(model, TreeModel):
            model = TreeModel(model, own_forward=True)
        return beam_search(model, request, trie, num_beams)


class TestCompleted(SearchSuite):
    complete = True

    def search(self, model, request, trie, num_beams):
        found = beam_search(model, request, trie, num_beams)
        return complete(model, found, request, trie, max_nodes=4096)


class TestNoDraft(DrafterSuite):
    patch_nodes = 5

    def drafter(self, model, trie, batch):
        return None


class TestPerfectDraft(DrafterSuite):
    def drafter(self, model, trie, batch):
        return model


class TestUnrelatedDraft(DrafterSuite):
    patch_nodes = 1

    def drafter(self, model, trie, batch):
        return ModelDrafter(UNRELATED, 20)


class TestAdversaryAsDraft(DrafterSuite):
    def drafter(self, model, trie, batch):
        return ModelDrafter(ADVERSARY, 60)


class TestDraftThatIsNotFinite(DrafterSuite):
    def drafter(self, model, trie, batch):
        return ModelDrafter(NAN, 20)


class TestDraftOfWidths(DrafterSuite):
    def drafter(self, model, trie, batch):
        return ModelDrafter(UNRELATED, widths=[5])


class RandomDrafter:
    """Random walks of the trie: levels of any size, duplicates, padding, mostly wrong."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def propose(self, prompts, step, num_beams):
        batch, trie = len(prompts), step.trie
        above = torch.zeros((batch, 1), dtype=torch.int64)
        levels = []
        for depth in range(trie.source.num_levels - 1):
            width = int(self.rng.integers(1, 40))
            parents = torch.from_numpy(self.rng.integers(0, above.shape[1], (batch, width)))
            states = above.gather(1, parents)
            children = trie.children(states, depth)
            pick = torch.from_numpy(self.rng.random(children.states.shape)) * children.alive
            pick = pick.argmax(-1, keepdim=True)
            scores = torch.zeros(batch, width, dtype=torch.float64)
            scores[torch.from_numpy(self.rng.random((batch, width)) < 0.1)] = -torch.inf
            above = children.states.gather(-1, pick).squeeze(-1)
            symbols = children.symbols.gather(-1, pick).squeeze(-1)
            levels.append(Frontier.proposed(above, scores, trie.alphabet[symbols], parents))
        return Proposal(levels)


class TestRandomDraft(DrafterSuite):
    test_tokens_outside_all_beams_are_never_run = None  # it drafts anything

    def drafter(self, model, trie, batch):
        return RandomDrafter(3)


class AnyPlan:
    """A planner that takes one plan after the other."""

    plans = (Plan(), Plan(Mode.EXHAUSTIVE), Plan(Mode.DRAFT, 20), Plan(Mode.DRAFT, 3))

    def __init__(self):
        self.chosen = 0

    def choose(self, _):
        self.chosen += 1
        return self.plans[self.chosen % len(self.plans)]

    def learn(self, *_):
        pass


class TestPlannedEngine(SearchSuite):
    """With prompts seen before or not, of which the store must forget some."""

    planner = AnyPlan()

    def search(self, model, request, trie, num_beams):
        engine = Engine(model, trie, draft=UNRELATED, prefix_bytes=60_000)
        engine.planner = self.planner
        engine.decode(request, num_beams, mode="planned")
        found = engine.decode(request, num_beams, mode="planned").beams
        for side in (engine.target, engine.draft):
            assert side.pool.lent == side.prefixes.held == 0
        return found
