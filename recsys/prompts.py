"""Prompts: turns a history into token ids, in the same way for training, evaluation and serving.

Long histories are cut in blocks: with n items, a window of W and blocks of s, the prompt starts at
item `s * ceil(max(0, n - W) / s)`. It then keeps between W - s + 1 and W items, and its start moves
only every s events, so that a cached prompt remains a prefix of the next one. NumPy only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recsys.config import section
from recsys.interactions import Histories
from recsys.vocabulary import Vocabulary

MOST_ITEMS = 2_000  # of a history that is read


@section
class PromptConfig:
    """How much of a history the model sees."""

    max_items: int = 20
    """Window W, the most items in a prompt."""
    block: int = 8
    """s, items dropped at a time once a history outgrows the window; 1 is a rolling window."""

    def __post_init__(self) -> None:
        if not 1 <= self.block <= self.max_items <= MOST_ITEMS:
            raise ValueError(
                f"want 1 <= block <= max_items <= {MOST_ITEMS}, got {self.block} and "
                f"{self.max_items}"
            )

    def start(self, n: ArrayLike) -> NDArray[np.int64]:
        """Index of the first item that the prompt of a history of n items keeps."""
        over = np.maximum(np.asarray(n, np.int64) - self.max_items, 0)
        return np.asarray(-(-over // self.block) * self.block)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a manifest."""
        return asdict(self)


@dataclass(frozen=True)
class PromptEncoder:
    """Turns a history of dense items into token ids.

    Attributes:
        item_tokens: (items, L) int64 token ids of each item.
        prefix: tokens in front.
        config: the window.
        pad: token that fills the unused places of a batch.

    >>> import numpy as np
    >>> encoder = PromptEncoder(np.array([[2, 5], [3, 4]]), (1,), PromptConfig(2, 1))
    >>> encoder.encode([0, 1, 0]).tolist()  # the window holds the last two items
    [1, 3, 4, 2, 5]
    """

    item_tokens: NDArray[np.int64]
    prefix: tuple[int, ...]
    config: PromptConfig
    pad: int = 0

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, codes: NDArray[np.integer], config: PromptConfig
    ) -> PromptEncoder:
        """The encoder of (items, L) codes; ValueError if one lies outside its level."""
        return cls(vocabulary.encode(codes), vocabulary.prefix, config, vocabulary.pad)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the longest prompt."""
        return len(self.prefix) + self.config.max_items * int(self.item_tokens.shape[1])

    def encode(self, history: ArrayLike) -> NDArray[np.int64]:
        """(T,) tokens of one history, oldest item first."""
        items = np.asarray(history, np.int64).reshape(-1)
        recent = items[int(self.config.start(len(items))) :]
        return np.concatenate(
            [np.asarray(self.prefix, np.int64), self.item_tokens[recent].reshape(-1)]
        )

    def encode_all(self, histories: Histories) -> list[NDArray[np.int64]]:
        """`encode` of each history."""
        return [self.encode(history) for history in histories]


@dataclass(frozen=True)
class Windows:
    """Training windows: each next-item prediction of a history occurs exactly once.

    Attributes:
        sequences: the windows; the items from `first` on are predicted.
        first: (n,) index in the window of the first item that carries loss. The items before it are
            context only; an earlier window predicts them.
    """

    sequences: Histories
    first: NDArray[np.int64]


def training_windows(histories: Histories, config: PromptConfig) -> Windows:
    """Cut histories so that each item is predicted from the same context as in serving.

    Item number p of a history is predicted from items `start(p) .. p - 1`; items with the same
    start share a window. The first item carries no loss.
    """
    counts = np.maximum(histories.lengths - 1, 0)  # predicted items of each history
    rows = np.repeat(np.arange(len(histories)), counts)
    predicted = 1 + np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = config.start(predicted)
    opens = np.ones(len(rows), np.bool_)  # whether a predicted item is the first of a window
    opens[1:] = (np.diff(rows) != 0) | (np.diff(starts) != 0)
    closes = np.ones(len(rows), np.bool_)
    closes[:-1] = opens[1:]
    lengths = predicted[closes] + 1 - starts[opens]
    offsets = np.append(0, np.cumsum(lengths))
    begin = histories.offsets[rows[opens]] + starts[opens]
    events = np.arange(offsets[-1]) + np.repeat(begin - offsets[:-1], lengths)
    sequences = Histories(offsets.astype(np.int64), histories.items[events])
    return Windows(sequences, predicted[opens] - starts[opens])
