"""Every ranker of an evaluation passes the suite of rankers."""

import numpy as np
import pytest
import torch
from ranker_suite import RankerSuite
from toy_bundle import counted_codes, items_table, write_bundle

from recsys.evaluation.baselines import Popularity, Repeats, fit_baselines
from recsys.evaluation.gate import Served
from recsys.prompts import PromptConfig
from recsys.recommender import Recommender
from recsys.training.sasrec import SasRecConfig, SasRecModel


class TestPopularity(RankerSuite):
    @pytest.fixture
    def ranker(self):
        return Popularity.fit(self.TRAINED, self.ITEMS)


class TestRecentPopularity(RankerSuite):
    @pytest.fixture
    def ranker(self):
        times = 86_400 * np.arange(len(self.TRAINED.items))
        return fit_baselines(self.TRAINED, self.ITEMS, times)["recent popularity"]


class TestRepeats(RankerSuite):
    @pytest.fixture
    def ranker(self):
        return Repeats()


class TestCounts(RankerSuite):
    @pytest.fixture(params=["item-kNN", "directional", "successors"])
    def ranker(self, request):
        return fit_baselines(self.TRAINED, self.ITEMS)[request.param]


class TestSasRec(RankerSuite):
    exact = False  # products of one row and of many may round differently

    @pytest.fixture
    def ranker(self):
        torch.manual_seed(0)
        config = SasRecConfig(1, hidden=8, window=PromptConfig(6, 2))
        return SasRecModel(self.ITEMS, config, None).frozen()


class TestRecommender(RankerSuite):
    exact = False  # beams are as wide as the lists, and few beams may find other items

    @pytest.fixture(scope="class")
    @classmethod
    def ranker(cls, tmp_path_factory):
        table = items_table([f"i{n}" for n in range(cls.ITEMS)])
        codes = counted_codes(cls.ITEMS, (2, 2, 2))
        path = tmp_path_factory.mktemp("ranker") / "bundle"
        return Served(Recommender.load(write_bundle(path, table, codes, (2, 2, 2))))
