"""Which models the native library runs from their weights alone."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

# Causal LMs of transformers that differ only in what `NativeDecoder` reads from their modules.
COVERED = frozenset(f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Phi3", "Qwen2", "Qwen3"))
# A packed copy of larger models could exhaust the memory; torch runs them from one copy.
_SHARE_OF_MEMORY = 0.25
_PARTS = frozenset((nn.Linear, nn.Embedding, nn.ModuleList, nn.Dropout, nn.SiLU))


def reason_against(model: Any) -> str | None:
    """Why torch has to run `model`; None if the library can."""
    if (reason := reason_against_modules(model, COVERED)) is not None:
        return reason
    weights = list(model.parameters())
    if any(w.dtype != torch.float32 or w.device.type != "cpu" for w in weights):
        return "its weights are not float32 on a CPU"
    if sum(w.nbytes for w in weights) > _SHARE_OF_MEMORY * _memory():
        return "a packed copy of its weights would take too much memory"
    return None


def reason_against_modules(model: Any, covered: frozenset[str]) -> str | None:
    """Why only the modules of `model` themselves can run it; None if their weights are enough.

    `covered` are classes of transformers. A module of another class, with a hook or with a forward
    of its own could compute anything; adapters that are not merged are such modules.
    """
    name = type(model).__name__
    if name not in covered or not type(model).__module__.startswith("transformers.models."):
        return f"{name} is not covered"
    config = model.config.get_text_config()
    activation = getattr(config, "hidden_act", None)
    if activation not in ("silu", "swish"):
        return f"its activation is {activation!r}"
    for module in model.modules():
        kind = type(module)
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or "forward" in vars(module):
            return "a module has hooks or a forward of its own"
        own = kind.__module__ == type(model).__module__  # not a class of somebody's own
        known = kind in _PARTS or kind.__name__ == "SiLUActivation"
        if not own and not known:
            return f"it has a {kind.__name__} of {kind.__module__}"
        if getattr(module, "variance_epsilon", config.rms_norm_eps) != config.rms_norm_eps:
            return "a norm has an epsilon of its own"
    head, embedding = model.get_output_embeddings(), model.get_decoder().embed_tokens
    if not len(head.weight) == len(embedding.weight) == config.vocab_size:
        return "head, embedding and configuration have different vocabularies"
    if getattr(head, "bias", None) is not None:
        return "its head has a bias"
    layers = model.get_decoder().layers
    if len(layers) != config.num_hidden_layers:
        return f"it has {len(layers)} layers and its configuration {config.num_hidden_layers}"
    if len({layer.self_attn.scaling for layer in layers}) > 1:
        return "its layers scale their attention differently"
    if any(map(_has_biases_in_part, layers)):
        return "some projections of a layer have a bias, and others of its kind have none"
    return None


def _has_biases_in_part(layer: Any) -> bool:
    """Whether projections that are merged into one differ in having a bias."""
    kinds = (layer.self_attn, ("q_proj", "k_proj", "v_proj")), (layer.mlp, ("gate_proj", "up_proj"))
    for module, names in kinds:
        parts = [getattr(module, name) for name in names if hasattr(module, name)]
        if len({part.bias is None for part in parts}) > 1:
            return True
    return False


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
