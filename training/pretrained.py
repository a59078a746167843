"""Adapts a pretrained LLaMA checkpoint to semantic tokens: new vocabulary rows, and LoRA."""

from __future__ import annotations

import os
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recsys.errors import ConfigError
from recsys.training.settings import LoraSettings
from recsys.vocabulary import Vocabulary

LEVELS = string.ascii_lowercase


def semantic_tokens(level_sizes: Sequence[int]) -> list[str]:
    """`<a_0>`, `<a_1>`, ... `<b_0>`, ...: the names of all codes, level by level."""
    return [
        f"<{letter}_{code}>"
        for letter, size in zip(LEVELS, level_sizes, strict=False)
        for code in range(size)
    ]


def load_base(
    folder: Path, level_sizes: Sequence[int], instruction: str
) -> tuple[Any, Any, Vocabulary]:
    """Read a checkpoint with its tokenizer and add a token for each code.

    The new tokens are appended, so that the codes of a level are a contiguous range of ids. The new
    rows of embedding and head start near the mean of the old ones.

    Args:
        folder: a local Hugging Face checkpoint directory with a tokenizer.
        level_sizes: codes at each level.
        instruction: text in front of every history, after the tokenizer's bos token.

    Returns:
        Model (float32), tokenizer, and vocabulary.

    Raises:
        ConfigError: no tokenizer, one that already has a semantic token, or more than 26 levels.
        ArtifactError: no loadable checkpoint.
    """
    model, tokenizer, first = _load_with_codes(folder, level_sizes)
    sizes = [int(size) for size in level_sizes]
    bos = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    text = tokenizer.encode(instruction, add_special_tokens=False)
    if not bos + text:
        raise ConfigError("instruction: empty, and the tokenizer has no bos token to begin with")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    vocabulary = Vocabulary(
        tuple(sizes),
        tuple(first + sum(sizes[:level]) for level in range(len(sizes))),
        model.get_input_embeddings().num_embeddings,
        pad or 0,
        tuple(bos + text),
    )
    return model, tokenizer, vocabulary


def load_draft_base(folder: Path, target: Path, vocabulary: Vocabulary) -> tuple[Any, Any]:
    """Read a checkpoint for a draft, whose tokenizer must be that of the target's checkpoint.

    The draft gets the target's number of rows, new ones near the mean of the old ones.

    Args:
        folder: as in `load_base`.
        target: folder of the target's checkpoint.
        vocabulary: the target's.

    Returns:
        Model (float32) and tokenizer.

    Raises:
        ConfigError: as `load_base`, or another vocabulary than the target's.
        ArtifactError: no loadable checkpoint.
    """
    remedy = "; draft and target need one vocabulary: give target.base and draft.base checkpoints "
    remedy += "with the same tokenizer, or leave draft.base out"
    if not (target / "tokenizer_config.json").is_file():
        raise ConfigError(f"draft.base: the target has no tokenizer{remedy}")
    model, tokenizer, _ = _load_with_codes(folder, vocabulary.level_sizes)
    if tokenizer.get_vocab() != load_tokenizer(target).get_vocab():
        raise ConfigError(f"draft.base: {folder} has other tokens than the target's base{remedy}")
    _resize(model, vocabulary.size)
    return model, tokenizer


def _load_with_codes(folder: Path, level_sizes: Sequence[int]) -> tuple[Any, Any, int]:
    """Model and tokenizer with a token for each code, and the first of these tokens."""
    import torch
    from transformers import AddedToken

    from recsys.models.checkpoint import load_model

    if len(level_sizes) > len(LEVELS):
        raise ConfigError(f"{len(level_sizes)} levels; token names go up to {len(LEVELS)}")
    model = load_model(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(folder)
    first = len(tokenizer)
    names = semantic_tokens(level_sizes)
    added = tokenizer.add_tokens([AddedToken(name, normalized=False) for name in names])
    if added != len(names) or tokenizer.convert_tokens_to_ids(names[0]) != first:
        raise ConfigError(f"base: the tokenizer of {folder} has tokens like {names[0]} already")
    _resize(model, max(len(tokenizer), model.get_input_embeddings().num_embeddings), 8)
    return model, tokenizer, first


def _resize(model: Any, rows: int, multiple: int | None = None) -> None:
    """Give embedding and head this many rows, or the next multiple; always the same new ones."""
    import torch
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # transformers prints long notes about new rows
    try:
        with torch.random.fork_rng(devices=[]):  # does not change the run's random numbers
            torch.manual_seed(0)
            model.resize_token_embeddings(rows, pad_to_multiple_of=multiple)
    finally:
        logging.set_verbosity(verbosity)


def load_tokenizer(folder: Path) -> Any:
    """Read the tokenizer in a checkpoint folder.

    Raises:
        ConfigError: it is missing or unreadable.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            os.fspath(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"base: {folder} has no readable tokenizer: {error}") from error


def add_lora(model: Any, vocabulary: Vocabulary, settings: LoraSettings) -> Any:
    """Add trainable LoRA matrices, and make the rows of the semantic tokens trainable.

    The rows are trained in embedding and head, tied or not; all other weights are frozen.

    Raises:
        ConfigError: a module that the model does not have.
    """
    from peft import LoraConfig, get_peft_model

    from recsys.models.checkpoint import quiet

    layers = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if unknown := [module for module in settings.modules if module not in layers]:
        raise ConfigError(f"lora.modules: the model has no layer {unknown[0]!r}")
    rows = [
        row
        for offset, size in zip(vocabulary.level_offsets, vocabulary.level_sizes, strict=True)
        for row in range(offset, offset + size)
    ]
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=list(settings.modules),
        # For tied weights peft trains one copy; without naming the head too, the head of an untied
        # model would keep its initial values.
        trainable_token_indices={"embed_tokens": rows, "lm_head": rows},
    )
    try:
        with quiet():
            return get_peft_model(model, config)
    except ValueError as error:  # a layer that is not linear
        raise ConfigError(f"lora.modules: {error}") from error
