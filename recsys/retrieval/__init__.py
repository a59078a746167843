"""Retrieval without the language model: co-occurrence, popularity, item vectors, SASRec.

This package does not import torch.
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
