"""NativeDecoder: a decoder's packed weights, and its forward pass in the native library.

The weights of the model stay where they are, for torch; the packed copy doubles their memory.

A packed model is frozen: passes have the weights, modules and hooks of when it was packed. A pass
after a weight was changed in place is an error; whoever trains a model makes a new `TreeModel` of
it, which packs it again if its weights are others.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch

from recsys.errors import RecsysError
from recsys.native.coverage import reason_against
from recsys.native.library import PANEL, Library, address, ffi, find_library

_POSITIONS = 512
_MOST_PROJECTED = 1 << 26  # bytes: above, what a table saves is not worth its memory
_SPARE_WORKSPACES = 2
_WRONG = {1: "token", 2: "position", 3: "slot to write", 4: "row"}
_BAD_POSITION = 2
_version, _size = operator.attrgetter("_version"), operator.itemgetter(0)
_lock = threading.Lock()  # of packing
_threads: int | None = None


def set_threads(count: int | None) -> None:
    """Set the threads of a pass, of all models of this process; None for those of torch.

    A process that runs nothing but native passes gives torch one thread: between the small
    operations around a pass, the threads of OpenMP would spin.
    """
    global _threads
    _threads = count


class NativeDecoder:
    """One model's weights in the layout of the library."""

    def __init__(
        self, model: Any, library: Library, kinds: tuple[str, ...], positions: int | None
    ) -> None:
        """Pack the weights of `model`, against which `reason_against` must have found nothing.

        `kinds` and `positions` are those of `native_model`.
        """
        self._call_of = library.call
        self._weights = list(model.parameters())
        # Tensors of inference mode do not count their changes.
        self._counted = [w for w in self._weights if not w.is_inference()]
        self._changes, self._sums = sum(map(_version, self._counted)), _sums(self._weights)
        self._decoder = model.get_decoder()
        self._kept: list[Any] = []  # what the structures point to
        self._kinds = kinds
        self._spare: list[tuple[int, torch.Tensor]] = []  # bytes, ascending, and memory
        self._lock = threading.Lock()
        config = model.config.get_text_config()
        first = self._decoder.layers[0].self_attn
        used = self._decoder.layers[: config.num_hidden_layers]
        layers = ffi.new("Layer[]", [self._layer(layer, config, i) for i, layer in enumerate(used)])
        weights = self._decoder.embed_tokens.weight.detach()
        self._model = _struct(
            "Model",
            layers=len(layers),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=first.head_dim,
            vocabulary=config.vocab_size,
            epsilon=config.rms_norm_eps,
            scaling=first.scaling,
            embedding=self._keep(weights),
            norm=self._padded(self._decoder.norm.weight),
            head=self._linear([model.get_output_embeddings().weight], [None]),
            layer=layers,
        )
        self._kept.append(layers)
        self._project()
        self._limit = positions
        self._make_positions(min(_POSITIONS, self._limit or _POSITIONS))

    def run(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        write: torch.Tensor,
        view: int,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run a pass; arguments and result are those of `TreeModel.run`.

        Args:
            tokens: (B, S) int64.
            positions: (B, S) int64.
            masks: by kind, (B or 1, 1, S, view) float32: 0 or -inf.
            buffer: (layers, 2, B, slots, H_kv, D) keys and values, which get those of the tokens.
            write: (B x S) int64 slots in the buffer, those of request b from b x slots.
            view: slots that attention reads.
            rows: (B, R) int64 indices in S; None for all.

        Returns:
            (B, R, vocabulary) float32.

        Raises:
            ValueError: sizes that do not fit together.
            IndexError: a token, position, slot or row outside its range.
            RecsysError: a weight was changed.
        """
        self._check_frozen()
        self._check(tokens, positions, masks, buffer, write, view, rows)
        batch, count = tokens.shape
        outputs = count if rows is None else rows.shape[1]
        inputs = [tokens.contiguous(), positions.contiguous(), write.contiguous()]
        if rows is not None:
            inputs.append(rows.contiguous())
        logits = torch.empty((batch, outputs, self._model.vocabulary), dtype=torch.float32)
        call = _struct(
            "Pass",
            batch=batch,
            tokens=count,
            rows=outputs,
            slots=buffer.shape[3],
            view=view,
            threads=_threads or torch.get_num_threads(),
            token=inputs[0].data_ptr(),
            position=inputs[1].data_ptr(),
            write=inputs[2].data_ptr(),
            row=0 if rows is None else inputs[3].data_ptr(),
            cache=buffer.data_ptr(),
            cache_layer=buffer.stride(0),
            cache_values=buffer.stride(1),
            logits=logits.data_ptr(),
        )
        for number, kind in enumerate(self._kinds):
            mask = masks[kind]
            if mask.stride(-1) != 1:
                mask = mask.contiguous()
            inputs.append(mask)
            call.mask[number] = mask.data_ptr()
            call.mask_batch[number] = mask.stride(0) if mask.shape[0] > 1 else 0
            call.mask_token[number] = mask.stride(2)
        if batch and outputs:
            self._call(call, inputs)
        return logits

    def search(self, trie: Any, call: Any) -> None:
        """Run a whole beam search; everything but positions and the workspace is set.

        Args:
            trie: a `Trie` of native.h.
            call: a `Search` of native.h.

        Raises:
            IndexError: as `run`, with the number of a request.
            RecsysError: as `run`.
        """
        self._check_frozen()
        call.threads = _threads or torch.get_num_threads()
        model, failed_at = self._model, ffi.new("int64_t *")
        workspace = self._borrow(self._call_of.recsys_search_workspace(model, trie, call))
        call.workspace = workspace[1].data_ptr()
        try:
            wrong = self._call_of.recsys_search(model, trie, call, address(failed_at))
        finally:
            self._give_back(workspace)
        if wrong:
            raise IndexError(f"{_WRONG[wrong]} of request {failed_at[0]} is outside its range")

    def has(self, weights: list[torch.Tensor]) -> bool:
        """Whether these tensors, with these values, were packed."""
        return (
            len(weights) == len(self._weights)
            and all(map(operator.is_, weights, self._weights))
            and self._is_unchanged()
            and _sums(weights) == self._sums  # of fused optimisers, which count no changes
        )

    def _is_unchanged(self) -> bool:
        return bool(sum(map(_version, self._counted)) == self._changes)

    def _check_frozen(self) -> None:
        if not self._is_unchanged():
            raise RecsysError(
                "a weight of the model was changed after it was packed; make a new TreeModel of it"
            )

    def reach(self, positions: int) -> None:
        """Make sure that the tables hold this many positions."""
        if self._model.positions < positions:
            self._make_positions(2 * positions)

    def _call(self, call: Any, inputs: list[torch.Tensor]) -> None:
        """Run a pass whose sizes fit; `inputs`: tokens, positions, slots, and the other tensors."""
        model, failed_at = self._model, ffi.new("int64_t *")
        workspace = self._borrow(self._call_of.recsys_workspace(model, call))
        call.workspace = workspace[1].data_ptr()
        try:
            wrong = self._call_of.recsys_forward(model, call, address(failed_at))
        finally:
            self._give_back(workspace)
        if not wrong:
            return
        bad = inputs[wrong - 1].flatten()[failed_at[0]].item()
        if wrong == _BAD_POSITION and bad >= 0 and (self._limit is None or bad < self._limit):
            self._make_positions(2 * (int(inputs[1].max()) + 1))
            self._call(call, inputs)
            return
        raise IndexError(
            f"{_WRONG[wrong]} {failed_at[0]} of the pass is {bad}, which the model or its cache "
            "does not have"
        )

    def _check(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        masks: Mapping[str, torch.Tensor],
        buffer: torch.Tensor,
        write: torch.Tensor,
        view: int,
        rows: torch.Tensor | None,
    ) -> None:
        """Refuse tensors whose sizes or types do not fit together."""
        (batch, count), model = tokens.shape, self._model
        integers = [tokens, positions, write, *([] if rows is None else [rows])]
        inner = (model.kv_heads * model.head_size, model.head_size, 1)
        slots = buffer.shape[3]
        fits = (
            all(t.dtype == torch.int64 for t in integers)
            and all(t.device.type == "cpu" for t in (*integers, buffer, *masks.values()))
            and positions.shape == tokens.shape
            and write.shape == (batch * count,)
            and (rows is None or (rows.dim() == 2 and len(rows) == batch))
            and buffer.dtype == torch.float32
            and buffer.shape == (model.layers, 2, batch, slots, model.kv_heads, model.head_size)
            and buffer.stride()[3:] == inner
            and (batch < 2 or buffer.stride(2) == slots * inner[0])
            and 0 < view <= slots
        )
        for kind in self._kinds:
            mask = masks[kind]
            fits = fits and mask.dtype == torch.float32 and mask.shape[1:] == (1, count, view)
            fits = fits and mask.shape[0] in (1, batch)
        if not fits:
            raise ValueError(
                f"tokens {tuple(tokens.shape)}, positions {tuple(positions.shape)}, writes "
                f"{tuple(write.shape)}, masks {[tuple(m.shape) for m in masks.values()]} and cache "
                f"{tuple(buffer.shape)} with {view} slots in view do not fit "
                "together, or are not all on the CPU"
            )

    def _project(self) -> None:
        """Compute the projections of each token in the first layer, unless there are too many."""
        model = self._model
        attention = self._decoder.layers[0].self_attn
        heads, pairs = (n * attention.head_dim for n in (model.heads, 2 * model.kv_heads))
        floats = model.vocabulary * sum(-(-n // PANEL) * PANEL for n in (heads, pairs))
        if 4 * floats > _MOST_PROJECTED:
            return
        table = _aligned(floats)
        workspace = _aligned(self._call_of.recsys_project_workspace(model) // 4)
        self._call_of.recsys_project(model, workspace.data_ptr(), table.data_ptr())
        model.projected = self._keep(table)

    def _borrow(self, size: int) -> tuple[int, torch.Tensor]:
        """A workspace of at least `size` bytes, aligned to 64, and its size."""
        with self._lock:
            for number, (bytes_, _) in enumerate(self._spare):
                if bytes_ >= size:
                    return self._spare.pop(number)
        return size, _aligned(size // 4 + 1)

    def _give_back(self, workspace: tuple[int, torch.Tensor]) -> None:
        with self._lock:
            self._spare.append(workspace)
            self._spare.sort(key=_size)
            del self._spare[:-_SPARE_WORKSPACES]

    def _make_positions(self, count: int) -> None:
        """Compute the rotation of the positions before `count` by the model's own module."""
        count = min(count, self._limit or count)
        with torch.inference_mode():
            position = torch.arange(count)[None]
            cosine, sine = self._decoder.rotary_emb(torch.zeros(1), position)
        with self._lock:
            if self._model.positions >= count:
                return
            model = ffi.new("Model *", self._model[0])
            # A running pass may read the tables before: they stay, half as long as these.
            model.cosine = self._keep(cosine[0].float())
            model.sine = self._keep(sine[0].float())
            model.positions, model.rotary = count, cosine.shape[-1]
            self._model = model

    def _layer(self, layer: Any, config: Any, number: int) -> dict[str, Any]:
        attention, mlp = layer.self_attn, layer.mlp
        size = attention.head_dim
        if hasattr(attention, "qkv_proj"):  # Phi-3 keeps them in one matrix
            sizes = [config.num_attention_heads * size] + 2 * [config.num_key_value_heads * size]
            merged = (attention.qkv_proj.weight.split(sizes), mlp.gate_up_proj.weight.chunk(2))
            q, k, v, gate, up = (SimpleNamespace(weight=w, bias=None) for ws in merged for w in ws)
        else:
            q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
            gate, up = mlp.gate_proj, mlp.up_proj
        kinds = getattr(config, "layer_types", None)
        kind = kinds[number] if kinds and len(self._kinds) > 1 else self._kinds[0]
        return {
            "q": self._linear([q.weight], [q.bias]),
            "kv": self._linear([torch.cat([k.weight, v.weight])], _joined(k.bias, v.bias)),
            "o": self._linear([attention.o_proj.weight], [attention.o_proj.bias]),
            "gate_up": self._linear([gate.weight, up.weight], [gate.bias, up.bias]),
            "down": self._linear([mlp.down_proj.weight], [mlp.down_proj.bias]),
            "norm": self._padded(layer.input_layernorm.weight),
            "mlp_norm": self._padded(layer.post_attention_layernorm.weight),
            "q_norm": self._head_norm(attention, "q_norm"),
            "k_norm": self._head_norm(attention, "k_norm"),
            "mask": self._kinds.index(kind),
        }

    def _head_norm(self, attention: Any, name: str) -> int:
        norm = getattr(attention, name, None)
        return 0 if norm is None else self._keep(norm.weight.detach())

    def _linear(
        self, weights: list[torch.Tensor], biases: list[torch.Tensor | None]
    ) -> tuple[int, ...]:
        """Pack matrices side by side, each from a panel of its own: a `Linear` of native.h."""
        inputs = weights[0].shape[1]
        outputs, bias = sum(len(w) for w in weights), 0
        if biases[0] is not None:
            bias = self._keep(torch.cat([_padded(b) for b in biases if b is not None]))
        panels = [_padded(w).view(-1, PANEL, inputs).transpose(1, 2) for w in weights]
        return self._keep(torch.cat(panels)), bias, inputs, outputs

    def _padded(self, weight: torch.Tensor) -> int:
        return self._keep(_padded(weight))

    def _keep(self, values: torch.Tensor) -> int:
        """Address of the values, which live as long as this object."""
        values = values.detach().contiguous()
        self._kept.append(values)
        return values.data_ptr()


def _struct(name: str, **fields: Any) -> Any:
    """A structure of native.h."""
    return ffi.new(f"{name} *", fields)


def _joined(*biases: torch.Tensor | None) -> list[torch.Tensor | None]:
    present = [bias for bias in biases if bias is not None]
    return [torch.cat(present)] if present else [None]


def _padded(weight: torch.Tensor) -> torch.Tensor:
    """The weights with rows of zeros up to a multiple of a panel."""
    weight = weight.detach()
    missing = -len(weight) % PANEL
    return torch.cat([weight, weight.new_zeros((missing, *weight.shape[1:]))])


def _aligned(floats: int) -> torch.Tensor:
    """Uninitialised floats from an address that is a multiple of 64."""
    raw = torch.empty(floats + 16, dtype=torch.float32)
    skip = -raw.data_ptr() % 64 // 4
    return raw[skip : skip + floats]


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """`logits.logsumexp(-1)`; with the library, by the sum that its searches use."""
    library = find_library()
    plain = logits.dtype == torch.float32 and logits.device.type == "cpu"
    if isinstance(library, str) or not plain:
        return logits.logsumexp(-1)
    logits = logits.contiguous()
    total = torch.empty(logits.shape[:-1])
    library.call.recsys_log_sum_exp(
        logits.data_ptr(), total.numel(), logits.shape[-1], total.data_ptr()
    )
    return total


_models: weakref.WeakKeyDictionary[Any, NativeDecoder] = weakref.WeakKeyDictionary()


def native_model(model: Any, kinds: tuple[str, ...], positions: int | None) -> NativeDecoder | None:
    """The native forward of `model`, packed once for all callers while its weights stay the same.

    None where torch has to run the model.

    Args:
        model: a causal LM of transformers.
        kinds: the kinds of attention masks that its layers need.
        positions: how many have the rotation of a short pass; None for all.
    """
    library = find_library()
    if isinstance(library, str) or reason_against(model) is not None:
        return None
    with _lock, torch.inference_mode():
        packed = _models.get(model)
        if packed is None or not packed.has(list(model.parameters())):
            packed = _models[model] = NativeDecoder(model, library, kinds, positions)
    return packed


def _sums(weights: list[torch.Tensor]) -> list[int]:
    """Hashes of the sums of the bits of float32 weights, of each row and of each column.

    Almost any change of values changes them, and so does another order of the same values.
    """
    sums = []
    for weight in weights:
        bits = weight.detach().flatten()
        width = len(bits) // max(1, len(weight))
        pairs = width % 2 == 0 and bits.storage_offset() % 2 == 0  # much faster
        rows = bits.view(torch.int64 if pairs else torch.int32).view(len(weight), width >> pairs)
        parts = (rows.sum(axis, dtype=torch.int64) for axis in (0, 1))
        sums.append(hash(tuple(part.numpy().tobytes() for part in parts)))
    return sums
