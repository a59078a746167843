"""Constraints: which token sequences are items. Knows tokens and rows of a trie, but no items' ids.

`ItemTrie` is built with NumPy; the tensor side (`DeviceTrie`) is imported when it is first used.
"""

from __future__ import annotations

from recsys.constraint.trie import ItemTrie

__all__ = ["ItemTrie"]
