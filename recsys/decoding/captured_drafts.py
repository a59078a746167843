"""DraftGraphs: whole speculative decodes, captured as one graph each.

The graph holds the draft model's beam search, the target's pass over prompts, draft tree and
candidates, and the acceptance of the levels. Both models run the code of every other decode
(`ModelDrafter.draft`, `verify_draft`). With the answers comes down how many levels of each request
were accepted. If that is all of them, the decode was one copy to the device, one launch and one
copy back.

Otherwise patch passes follow, as in `speculative_beam_search`, from the state that the graph left:
the tree, its logits, keys and values. So the target never runs more passes than in beam search,
whatever was drafted, and requests that were accepted are not run again.

Both models begin a prompt at the same place: behind what the prefix stores of both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from recsys.constraint import ItemTrie
from recsys.constraint.fixed import FixedTrie
from recsys.decoding.captured import Decode, DecodeGraph, DecodeGraphs, Part
from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.draft import ModelDrafter, Proposal
from recsys.decoding.output import Beams
from recsys.decoding.request import Search
from recsys.decoding.speculative import (
    PATCH_NODES,
    Answers,
    Verification,
    patch_room,
    verify_draft,
)
from recsys.decoding.tree import FixedTree
from recsys.models.graphs import PassGraphs


class DraftGraphs(DecodeGraphs):
    """Captured speculative decodes of one target and one drafter over one catalog, for one K."""

    def __init__(
        self,
        passes: PassGraphs,
        draft: PassGraphs,
        drafter: ModelDrafter,
        trie: ItemTrie | FixedTrie,
        **limits: int,
    ) -> None:
        """Prepare as `DecodeGraphs`, with its limits; nothing is captured.

        Args:
            passes: captured passes of the target, with room for the decodes.
            draft: captured passes of the drafter's model, with room for the draft trees.
            drafter: drafts the trees.
            trie: the catalog.
            **limits: `prompt`, `num_beams`, `excluded` and `masks` of `DecodeGraphs`.

        Raises:
            ValueError: a catalog of one level, or passes of another model than the drafter's.
        """
        super().__init__(passes, trie, **limits)
        if self._trie.source.num_levels == 1:
            raise ValueError("a catalog of one level needs no draft; capture beam searches")
        if draft.model is not drafter.model:
            raise ValueError("draft: want captured passes of the drafter's model")
        self._drafter, self._width = drafter, self._widths[-1]
        self._split = drafter.split(self._trie, self._width)
        self._parts.append(Part(draft, draft.model.prefixes))

    def _check(self, search: Search, num_beams: int) -> None:
        """As `DecodeGraphs`; ValueError if the draft model cannot run the prompts."""
        self._drafter.check(search.prompts, search.step.trie)
        super()._check(search, num_beams)

    @property
    def _columns(self) -> int:
        """See `DecodeGraphs`: `Verification.results`, and what is finite of both models."""
        return 5 + 5 * self._width + 1 + 1 + 2

    @property
    def _tree_nodes(self) -> int:
        return sum(self._split)

    def _nodes(self, shape: DecodeShape) -> list[int]:
        room = patch_room(self._trie.source, self._width)
        return [self._tree_nodes + shape.nodes + room, sum(self._split[:-1])]

    def _compute(
        self, search: Search, trees: Sequence[FixedTree]
    ) -> tuple[dict[str, torch.Tensor], Verification]:
        draft = self._drafter.draft(trees[1], search.step, self._split)
        left = verify_draft(search, trees[0], draft, self._width)
        results, proposal = left.results(), left.proposal
        left.proposal = Proposal(proposal.levels, proposal.passes)  # frees the draft's tree
        return results, left

    def _beams(self, graph: DecodeGraph, results: dict[str, torch.Tensor], decode: Decode) -> Beams:
        search, left = decode.search, graph.left
        step = replace(search.step, trie=self._trie)  # the numbers of states in the graph
        tree = left.table.tree.continued(
            search.prompts,
            decode.cache,
            decode.begun,
            unused=decode.shape.nodes - (0 if search.rows is None else search.rows.width),
        )
        verifying = left.continued(tree)
        verifying.table.step = replace(verifying.table.step, trie=self._trie)
        answers = Answers(verifying, len(search))
        waiting = answers.take(verifying, results)
        if waiting is not None:
            self._patched += 1
            if verifying.level is left.level:
                # Passes may be graphs, which write into memory where others left their results.
                verifying.keep(torch.arange(len(search), device=left.level.device))
            answers.run_patches(verifying, waiting, PATCH_NODES)
            finite = answers.finite.all()  # known here, so the next decode need not wait for it
            decode.cache.note(finite).host = [bool(finite)]
        return answers.beams(step, self._num_beams, tree)
