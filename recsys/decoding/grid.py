"""Grid: the shapes of all passes that decodes can take, so that each of them has a captured graph.

A pass is captured for every number of requests in `BATCHES` and every number of tokens in
`list_sizes`, in the view that its plan needs. Whether prompts are new or mostly kept, a pass of a
batch within the grid then never runs without a graph.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from recsys.decoding.captured_inputs import MOST_DECODES, DecodeShape
from recsys.decoding.planner import Plan, is_worth_trying
from recsys.models.cache import whole_blocks
from recsys.models.graphs import BATCHES, PassShape, list_sizes
from recsys.modes import Mode

_KEPT_TOKENS = 8  # new prompt tokens of a kept history, about
_TILE = 64  # rows that a GPU multiplies at a time, at least, in products of many rows


@dataclass(frozen=True)
class Grid:
    """The decodes to capture for.

    Attributes:
        batch: most requests.
        prompt: prompt slots of a request.
        widths: most beams of levels 1 .. L - 1.
        patch: most nodes of a patch pass.
        first_level: children of the catalog's root.
    """

    batch: int
    prompt: int
    widths: tuple[int, ...]
    patch: int
    first_level: int

    def of_target(self, plans: Iterable[Plan]) -> set[PassShape]:
        """Shapes of the target's passes under some plans."""
        shapes = set(self.of_beams(self.widths))
        for plan in plans:
            if plan.mode != Mode.BEAM:
                shapes |= self._of_trees(plan)
        return shapes

    def of_beams(self, widths: tuple[int, ...]) -> set[PassShape]:
        """Shapes of a plain search that keeps `widths` beams at levels 1, 2, ... and runs them."""
        slots = whole_blocks(self.prompt)
        prompts = {(size, slots, 1) for size in list_sizes(self.prompt)}
        slots += whole_blocks(sum(widths))
        nodes = {(size, slots, size) for size in list_sizes(max(widths, default=0))}
        return self._of_batches(prompts | nodes, self._batches)

    def of_decodes(
        self, plan: Plan, *, kept: bool, candidates: Collection[tuple[int, int]] = ((0, 0),)
    ) -> set[DecodeShape]:
        """Shapes of whole decodes under a plan.

        The numbers of new tokens double from one to the next, since a decode has many kernels and
        its graph takes memory; they grow faster where there would be more than `MOST_DECODES`
        shapes. With `kept`, stored histories are read as well. `candidates` are pairs of candidates
        and of their nodes per request.
        """
        *smaller, longest = list_sizes(self.prompt)
        sizes = [longest, *(size for size in reversed(smaller) if size.bit_count() == 1)]
        batches, reads = self._batches_of(plan), {False, kept}
        of_each_size = len(batches) * len(reads) * len(candidates)
        while len(sizes) > 1 and len(sizes) * of_each_size > MOST_DECODES:
            sizes = sizes[::2]
        return {
            DecodeShape(batch, size, read, *extra)
            for batch in batches
            for size in sizes
            for read in reads
            for extra in candidates
        }

    def most_slots(self, plans: Iterable[Plan], nodes: int) -> int:
        """Slots of a request that decodes under some plans need, with `nodes` of candidates."""
        trees = [sum(self.widths)]
        for plan in plans:
            if plan.mode != Mode.BEAM:
                trees.append(self._drafted(plan) + len(self.widths) * self.patch)
        return whole_blocks(self.prompt) + whole_blocks(max(trees) + nodes)

    def _drafted(self, plan: Plan) -> int:
        """Nodes of a draft tree, which has one for each level at least."""
        if plan.mode == Mode.EXHAUSTIVE:
            return self.first_level
        return max(plan.nodes, len(self.widths))

    def _of_trees(self, plan: Plan) -> set[PassShape]:
        """Shapes of passes that verify and patch draft trees."""
        nodes, slots, rounds = self._drafted(plan), whole_blocks(self.prompt), len(self.widths)
        slots += whole_blocks(nodes + rounds * self.patch)
        patches = {(size, slots, size) for size in list_sizes(self.patch)}
        return self._of_batches(self._of_prompts(nodes) | patches, self._batches_of(plan))

    def _batches_of(self, plan: Plan) -> list[int]:
        """Numbers of requests to capture for under a plan."""
        batches = self._batches  # a shape is for the batches behind the one before it, too
        if plan.mode == Mode.BEAM:
            return batches
        return [
            b
            for before, b in zip([0, *batches], batches, strict=False)
            if is_worth_trying(plan, before + 1, self.first_level)
        ]

    def _of_prompts(self, nodes: int) -> set[tuple[int, int, int]]:
        """(tokens, slots in view, rows) of passes that run prompts and a tree.

        One size more is for a whole tree below a kept history: `list_sizes` would pad 256 nodes and
        8 tokens to 384.
        """
        slots = whole_blocks(self.prompt) + whole_blocks(nodes)
        sizes = {size for size in list_sizes(self.prompt + nodes) if size > nodes}
        sizes.add(-(-(nodes + _KEPT_TOKENS) // _TILE) * _TILE)
        return {(size, slots, nodes + 1) for size in sizes}

    @property
    def _batches(self) -> list[int]:
        """Numbers of requests to capture for."""
        most = next((b for b in BATCHES if b >= self.batch), self.batch)
        return sorted({b for b in BATCHES if b < most} | {most})

    def _of_batches(
        self, passes: Iterable[tuple[int, int, int]], batches: Iterable[int]
    ) -> set[PassShape]:
        """Passes of (tokens, slots in view, rows) with each number of requests."""
        return {PassShape(batch, *sizes).rounded() for sizes in passes for batch in batches}
