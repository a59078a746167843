"""`recsys benchmark atspeed`: the line-up, the figures, and a toy run of all of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.constraint import ItemTrie
from recsys.decoding import Beams
from recsys.training.atspeed import paper
from recsys.training.atspeed.commands import atspeed
from recsys.training.atspeed.lineup import (
    Budget,
    DraftSpace,
    Variant,
    derive_settings,
    list_ablations,
    list_plain,
    list_variants,
    list_weights,
)
from recsys.training.atspeed.measure import (
    Question,
    Sample,
    _differing,
    _items,
    compare_accepted,
    describe,
)
from recsys.training.atspeed.produce import _first_of_teacher, workers
from recsys.training.atspeed.run import PARTS, Options, list_cells
from recsys.training.settings import DraftConfig, TeacherConfig

HOME = Workspace(Path("home"), "shop")


def test_every_variant_has_a_folder_of_its_own():
    everyone = list_variants(PARTS, ("scratch", "target"), (0, 1))
    folders = {DraftSpace.seen_by(HOME, v).run("draft") for v in everyone}
    assert len(folders) == len(everyone) == 2 * (2 * 8 + 7 + 3) + 2
    assert all(f.is_relative_to(Path("home/runs/shop/atspeed")) for f in folders)


def test_variants_share_what_belongs_to_the_run():
    space = DraftSpace.seen_by(HOME, Variant("atspeed-s", "scratch"))
    assert space.run("target") == HOME.run("target")
    assert space.dataset == HOME.dataset
    assert space.run("draft.checkpoint").parent == space.run("draft").parent
    assert space.run("teacher.partial").parent.name == "teacher-mixture_scratch_0"


def test_settings_of_every_variant_are_its_own():
    deployed = Settings({"draft": {"objective": "beam-kd", "alpha": 1.0, "layers": 2}})
    for variant in list_variants(PARTS, ("scratch", "target"), (3,)):
        settings = derive_settings(deployed, variant, Budget(0.5, 7), HOME)
        config = settings.section("draft", DraftConfig)
        assert settings.seed == 3
        assert (config.objective, config.epochs) == (variant.objective, 7)
        assert config.max_minutes == variant.options.get("max_minutes", 0.5)
        assert config.alpha == variant.options.get("alpha")
        assert config.init_from_target == (variant.init == "target")
        assert config.layers == (2 if variant.init == "target" else 1)
        assert not config.evaluate_every  # no choice is made on any split


def test_a_mixture_uses_the_sft_draft_of_its_start_and_seed():
    variant = Variant("atspeed-s", "target", 2, "no density", {"density": False})
    settings = derive_settings(Settings({}), variant, Budget(), HOME)
    teacher = settings.section("teacher", TeacherConfig)
    sft = DraftSpace.seen_by(HOME, Variant("sft", "target", 2)).run("draft")
    assert (teacher.source, teacher.draft) == ("mixture", sft)
    plainly = derive_settings(Settings({}), Variant("seqkd", "target", 2), Budget(), HOME)
    assert plainly.section("teacher", TeacherConfig).source == "target"


def test_waves_train_what_others_need_first():
    for variant in list_variants(PARTS, ("scratch",), (0,)):
        wants = {"none": 0, "target": 1, "mixture": 2}[variant.source]
        assert variant.wave == wants
    mixed = [v for v in list_variants(PARTS, ("scratch", "target"), (0,)) if v.wave == 2]
    assert [v.teacher for v in _first_of_teacher(mixed)] == [
        "teacher-mixture_scratch_0",
        "teacher-mixture_target_0",
    ]
    assert Variant("sft", "scratch").wave == 0  # which the mixtures are made with


def test_studies_use_one_starting_point():
    studies = [*list_ablations("target", [0]), *list_weights("target", [0])]
    assert {v.init for v in studies} == {"target"}
    assert {v.objective for v in studies} == {"atspeed-s", "atspeed-r"}
    assert len(list_plain(["target"], [0])) == 8


def test_cells_cover_the_papers_tables_once():
    cells = list(list_cells(Options()))
    count = {part: sum(cell.part == part for cell in cells) for part in PARTS}
    # eight objectives from two starts; 1 + 4 and 1 + 3 ablations; N, gamma and alpha for three K
    assert count == {"table": 16 * 10, "ablations": 5 * (5 + 4), "effects": 53, "recall": 0}
    assert len({(c.variant.key, c.question) for c in cells if c.part == "table"}) == 160


def test_published_figures_are_found_by_k():
    assert paper.figure(paper.ACCEPTED, "strict", "atspeed-s", 10) == 1.64
    assert paper.figure(paper.SPEEDUP, "relaxed", "atspeed-r", 20) == 2.47
    assert paper.figure(paper.ACCEPTED, "strict", "beam-kd", 10) is None
    assert paper.figure(paper.ACCEPTED, "strict", "sft", 50) is None


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


def beams(rows, scores):
    rows, scores = torch.tensor(rows), torch.tensor(scores)
    return Beams(torch.zeros((*rows.shape, 2), dtype=torch.int64), scores, rows)


def test_lists_are_best_first_and_list_all_items_of_a_leaf():
    trie = ItemTrie.build([[1, 1], [0, 0], [1, 1], [0, 1]])  # rows: 00, 01, 11; 11 twice
    found = beams([[1, 2, -1]], [[-2.0, -1.0, -torch.inf]])
    assert _items(found, trie, 3).tolist() == [[0, 2, 3]]
    assert _items(found, trie, 2).tolist() == [[0, 2]]
    alone = beams([[0, -1, -1]], [[-2.0, -torch.inf, -torch.inf]])
    assert _items(alone, trie, 3).tolist() == [[1, -1, -1]]


def test_lists_differ_only_beyond_rounding():
    expected = beams([[0, 1], [0, 1]], [[-1.0, -2.0], [-1.0, -1.0]])
    assert _differing(beams([[0, 1], [1, 0]], [[-1.0, -2.0], [-1.0, -1.0]]), expected) == 0
    assert _differing(beams([[0, 2], [1, 0]], [[-1.0, -2.1], [-1.0, -1.0]]), expected) == 1


def test_two_workers_answer_in_order():
    with workers(2) as run:
        assert run(abs, [-3, 2, -1]) == [3, 2, 1]


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
        stamp = {f: f.stat().st_mtime_ns for f in home.rglob("manifest.json")}
        again = ["--quick", "--workers", "1", "--parts", "ablations", "--json"]
        second = CliRunner().invoke(app, again, catch_exceptions=False)
    assert {f: f.stat().st_mtime_ns for f in home.rglob("manifest.json")} == stamp
    return home / "out", first, second


@pytest.mark.slow
def test_a_toy_run_fills_every_part(quick):
    folder, first, _ = quick
    document = json.loads(first.stdout.splitlines()[-1])
    assert first.exit_code == 0
    assert document == json.loads((folder / "result.json").read_text())
    assert len(document["drafts"]) == 2 * 8 + 7 + 2 + 3
    assert len(document["table"]) == len(document["speed"]) == 2 * 8 * 2 * 2
    assert len(document["ablations"]) == 2 * (5 + 4)
    assert {row["effect"] for row in document["effects"]} == {"N", "gamma", "alpha"}
    assert all(0 <= row["accepted"]["mean"] <= 2 for row in document["table"])
    assert all(1 <= row["passes"]["mean"] <= 3 for row in document["table"])
    assert sum(row["differing"] or 0 for row in document["recall"]) == 0
    for row in document["recall"]:
        if row["name"] == "atspeed-s":
            assert row["recall_gain"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


@pytest.mark.slow
def test_a_toy_run_shows_published_figures(quick):
    folder, first, _ = quick
    page = (folder / "report.html").read_text()
    for text in ("paper (7B)", "2.58", "6.7 billion parameters", "AtSpeed-S", "beam-kd (ours)"):
        assert text in page
        assert text in first.stdout
    assert "<script" not in page
    assert {f.name for f in folder.glob("*.svg")} == {"accepted.svg"}
    assert all("var(--" not in f.read_text() for f in folder.glob("*.svg"))


@pytest.mark.slow
def test_existing_drafts_are_not_trained_again(quick):
    _, first, second = quick
    before, after = (json.loads(run.stdout.splitlines()[-1]) for run in (first, second))
    assert second.exit_code == 0
    assert "table" not in after
    assert before["ablations"] == after["ablations"]


def test_unknown_parts_are_refused():
    app = typer.Typer()
    app.command()(atspeed)
    with pytest.raises(Exception, match="--parts 'tabel' is not one of table"):
        CliRunner().invoke(app, ["--quick", "--parts", "tabel"], catch_exceptions=False)
