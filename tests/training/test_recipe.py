"""Stage `recipe`: which trials are run, which are kept, and what the later stages then use."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

from recsys.config import Settings
from recsys.errors import ArtifactError, ConfigError
from recsys.pipeline import Context, check
from recsys.pipeline import run as run_stages
from recsys.training import ids, recipe

SMALL = {
    "name": "r",
    "data": {"source": "synthetic", "synthetic": {"users": 250, "items": 240}},
    "ids": {"method": "rq-kmeans", "levels": 3, "codebook_size": 8},
    "target": {
        "architecture": {"hidden_size": 32, "intermediate_size": 64, "layers": 1, "heads": 1},
        "epochs": 2,
        "evaluate_every": 2,
        "eval_users": 50,
        "precision": "float32",
    },
}
TRIALS = {"smoother": ["target.label_smoothing=0.2"], "shorter": ["ids.levels=2"]}


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def scripted(monkeypatch):
    """Trials that train nothing: the gain of all users by the settings of the trial."""

    def script(gains: dict[str, float], epochs: int = 5) -> list[list[str]]:
        tried = []

        def train(context, users, minutes, overrides):
            tried.append(list(overrides))
            total = 0.2 + sum(gains.get(text, 0.0) for text in overrides)
            return total + 0.01 * np.sin(np.arange(100)), epochs

        monkeypatch.setattr(recipe, "_train", train)
        return tried

    return script


def choose(values: dict[str, object], trials: dict[str, list[str]]) -> Context:
    settings = Settings(values | {"recipe": {"trials": trials}})
    run_stages(Context.of(settings), ("data", "recipe"))
    return Context.of(settings)


def test_a_trial_that_gains_is_kept_and_the_next_one_builds_on_it(home, scripted):
    tried = scripted({"target.label_smoothing=0.2": 0.1, "ids.levels=2": -0.05})
    context = choose(SMALL, TRIALS)
    smoother, shorter = TRIALS["smoother"], TRIALS["shorter"]
    assert tried == [[], smoother, smoother + shorter]
    info = context.workspace.manifest("recipe").info
    assert info["chosen"] == smoother
    assert [row["kept"] for row in info["trials"]] == [True, True, False]
    assert info["trials"][2]["gain"] == pytest.approx(-0.05)


def test_a_gain_within_two_standard_errors_is_not_kept(home, monkeypatch):
    users = np.random.default_rng(0).normal(size=100)
    results = iter([np.zeros(100), users - users.mean() + 1.9 * users.std() / 10])
    monkeypatch.setattr(recipe, "_train", lambda *_: (next(results), 5))
    context = choose(SMALL, {"one": ["ids.levels=2"]})
    assert context.workspace.manifest("recipe").info["chosen"] == []


def test_later_stages_use_what_was_chosen(home, scripted):
    scripted({"ids.levels=2": 0.1})
    context = choose(SMALL, TRIALS)
    assert context.settings.values["ids"]["levels"] == 3
    assert context.with_recipe().settings.values["ids"]["levels"] == 2
    run_stages(context, ("data", "recipe", "ids"))
    codes = np.load(context.workspace.run("ids") / "codes.npy")
    assert codes.shape[1] == 2
    file = context.workspace.run("recipe") / recipe.FILE
    fixed = yaml.safe_load(file.read_text())
    assert fixed["ids"] == SMALL["ids"] | {"levels": 2}
    assert not {"recipe", "name", "data"} & set(fixed)
    check(Settings.load(file))


def test_what_the_command_line_sets_is_not_tried(home, scripted):
    tried = scripted({})
    file = home / "config.yaml"
    file.write_text(yaml.safe_dump(SMALL | {"recipe": {"trials": TRIALS}}))
    settings = Settings.load(file, ["ids.levels=4"])
    run_stages(Context.of(settings), ("data", "recipe"))
    assert tried == [[], TRIALS["smoother"]]


def test_too_few_epochs_or_users_end_the_trials(home, scripted):
    tried = scripted({}, epochs=1)
    choose(SMALL, TRIALS)
    assert tried == [[]]
    few = SMALL | {"name": "few", "data": {"source": "synthetic", "synthetic": {"users": 40}}}
    info = choose(few, TRIALS).workspace.manifest("recipe").info
    assert (info["chosen"], info["trials"]) == ([], [])


@pytest.mark.parametrize(
    ("passes", "reached", "shares"),
    [(3, 2, [0.75, 0.75]), (2, 1, [0.5, 0.125, 0.125]), (0.2, 1, [0.0625]), (0.1, 1, [])],
)
def test_without_time_for_four_passes_a_sample_is_used(home, monkeypatch, passes, reached, shares):
    """The first trial has so many epochs; if they are too few, one with fewer windows follows."""
    tried, epochs = [], iter([reached])

    def train(context, users, minutes, overrides):
        tried.append(float(overrides[0].removeprefix("target.window_share=")))
        return np.zeros(100), next(epochs, 2.0)

    monkeypatch.setattr(recipe, "_train", train)
    monkeypatch.setattr(recipe, "_passes", lambda context, minutes: passes)
    info = choose(SMALL | {"minutes": 5}, {"a": ["ids.levels=2"]}).workspace.manifest("recipe").info
    assert tried == shares
    assert info.get("window_share", 0) == (shares or [0])[-1]


def test_the_speed_is_that_of_a_short_run_of_the_stage_itself(home, monkeypatch):
    context, stage, limits = choose(SMALL, {}), recipe.target.stage, []

    def timed(context):
        limits.append(context.settings.values["target"]["max_minutes"])
        return stage(replace(context, settings=context.settings.overridden(["target.max_steps=1"])))

    monkeypatch.setattr(recipe.target, "stage", timed)
    assert (recipe._passes(context, 2.0), limits) == (pytest.approx(10 / 3), [0.2])  # 3 batches
    broken = context.settings.overridden(["target.base=/no/such/model"])
    with pytest.raises(ArtifactError, match="/no/such/model"):
        recipe._passes(replace(context, settings=broken), 2.0)


def test_trials_train_real_models_and_leave_nothing_behind(home):
    context = choose(SMALL | {"minutes": 60}, {"smoother": ["target.label_smoothing=0.2"]})
    folder = context.workspace.run("recipe")
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", recipe.FILE]
    first, second = context.workspace.manifest("recipe").info["trials"]
    assert 0 < first["ndcg@10"] < 1
    assert second["gain"] == pytest.approx(second["ndcg@10"] - first["ndcg@10"])
    assert not context.workspace.run("target").exists()
    before = (folder / "manifest.json").stat().st_mtime_ns
    run_stages(context, ("data", "recipe"))
    assert (folder / "manifest.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("trials", "message"),
    [
        ({"a": "target.epochs=3"}, r"recipe\.trials\.a: .*valid list, found 'target.epochs=3'"),
        ({"a": ["target.epoch=3"]}, r"recipe\.trials\.a: .*did you mean 'epochs'"),
        ({"a": ["ids.features.collaborative=sasrec"]}, r"recipe\.trials\.a: .*sasrec\.epochs"),
    ],
)
def test_a_wrong_trial_is_refused_before_the_first_stage(trials, message):
    with pytest.raises(ConfigError, match=message):
        check(Settings(SMALL | {"recipe": {"trials": trials}}))


def test_the_run_keeps_the_ids_of_the_last_trial_if_it_would_make_the_same(home):
    context = choose(SMALL, {"smoother": ["target.label_smoothing=0.2"]})
    made = context.workspace.manifest("ids")
    assert ids.stage(context.with_recipe()).is_dir()
    assert context.workspace.manifest("ids") == made


def test_ids_of_other_settings_are_not_kept(home, monkeypatch):
    monkeypatch.setattr(recipe, "ERRORS", 1e9)  # no trial is
    context = choose(SMALL, {"fewer": ["ids.levels=2"]})
    assert context.made("ids") is None
