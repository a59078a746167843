"""PassGraphs: passes of a model at fixed sizes and addresses, captured as CUDA graphs and replayed.

On a GPU, a pass over few tokens takes longer to launch than to compute. A CUDA graph is a single
launch, but with fixed sizes and addresses. So a pass is padded to the next captured shape, copied
into the graph's static tensors and replayed, and its logits are sliced out:

- a request with too few tokens or rows repeats its last one, which writes the same slot again;
- a batch with too few requests repeats the last one, in an unused part of the storage;
- slots out of view are masked; old values there are finite.

Shapes come from a fixed list of sizes (`BATCHES`, `list_sizes`), so the passes that decodes can
need are known before any is run (`recsys.decoding.grid`). All shapes that are captured together
write their logits to one buffer.

Keys and values also need a fixed address: one storage with `slots` slots for each of `batch`
requests, lent to one decode at a time. A decode that does not get it, and a pass without a fitting
graph, run without graphs; both are counted. A pass computes `TreeModel.run` with or without a
graph, up to the rounding of kernels of another size.
"""

from __future__ import annotations

import gc
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from recsys.models.architectures import rotary_embeddings
from recsys.models.cache import CachePool, SlotCache, Storage, whole_blocks
from recsys.models.tree_forward import TreeModel

BATCHES = (1, 2, 4, 8, 12, 16, 24, 32)
_STEP = 8
# Padding costs little as long as a pass is bound by reading the weights: on an H200, up to about
# 180 tokens per pass, whatever the model.
_FREE_TOKENS = 128
_MOST_PADDING = 2
_WARM_UPS = 3


def list_sizes(most: int) -> list[int]:
    """Numbers of tokens to capture, ascending; the last one is at least `most`.

    From 16 on, each is at most half as large again as the one before it.

    >>> list_sizes(100)
    [8, 16, 24, 32, 48, 64, 96, 104]
    """
    last = max(1, -(-most // _STEP)) * _STEP
    sizes = {_STEP << i for i in range(last.bit_length())}
    sizes |= {3 * size // 2 for size in sizes if size > _STEP}
    return [*sorted(size for size in sizes if size < last), last]


@dataclass(frozen=True, order=True)
class PassShape:
    """Sizes of a pass.

    Attributes:
        batch: requests.
        new: tokens to run per request.
        view: slots in view.
        rows: rows per request whose logits are needed.
    """

    batch: int
    new: int
    view: int
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens of the whole batch."""
        return self.batch * self.new

    def rounded(self) -> PassShape:
        """The shape to capture for this one: requests as in `BATCHES`, the rest in steps."""
        return PassShape(
            _round_up(self.batch),
            -(-self.new // _STEP) * _STEP,
            whole_blocks(self.view),
            -(-self.rows // _STEP) * _STEP,
        )

    def fits(self, captured: PassShape) -> bool:
        """Whether a graph of shape `captured` can run this rounded pass with acceptable padding."""
        return (
            self.batch <= captured.batch
            and self.new <= captured.new
            and self.view <= captured.view
            and self.rows <= captured.rows
            and captured.tokens <= max(_FREE_TOKENS, _MOST_PADDING * self.tokens)
        )


@dataclass(frozen=True)
class GraphStatistics:
    """Sizes of captured passes or decodes now, and counts since they were made.

    Attributes:
        graphs: captured shapes.
        replays: passes or decodes that ran as one graph.
        fallbacks: those that did not, by reason. Of passes: `cache`, the decode did not have the
            storage; `shape`, no captured shape fits.
        patched: decodes that patch passes followed, because a draft was not accepted.
    """

    graphs: int
    replays: int
    fallbacks: dict[str, int]
    patched: int = 0


Run = Callable[[], object]
Capture = Callable[[Run], Run]
"""Captures a computation on fixed tensors, which it reads and writes; returns the replay."""


class CudaCapture:
    """CUDA graphs on one stream, over one memory pool.

    Graphs of one pool may overwrite each other's temporaries, so they are replayed one after the
    other. Capture the largest shape first, so that the smaller ones reuse its memory.

    `torch.cuda.graph` waits for the whole device and empties the allocator's cache at every
    capture, which stops all other work of the process. Here the stream is captured directly: other
    threads go on, and only their own later allocations see the memory that captures took.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """Capture `run` as a graph; see `Capture`."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream), _no_collection():
                # Libraries choose kernels and allocate workspaces on first use, not in a capture.
                for _ in range(_WARM_UPS):
                    run()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
            current.wait_stream(self._stream)
        return graph.replay


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: what it frees on a GPU could end a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def run_again(run: Run) -> Run:
    """A `Capture` for any device: a replay runs the computation again, on the same tensors.

    It saves no time, but tests buffers, padding and fallbacks without a GPU.
    """
    run()
    return run


class PinnedPool(CachePool):
    """A `CachePool` that first lends one storage at a fixed address.

    Attributes:
        storage: the storage, (layers, 2, batch x slots, H_kv, D).
        batch: number of requests that fit.
        slots: slots of each request.
        pinned: the cache in this storage while it is lent, else None.
        refused: decodes that did not get the storage, by reason.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        batch: int,
        slots: int,
    ) -> None:
        """Allocate the storage for `batch` requests of `slots` slots each, in whole blocks."""
        super().__init__(config, dtype, device)
        self.batch, self.slots = batch, whole_blocks(slots)
        layers, heads, size = self._shape
        shape = (layers, 2, batch * self.slots, heads, size)
        self.storage = Storage(torch.zeros(shape, dtype=dtype, device=device))
        self.pinned: SlotCache | None = None

    @contextmanager
    def lend(self, batch: int, prompt: int, nodes: int) -> Iterator[SlotCache]:
        """As `CachePool.lend`; all other slots of the pinned storage are node slots."""
        first_node = whole_blocks(prompt)
        fits = batch <= self.batch and first_node + whole_blocks(nodes) <= self.slots
        mine = None
        with self._lock:
            if fits and self.pinned is None:
                storage = self.storage.clean()
                mine = SlotCache(storage, batch, prompt, self.slots - first_node)
                self.pinned, self.lent = mine, self.lent + 1
        if mine is None:
            with super().lend(batch, prompt, nodes) as cache:
                yield cache
            return
        try:
            yield mine
        except BaseException:
            self.storage.values.zero_()  # a failed pass may leave values that are not finite
            raise
        finally:
            with self._lock:
                self.pinned, self.lent = None, self.lent - 1


class PassGraph:
    """One captured shape."""

    def __init__(
        self,
        model: TreeModel,
        shape: PassShape,
        pool: PinnedPool,
        capture: Capture,
        logits: torch.Tensor,
    ) -> None:
        """Capture the shape; this may write any slot of `pool.storage`.

        `logits` is flat memory for at least as many logits as the shape has.
        """
        self.shape, self._dtype = shape, model.score_dtype
        device = pool.storage.values.device
        # tokens, positions and slots to write in one tensor: one copy fills all three
        sizes = (shape.batch, shape.new, 3)
        self._inputs = torch.zeros(sizes, dtype=torch.int64, device=device)
        self._rows = torch.zeros((shape.batch, shape.rows), dtype=torch.int64, device=device)
        sizes = (shape.batch, shape.new, shape.view)
        self._masks = {
            kind: torch.zeros(sizes, dtype=model.dtype, device=device) for kind in model.mask_kinds
        }
        cache = SlotCache(pool.storage, shape.batch, pool.slots, 0)

        sizes = (shape.batch, shape.rows, model.vocabulary_size)
        self._logits = logits[: math.prod(sizes)].view(sizes)

        def run() -> None:
            tokens, positions, write = self._inputs.unbind(-1)
            cache.select(write, shape.view)
            masks = {kind: mask[:, None] for kind, mask in self._masks.items()}
            self._logits.copy_(model.run(tokens, positions, masks, cache, self._rows))

        self._replay = capture(run)

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, torch.Tensor],
        write: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a pass that fits; arguments and result are those of `TreeModel.forward`."""
        batch, new = tokens.shape
        if rows is None:
            rows = torch.arange(new, device=tokens.device).expand(batch, -1)
        _fill(self._inputs, torch.stack([tokens, positions, write], dim=-1))
        _fill(self._rows, rows)
        for kind, mask in masks.items():
            view = mask.shape[-1]
            _fill(self._masks[kind][..., :view], mask.expand(batch, -1, -1, -1)[:, 0])
            self._masks[kind][..., view:] = -torch.inf
        self._replay()
        return self._logits[:batch, : rows.shape[1]].to(self._dtype, copy=True)


class PassGraphs:
    """The captured passes of one model; `attach` makes the model use them.

    Attributes:
        model: the model.
        capture: captures a computation.
        pool: the model's caches.
    """

    def __init__(
        self, model: TreeModel, *, batch: int, slots: int, capture: Capture | None = None
    ) -> None:
        """Allocate the storage. Nothing is captured, and the model does not use it yet.

        Args:
            model: the model; no decode may be running on it.
            batch: most requests of a decode on graphs, rounded up as in the shapes.
            slots: most slots of a request, prompt and nodes each in whole blocks.
            capture: None for CUDA graphs on a GPU and `run_again` elsewhere.

        Raises:
            ValueError: a model that reads its positions on the host.
        """
        # transformers.modeling_rope_utils.dynamic_frequency_update branches on the largest position
        if any(rope.get("rope_type") == "dynamic" for rope in rotary_embeddings(model.config)):
            raise ValueError(
                "rope_type 'dynamic' waits for the device in every pass, which a graph cannot; "
                "use the model without graphs"
            )
        if capture is None:
            capture = CudaCapture(model.device) if model.device.type == "cuda" else run_again
        self.model, self.capture = model, capture
        self.pool = PinnedPool(
            model.config, model.dtype, model.device, batch=_round_up(batch), slots=slots
        )
        self._graphs: list[PassGraph] = []
        self._found: dict[PassShape, PassGraph | None] = {}
        self._replays, self._fallbacks = 0, Counter[str]()
        self._paused = False
        self._lock = threading.Lock()

    @classmethod
    def attach(
        cls, model: TreeModel, *, batch: int, slots: int, capture: Capture | None = None
    ) -> PassGraphs:
        """Make captured passes and set them as `model.find_graph` and `model.pool`."""
        graphs = cls(model, batch=batch, slots=slots, capture=capture)
        model.pool, model.find_graph = graphs.pool, graphs.find
        return graphs

    def has_room(self, batch: int, slots: int) -> bool:
        """Whether the storage holds that many requests, and slots of each."""
        return batch <= self.pool.batch and slots <= self.pool.slots

    @property
    def shapes(self) -> list[PassShape]:
        """Captured shapes, fewest tokens first."""
        return [graph.shape for graph in self._graphs]

    @torch.inference_mode()
    def warm_up(self, shapes: Iterable[PassShape]) -> None:
        """Capture graphs for passes of these shapes, rounded up; existing graphs stay.

        Raises:
            ValueError: a shape is larger than the storage.
            RuntimeError: a decode holds the storage, which capture would overwrite.
        """
        missing = {shape.rounded() for shape in shapes} - set(self.shapes)
        for shape in missing:
            if not self.has_room(shape.batch, shape.view):
                raise ValueError(
                    f"{shape} does not fit a storage of {self.pool.batch} requests with "
                    f"{self.pool.slots} slots; make it larger"
                )
        if self.pool.pinned is not None:
            raise RuntimeError("a decode holds the storage; warm up before decoding")
        model = self.model
        with self.pool.lend(self.pool.batch, self.pool.slots, 0):
            rows = max((shape.batch * shape.rows for shape in missing), default=0)
            logits = torch.zeros(
                rows * model.vocabulary_size, dtype=model.score_dtype, device=model.device
            )
            captured = [
                PassGraph(model, shape, self.pool, self.capture, logits)
                for shape in sorted(missing, key=_size, reverse=True)
            ]
        self.pool.storage.values.zero_()  # captures may have left values that are not finite
        with self._lock:
            self._graphs = sorted([*self._graphs, *captured], key=lambda g: _size(g.shape))
            self._found = {}

    def find(
        self, tokens: torch.Tensor, cache: SlotCache, view: int, rows: torch.Tensor | None
    ) -> PassGraph | None:
        """The graph with the fewest tokens that can run a pass; None if there is none.

        A pass has (B, S) tokens, a cache, slots in view, and (B, R) rows, or None for all rows.
        """
        if self._paused:
            return None
        batch, new = tokens.shape
        shape = PassShape(batch, new, view, new if rows is None else rows.shape[1]).rounded()
        with self._lock:
            if shape not in self._found:
                fitting = (g for g in self._graphs if shape.fits(g.shape))
                self._found[shape] = next(fitting, None)
            smallest = self._found[shape]
            if cache is not self.pool.pinned:
                self._fallbacks["cache"] += 1
                return None
            if smallest is None:
                self._fallbacks["shape"] += 1
                return None
            self._replays += 1
        return smallest

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Find no graph and count nothing: a larger computation is captured with its passes."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def statistics(self) -> GraphStatistics:
        """Sizes now and counts since this object was made."""
        with self._lock:
            return GraphStatistics(
                graphs=len(self._graphs),
                replays=self._replays,
                fallbacks=dict(self._fallbacks),
            )


def _size(shape: PassShape) -> tuple[int, int, int]:
    """Sort key of graphs: tokens first, because they determine the cost of padding."""
    return shape.tokens, shape.view, shape.rows


def _round_up(batch: int) -> int:
    """Number of requests of the graphs that run `batch` requests."""
    return next((b for b in BATCHES if b >= batch), batch)


def _fill(static: torch.Tensor, values: torch.Tensor) -> None:
    """Copy (b, s, ...) values into (B, S, ...); repeat the last entry and the last request."""
    batch, count = values.shape[:2]
    static[:batch, :count] = values
    if count < static.shape[1]:
        static[:batch, count:] = values[:, -1:]
    if batch < static.shape[0]:
        static[batch:] = static[batch - 1 : batch]
