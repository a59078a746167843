"""`TextTokenizer` reads a Hugging Face tokenizer through llguidance.

It supports byte-level and byte-fallback tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray


class TextTokenizer:
    """A fast Hugging Face tokenizer, prepared for constraints.

    Attributes:
        parser: llguidance's form of it.
        end_tokens: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocabulary_size: int | None = None) -> None:
        """Read the vocabulary, which takes seconds for a large one.

        Args:
            tokenizer: a `transformers.PreTrainedTokenizerFast`.
            vocabulary_size: rows of the model's head, if there are more than tokens.

        Raises:
            ValueError: not a fast tokenizer, no end token, or a vocabulary that is too small.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} is not a fast Hugging Face tokenizer"
            )
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError("tokenizer: it has no end token; set its eos_token")
        tokens = len(tokenizer)
        if vocabulary_size is not None and vocabulary_size < tokens:
            raise ValueError(
                f"vocabulary_size: {vocabulary_size} is less than the tokenizer's {tokens} tokens"
            )
        copy = type(backend).from_str(backend.to_str())
        copy.no_padding()
        copy.no_truncation()
        self.parser = LLTokenizer(copy.to_str(), n_vocab=vocabulary_size, eos_token=end)
        self.end_tokens: tuple[int, ...] = tuple(self.parser.eos_tokens)

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, V."""
        return self.parser.vocab_size

    @cached_property
    def spelling(self) -> list[bytes]:
        """The bytes of each token; empty for special tokens."""
        parser = self.parser
        return [
            b"" if parser.is_special_token(token) else parser.decode_bytes([token])
            for token in range(self.vocabulary_size)
        ]

    @cached_property
    def of_byte(self) -> NDArray[np.int64]:
        """(256,) a token that consists of this byte alone, or -1."""
        table = np.full(256, -1, np.int64)
        for token, data in enumerate(self.spelling):
            if len(data) == 1:
                table[data[0]] = token
        return table

    @cached_property
    def first_byte(self) -> NDArray[np.int16]:
        """(V,) first byte of each token; -1 for tokens without bytes."""
        return np.asarray([data[0] if data else -1 for data in self.spelling], np.int16)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; the name of a special token in it, such as `</s>`, is this token."""
        return self.parser.tokenize_str(text)

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of a text that somebody else wrote: none of them is special."""
        tokens: list[int] = []
        for token in self.encode(text):
            if self.parser.is_special_token(token):
                tokens += self.parser.greedy_tokenize(self.parser.decode_str([token]))
            else:
                tokens.append(token)
        # A special token may have swallowed the blanks around its name.
        is_whole = self.parser.decode_bytes(tokens) == text.encode()
        return tokens if is_whole else self.parser.greedy_tokenize(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of some tokens, without end tokens."""
        return self.parser.decode_str([t for t in tokens if t not in self.end_tokens])
