"""Vocabulary: maps (level, code) to token ids and back. NumPy only.

A model trained from scratch has the tokens `<pad>`, `<bos>` and the semantic tokens; a pretrained
model has its own vocabulary with the semantic tokens appended. In both, the codes of a level are a
contiguous range of token ids.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recsys.errors import ArtifactError

FILE = "vocabulary.json"


@dataclass(frozen=True)
class Vocabulary:
    """The positions of the semantic tokens in the model's vocabulary.

    Attributes:
        level_sizes: number of codes at each level.
        level_offsets: token id of code 0 at each level.
        size: rows of the model's embedding.
        pad: token that fills unused positions.
        prefix: tokens in front of every history (`<bos>`, or a tokenised instruction).

    >>> vocabulary = Vocabulary.from_levels([4, 3])
    >>> vocabulary.encode(np.array([[0, 0], [3, 2]])).tolist()
    [[2, 6], [5, 8]]
    """

    level_sizes: tuple[int, ...]
    level_offsets: tuple[int, ...]
    size: int
    pad: int = 0
    prefix: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        if len(self.level_sizes) != len(self.level_offsets) or not self.level_sizes:
            raise ValueError("Vocabulary: level_sizes and level_offsets must be of one length >= 1")
        for size, offset in zip(self.level_sizes, self.level_offsets, strict=True):
            if size < 1 or offset < 0 or offset + size > self.size:
                raise ValueError(f"Vocabulary: level {offset}+{size} leaves [0, {self.size})")
        for token in (self.pad, *self.prefix):
            if not 0 <= token < self.size:
                raise ValueError(f"Vocabulary: pad or prefix {token} leaves [0, {self.size})")

    @classmethod
    def from_levels(
        cls, level_sizes: ArrayLike, *, first: int = 2, multiple: int = 8
    ) -> Vocabulary:
        """Token ids 0 and 1 for `<pad>` and `<bos>`, then the levels in order, from `first` on.

        The size is rounded up to a multiple of `multiple`, for faster matrix products.
        """
        sizes = [int(s) for s in np.asarray(level_sizes).reshape(-1)]
        offsets = first + np.concatenate([[0], np.cumsum(sizes)])
        size = -(-int(offsets[-1]) // multiple) * multiple
        return cls(tuple(sizes), tuple(int(o) for o in offsets[:-1]), size)

    @property
    def num_levels(self) -> int:
        """L, the number of codes of a semantic ID."""
        return len(self.level_sizes)

    def encode(self, codes: NDArray[np.integer]) -> NDArray[np.int64]:
        """Map (..., L) codes to (..., L) token ids.

        Raises:
            ValueError: a code outside its level.
        """
        codes = np.asarray(codes, np.int64)
        if codes.shape[-1] != self.num_levels:
            raise ValueError(
                f"codes have {codes.shape[-1]} levels, the vocabulary {self.num_levels}"
            )
        bad = (codes < 0) | (codes >= np.asarray(self.level_sizes))
        if bad.any():
            where = np.argwhere(bad)[0]
            raise ValueError(
                f"code {codes[tuple(where)]} at level {where[-1] + 1} is outside "
                f"[0, {self.level_sizes[where[-1]]})"
            )
        return np.asarray(codes + np.asarray(self.level_offsets))

    def save(self, folder: Path) -> None:
        """Write `vocabulary.json`."""
        (folder / FILE).write_text(json.dumps(self.__dict__, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """Read `vocabulary.json`; ArtifactError if it is missing or inconsistent."""
        try:
            values = json.loads((folder / FILE).read_text(encoding="utf-8"))
            for key in ("level_sizes", "level_offsets", "prefix"):
                values[key] = tuple(int(v) for v in values[key])
            return cls(**values)
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{folder / FILE}: {error}") from error
