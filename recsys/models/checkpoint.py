"""Checkpoints: LLaMA models by size, and Hugging Face folders read and written.

Weights are safetensors, never pickle, and code that comes with a checkpoint is never run. A folder
may contain `adapter/`, a LoRA adapter of the weights beside it, which is merged into them on
reading: a separate adapter would cost two more matrix products per layer, and a copy of the
embedding, in every pass. Nothing outside the folder is read.
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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from recsys.errors import ArtifactError
from recsys.models.architecture import Architecture, architecture
from recsys.vocabulary import Vocabulary

ADAPTER = "adapter"
_SIZES = (
    "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "head_dim",
)  # fmt: skip
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
        ArtifactError: not a checkpoint, weights that are not safetensors or not as large as the
            config says, an architecture that is not built into transformers, an adapter of weights
            in another place, or a NaN or infinity in any weight or adapter.
    """
    folder = Path(folder)
    check_sizes(folder)
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
            )
            if adapted:
                model = _add_in(model, adapter)
    except ArtifactError:
        raise
    except (OSError, RuntimeError, TypeError, ValueError, KeyError) as error:
        raise ArtifactError(f"{folder}: not a loadable checkpoint: {error}") from error
    if adapted and dtype is not None:
        for parameter in model.parameters():  # not the buffers with the rotary frequencies
            parameter.data = parameter.data.to(dtype)
    _require_finite(folder, model.state_dict())
    return model.to(device).eval()


def check_sizes(folder: Path) -> None:
    """Refuse a config that asks for more than the weights beside it have.

    Transformers makes all layers of a config before it reads a weight. Only the config and the
    headers of the weights are read here.

    Raises:
        ArtifactError: not a checkpoint, or one with more layers or wider ones than its weights.
    """
    config = _require(folder, "config.json", "*.safetensors")
    shapes = _shapes(folder)
    values = sum(math.prod(shape) for shape in shapes)
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
        rank = _require(folder / ADAPTER, file, "adapter_model.safetensors").get("r")
        widest = max((size for shape in _shapes(folder / ADAPTER) for size in shape), default=0)
        if isinstance(rank, int) and rank > widest:
            raise ArtifactError(f"{folder / ADAPTER}: {file}: r {rank} does not fit the weights")


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
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _require(folder: Path, config: str, weights: str) -> dict[str, Any]:
    """Read the config of `folder`; ArtifactError if that fails or there are no safetensors."""
    try:
        values = dict(json.loads((folder / config).read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ArtifactError(f"{folder} is not a checkpoint: {config}: {error}") from error
    if not any(folder.glob(weights)):
        raise ArtifactError(
            f"{folder}: no {weights}; only safetensors weights are loaded, convert them first"
        )
    return values
