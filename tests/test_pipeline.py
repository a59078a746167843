"""One road from raw data to a report: every stage, small, in one process."""

from __future__ import annotations

import json

import pytest
import torch

from recsys.config import Settings
from recsys.evaluation import rankings
from recsys.evaluation import run as evaluation
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.report import JSON
from recsys.pipeline import STAGES, Context
from recsys.pipeline import run as run_stages

SMALL = {
    "name": "road",
    "data": {"source": "synthetic", "synthetic": {"users": 250, "items": 240}},
    "ids": {"method": "rq-kmeans", "levels": 3, "codebook_size": [12, 8, 4]},
    "target": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 1},
        "epochs": 3,
        "evaluate_every": 3,
        "eval_users": 50,
        "precision": "float32",
    },
    "evaluate": {"ks": [1, 5, 10], "resamples": 100, "users": 80},
}


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """All artifacts of one small run."""
    home = tmp_path_factory.mktemp("road")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(home))
        context = Context.of(Settings(SMALL))
        results = run_stages(context)
    return context, results


def test_every_stage_writes_its_artifact(road):
    _, results = road
    left_out = ("sasrec", "recipe", "draft")  # the last one, since answers are made on a CPU
    assert tuple(results) == tuple(name for name in STAGES if name not in left_out)
    for path, _seconds in results.values():
        assert (path / "manifest.json").is_file()


def test_a_second_run_finds_everything_up_to_date(road):
    context, results = road
    before = {p: (p / "manifest.json").stat().st_mtime_ns for p, _ in results.values()}
    run_stages(context)
    assert {p: (p / "manifest.json").stat().st_mtime_ns for p in before} == before


def test_evaluation_on_two_threads_writes_the_same_report(road, tmp_path, monkeypatch):
    context, _ = road
    monkeypatch.setattr(rankings, "CHUNK", 16)  # so that each thread ranks some
    rank, ranked_by = rankings.rank_histories, set()

    def noted(recommender, *args, **options):
        ranked_by.add(id(recommender.engine))
        return rank(recommender, *args, **options)

    monkeypatch.setattr(rankings, "rank_histories", noted)
    before = torch.get_num_threads()
    reports = []
    for threads in (1, 2):
        ranked_by.clear()
        config = EvaluationConfig(ks=(1, 10), resamples=20, threads=threads)
        workspace, out = context.workspace, tmp_path / str(threads)
        evaluation.evaluate_bundle(workspace.bundle, workspace.dataset, config, out)
        reports.append(json.loads((out / JSON).read_text(encoding="utf-8")))
        assert reports[-1]["protocol"].pop("threads") == len(ranked_by) == threads
    assert reports[0] == reports[1]
    assert torch.get_num_threads() == before
