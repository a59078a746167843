"""Generative recommendation: semantic IDs, a catalog trie, exact beam search.

The public names are loaded on first use, so that `import recsys` (and `recsys --help`) stay quick:
torch is imported only by what needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Recommendation": "recsys.recommender",
    "Recommender": "recsys.recommender",
    "fit": "recsys.fitting",
    "Catalog": "recsys.catalog",
    "Dataset": "recsys.dataset",
    "Histories": "recsys.interactions",
    "Interactions": "recsys.interactions",
    "Vocabulary": "recsys.vocabulary",
    "ItemTrie": "recsys.constraint",
    "beam_search": "recsys.decoding",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from recsys.catalog import Catalog as Catalog
    from recsys.constraint import ItemTrie as ItemTrie
    from recsys.dataset import Dataset as Dataset
    from recsys.decoding import beam_search as beam_search
    from recsys.fitting import fit as fit
    from recsys.interactions import Histories as Histories
    from recsys.interactions import Interactions as Interactions
    from recsys.recommender import Recommendation as Recommendation
    from recsys.recommender import Recommender as Recommender
    from recsys.vocabulary import Vocabulary as Vocabulary


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'recsys' has no attribute {name!r}; it has {sorted(_PUBLIC)}")
