"""Evaluation of any `Ranker`: metrics with intervals, baselines, one protocol, one report."""

from recsys.evaluation.baselines import Popularity as Popularity
from recsys.evaluation.baselines import fit_baselines as fit_baselines
from recsys.evaluation.metrics import Hits as Hits
from recsys.evaluation.metrics import Interval as Interval
from recsys.evaluation.metrics import bootstrap as bootstrap
from recsys.evaluation.metrics import mrr_at_k as mrr_at_k
from recsys.evaluation.metrics import ndcg_at_k as ndcg_at_k
from recsys.evaluation.metrics import paired_bootstrap as paired_bootstrap
from recsys.evaluation.metrics import recall_at_k as recall_at_k
from recsys.evaluation.protocol import EvaluationConfig as EvaluationConfig
from recsys.evaluation.protocol import Ranker as Ranker
from recsys.evaluation.protocol import Result as Result
from recsys.evaluation.protocol import evaluate as evaluate

__all__ = [
    "EvaluationConfig",
    "Hits",
    "Interval",
    "Popularity",
    "Ranker",
    "Result",
    "bootstrap",
    "evaluate",
    "fit_baselines",
    "mrr_at_k",
    "ndcg_at_k",
    "paired_bootstrap",
    "recall_at_k",
]
