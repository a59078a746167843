"""Retrieval without the language model: co-occurrence, popularity, item vectors, SASRec.

This package does not import torch. What it is made of:

- Sources, each fitted on training histories or on the catalog alone: `item_item` by the rules that
  `pair_search` chooses, `popularity`, `vectors`, `content`, `sasrec`, `event_types`, `again`.
- `retrieval` keeps them together, on disk by `files`; `evidence` is what they say of some
  histories, and `reranker` makes one score of it. `pool` ranks the model's items and retrieval's
  together, in NumPy; `native` does the same in C.
- `later` describes items that were added after the fit; `as_new` takes known items for such ones,
  so that a reranker learns about them.
- `related` answers "similar to this one" and "chosen together with these".
- `rows` has the small sparse matrices that all of them use.
"""

from recsys.retrieval.item_item import ItemItem as ItemItem
from recsys.retrieval.item_item import PairRules as PairRules
from recsys.retrieval.later import LaterItems as LaterItems
from recsys.retrieval.pair_search import search_rules as search_rules
from recsys.retrieval.pool import Pool as Pool
from recsys.retrieval.pool import Proposals as Proposals
from recsys.retrieval.popularity import decayed_counts as decayed_counts
from recsys.retrieval.reranker import Reranker as Reranker
from recsys.retrieval.retrieval import Candidates as Candidates
from recsys.retrieval.retrieval import Retrieval as Retrieval
from recsys.retrieval.retrieval import digest as digest
from recsys.retrieval.sasrec import SasRec as SasRec
from recsys.retrieval.vectors import VectorIndex as VectorIndex
