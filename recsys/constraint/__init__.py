"""Constraints: which token sequences are items. Knows tokens and rows of a trie, but no items' ids.

`ItemTrie` is built with NumPy, `MinimalTrie` of it; the tensor side (`DeviceTrie`) is loaded when
it is first asked for.
"""

from __future__ import annotations

from recsys.constraint.minimal import MinimalTrie
from recsys.constraint.trie import ItemTrie

__all__ = ["ItemTrie", "MinimalTrie"]
