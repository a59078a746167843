"""DecodeGraphs: whole beam searches, captured as one graph each.

With captured passes alone (`recsys.models.graphs`), a beam search still launches hundreds of small
operations around them: masks, steps over the trie, gathers. Here `search_tree`, the code of every
beam search, is captured as a whole. Each decode is one copy to the device, one launch and one copy
back. Speculative decodes are captured by a subclass (`recsys.decoding.captured_drafts`).

A graph has fixed sizes, to which `recsys.decoding.captured_inputs` pads what a request holds. A
decode that fits no captured graph returns None and is counted with the reason; the caller decodes
it in another way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.constraint.fixed import FixedTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.beam import answer, beams_of, search_tree
from recsys.decoding.captured_inputs import (
    EXCLUDED,
    MASKS,
    MOST_DECODES,
    DecodeInputs,
    DecodeShape,
)
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search
from recsys.decoding.tree import FixedTree, require_finite
from recsys.models.cache import Finite, SlotCache, whole_blocks
from recsys.models.graphs import GraphStatistics, PassGraphs, Run
from recsys.models.prefix_store import PrefixStore
from recsys.transfers import FixedInputs, pack, unpack


class NoGraphError(Exception):
    """A decode that no graph can run; the text is the reason.

    `catalog`: the present one has no room in the captured tensors (`FixedTrie`); `beams`: another
    K; `kind`: samples, boosts, or sums over the allowed tokens; `prompt`: too long; `excluded` and
    `masks`: too many; `shape`: no captured one fits; `busy`: another decode has the storage or
    changed the prefix store meanwhile; `replaced`: the model got other ones since the capture.
    """


class Part(NamedTuple):
    """A model that decodes run: its captured passes, and its prefix store or None."""

    passes: PassGraphs
    store: PrefixStore | None


@dataclass(frozen=True)
class Decode:
    """What a replay decodes.

    Attributes:
        shape: of the graph.
        search: not sent to the device.
        begun: (B,) prompt tokens that are read from the prefix stores.
        cache: keys and values of the target, for this batch alone.
    """

    shape: DecodeShape
    search: Search
    begun: NDArray[np.int64]
    cache: SlotCache


class DecodeGraphs:
    """Captured beam searches of one model over one catalog, for one K.

    Attributes:
        passes: captured passes of the same model, whose storage and memory pool are used.
        shapes: captured shapes, fewest tokens first.
    """

    def __init__(
        self,
        passes: PassGraphs,
        trie: ItemTrie | FixedTrie,
        *,
        prompt: int,
        num_beams: int,
        excluded: int = EXCLUDED,
        masks: int = MASKS,
    ) -> None:
        """Prepare for requests of at most these sizes; nothing is captured.

        Args:
            passes: captured passes of the model, with room for the decodes.
            trie: the catalog; decodes over another one fall back, unless a `FixedTrie` has it.
            prompt: most prompt tokens of a request, and its prompt slots.
            num_beams: K.
            excluded: most dead states of a request at a depth (`Excluded`).
            masks: most distinct masks of a decode.
        """
        self.passes, self.shapes = passes, list[DecodeShape]()
        self._parts = [Part(passes, passes.model.prefixes)]  # the target first
        self._model, self._num_beams = passes.model, num_beams
        self._catalog = FixedTrie.of(trie, passes.model.device)
        self._inputs = DecodeInputs(passes.model, self._catalog, prompt, excluded, masks)
        source = self._trie.source
        self._widths = [source.width(depth, num_beams) for depth in range(1, source.num_levels + 1)]
        self._graphs: dict[DecodeShape, DecodeGraph] = {}
        self._replays = self._patched = 0
        self._fallbacks = Counter[str]()

    @torch.inference_mode()
    def warm_up(self, shapes: Iterable[DecodeShape]) -> None:
        """Capture decodes of exactly these shapes, in place of all that were captured before.

        Raises:
            ValueError: too many shapes, or one that is larger than the storage.
            RuntimeError: a decode holds the storage, which capture would overwrite.
        """
        # Tokens come first, because they determine the cost of padding.
        ordered = sorted(set(shapes), key=lambda s: (s.batch * (s.new + s.nodes), s))
        pools = [part.passes.pool for part in self._parts]
        if len(ordered) > MOST_DECODES:
            raise ValueError(
                f"{len(ordered)} decodes to capture, and at most {MOST_DECODES} are "
                "captured; ask for smaller batches or prompts, or fewer sizes of candidates"
            )
        for shape in ordered:
            for pool, nodes in zip(pools, self._nodes(shape), strict=True):
                slots = whole_blocks(self._inputs.prompt) + whole_blocks(nodes)
                if shape.batch > pool.batch or slots > pool.slots:
                    raise ValueError(
                        f"{shape} does not fit a storage of {pool.batch} requests with "
                        f"{pool.slots} slots; make it larger"
                    )
        if any(pool.pinned is not None for pool in pools):
            raise RuntimeError("a decode holds the storage; warm up before decoding")
        self._graphs, self.shapes, device = {}, [], self._model.device
        self._parts = [Part(passes, passes.model.prefixes) for passes, _ in self._parts]
        examples = {shape: self._inputs.example(shape, len(self._parts)) for shape in ordered}
        size = max((FixedInputs.size(arrays) for arrays in examples.values()), default=0)
        inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        size = max((s.batch * (self._columns + s.candidates) for s in ordered), default=0)
        output = torch.zeros(size, dtype=torch.float64, device=device)
        for shape in reversed(ordered):  # the smaller ones reuse the memory of the largest
            fixed = FixedInputs(examples[shape], inputs)
            fixed.send(examples[shape])
            self._graphs[shape] = self._capture(shape, fixed, output)
        for pool in pools:  # the examples may have left values that are not finite
            pool.storage.values.zero_()
        self.shapes = ordered

    def run(self, search: Search, num_beams: int) -> Beams | None:
        """The answer of `beam_search`, by one graph; None if no graph can run this decode.

        A batch of no requests needs none, and is not counted.

        Raises:
            NonFiniteError: as `beam_search`.
        """
        if not len(search):
            return None
        try:
            return self._run(search, num_beams)
        except NoGraphError as reason:
            self._fallbacks[str(reason)] += 1
            return None

    def statistics(self) -> GraphStatistics:
        """Sizes now and counts since this object was made; reasons are those of `NoGraphError`."""
        return GraphStatistics(
            len(self._graphs), self._replays, dict(self._fallbacks), self._patched
        )

    @torch.inference_mode()
    def _run(self, search: Search, num_beams: int) -> Beams:
        """`run`; NoGraphError if no graph can run this decode."""
        self._check(search, num_beams)
        begun, batch = self._begun(search), len(search)
        shape = self._find(search, begun)
        graph, prompts = self._graphs[shape], search.prompts
        tokens, lengths = prompts.host_tokens, prompts.host_lengths
        with ExitStack() as stack:
            caches, prefixes = [], []
            for (passes, _), nodes in zip(self._parts, self._nodes(shape), strict=True):
                cache = stack.enter_context(passes.pool.lend(batch, self._inputs.prompt, nodes))
                if cache is not passes.pool.pinned:
                    raise NoGraphError("busy")
                caches.append(cache)
            for (_, store), cache in zip(self._parts, caches, strict=True):
                if store is not None:
                    hit = stack.enter_context(store.lookup(tokens, lengths))
                    if (hit.cached < begun).any():  # another thread changed the store
                        raise NoGraphError("busy")
                    prefixes.append(hit.places(cache.slots))
            graph.inputs.send(self._inputs.arrays(shape, search, begun, prefixes))
            graph.replay()
            stored = []
            if prefixes:
                finite = graph.finite[:batch]
                for number, ((_, store), cache) in enumerate(zip(self._parts, caches, strict=True)):
                    if store is not None:  # while the device computes
                        stored.append((number, Finite(finite[:, number])))
                        store.insert(tokens, lengths, cache.buffer, stored[-1][1])
            values_by_name = {name: values[:batch] for name, values in graph.download().items()}
            self._replays += 1
            for number, record in stored:
                record.host = values_by_name["finite"][:, number].tolist()
            for cache, finite in zip(caches, values_by_name["finite"].unbind(1), strict=True):
                cache.note(finite.all())
            if search.rows is not None:  # without the padding
                values_by_name["candidates"] = values_by_name["candidates"][
                    :, : search.rows.known.shape[1]
                ]
            return self._beams(graph, values_by_name, Decode(shape, search, begun, caches[0]))

    def _check(self, search: Search, num_beams: int) -> None:
        """NoGraphError if no graph can run a decode, whatever has been captured."""
        step, prompts, excluded = search.step, search.prompts, search.step.excluded
        masks = () if step.allowed is None else step.allowed.masks
        reasons = {
            "catalog": step.trie.source is not self._catalog.catalog,
            "beams": num_beams != self._num_beams,
            "kind": step.noise is not None
            or step.gains is not None
            or step.normalize != "vocabulary",
            "prompt": max(prompts.host_tokens.shape[1], prompts.slots) > self._inputs.prompt,
            "excluded": excluded is not None
            and max(dead.shape[1] for dead in excluded.dead) > self._inputs.excluded,
            "masks": len({id(mask) for mask in masks if mask is not None})
            > self._inputs.masks.room,
            "replaced": any(
                passes.model.pool is not passes.pool or passes.model.prefixes is not store
                for passes, store in self._parts
            ),
        }
        if (
            reason := next((name for name, applies in reasons.items() if applies), None)
        ) is not None:
            raise NoGraphError(reason)

    def _begun(self, search: Search) -> NDArray[np.int64]:
        """(B,) tokens of the prompts that the stores of all models have."""
        tokens, lengths = search.prompts.host_tokens, search.prompts.host_lengths
        known = [
            np.zeros_like(lengths) if store is None else store.known(tokens, lengths)
            for _, store in self._parts
        ]
        begun: NDArray[np.int64] = np.min(known, axis=0)
        return begun

    def _find(self, search: Search, begun: NDArray[np.int64]) -> DecodeShape:
        """The shape to decode in, if (B,) `begun` tokens of the prompts are stored."""
        new, rows = search.prompts.host_lengths - begun, search.rows
        shape = DecodeShape(len(search), int(new.max()), bool(begun.any()))
        if rows is not None:
            shape = replace(shape, candidates=max(1, rows.known.shape[1]), nodes=rows.width)
        smallest = next((captured for captured in self.shapes if shape.fits(captured)), None)
        if smallest is None:
            raise NoGraphError("shape")
        return smallest

    @property
    def _trie(self) -> DeviceTrie:
        """What graphs read, with the catalog that is there now."""
        return self._catalog.trie

    @property
    def _columns(self) -> int:
        """Numbers per request that a graph returns, without the scores of candidates."""
        return 2 * self._num_beams + 2

    @property
    def _tree_nodes(self) -> int:
        """Nodes per request that the target runs in a graph, without those of candidates."""
        return sum(self._widths[:-1])

    def _nodes(self, shape: DecodeShape) -> list[int]:
        """Slots per request that a decode needs for nodes, of each model."""
        return [self._tree_nodes + shape.nodes]

    def _capture(
        self, shape: DecodeShape, inputs: FixedInputs, output: torch.Tensor
    ) -> DecodeGraph:
        """Capture a decode on these inputs; `inputs` hold one."""
        search, nodes = self._inputs.search(shape, inputs), self._nodes(shape)
        begin, graph = (inputs["places"], inputs["last"]), DecodeGraph(inputs, search)
        with ExitStack() as stack:
            caches = [
                stack.enter_context(passes.pool.lend(shape.batch, self._inputs.prompt, slots))
                for (passes, _), slots in zip(self._parts, nodes, strict=True)
            ]

            def run() -> None:
                trees = []
                for number, (passes, store) in enumerate(self._parts):
                    cache, prompts = caches[number], search.prompts
                    if shape.kept and store is not None:
                        store.read(inputs[f"kept {number}"], cache.buffer)
                    tree = FixedTree(
                        passes.model, prompts, nodes[number], cache=cache, places=begin
                    )
                    trees.append(tree)
                with ExitStack() as paused:
                    for passes, _ in self._parts:
                        paused.enter_context(passes.paused())
                    results, left = self._compute(search, trees)
                results["finite"] = torch.stack([tree.finite for tree in trees], 1)
                graph.write(results, left, output)

            graph.replay = self.passes.capture(run)
        return graph

    def _compute(
        self, search: Search, trees: Sequence[FixedTree]
    ) -> tuple[dict[str, torch.Tensor], Any]:
        """What a graph computes in empty trees of all models: results, and what it leaves."""
        frontier, scores = search_tree(search, trees[0], self._widths)
        return answer(frontier, search.step, self._num_beams, scores), None

    def _beams(self, graph: DecodeGraph, results: dict[str, torch.Tensor], decode: Decode) -> Beams:
        """The answer, from what a replay found; NonFiniteError as `run`."""
        require_finite(results["finite"][:, 0])
        search, lengths = decode.search, decode.search.prompts.host_lengths
        nodes = self._tree_nodes + (0 if search.rows is None else search.rows.width)
        stats = DecodeStats.of_beams(
            len(self._widths), lengths, decode.begun, [nodes] * len(lengths), decode.cache
        )
        return beams_of(results, search.step, stats)


class DecodeGraph:
    """One captured decode.

    Attributes:
        inputs: what a replay reads.
        search: what was captured; a graph does not keep the tensors alive that it reads.
        replay: runs the decode on `inputs`, and overwrites what was not downloaded.
        left: what a replay leaves besides, as `DecodeGraphs._compute` returned it.
    """

    replay: Run
    left: Any

    def __init__(self, inputs: FixedInputs, search: Search) -> None:
        """A graph without results yet."""
        self.inputs, self.search = inputs, search

    def write(self, results: dict[str, torch.Tensor], left: Any, output: torch.Tensor) -> None:
        """Write results to `output`, packed; to be captured, after what computes them."""
        packed = pack(list(results.values()))
        self._output, self.left = output[: packed.numel()].view(packed.shape), left
        self._output.copy_(packed)
        self._like = {name: torch.empty_like(t, device="meta") for name, t in results.items()}

    @property
    def finite(self) -> torch.Tensor:
        """(B, models) bool of the last replay, on the device, whether all logits were finite."""
        return self._output[:, -self._like["finite"].shape[1] :].bool()

    def download(self) -> dict[str, torch.Tensor]:
        """Results of the last replay on the host, by one copy; this waits for the device."""
        packed = self._output.to("cpu", copy=True)
        return dict(zip(self._like, unpack(packed, list(self._like.values())), strict=True))
