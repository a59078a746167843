"""Checkpoints: LLaMA models by size, and Hugging Face folders read and written.

Weights are safetensors, never pickle, and code that comes with a checkpoint is never run. A folder
may contain `adapter/`, a LoRA adapter of the weights beside it, which is merged into them on
reading: a separate adapter would cost two more matrix products per layer, and a copy of the
embedding, in every pass. Nothing outside the folder is read: a config has only fields that describe
a model, with plain values, since others make transformers load code, kernels or other weights.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from recsys.errors import ArtifactError, shown
from recsys.models.architecture import Architecture, architecture
from recsys.vocabulary import Vocabulary

ADAPTER = "adapter"
_SIZES = (
    "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim", "num_experts", "num_local_experts", "n_routed_experts",
)  # fmt: skip
_OLDER = ("torch_dtype", "rope_theta", "rope_scaling")  # fields of earlier versions
_MAPPINGS = ("rope_parameters", "rope_scaling", "id2label", "label2id")
_VALUES = dict.fromkeys(("dtype", "torch_dtype"), ("float64", "float32", "bfloat16", "float16"))
_OF_ADAPTERS = (
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying",
    "fan_in_fan_out",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_core", "modules_to_save", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "target_modules", "task_type",
    "trainable_token_indices", "use_rslora",
)  # fmt: skip
_HARMLESS = 1e6  # a number of labels would make as many names
BESIDE = ".."  # base model of an adapter, relative to it, so that the folder can move


def build(
    sizes: str | Mapping[str, Any] | Architecture, vocabulary: Vocabulary
) -> LlamaForCausalLM:
    """Make a LLaMA model with random weights for `vocabulary`.

    `sizes` is the name of a preset, an `Architecture`, or its values; missing ones are those of
    `tiny`.
    """
    if isinstance(sizes, str):
        sizes = architecture(sizes)
    elif not isinstance(sizes, Architecture):
        sizes = replace(Architecture(), **sizes)
    config = LlamaConfig(
        vocab_size=vocabulary.size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        attention_dropout=sizes.attention_dropout,
        tie_word_embeddings=sizes.tied,
        pad_token_id=vocabulary.pad,
        bos_token_id=vocabulary.prefix[0] if vocabulary.prefix else None,
        eos_token_id=None,  # a semantic ID has a known length and needs no end token
    )
    return LlamaForCausalLM(config)


def load_model(
    folder: Path | str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> Any:
    """Read a checkpoint folder as a causal LM, and merge `adapter/` if there is one.

    Args:
        folder: a Hugging Face checkpoint directory with safetensors weights.
        dtype: dtype of the weights, applied after an adapter is merged; None keeps the stored one.
        device: device of the weights.

    Raises:
        ArtifactError: not a checkpoint, a field that a config may not have, weights that are not
            safetensors or not as large as the config says, an architecture that is not built into
            transformers, an adapter of weights in another place, or a NaN or infinity in any weight
            or adapter.
    """
    folder = Path(folder)
    check_config(folder)
    adapter = folder / ADAPTER
    adapted = adapter.is_dir()
    try:
        with quiet():
            model: Any = AutoModelForCausalLM.from_pretrained(
                os.fspath(folder),
                dtype=(None if adapted else dtype) or "auto",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                generation_config=GenerationConfig(),  # else a file of the folder is read
            )
            if adapted:
                model = _add_in(model, adapter)
    except ArtifactError:
        raise
    except Exception as error:  # of any kind: transformers trusts a config
        raise ArtifactError(f"{folder}: not a loadable checkpoint: {error}") from error
    if adapted and dtype is not None:
        for parameter in model.parameters():  # not the buffers with the rotary frequencies
            parameter.data = parameter.data.to(dtype)
    _require_finite(folder, model.state_dict())
    return model.to(device).eval()


def check_config(folder: Path) -> None:
    """Refuse a config that asks for more than the weights beside it, or for anything else.

    Transformers makes all layers of a config before it reads a weight. Only the config and the
    headers of the weights are read here.

    Raises:
        ArtifactError: not a checkpoint, one with a field or value that is not allowed, or one with
            more layers or wider ones than its weights.
    """
    config = _require(folder, "config.json", "*.safetensors")
    _check_fields(folder, config)
    shapes = _shapes(folder)
    values = sum(math.prod(shape) for shape in shapes)
    config = CONFIG_MAPPING[config["model_type"]]().to_dict() | config  # as transformers reads it
    sizes = {name: config[name] for name in _SIZES if isinstance(config.get(name), int)}
    width = sizes.get("hidden_size", 1)
    if "head_dim" in sizes:
        sizes["num_attention_heads"] = sizes.get("num_attention_heads", 1) * sizes["head_dim"]
    for name, size in sizes.items():
        most = len(shapes) if name == "num_hidden_layers" else values // max(1, width)
        if name == "hidden_size":
            most = values
        if not 0 < size <= most:
            raise ArtifactError(
                f"{folder}: config.json: {name} {config[name]} does not fit the weights, which "
                f"have {len(shapes)} tensors with {values} values; export the checkpoint again"
            )
    if (folder / ADAPTER).is_dir():
        file = "adapter_config.json"
        adapter = _require(folder / ADAPTER, file, "adapter_model.safetensors")
        rank = adapter.get("r")
        widest = max((size for shape in _shapes(folder / ADAPTER) for size in shape), default=0)
        if isinstance(rank, int) and rank > widest:
            raise ArtifactError(f"{folder / ADAPTER}: {file}: r {rank} does not fit the weights")
        for name, value in adapter.items():
            # names of modules: a text would be a pattern, which may take for ever
            named = name not in ("target_modules", "modules_to_save") or isinstance(value, list)
            if value and not (name in _OF_ADAPTERS and named):
                raise _refused_field(f"{folder / ADAPTER}: {file}", name, value)


def _check_fields(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse a config with other fields or values than those of its architecture, and redirections.

    ArtifactError with the field.
    """
    kind = config.get("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ArtifactError(
            f"{folder}: not a loadable checkpoint: config.json: model_type: transformers has no "
            f"causal language model {shown(kind)}"
        )
    fields = {*CONFIG_MAPPING[kind]().to_dict(), *_OLDER}
    for name, value in config.items():
        parts = value.values() if isinstance(value, dict) and name in _MAPPINGS else [value]
        flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
        plain = all(isinstance(one, str | int | float | None) for one in flat)
        # Other tools add fields of their own, of which small numbers and booleans name nothing.
        harmless = isinstance(value, int | float) and abs(value) <= _HARMLESS
        if value is not None and not (
            harmless or (name in fields and plain and value in _VALUES.get(name, (value,)))
        ):
            raise _refused_field(f"{folder}: config.json", name, value)
    if (folder / "adapter_config.json").exists():  # transformers would load what it names
        raise ArtifactError(f"{folder}: adapter_config.json: move the adapter to {ADAPTER}/")
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = _require(folder, index.name, "*.safetensors").get("weight_map")
        for file in files.values() if isinstance(files, dict) else [files]:
            if not (isinstance(file, str) and Path(file).name == file):
                raise _refused_field(f"{folder}: {index.name}", "weight_map", file)


def _refused_field(where: str, name: str, value: Any) -> ArtifactError:
    return ArtifactError(
        f"{where}: {name}: {shown(value)} is not allowed, since it may lead outside the folder; "
        "export the checkpoint without it, and make the bundle again"
    )


def _shapes(folder: Path) -> list[list[int]]:
    """Shapes of all tensors of a folder, from the headers of their files."""
    shapes = []
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as tensors:
                shapes += [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ArtifactError(f"{file}: not safetensors weights: {error}") from error
    return shapes


def _add_in(model: Any, folder: Path) -> Any:
    """Merge the LoRA adapter in `folder` into the weights of `model`, in their dtype.

    ArtifactError if it is of another type or of weights in another place, or is not finite.
    """
    from peft import PeftModel, get_peft_model_state_dict

    config = _require(folder, "adapter_config.json", "adapter_model.safetensors")
    if config.get("peft_type") != "LORA":
        raise ArtifactError(f"{folder}: {config.get('peft_type')!r} adapters are not supported")
    base = config.get("base_model_name_or_path")
    if base != BESIDE:
        raise ArtifactError(
            f"{folder}: the adapter belongs to {base!r}, and only weights in the folder above it "
            f"are used; put them there and set base_model_name_or_path to {BESIDE!r}"
        )
    model = PeftModel.from_pretrained(model, os.fspath(folder), autocast_adapter_dtype=False)
    # Check before merging: afterwards the message would name the weights, which may be finite.
    _require_finite(folder, get_peft_model_state_dict(model, save_embedding_layers=False))
    return model.merge_and_unload()


def _require_finite(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors with a NaN or infinity; the ArtifactError names the first such tensor."""
    for name, tensor in tensors.items():
        narrow = tensor.is_floating_point() and tensor.itemsize == 1  # torch lacks their isfinite
        if not (tensor.float() if narrow else tensor).isfinite().all():
            raise ArtifactError(
                f"{folder}: {name} ({tensor.dtype}) has values that are not finite (NaN or "
                "infinity); train or export the checkpoint again, or load it with a wider dtype if "
                "its own values are finite"
            )


def save_model(model: PreTrainedModel | Any, folder: Path, *, merge: bool = True) -> None:
    """Write a checkpoint folder that `load_model` reads; it is created if needed.

    A peft model cannot be used afterwards: with `merge` its adapter is added to the weights,
    otherwise it is split into base weights and `adapter/`.
    """
    if hasattr(model, "peft_config"):
        if merge:
            model = model.merge_and_unload()
        else:
            adapter = folder / ADAPTER
            for config in model.peft_config.values():
                config.base_model_name_or_path = BESIDE
            model.save_pretrained(os.fspath(adapter), save_embedding_layers=False)
            (adapter / "README.md").unlink(missing_ok=True)  # an empty template
            model = model.unload()
    with quiet():
        model.save_pretrained(os.fspath(folder))


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and peft: progress bars, and a deprecation warning about peft itself."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def _require(folder: Path, config: str, weights: str) -> dict[str, Any]:
    """Read the config of `folder`; ArtifactError if that fails or there are no safetensors."""
    try:
        values = dict(json.loads((folder / config).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{folder} is not a checkpoint: {config}: {error}; make it anew (a bundle's draft: "
            "recsys train draft, then recsys bundle)"
        ) from error
    if not any(folder.glob(weights)):
        raise ArtifactError(
            f"{folder}: no {weights}; only safetensors weights are loaded, convert them first"
        )
    return values
