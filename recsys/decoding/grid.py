"""Grid: the shapes of all passes that decodes can take, so that each of them has a captured graph.

A pass is captured for every number of requests in `BATCHES` and every number of tokens in
`list_sizes`, in the view that its plan needs. Whether prompts are new or mostly kept, a pass of a
batch within the grid then never runs without a graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from recsys.decoding.captured_inputs import DecodeShape
from recsys.decoding.planner import Plan, is_worth_trying
from recsys.models.cache import whole_blocks
from recsys.models.graphs import BATCHES, PassShape, list_sizes
from recsys.modes import Mode


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
        self, *, kept: bool, candidates: Iterable[tuple[int, int]] = ()
    ) -> set[DecodeShape]:
        """Shapes of whole beam searches.

        The numbers of new tokens double from one to the next, since a decode has many kernels and
        its graph takes memory. With `kept`, stored histories are read as well; (candidates, nodes)
        of a request are also captured.
        """
        sizes = [size for size in list_sizes(self.prompt) if size.bit_count() == 1]
        return {
            DecodeShape(batch, size, reads, *extra)
            for batch in self._batches
            for size in {*sizes, list_sizes(self.prompt)[-1]}
            for reads in {False, kept}
            for extra in ((0, 0), *candidates)
        }

    def _of_trees(self, plan: Plan) -> set[PassShape]:
        """Shapes of passes that verify and patch draft trees."""
        nodes = self.first_level if plan.mode == Mode.EXHAUSTIVE else plan.nodes
        slots, rounds = whole_blocks(self.prompt), len(self.widths)
        first = {
            (size, slots + whole_blocks(nodes), nodes + 1)
            for size in list_sizes(self.prompt + nodes)
            if size > nodes
        }
        slots += whole_blocks(nodes + rounds * self.patch)
        patches = {(size, slots, size) for size in list_sizes(self.patch)}
        batches = self._batches  # a shape is for the batches behind the one before it, too
        few = [
            b
            for before, b in zip([0, *batches], batches, strict=False)
            if is_worth_trying(plan, before + 1, self.first_level)
        ]
        return self._of_batches(first | patches, few)

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
