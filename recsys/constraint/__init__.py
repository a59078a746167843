"""Constraints: which token sequences are items, and which items a request may get.

`ItemTrie` is built with NumPy and does not import torch. Its tensors are in `DeviceTrie`
(`recsys.constraint.transitions`).
"""

from __future__ import annotations

from recsys.constraint.trie import ItemTrie

__all__ = ["ItemTrie"]
