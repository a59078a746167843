"""TextModel: a language model with its tokenizer, read from a local checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Self

from recsys.errors import ArtifactError
from recsys.models.tree_forward import TreeModel
from recsys.text.tokenizer import TextTokenizer


class TextModel:
    """A model that writes texts (`recsys.text.sample_text`, `recsys.text.generate_text`).

    Attributes:
        model: the model.
        tokenizer: its tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        """Prepare a Hugging Face decoder-only causal LM and its fast tokenizer.

        Raises:
            ValueError: a tokenizer that is not supported.
        """
        self.model = TreeModel.of(model)
        self.tokenizer = TextTokenizer(tokenizer, self.model.vocabulary_size)
        self._begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]

    @classmethod
    def load(cls, folder: Path, device: str = "cpu") -> Self:
        """Read a local checkpoint with its tokenizer, such as a bundle's target.

        Raises:
            ArtifactError: the checkpoint cannot be loaded, has no tokenizer, or has one that is not
                supported.
        """
        from transformers import AutoTokenizer

        from recsys.models.checkpoint import load_model, quiet

        if not (folder / "tokenizer_config.json").is_file():
            raise ArtifactError(
                f"{folder} has no tokenizer, so it writes no text; name a text model, a local "
                "Hugging Face folder, with a service's serve.explainer"
            )
        try:
            with quiet():
                tokenizer = AutoTokenizer.from_pretrained(
                    os.fspath(folder), local_files_only=True, trust_remote_code=False
                )
            return cls(load_model(folder, device=device), tokenizer)
        except (OSError, ValueError) as error:
            said = " ".join(str(error).split())
            raise ArtifactError(f"{folder} cannot write texts: {said}") from error

    def encode(self, prompt: str) -> list[int]:
        """Tokens of a prompt that somebody else wrote, behind the token that begins texts.

        The names of special tokens in the prompt, such as `</s>`, are text.
        """
        return self._begin + self.tokenizer.encode_plain(prompt)
