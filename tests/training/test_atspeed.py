"""`python benchmarks/atspeed.py`: the line-up, the figures, and a toy run of all of it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import typer
from atspeed import atspeed
from atspeed_tables import paper
from atspeed_tables.lineup import (
    DraftSpace,
    Limits,
    Variant,
    derive_settings,
    list_variants,
)
from atspeed_tables.measure import Question, Sample, compare_accepted, describe
from atspeed_tables.produce import workers
from atspeed_tables.report import report
from atspeed_tables.run import PARTS, Cell, Options, list_cells, list_orders
from typer.testing import CliRunner

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.training.settings import DraftConfig, TeacherConfig

HOME = Workspace(Path("home"), "shop")
BOTH, BUDGETS = ("scratch", "target"), ("time", "steps")
LIMITS = Limits(minutes=0.5, steps=700)


def test_every_variant_has_a_folder_of_its_own():
    everyone = list_variants(PARTS, BOTH, (0, 1), BUDGETS)
    folders = {DraftSpace.seen_by(HOME, v).run("draft") for v in everyone}
    # Two seeds: two budgets of nine objectives from two starts and nine ablations; 2 * 3 weights.
    assert len(folders) == len(everyone) == 2 * (2 * (2 * 9 + 9) + 6)
    assert all(f.is_relative_to(Path("home/runs/shop/atspeed")) for f in folders)


def test_settings_of_every_variant_are_its_own():
    deployed = Settings({"draft": {"objective": "margin-kd", "alpha": 1.0, "layers": 2}})
    for variant in list_variants(PARTS, BOTH, (3,), BUDGETS):
        settings = derive_settings(deployed, variant, LIMITS, HOME)
        config = settings.section("draft", DraftConfig)
        assert (settings.seed, config.objective) == (3, variant.objective)
        limits = (config.max_minutes, config.epochs, config.min_steps, config.max_steps)
        assert limits == ((0.5, 20, 0, None) if variant.budget == "time" else (None, 1, 700, 700))
        assert config.alpha == variant.options.get("alpha")
        assert config.init_from_target == (variant.init == "target")
        assert config.layers == (2 if variant.init == "target" else 1)
        assert not config.evaluate_every  # no choice is made on any split
        if config.on_levels:
            assert settings.section("teacher", TeacherConfig).level_tokens


def test_an_ablation_changes_one_setting_of_its_objective():
    plain, *changed = (
        derive_settings(Settings({}), v, LIMITS, HOME).section("draft", DraftConfig)
        for v in list_variants(("ablations",), ("scratch",), (0,), ("steps",))
        if v.objective == "atspeed-s"
    )
    values = vars(plain)
    different = [
        {name: value for name, value in vars(one).items() if value != values[name]}
        for one in changed
    ]
    assert different == [
        {"density": False},
        {"constrained": False},
        {"top_k": False},
        {"beam_steps": "last"},
        {"level_tokens": False},
        {"softmax_temperature": 0.001},
    ]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_mixture_uses_the_sft_draft_of_its_start_and_seed(budget):
    variant = Variant("atspeed-s-eq4", "target", 2, budget=budget)
    settings = derive_settings(Settings({}), variant, LIMITS, HOME)
    teacher = settings.section("teacher", TeacherConfig)
    sft = DraftSpace.seen_by(HOME, Variant("sft", "target", 2, budget=budget)).run("draft")
    assert (teacher.source, teacher.draft) == ("mixture", sft)
    for name in ("seqkd", "atspeed-s"):
        plainly = derive_settings(Settings({}), Variant(name, "target", 2), LIMITS, HOME)
        assert plainly.section("teacher", TeacherConfig).source == "target"


def test_cells_cover_the_papers_tables_once():
    cells = list(list_cells(Options()))
    count = {part: sum(cell.part == part for cell in cells) for part in PARTS}
    # two budgets; nine objectives from two starts, counted in three ways; 1 + 6 and 1 + 3
    # ablations; for three K, five or fewer N in two ways, three gamma, and five alpha in two ways
    table, ablations = 2 * 18 * 3 * 5, 2 * 5 * (7 + 4)
    assert count == {"table": table, "ablations": ablations, "effects": 68, "recall": 0}
    assert len({(c.variant.key, c.question) for c in cells if c.part == "table"}) == table
    assert all(c.against.budget == c.variant.budget for c in cells if c.against)


def test_published_levels_compare_with_the_released_count():
    assert paper.figure(paper.ACCEPTED, "released", "atspeed-r", 10) == 2.10
    assert paper.figure(paper.ACCEPTED, "relaxed", "atspeed-r", 10) is None
    assert paper.figure(paper.ACCEPTED, "strict", "atspeed-s", 10) == 1.64
    assert paper.figure(paper.ACCEPTED, "strict", "atspeed-s-eq4", 10) is None
    assert paper.figure(paper.SPEEDUP, "relaxed", "atspeed-r", 10) == 2.16


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"objectives": ("atspeed-s-eq4",), "parts": ("table",)}, "eq4 needs the draft of sft"),
        ({"objectives": ("sft", "atspeed-s")}, "recall needs the draft of atspeed-r"),
        ({"minutes": -1.0}, "minutes: expected more than 0, got -1.0"),
        ({"minutes": 0.0}, "minutes: expected more than 0, got 0.0"),
    ],
)
def test_options_that_cannot_work_are_named(options, says):
    with pytest.raises(ConfigError, match=says):
        Options(**options)


def sample(accepted):
    return Sample(Question(5), np.asarray(accepted, float), 4 - np.asarray(accepted, float))


def test_intervals_are_over_users_and_figures_means_over_seeds():
    row = describe([sample([0, 2, 2, 0]), sample([2, 2, 2, 2])])
    assert row["accepted"] == {"mean": 1.5, "error": 0.49}  # 1.96 * 0.5 / 2
    assert row["passes"]["mean"] == 2.5
    assert row["by_seed"] == [1.0, 2.0]
    assert (row["k"], row["verification"], row["drafts"]) == (5, "strict", 40)


def test_differences_are_paired():
    gap = compare_accepted([sample([3, 1, 2])], [sample([2, 0, 1])])
    assert gap == {"mean": 1.0, "error": 0.0}


def test_neighbours_of_an_order_are_compared_over_the_same_users():
    levels = {"sft": [0, 1, 2, 3], "seqkd": [1, 2, 3, 4], "tree-kd": [4, 0, 4, 1]}
    question = Question(5)
    cells = [Cell("table", Variant(name, "scratch"), question) for name in levels]
    samples = {
        (cell.variant.of(seed).key, question): sample(levels[cell.variant.objective])
        for cell in cells
        for seed in (0, 1)
    }
    rows = list_orders(cells, samples, (0, 1))
    assert [row["title"] for row in rows] == ["SeqKD", "tree-kd (ours)", "SFT"]
    assert [row["accepted"]["mean"] for row in rows] == [2.5, 2.25, 1.5]
    assert rows[0]["lead"]["mean"] == 0.25
    assert rows[1]["lead"]["mean"] == 0.75
    assert rows[0]["lead"]["error"] > 0.25  # 2.5 and 2.25 are no order over four users
    assert rows[2]["lead"] is None


def test_no_task_begins_after_the_deadline():
    for count in (1, 2):
        with workers(count, deadline=0.0) as run:
            assert run([partial(abs, -1)]) == [None]


def test_two_workers_answer_in_order():
    with workers(2) as run:
        assert run([partial(abs, n) for n in (-3, 2, -1)]) == [3, 2, 1]


def stamps(home):
    """When each artifact and each figure was written."""
    files = [*home.rglob("manifest.json"), *home.rglob("samples/*.json")]
    return {file: file.stat().st_mtime_ns for file in files}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A toy run of all parts: output folder, printed text, document."""
    home = tmp_path_factory.mktemp("home")
    app = typer.Typer()
    app.command()(atspeed)
    arguments = ["--quick", "--workers", "1", "--out", str(home / "out")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECSYS_HOME", str(home))
        first = CliRunner().invoke(app, arguments, catch_exceptions=False)
        stamp = stamps(home)
        again = ["--quick", "--workers", "1", "--parts", "ablations", "--json"]
        few = ["--quick", "--workers", "1", "--parts", "table", "--objectives", "seqkd,tree-kd"]
        third = CliRunner().invoke(app, few, catch_exceptions=False)
        second = CliRunner().invoke(app, again, catch_exceptions=False)
        stopped = CliRunner().invoke(app, [*again, "--stop-after", "0"], catch_exceptions=False)
    assert stamps(home) == stamp
    return home / "out", first, second, third, stopped


@pytest.mark.slow
def test_a_toy_run_fills_every_part(quick):
    folder, first, *_ = quick
    document = json.loads(first.stdout.splitlines()[-1])
    assert first.exit_code == 0
    assert document == json.loads((folder / "result.json").read_text())
    assert len(document["drafts"]) == 2 * (2 * 9 + 9) + 6
    assert len(document["orders"]) == len(document["table"])
    assert document["seeds"] == [0]
    assert len(document["table"]) == 2 * 2 * 9 * 3 * 2
    assert len(document["speed"]) == 2 * 9 * 2 * 2
    assert len(document["ablations"]) == 2 * 2 * (7 + 4)
    assert {d["steps"] for d in document["drafts"] if d["budget"] == "steps"} == {3}
    sizes = {(row["drafts"], row["depth"]) for row in document["effect_speed"]}
    assert sizes == {(3, None), (6, None), (6, 1), (6, 2), (6, 3)}
    assert all(row["prompt_ms"]["p50"] > 0 for row in document["speed"])
    for row in document["tree_attention"]:
        assert row["nodes"] == 2 * row["drafts"]
        assert row["largest_difference"] < 1e-4
    assert {row["effect"] for row in document["effects"]} == {"N", "gamma", "alpha"}
    assert all(0 <= row["accepted"]["mean"] <= 2 for row in document["table"])
    assert all(1 <= row["passes"]["mean"] <= 3 for row in document["table"])
    assert sum(row["differing"] or 0 for row in document["recall"]) == 0
    for row in document["recall"]:
        if row["name"] == "atspeed-s":
            assert row["recall_gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.slow
def test_a_toy_run_shows_published_figures(quick):
    folder, first, *_ = quick
    page = (folder / "report.html").read_text()
    for text in ("paper (7B)", "2.58", "6.7 billion parameters", "AtSpeed-S", "margin-kd (ours)"):
        assert text in page
        assert text in first.stdout
    assert "…" not in first.stdout, "nothing is cut off"
    assert "<script" not in page
    assert {f.name for f in folder.glob("*.svg")} == {"accepted.svg"}
    assert all("var(--" not in f.read_text() for f in folder.glob("*.svg"))


@pytest.mark.slow
def test_existing_drafts_are_not_trained_again(quick):
    _, first, second, *_ = quick
    before, after = (json.loads(run.stdout.splitlines()[-1]) for run in (first, second))
    assert second.exit_code == 0
    assert "table" not in after
    assert before["ablations"] == after["ablations"]


@pytest.mark.slow
def test_a_run_whose_time_is_over_shows_what_it_has(quick):
    document = json.loads(quick[4].stdout.splitlines()[-1])
    assert quick[4].exit_code == 0
    assert document["drafts"] == []
    assert "ablations" not in document
    document = json.loads(quick[1].stdout.splitlines()[-1])
    for part in ("speed", "effect_speed", "recall", "tree_attention"):
        del document[part]
    for part in ("table", "orders", "ablations", "effects"):
        document[part] = document[part][: len(document[part]) // 3]
    assert report(document).tables


@pytest.mark.slow
def test_other_objectives_can_be_left_out(quick):
    document = json.loads(quick[3].stdout.splitlines()[-1])
    assert {row["objective"] for row in document["table"]} == {"seqkd", "tree-kd"}
    assert len(document["drafts"]) == 2 * 2 * 2
