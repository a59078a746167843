"""`python benchmarks/atspeed.py`: the line-up, the figures, and a toy run of all of it."""

import json
from pathlib import Path

import atspeed
import numpy as np
import pytest
from atspeed_tables.lineup import DraftSpace, Variant, derive_settings, list_variants
from atspeed_tables.measure import Question, Sample, describe
from atspeed_tables.run import PARTS, Options, list_cells

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.training.settings import DraftConfig, TeacherConfig

HOME = Workspace(Path("home"), "shop")


def test_settings_of_every_variant_are_its_own():
    deployed = Settings({"draft": {"objective": "margin-kd", "alpha": 1.0, "layers": 2}})
    for variant in list_variants(PARTS):
        settings = derive_settings(deployed, variant.of(3), 700, HOME)
        config = settings.section("draft", DraftConfig)
        assert (settings.seed, config.objective) == (3, variant.objective)
        own = (config.max_minutes, config.epochs, config.min_steps, config.max_steps)
        assert own == (None, 1, 700, 700)
        assert config.alpha == variant.options.get("alpha")
        assert not config.init_from_target
        assert config.layers == 1
        assert not config.evaluate_every  # no choice is made on any split
        if config.alignment.on_levels:
            assert settings.section("teacher", TeacherConfig).level_tokens


def test_an_ablation_changes_one_setting_of_its_objective():
    plain, *changed = (
        derive_settings(Settings({}), v, 700, HOME).section("draft", DraftConfig)
        for v in list_variants(("ablations",))
        if v.objective == "atspeed-s"
    )
    values = vars(plain)
    different = [
        {name: value for name, value in vars(one).items() if value != values[name]}
        for one in changed
    ]
    assert different == [
        {"ablations": (name,)}
        for name in (
            "no-density", "released", "unconstrained", "top-1", "last-beams", "node-tokens",
        )
    ]  # fmt: skip


def test_a_mixture_uses_the_sft_draft_of_its_start_and_seed():
    settings = derive_settings(Settings({}), Variant("atspeed-s-eq4", 2), 700, HOME)
    teacher = settings.section("teacher", TeacherConfig)
    sft = DraftSpace.seen_by(HOME, Variant("sft", 2)).run("draft")
    assert teacher.draft == sft
    for name in ("seqkd", "atspeed-s"):
        plainly = derive_settings(Settings({}), Variant(name, 2), 700, HOME)
        assert plainly.section("teacher", TeacherConfig).draft is None


def test_cells_cover_the_papers_tables_once():
    cells = list(list_cells(Options()))
    count = {part: sum(cell.part == part for cell in cells) for part in PARTS}
    # nine objectives, counted in three ways; 1 + 6 and 1 + 4 ablations
    table, ablations = 9 * 3 * 5, 5 * (7 + 5)
    assert count == {"table": table, "ablations": ablations, "recall": 0}
    assert len({(c.variant.key, c.question) for c in cells if c.part == "table"}) == table


def sample(accepted):
    return Sample(Question(5), np.asarray(accepted, float), 4 - np.asarray(accepted, float))


def test_intervals_are_over_users_and_figures_means_over_seeds():
    row = describe([sample([0, 2, 2, 0]), sample([2, 2, 2, 2])])
    assert row["accepted"] == {"mean": 1.5, "error": 0.49}  # 1.96 * 0.5 / 2
    assert row["passes"]["mean"] == 2.5
    assert row["by_seed"] == [1.0, 2.0]
    assert (row["k"], row["verification"], row["drafts"]) == (5, "strict", 40)


def stamps(home):
    """When each artifact was written."""
    return {file: file.stat().st_mtime_ns for file in home.rglob("manifest.json")}


@pytest.mark.slow
def test_a_toy_run_fills_every_part_and_what_exists_is_not_made_again(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "home"))

    def run(*argv):
        atspeed.main(["--quick", *argv])
        *shown, last = capsys.readouterr().out.splitlines()
        return "\n".join(shown), json.loads(last)

    shown, document = run("--out", str(tmp_path / "out"))
    made = stamps(tmp_path)
    assert document == json.loads((tmp_path / "out" / "result.json").read_text())
    for text in ("paper (7B)", "2.58", "6.7 billion parameters", "AtSpeed-S", "margin-kd (ours)"):
        assert text in shown
    assert "…" not in shown, "nothing is cut off"
    assert len(document["drafts"]) == 9 + 10
    assert {row["steps"] for row in document["drafts"]} == {3}
    assert len(document["table"]) == 9 * 3 * 2
    assert len(document["speed"]) == 9 * 2 * 2
    assert len(document["ablations"]) == 2 * (7 + 5)
    assert all(0 <= row["accepted"]["mean"] <= 2 for row in document["table"])
    assert all(1 <= row["passes"]["mean"] <= 3 for row in document["table"])
    assert sum(row["differing"] or 0 for row in document["recall"]) == 0
    for row in document["recall"]:
        if row["name"] == "atspeed-s":
            assert row["recall_gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}

    _, again = run("--parts", "ablations")
    assert "table" not in again
    assert document["ablations"] == again["ablations"]
    assert stamps(tmp_path) == made
