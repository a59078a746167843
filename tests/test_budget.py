"""The time budget of a run: how stages share it, and what it does not change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from recsys.artifacts import Workspace, write_artifact
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.pipeline import NEEDS, SHARES, Context, foresee, run
from recsys.training.settings import LoopConfig
from recsys.training.supervised import LABELS, TRAINED, budget, labels_minutes, within_budget


@pytest.fixture
def make_context(monkeypatch, tmp_path):
    """Make the context of a run that started some minutes ago."""

    def make(minutes: object, spent: float = 0.0, **sections: object) -> Context:
        monkeypatch.setattr("time.monotonic", lambda: 1000 + 60 * spent)
        settings = Settings({"minutes": minutes, **sections})
        return Context(settings, Workspace(tmp_path, "b"), start=1000)

    return make


def test_a_stage_gets_its_share_of_what_remains(make_context):
    assert make_context(10).share("sasrec") == pytest.approx(10 * SHARES["sasrec"])
    assert make_context(10, spent=6).share("evaluate") == pytest.approx(4)
    assert make_context(10, spent=4).deadline("evaluate") == pytest.approx(1000 + 60 * 10)
    assert make_context(None).deadline("evaluate") == math.inf


def test_what_stages_need_grows_with_the_data_and_is_kept_for_them(
    make_context, monkeypatch, capsys
):
    monkeypatch.setattr("recsys.pipeline.slowness", lambda: 2.0)
    large = foresee(12_000_000, 1_000_000, 100)
    for name, (least, growth, *_) in NEEDS.items():
        assert large[name] == pytest.approx((2 * least + 2 * growth) / 60)
    assert sum(foresee(12_000_000, 1_000_000, 10).values()) == pytest.approx(5)
    share = replace(make_context(100), needs=large).share("sasrec")
    shared = 100 - sum(large.values()) + large["data"]
    assert share == pytest.approx(large["sasrec"] + shared * SHARES["sasrec"])
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("too short") == 1
    assert said.count("retrieval 7.3, 15.2") == 2


def test_what_a_stage_takes_before_it_trains_is_part_of_its_share(make_context):
    context = replace(make_context(10, spent=3), ends={"target": 1000 + 60 * 4})
    assert context.share("target") == pytest.approx(1)
    assert within_budget(LoopConfig(), "target", context).max_minutes == pytest.approx(TRAINED)
    assert labels_minutes(LoopConfig(), "target", context) == pytest.approx(LABELS)
    assert labels_minutes(LoopConfig(max_minutes=2), "target", context) == 2 * LABELS


def test_stages_that_take_their_shares_keep_the_budget(make_context):
    spent = 0.0
    for name in SHARES:
        spent += make_context(10, spent).share(name)
    assert spent == pytest.approx(10)
    assert 0 < make_context(10, spent=60).share("target") < 0.1, "it trains nevertheless"


def test_time_that_made_a_reused_artifact_counts_as_spent(make_context, monkeypatch):
    context, shares = make_context(10), []

    def stage(context: Context):
        path = context.workspace.run("ids")
        if not path.exists():
            with write_artifact(path, "ids", info={"seconds": 240.0}):
                pass
        return path

    def next_stage(context: Context):
        shares.append(context.remaining())

    monkeypatch.setattr("recsys.pipeline.check", lambda settings: None)
    stages = {"ids": stage, "target": next_stage}
    monkeypatch.setattr("recsys.pipeline.load_stage", stages.__getitem__)
    run(context, ["ids", "target"])
    run(context, ["ids", "target"])
    assert shares == [pytest.approx(10), pytest.approx(6)]


def test_no_budget_limits_nothing(make_context):
    context, config = make_context(None), LoopConfig()
    assert (context.remaining(), context.share("target")) == (None, None)
    assert within_budget(config, "target", context) == config
    assert budget(config, context) == {}
    assert context.sample("retrieval", 4000) == 4000
    assert labels_minutes(config, "target", context) is None


def test_an_artifact_names_the_budget_and_not_the_clock_unless_a_stage_has_its_own(make_context):
    early, late = (budget(LoopConfig(), make_context(10, spent)) for spent in (1, 3))
    assert early == late == {"minutes": 10}
    config, context = LoopConfig(max_minutes=7), make_context(10)
    assert within_budget(config, "target", context) == config
    assert budget(config, context) == {}


def test_a_sample_follows_the_budget_unless_it_is_set(make_context):
    assert make_context(5).sample("target", 4000, "eval_users") == 500
    assert make_context(2).sample("retrieval", 4000) == 500
    assert make_context(60).sample("retrieval", 4000) == 4000
    assert make_context(2, evaluate={"users": 4000}).sample("evaluate", 4000) == 4000


def test_an_automatic_budget_follows_the_number_of_events(make_context):
    context = make_context("auto")
    info = {"stats": {"interactions": 100_000}}
    with write_artifact(context.workspace.dataset, "dataset", info=info):
        pass
    assert context.minutes == 10


@pytest.mark.parametrize("minutes", [0, -1, float("inf"), float("nan"), "soon", True])
def test_a_wrong_budget_is_refused(minutes):
    with pytest.raises(ConfigError, match=r"^minutes: "):
        _ = Settings({"minutes": minutes}).minutes
