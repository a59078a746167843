"""DecodeGraphs: whole beam searches, captured as one graph each.

With captured passes alone (`recsys.models.graphs`), a beam search still launches hundreds of small
operations around them: masks, steps over the trie, gathers. Here `search_tree`, the code of every
beam search, is captured as a whole. Each decode is one copy to the device, one launch and one copy
back.

What is static is decided in this module. A `DecodeShape` and the object's own attributes fix every
size, and `DecodeGraphs._arrays` pads what a request holds to these sizes:

- the last request is repeated; its copies use slots of their own, and their answers are dropped;
- the last token of a prompt is repeated, and stored histories are read again, into the same slots;
- exclusions, masks and candidates are padded with what changes no score.

Masks lie in a table of their own on the device, and their places are inputs. A decode that fits no
captured graph returns None and is counted with the reason; the caller decodes it in another way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint import ItemTrie
from recsys.constraint.mask import RowMask, all_flags
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.constraint.trie import NO_STATE
from recsys.decoding.beam import answer, beams_of, search_tree
from recsys.decoding.expand import Step
from recsys.decoding.output import Beams, DecodeStats
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import (
    NO_TOKEN,
    ROOT,
    FixedTree,
    PromptBatch,
    find_long_prompts,
    prompt_places,
    require_finite,
)
from recsys.models.cache import Finite, whole_blocks
from recsys.models.graphs import PassGraphs, Run
from recsys.transfers import FixedInputs, Upload, pack, unpack

MOST_DECODES = 128  # each holds some thousand kernels' arguments on the device
EXCLUDED = 128
MASKS = 8
# Fields of `RowTree`: padding that is not 0, and those with an axis of candidates, not of nodes.
_FILL = {"tokens": NO_TOKEN, "parents": ROOT, "depth": 1}
_OF_CANDIDATES = ("places", "symbols", "known", "free")

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, order=True)
class DecodeShape:
    """Sizes of a captured decode.

    Attributes:
        batch: requests.
        new: prompt tokens to run per request.
        kept: whether stored histories are read.
        candidates: candidates per request; 0 for a search without them.
        nodes: nodes of the candidates per request.
    """

    batch: int
    new: int
    kept: bool = False
    candidates: int = 0
    nodes: int = 0

    def fits(self, captured: DecodeShape) -> bool:
        """Whether a graph of shape `captured` can run this decode."""
        return (
            self.batch <= captured.batch
            and self.new <= captured.new
            and self.kept == captured.kept
            and self.candidates <= captured.candidates
            and self.nodes <= captured.nodes
            and (self.candidates > 0) == (captured.candidates > 0)
        )


@dataclass(frozen=True)
class DecodeGraphStatistics:
    """Sizes of a `DecodeGraphs` now, and counts since it was made.

    Attributes:
        graphs: captured shapes.
        bytes: size of inputs, outputs and masks, which all graphs share. On a GPU, temporaries come
            from the memory pool of the captured passes, and the driver keeps each graph's kernels.
        replays: decodes that ran as one graph.
        fallbacks: decodes that did not, by reason: `catalog`, it is another one; `beams`, another
            K; `kind`, samples, boosts, or sums over the allowed tokens; `prompt`, too long;
            `excluded` and `masks`, too many; `padding`, long prompts run in a pass of their own;
            `shape`, no captured one fits; `busy`, another decode has the storage or changed the
            prefix store meanwhile; `replaced`, the model got other ones since the capture.
    """

    graphs: int
    bytes: int
    replays: int
    fallbacks: dict[str, int]


class _NoGraphError(Exception):
    """A decode that no graph can run; the text is the reason."""


class DecodeGraphs:
    """Captured beam searches of one model over one catalog, for one K.

    Attributes:
        passes: captured passes of the same model, whose storage and memory pool are used.
        shapes: captured shapes, fewest tokens first.
    """

    def __init__(
        self,
        passes: PassGraphs,
        trie: ItemTrie,
        *,
        prompt: int,
        num_beams: int,
        excluded: int = EXCLUDED,
        masks: int = MASKS,
    ) -> None:
        """Prepare for requests of at most these sizes; nothing is captured.

        Args:
            passes: captured passes of the model, with room for the decodes.
            trie: the catalog.
            prompt: most prompt tokens of a request, and its prompt slots.
            num_beams: K.
            excluded: most dead states of a request at a depth (`Excluded`).
            masks: most distinct masks of a decode.
        """
        self.passes, self.shapes = passes, list[DecodeShape]()
        self._model, self._num_beams = passes.model, num_beams
        self._prompt, self._excluded = prompt, excluded
        self._trie = DeviceTrie.of(trie, passes.model.device)
        self._widths = [trie.width(depth, num_beams) for depth in range(1, trie.num_levels + 1)]
        self._masks = _MaskTable(trie, passes.model.device, masks)
        self._graphs: dict[DecodeShape, _DecodeGraph] = {}
        self._store = passes.model.prefixes
        self._bytes = self._replays = 0
        self._fallbacks = Counter[str]()

    @torch.inference_mode()
    def warm_up(self, shapes: Iterable[DecodeShape]) -> None:
        """Capture decodes of exactly these shapes, in place of all that were captured before.

        Raises:
            ValueError: too many shapes, or one that is larger than the storage.
            RuntimeError: a decode holds the storage, which capture would overwrite.
        """
        wanted, pool = sorted(set(shapes), key=_cost), self.passes.pool
        if len(wanted) > MOST_DECODES:
            raise ValueError(
                f"{len(wanted)} decodes to capture, and at most {MOST_DECODES} are captured; ask "
                "for smaller batches or prompts, or fewer sizes of candidates"
            )
        for shape in wanted:
            if not self.passes.has_room(shape.batch, self._slots(shape)):
                raise ValueError(
                    f"{shape} does not fit a storage of {pool.batch} requests with {pool.slots} "
                    "slots; make it larger"
                )
        if pool.pinned is not None:
            raise RuntimeError("a decode holds the storage; warm up before decoding")
        self._graphs, self.shapes, device = {}, [], self._model.device
        self._store = self._model.prefixes
        examples = {shape: self._example(shape) for shape in wanted}
        size = max((FixedInputs.size(arrays) for arrays in examples.values()), default=0)
        inputs = torch.zeros(size, dtype=torch.uint8, device=device)
        size = max((s.batch * (2 * self._num_beams + s.candidates + 2) for s in wanted), default=0)
        output = torch.zeros(size, dtype=torch.float64, device=device)
        for shape in reversed(wanted):  # the smaller ones reuse the memory of the largest
            fixed = FixedInputs(examples[shape], inputs)
            fixed.send(examples[shape])
            self._graphs[shape] = self._capture(shape, fixed, output)
        pool.storage.values.zero_()  # the examples may have left values that are not finite
        self.shapes, self._bytes = wanted, inputs.nbytes + output.nbytes

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
        except _NoGraphError as reason:
            self._fallbacks[str(reason)] += 1
            return None

    def statistics(self) -> DecodeGraphStatistics:
        """Sizes now and counts since this object was made."""
        return DecodeGraphStatistics(
            graphs=len(self._graphs),
            bytes=self._bytes + self._masks.flags.nbytes,
            replays=self._replays,
            fallbacks=dict(self._fallbacks),
        )

    @torch.inference_mode()
    def _run(self, search: Search, num_beams: int) -> Beams:
        """`run`; _NoGraphError if no graph can run this decode."""
        self._check(search, num_beams)
        model, pool, batch = self._model, self.passes.pool, len(search)
        tokens, lengths = search.prompts.host_tokens, search.prompts.host_lengths
        store, version, kept = self._store, model.version, None
        begun = np.zeros(batch, np.int64)
        if store is not None:
            begun = store.known(version, tokens, lengths)
        shape = self._find(search, begun)
        graph = self._graphs[shape]
        with pool.lend(shape.batch, self._prompt, self._nodes(shape)) as cache:
            if cache is not pool.pinned:
                raise _NoGraphError("busy")
            with nullcontext() if store is None else store.lookup(version, tokens, lengths) as hit:
                if hit is not None:
                    if not np.array_equal(hit.cached, begun):  # another thread changed the store
                        raise _NoGraphError("busy")
                    kept = hit.places(cache.slots)
                graph.inputs.send(self._arrays(shape, search, begun, kept))
                graph.replay()
            stored = None
            if store is not None:  # while the device computes
                stored = Finite(graph.finite[:batch])
                store.insert(version, tokens, lengths, cache.buffer, stored)
            found = graph.download()
            self._replays += 1
            cache.note(found["finite"].all())
            found = {name: values[:batch] for name, values in found.items()}
            if stored is not None:
                stored.host = found["finite"].tolist()
            slot = cache.bytes_per_slot
        require_finite(found["finite"])
        if search.rows is not None:  # without the padding
            found["candidates"] = found["candidates"][:, : search.rows.known.shape[1]]
        return beams_of(found, search.step, self._stats(shape, search, begun, slot))

    def _check(self, search: Search, num_beams: int) -> None:
        """_NoGraphError if no graph can run a decode, whatever has been captured."""
        step, prompts, excluded = search.step, search.prompts, search.step.excluded
        masks = () if step.allowed is None else step.allowed.masks
        reasons = {
            "catalog": step.trie is not self._trie,
            "beams": num_beams != self._num_beams,
            "kind": step.noise is not None
            or step.gains is not None
            or step.normalize != "vocabulary",
            "prompt": max(prompts.host_tokens.shape[1], prompts.slots) > self._prompt,
            "excluded": excluded is not None
            and max(dead.shape[1] for dead in excluded.dead) > self._excluded,
            "masks": len({id(mask) for mask in masks if mask is not None}) > self._masks.room,
            "replaced": self._model.pool is not self.passes.pool
            or self._model.prefixes is not self._store,
        }
        if (reason := next((name for name, found in reasons.items() if found), None)) is not None:
            raise _NoGraphError(reason)

    def _find(self, search: Search, begun: NDArray[np.int64]) -> DecodeShape:
        """The shape to decode in, if (B,) `begun` tokens of the prompts are stored."""
        new, rows, most = search.prompts.host_lengths - begun, search.rows, self._model.most_padding
        if most is not None and find_long_prompts(new).saved > most:
            raise _NoGraphError("padding")
        shape = DecodeShape(len(search), int(new.max()), bool(begun.any()))
        if rows is not None:
            shape = replace(shape, candidates=max(1, rows.known.shape[1]), nodes=rows.width)
        found = next((captured for captured in self.shapes if shape.fits(captured)), None)
        if found is None:
            raise _NoGraphError("shape")
        return found

    def _nodes(self, shape: DecodeShape) -> int:
        """Nodes per request that a decode runs."""
        return sum(self._widths[:-1]) + shape.nodes

    def _slots(self, shape: DecodeShape) -> int:
        """Slots per request that a decode needs."""
        return whole_blocks(self._prompt) + whole_blocks(self._nodes(shape))

    def _example(self, shape: DecodeShape) -> Arrays:
        """Inputs of this shape."""
        one = [[0]] * shape.batch
        request = SearchRequest(
            one, candidates=one if shape.candidates else None, candidate_nodes=shape.nodes
        )
        nothing = np.zeros(shape.batch, np.int64)
        search = Search.of(request, self._model, self._trie)
        return self._arrays(shape, search, nothing, np.zeros((2, 1), np.int64))

    def _arrays(
        self,
        shape: DecodeShape,
        search: Search,
        begun: NDArray[np.int64],
        kept: NDArray[np.int64] | None,
    ) -> Arrays:
        """All inputs of a decode on the host, padded to a shape.

        Args:
            shape: of the graph.
            search: not yet on the device.
            begun: (B,) prompt tokens that are stored.
            kept: their `Hit.places`; not read unless the shape has `kept`.
        """
        prompts, step, batch = search.prompts, search.step, shape.batch
        lengths, host = prompts.host_lengths, prompts.upload.host
        places, last = prompt_places(lengths, begun, shape.new)
        arrays = {
            "tokens": _padded(prompts.host_tokens, batch, self._prompt),
            "lengths": _padded(lengths, batch),
            "places": _padded(places, batch),
            "last": _padded(last, batch),
        }
        if shape.kept and kept is not None:
            count = np.arange(batch * self._prompt) % kept.shape[1]
            arrays["kept"] = kept[:, count]
        states = np.diff(self._trie.source.depth_start)[1:]
        for name, fill in (("dead", NO_STATE), ("parent", -1), ("place", 0)):
            for depth, most in enumerate(states.tolist()):
                array = np.zeros((len(search), 0), np.int64)
                if step.excluded is not None:
                    array = host(getattr(step.excluded, name)[depth])
                size = min(self._excluded, most)
                arrays[f"{name} {depth}"] = _padded(array, batch, size, fill)
        masks = [None] * len(search) if step.allowed is None else step.allowed.masks
        start = _padded(self._masks.places(masks), batch)
        arrays |= {"allowed": start, "dense": start + self._trie.source.padded_states}
        for name in _row_fields(search.rows):
            size = shape.candidates if name in _OF_CANDIDATES else shape.nodes
            array = host(getattr(search.rows, name))
            arrays[f"row {name}"] = _padded(array, batch, size, _FILL.get(name, 0))
        return arrays

    def _capture(
        self, shape: DecodeShape, inputs: FixedInputs, output: torch.Tensor
    ) -> _DecodeGraph:
        """Capture a beam search on these inputs; `inputs` hold a decode."""
        batch, levels = shape.batch, range(self._trie.source.num_levels)
        prompts = PromptBatch(
            host_tokens=np.zeros((batch, self._prompt), np.int64),
            host_lengths=np.zeros(batch, np.int64),
            tokens=inputs["tokens"],
            lengths=inputs["lengths"],
            upload=Upload(self._model.device),
            slots=self._prompt,
        )
        dead, parent, place = (
            tuple(inputs[f"{name} {depth}"] for depth in levels)
            for name in ("dead", "parent", "place")
        )
        line = torch.zeros_like(inputs["lengths"])
        allowed = Allowed((self._masks.flags,), line, inputs["allowed"], inputs["dense"], ())
        step = Step(self._trie, Excluded(dead, parent, place), allowed=allowed)
        rows = None
        if shape.candidates:
            names = [field.name for field in fields(RowTree)]
            rows = RowTree(**{n: inputs.get(f"row {n}") for n in names})  # type: ignore[arg-type]
        search = Search(self._model, prompts, step, rows)
        store, nodes, found = self._store, self._nodes(shape), dict[str, torch.Tensor]()
        pool, passes = self.passes.pool, self.passes
        with pool.lend(batch, self._prompt, nodes) as cache:

            def run() -> None:
                if shape.kept and store is not None:
                    store.read(inputs["kept"], cache.buffer)
                begin = inputs["places"], inputs["last"]
                tree = FixedTree(self._model, prompts, nodes, cache=cache, places=begin)
                with passes.paused():
                    frontier, scores = search_tree(search, tree, self._widths)
                found.update(answer(frontier, step, self._num_beams, scores))
                found["finite"] = tree.finite
                packed = pack(list(found.values()))
                output[: packed.numel()].view(packed.shape).copy_(packed)

            replay = passes.capture(run)
        return _DecodeGraph(inputs, replay, found, output, search)

    def _stats(
        self, shape: DecodeShape, search: Search, begun: NDArray[np.int64], slot: int
    ) -> list[DecodeStats]:
        """Counters of each request; `slot` is the number of bytes of a slot."""
        lengths, passes = search.prompts.host_lengths, len(self._widths)
        nodes = sum(self._widths[:-1]) + (0 if search.rows is None else search.rows.width)
        run = shape.batch * (shape.new + self._nodes(shape))
        useful = int((lengths - begun).sum()) + len(search) * nodes
        padded = round((run - useful) / len(search))
        return [
            DecodeStats(
                target_passes=passes,
                target_tokens=length + nodes - cached,
                kv_slots=length + nodes,
                kv_bytes=(length + nodes) * slot,
                cached_tokens=cached,
                padded_tokens=padded,
            )
            for length, cached in zip(lengths.tolist(), begun.tolist(), strict=True)
        ]


class _DecodeGraph:
    """One captured decode.

    Attributes:
        inputs: what a replay reads.
        replay: runs the decode on `inputs`, and overwrites what was not downloaded.
        search: what was captured; a graph does not keep the tensors alive that it reads.
    """

    def __init__(
        self,
        inputs: FixedInputs,
        replay: Run,
        found: dict[str, torch.Tensor],
        output: torch.Tensor,
        search: Search,
    ) -> None:
        """A graph that writes results with the types and shapes of `found`, packed, to `output`."""
        self.inputs, self.replay, self.search, self._names = inputs, replay, search, list(found)
        self._like = [torch.empty_like(value, device="meta") for value in found.values()]
        batch, columns = len(found["finite"]), sum(t[0].numel() for t in found.values())
        self._output = output[: batch * columns].view(batch, columns)

    @property
    def finite(self) -> torch.Tensor:
        """(B,) bool of the last replay, on the device, whether all logits were finite."""
        return self._output[:, self._names.index("finite") - len(self._names)].bool()

    def download(self) -> dict[str, torch.Tensor]:
        """Results of the last replay on the host, by one copy; this waits for the device."""
        packed = self._output.to("cpu", copy=True)
        return dict(zip(self._names, unpack(packed, self._like), strict=True))


class _MaskTable:
    """The masks of recent decodes in one tensor on a device, behind one that allows everything.

    Attributes:
        flags: ((1 + `room`) (S + C + F),) bool, laid out as `Allowed.alive`.
        room: number of masks.
    """

    def __init__(self, trie: ItemTrie, device: torch.device, room: int) -> None:
        """Allocate room for masks over `trie`."""
        everything = torch.from_numpy(all_flags(trie)).to(device)
        self.flags, self.room = everything.repeat(1 + room), room
        self._size = len(everything)
        self._kept: OrderedDict[int, tuple[RowMask, int]] = OrderedDict()  # last used last

    def places(self, masks: Sequence[RowMask | None]) -> NDArray[np.int64]:
        """(B, 1) start of the flags of each request's mask, at most `room` distinct ones.

        A mask that is not here is copied, in place of the one that was not used for longest.
        """
        wanted = {id(mask): mask for mask in masks if mask is not None}
        for key in wanted.keys() & self._kept.keys():
            self._kept.move_to_end(key)
        for key in wanted.keys() - self._kept.keys():
            flags = wanted[key].to(self.flags.device)
            if len(self._kept) == self.room:
                self._kept.popitem(last=False)
            # Not `len(self._kept)`: if a copy fails, the free place is any one.
            taken = {place for _, place in self._kept.values()}
            place = next(place for place in range(self.room) if place not in taken)
            start = (1 + place) * self._size
            self.flags[start : start + self._size] = flags
            self._kept[key] = wanted[key], place
        places = [0 if mask is None else 1 + self._kept[id(mask)][1] for mask in masks]
        return np.array(places, np.int64)[:, None] * self._size


def _cost(shape: DecodeShape) -> tuple[int, DecodeShape]:
    """Sort key: tokens first, because they determine the cost of padding."""
    return shape.batch * (shape.new + shape.nodes), shape


def _row_fields(rows: RowTree | None) -> list[str]:
    """Names of the tensors that a tree of candidates has."""
    if rows is None:
        return []
    return [field.name for field in fields(RowTree) if getattr(rows, field.name) is not None]


def _padded(
    array: NDArray[Any], batch: int, size: int | None = None, fill: int = 0
) -> NDArray[Any]:
    """(B, n, ...) as (`batch`, `size`, ...): the second axis is filled, the last entry repeated."""
    shape = [batch, *array.shape[1:]]
    if size is None:
        here: Any = slice(0, len(array))
    else:
        here, shape[1] = (slice(0, len(array)), slice(0, array.shape[1])), size
    padded = np.full(shape, fill, array.dtype)
    padded[here] = array
    padded[len(array) :] = padded[len(array) - 1]
    return padded
