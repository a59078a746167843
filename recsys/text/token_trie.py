"""The bytes of each token: `TokenTrie`, a vocabulary as a byte trie, and `TextTokenizer`.

`TextTokenizer` reads a Hugging Face tokenizer through llguidance, which supports byte-level and
byte-fallback tokenizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from recsys.text.byte_trie import ByteTrie


@dataclass(frozen=True, eq=False)
class TokenTrie:
    """Tokens by their bytes.

    Attributes:
        trie: bytes of all tokens that have any.
        token_start: (nodes + 1,) start of each node's tokens in `tokens`.
        tokens: tokens by the node at which their bytes end, ascending inside a node.
        spelling: bytes of each token; empty for special tokens.
        end_tokens: tokens that end a text; they have no bytes.
    """

    trie: ByteTrie
    token_start: NDArray[np.int64]
    tokens: NDArray[np.int64]
    spelling: Sequence[bytes]
    end_tokens: tuple[int, ...]

    @classmethod
    def build(cls, spelling: Sequence[bytes], end_tokens: Sequence[int]) -> TokenTrie:
        """Build from the bytes of each token.

        Raises:
            ValueError: no end token, or one outside the vocabulary.
        """
        if not end_tokens:
            raise ValueError("end_tokens: at least one token must end a text")
        for token in end_tokens:
            if not 0 <= token < len(spelling):
                raise ValueError(
                    f"end_tokens: {token} is outside the vocabulary 0 .. {len(spelling) - 1}"
                )
        ends = set(end_tokens)
        plain = [b"" if token in ends else data for token, data in enumerate(spelling)]
        writing = np.asarray([token for token, data in enumerate(plain) if data], np.int64)
        trie = ByteTrie.build([plain[token] for token in writing.tolist()])
        order = np.argsort(trie.end, kind="stable")
        token_start = np.searchsorted(trie.end[order], np.arange(trie.num_nodes + 1))
        return cls(trie, token_start, writing[order], plain, tuple(end_tokens))

    def __len__(self) -> int:
        return len(self.spelling)

    @cached_property
    def bytes_alone(self) -> NDArray[np.bool_]:
        """(256,) whether a token consists of this byte alone."""
        return self.of_byte >= 0

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


class TextTokenizer:
    """A fast Hugging Face tokenizer, prepared for constraints.

    Attributes:
        parser: llguidance's form of it.
        end_tokens: tokens that end a text.
    """

    def __init__(
        self, tokenizer: Any, vocabulary_size: int | None = None, end_token: int | None = None
    ) -> None:
        """Read the vocabulary, which takes seconds for a large one.

        Args:
            tokenizer: a `transformers.PreTrainedTokenizerFast`.
            vocabulary_size: rows of the model's head, if there are more than tokens.
            end_token: token that ends a text; the tokenizer's end token if None.

        Raises:
            ValueError: not a fast tokenizer, no end token, or a vocabulary that is too small.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(
                f"tokenizer: {type(tokenizer).__name__} is not a fast Hugging Face tokenizer"
            )
        end = tokenizer.eos_token_id if end_token is None else end_token
        if end is None:
            raise ValueError("end_token: the tokenizer has no end token; pass one")
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
    def tokens(self) -> TokenTrie:
        """The vocabulary by bytes; special tokens have none."""
        parser = self.parser
        spelling = [
            b"" if parser.is_special_token(token) else parser.decode_bytes([token])
            for token in range(self.vocabulary_size)
        ]
        return TokenTrie.build(spelling, self.end_tokens)

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
