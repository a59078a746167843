"""LlamaForward: an own forward of Llama-family weights, with few launches for a GPU.

It computes what the modules of transformers compute for Llama, Mistral, Qwen2 and Qwen3, with

- one matrix product for queries, keys and values, and one for gate and up;
- one operation each for a norm with the addition before it, for rotating and storing keys and
  values, and for the gated activation (`recsys.models.layers`, on a GPU `layer_kernels`);
- rotations of all positions computed once;
- keys and values that are read where they lie. Queries that share a key/value head are rows of one
  head in attention, with the mask repeated once a pass. `enable_gqa` would do the same, but with a
  mask it selects the slow `math` backend on a GPU;
- logits of 16-bit models that are rounded to float32 only, on a GPU.

Weights are held once: the parameters of the model become views of the merged matrices. Changes of
weights in place are followed. A parameter or module that is replaced later, an adapter for example,
is not: wrap the model in a new `TreeModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from recsys.kernels import find_kernels
from recsys.models import layers
from recsys.models.layers import Heads, Norms
from recsys.native.coverage import reason_against_modules

COVERED = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3"))
ROPE = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class Linear:
    """A matrix product with (outputs, inputs) weights."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """(T, outputs) of (T, inputs)."""
        return functional.linear(values, self.weight, self.bias)


@dataclass(frozen=True)
class Layer:
    """The weights of a decoder layer, and the kind of its mask."""

    norm: torch.Tensor
    merged: Linear
    head_norms: Norms | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    mask: str


class LlamaForward:
    """The forward of one model.

    Attributes:
        positions: number of positions, from 0, that have a rotation.
    """

    def __init__(self, model: Any, kinds: tuple[str, ...]) -> None:
        """Merge the weights of `model`, against which `reason_against` must have found nothing.

        `kinds` are those of the masks that its layers need.
        """
        config, decoder = model.config.get_text_config(), model.get_decoder()
        used = decoder.layers[: config.num_hidden_layers]
        head = model.get_output_embeddings().weight
        kernels = None
        if head.dtype != torch.float64:
            kernels = find_kernels("recsys.models.layer_kernels", head.device)
        self._functions = layers if kernels is None else kernels

        types = getattr(config, "layer_types", None) if len(kinds) > 1 else None
        # A view that replaces a parameter must be an inference tensor if and only if that is one.
        inference = head.is_inference()
        with torch.inference_mode(inference), torch.no_grad():
            self._embedding = decoder.embed_tokens.weight.detach()
            self._norm = decoder.norm.weight.detach()
            self._head = head.detach()
            self._layers = [
                _layer(layer, types[i] if types else kinds[0]) for i, layer in enumerate(used)
            ]
            attention = decoder.layers[0].self_attn
            self._scaling = attention.scaling
            self.positions = int(config.max_position_embeddings)
            self._heads = Heads(
                config.num_attention_heads,
                config.num_key_value_heads,
                attention.head_dim,
                config.rms_norm_eps,
                _rotation(decoder, self.positions, self._head),
            )

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
        """Run a pass; arguments and result are those of `NativeDecoder.run`.

        Nothing waits for the device, so it can be captured, and nothing checks the values there.
        On a GPU, a model of 16 bits has float32 logits; else they have the model's dtype.
        """
        batch, new = tokens.shape
        groups = self._heads.queries // self._heads.pairs
        if groups > 1:
            masks = {kind: mask.repeat(1, 1, groups, 1) for kind, mask in masks.items()}
        do, epsilon = self._functions, self._heads.epsilon
        residual = self._embedding[tokens.flatten()]
        added: torch.Tensor | None = None
        for layer, cached in zip(self._layers, buffer, strict=True):
            if added is None:
                hidden = do.norm(residual, layer.norm, epsilon)
            else:
                hidden = do.add_norm(residual, added, layer.norm, epsilon)
            queries = do.rotate_and_store(
                layer.merged(hidden), positions, write, cached, self._heads, layer.head_norms
            )
            added = layer.out(self._attend(queries, cached[:, :, :view], masks[layer.mask]))
            hidden = do.add_norm(residual, added, layer.mlp_norm, epsilon)
            added = layer.down(do.silu_multiply(layer.gate_up(hidden)))
        hidden = do.add_norm(residual, added, self._norm, epsilon)
        if rows is not None:
            first = torch.arange(batch, device=rows.device).unsqueeze(-1) * new
            hidden = hidden[(rows + first).flatten()]
        return self._project(hidden).view(batch, -1, len(self._head))

    def _attend(
        self, queries: torch.Tensor, cached: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """(T, H x D) results of (B, H, S, D) queries over (2, B, view, G, D) keys and values."""
        batch, _, new, size = queries.shape
        keys, values = cached.transpose(2, 3)
        attended = functional.scaled_dot_product_attention(
            queries.view(batch, self._heads.pairs, -1, size),
            keys,
            values,
            attn_mask=mask,
            scale=self._scaling,
        )
        attended = attended.view(batch, self._heads.pairs, -1, new, size)
        return attended.permute(0, 3, 1, 2, 4).reshape(batch * new, -1)

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, vocabulary) logits."""
        if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(hidden, self._head.t(), out_dtype=torch.float32)
        return functional.linear(hidden, self._head)


def reason_against(model: Any) -> str | None:
    """Why the modules of transformers have to run `model`; None if `LlamaForward` can."""
    if (reason := reason_against_modules(model, COVERED)) is not None:
        return reason
    weights = list(model.parameters())
    if len({(w.device, w.dtype) for w in weights}) != 1 or not weights[0].is_floating_point():
        return "its weights are not all of one floating-point dtype on one device"
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") not in ROPE:
        return f"its rotations are {rope.get('rope_type')!r}"
    decoder = model.get_decoder()
    inner = [id(w) for _, w in decoder.layers.named_parameters(remove_duplicate=False)]
    if len(set(inner)) < len(inner):
        return "some of its layers share parameters"
    if 2 * len(decoder.rotary_emb.inv_freq) != decoder.layers[0].self_attn.head_dim:
        return "its heads are rotated in part"
    return None


def _layer(layer: Any, mask: str) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = None
    if hasattr(attention, "q_norm"):
        head_norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return Layer(
        norm=layer.input_layernorm.weight.detach(),
        merged=_merged(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=head_norms,
        out=_merged(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_merged(mlp.gate_proj, mlp.up_proj),
        down=_merged(mlp.down_proj),
        mask=mask,
    )


def _merged(*parts: Any) -> Linear:
    """Linear layers as one, whose parameters become views of the merged ones."""
    biases = [part.bias for part in parts if part.bias is not None]
    return Linear(_joined([part.weight for part in parts]), _joined(biases) if biases else None)


def _joined(parts: list[Any]) -> torch.Tensor:
    """Parameters along their first axis in one tensor, of which they become views."""
    first = parts[0].detach()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    behind, adjacent = first.storage_offset(), True
    for part in parts:  # merged before, for another `TreeModel` of the same model
        adjacent &= part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        adjacent &= part.storage_offset() == behind and part.is_contiguous()
        behind += part.numel()
    if adjacent:
        whole: torch.Tensor = first.as_strided(shape, first.stride())
        return whole
    merged = torch.cat([part.detach() for part in parts])
    behind = 0
    for part in parts:
        part.data = merged[behind : behind + len(part)]
        behind += len(part)
    return merged


def _rotation(decoder: Any, positions: int, like: torch.Tensor) -> torch.Tensor:
    """(positions, D) cosines and sines, by the model's own module; their halves repeat."""
    position = torch.arange(positions, device=like.device)[None]
    both = decoder.rotary_emb(like, position)
    return torch.cat([part[0].chunk(2, dim=-1)[0] for part in both], dim=-1).contiguous()
