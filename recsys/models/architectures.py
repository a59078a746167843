"""Which Hugging Face architectures `TreeModel` runs, and up to which position.

An architecture is verified if tree passes (prompts of unequal lengths, nodes in arbitrary slots,
several passes) give the logits of the model's own plain forward. That a model runs without an error
proves nothing, because some ignore the given positions or mask. `tests/recsys/test_architectures`
compares every causal LM of transformers; `docs/architectures.md` has the results and the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PretrainedConfig

_DOCS = "docs/architectures.md"

VERIFIED = frozenset(
    """
    afmoe apertus arcee aria_text beam biogpt bitnet codegen cohere cohere2 cohere2_moe ctrl cwm
    dbrx diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon flex_olmo flint gemma
    gemma2 gemma3_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite
    granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama mellum minimax_m2
    ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi
    phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma xglm
    """.split()  # noqa: SIM905
)

# Their table of positions has `max_position_embeddings` rows.
FIXED_POSITIONS = frozenset({"biogpt", "codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "opt"})


# How architectures change the output of the LM head: field of the configuration, architectures that
# use it in this way, computation.
_AFTER_HEAD: tuple[tuple[str, frozenset[str], Callable[..., torch.Tensor]], ...] = (
    (
        "final_logit_softcapping",
        frozenset({"beam", "gemma2", "gemma3_text", "nanochat", "vaultgemma"}),
        lambda logits, cap: torch.tanh(logits / cap) * cap,
    ),
    (
        "logits_scaling",
        frozenset({"granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"}),
        torch.div,
    ),
    ("logits_scaling", frozenset({"hyperclovax"}), torch.mul),
    ("logit_scale", frozenset({"cohere", "cohere2", "cohere2_moe"}), torch.mul),
)


def check_architecture(config: PretrainedConfig) -> None:
    """Refuse architectures and configurations of whole models that have not been verified.

    Raises:
        ValueError: the architecture is not in `VERIFIED`, or the configuration has ALiBi,
            cross-attention or attention to later tokens.
    """
    name = config.model_type
    if name not in VERIFIED:
        raise ValueError(
            f"architecture {name!r} has not been verified to give its own logits in tree passes "
            f"and is not supported; {_DOCS} lists those that are"
        )
    options = {
        "alibi": (True, "positions by ALiBi"),
        "add_cross_attention": (True, "cross-attention"),
        "is_encoder_decoder": (True, "an encoder"),
        "use_bidirectional_attention": (True, "attention to later tokens"),
        "is_causal": (False, "attention to later tokens"),
    }
    for option, (refused, meaning) in options.items():
        value = getattr(config, option, None)
        if value is not None and bool(value) is refused:
            raise ValueError(
                f"architecture {name!r} with {option}={value!r} ({meaning}) is not supported; "
                f"see {_DOCS}"
            )


def attention_kinds(config: PretrainedConfig) -> tuple[int | None, frozenset[str]]:
    """Sliding window in positions (or None), and the kinds of layers if each layer has its own.

    An architecture reads `sliding_window` and `layer_types` if its class of configurations declares
    them. A configuration can have either without that, from a converted checkpoint, say; the model
    then ignores it: Llama both, and Mistral the types.

    Raises:
        ValueError: layers other than those of full and sliding attention.
    """
    declared = type(config)
    window = config.sliding_window if hasattr(declared, "sliding_window") else None
    if not hasattr(declared, "layer_types"):
        return window, frozenset()
    kinds = frozenset(config.layer_types or ())
    if kinds - {"full_attention", "sliding_attention"}:
        raise ValueError(f"layer types {sorted(kinds)} are not supported; see {_DOCS}")
    if kinds and "sliding_attention" not in kinds:
        return None, frozenset()
    return window, kinds


def after_head(config: PretrainedConfig) -> list[tuple[Callable[..., torch.Tensor], float]]:
    """Operations on the output of the text model's LM head, in order: functions of (logits, value).

    Raises:
        ValueError: a field is set that this architecture is not known to use.
    """
    steps = []
    for field in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        value = getattr(config, field, None)
        if value is None:
            continue
        step = next(
            (f for n, kinds, f in _AFTER_HEAD if n == field and _kind(config) in kinds), None
        )
        if step is not None:
            steps.append((step, float(value)))
        elif value != 1:
            raise ValueError(
                f"architecture {_kind(config)!r} with {field}={value!r} scales its logits in a "
                f"way that has not been verified; it is not supported, see {_DOCS}"
            )
    return steps


def exact_positions(config: PretrainedConfig) -> int | None:
    """Positions, of prompt and generated tokens, up to which logits are exact; None for all.

    Rotary embeddings of type `dynamic` and `longrope` choose their frequencies by the largest
    position of a pass. A long prompt would change the scores of a short one in the same batch, and
    keys from a shorter pass would have other frequencies than the queries of a longer one. Up to
    the length that the model was trained with, all passes have the same frequencies.

    After a longer pass outside this package, a `dynamic` embedding returns to its first frequencies
    in a pass shorter than `max_position_embeddings`, but not in one of exactly that length. So the
    last position is not counted. `longrope` chooses anew in every pass.
    """
    limits = [config.max_position_embeddings] if _kind(config) in FIXED_POSITIONS else []
    for rope in rotary_embeddings(config):
        kind = rope.get("rope_type", "default")
        if "dynamic" in kind:
            limits.append(config.max_position_embeddings - 1)
        elif kind == "longrope":
            limits.append(rope["original_max_position_embeddings"])
    return min(limits, default=None)


def rotary_embeddings(config: PretrainedConfig) -> list[dict[str, Any]]:
    """Parameters of the rotary embedding, of the model or of each type of its layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _kind(config: PretrainedConfig) -> str:
    return str(config.model_type)
