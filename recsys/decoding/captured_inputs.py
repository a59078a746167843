"""DecodeInputs: what captured decodes read, padded to fixed sizes.

A `DecodeShape` and the limits of a `DecodeInputs` fix every size, and `DecodeInputs.arrays` pads
what a request holds to these sizes:

- the last request is repeated; its copies use slots of their own, and their answers are dropped;
- the last token of a prompt is repeated, and stored histories are read again, into the same slots;
- exclusions, masks and candidates are padded with what changes no score.

Masks lie in a table of their own on the device, and their places are inputs.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recsys.constraint.fixed import FixedTrie
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.trie import NO_STATE
from recsys.decoding.expand import Step
from recsys.decoding.request import Search, SearchRequest
from recsys.decoding.row_tree import RowTree
from recsys.decoding.tree import NO_TOKEN, ROOT, PromptBatch, prompt_places
from recsys.models.tree_forward import TreeModel
from recsys.transfers import FixedInputs, Upload

EXCLUDED = 128
MASKS = 8
MOST_DECODES = 128  # of a plan; each holds some thousand kernels' arguments on the device
# Fields of `RowTree`: padding that is not 0, and those with an axis of candidates, not of nodes.
_FILL = {"tokens": NO_TOKEN, "parents": ROOT, "depth": 1}
_OF_CANDIDATES = ("places", "symbols", "known")

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


class DecodeInputs:
    """The inputs of captured decodes of one model over one catalog.

    Attributes:
        prompt: most prompt tokens of a request, and its prompt slots.
        excluded: most dead states of a request at a depth (`Excluded`).
        masks: the masks of recent decodes.
    """

    def __init__(
        self, model: TreeModel, catalog: FixedTrie, prompt: int, excluded: int, masks: int
    ) -> None:
        """Inputs of decodes within these limits; `masks` is the number of distinct ones."""
        self._model, self._catalog, self.prompt, self.excluded = model, catalog, prompt, excluded
        self.masks = MaskTable(catalog, masks)

    def example(self, shape: DecodeShape, models: int) -> Arrays:
        """Inputs of this shape, for a decode that runs so many models."""
        tokens = [[0]] * shape.batch
        request = SearchRequest(
            tokens, candidates=tokens if shape.candidates else None, candidate_nodes=shape.nodes
        )
        nothing = np.zeros(shape.batch, np.int64)
        search = Search.of(request, self._model, self._catalog.catalog)
        places = [np.zeros((2, 1), np.int64)] * models
        return self.arrays(shape, search, nothing, places)

    def arrays(
        self,
        shape: DecodeShape,
        search: Search,
        begun: NDArray[np.int64],
        kept: Sequence[NDArray[np.int64]],
    ) -> Arrays:
        """All inputs of a decode on the host, padded to a shape.

        Args:
            shape: of the graph.
            search: not yet on the device.
            begun: (B,) prompt tokens that are stored.
            kept: `Hit.places` of each model; not read unless the shape has `kept`.
        """
        prompts, step, batch = search.prompts, search.step, shape.batch
        lengths, host = prompts.host_lengths, prompts.upload.host
        places, last = prompt_places(lengths, begun, shape.new)
        arrays = {
            "tokens": _padded(prompts.host_tokens, batch, self.prompt),
            "lengths": _padded(lengths, batch),
            "places": _padded(places, batch),
            "last": _padded(last, batch),
        }
        for number, slots in enumerate(kept if shape.kept else ()):
            count = np.arange(batch * self.prompt) % slots.shape[1]
            arrays[f"kept {number}"] = slots[:, count]
        states = np.diff(self._catalog.trie.source.depth_start)[1:]
        for depth, most in enumerate(states.tolist()):
            dead = np.zeros((len(search), 0), np.int64)
            if step.excluded is not None:
                dead = self._catalog.renumber_excluded(depth, host(step.excluded.dead[depth]))
            arrays[f"dead {depth}"] = _padded(dead, batch, min(self.excluded, most), NO_STATE)
        masks = [None] * len(search) if step.allowed is None else step.allowed.masks
        arrays["allowed"] = _padded(self.masks.places(masks), batch)
        rows: Arrays = {}
        if search.rows is not None:
            rows = {name: host(part) for name, part in vars(search.rows).items()}
            moved = self._catalog.states(rows["states"], rows["depth"])
            rows["states"] = np.where(rows["real"], moved, rows["states"])
            rows["symbols"] = self._catalog.symbols(rows["symbols"])
        for name, array in rows.items():
            size = shape.candidates if name in _OF_CANDIDATES else shape.nodes
            arrays[f"row {name}"] = _padded(array, batch, size, _FILL.get(name, 0))
        return arrays

    def search(self, shape: DecodeShape, inputs: FixedInputs) -> Search:
        """The search to capture, whose tensors are the inputs."""
        trie = self._catalog.trie
        batch, levels = shape.batch, range(trie.source.num_levels)
        prompts = PromptBatch(
            host_tokens=np.zeros((batch, self.prompt), np.int64),
            host_lengths=np.zeros(batch, np.int64),
            tokens=inputs["tokens"],
            lengths=inputs["lengths"],
            upload=Upload(self._model.device),
            slots=self.prompt,
        )
        dead = tuple(inputs[f"dead {depth}"] for depth in levels)
        line = torch.zeros_like(inputs["lengths"])
        allowed = Allowed((self.masks.flags,), line, inputs["allowed"], ())
        step = Step(trie, Excluded(dead), allowed=allowed)
        rows = None
        if shape.candidates:
            rows = RowTree(**{field.name: inputs[f"row {field.name}"] for field in fields(RowTree)})
        return Search(self._model, prompts, step, rows)


class MaskTable:
    """The masks of recent decodes in one tensor on a device, behind one that allows everything.

    Attributes:
        flags: ((1 + `room`) (S + C),) bool, whether each state of a `FixedTrie` and the C behind
            them may be reached.
        room: number of masks.
    """

    def __init__(self, catalog: FixedTrie, room: int) -> None:
        """Allocate room for masks over what is in `catalog`."""
        source = catalog.trie.source
        self._catalog, self._of, self.room = catalog, catalog.catalog, room
        self._size = source.padded_states
        everything = torch.arange(self._size, device=catalog.trie.device) < source.num_states
        self.flags = everything.repeat(1 + room)
        self._kept: OrderedDict[int, tuple[RowMask, int]] = OrderedDict()  # last used last

    def places(self, masks: Sequence[RowMask | None]) -> NDArray[np.int64]:
        """(B, 1) start of the flags of each request's mask, at most `room` distinct ones.

        A mask that is not here is copied, in place of the one that was not used for longest.
        """
        if self._of is not self._catalog.catalog:
            self._of = self._catalog.catalog
            self._kept.clear()
        by_id = {id(mask): mask for mask in masks if mask is not None}
        for key in by_id.keys() & self._kept.keys():
            self._kept.move_to_end(key)
        for key in by_id.keys() - self._kept.keys():
            flags = by_id[key].to(self.flags.device)
            if len(self._kept) == self.room:
                self._kept.popitem(last=False)
            # Not `len(self._kept)`: if a copy fails, the free slot is any one.
            taken = {slot for _, slot in self._kept.values()}
            slot = next(slot for slot in range(self.room) if slot not in taken)
            start = (1 + slot) * self._size
            own = self.flags[start : start + self._size]
            torch.index_select(flags, 0, self._catalog.places, out=own)
            self._kept[key] = by_id[key], slot
        places = [0 if mask is None else 1 + self._kept[id(mask)][1] for mask in masks]
        return np.array(places, np.int64)[:, None] * self._size


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
