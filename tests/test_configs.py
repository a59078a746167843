"""Every configuration in the repository can be read, and says how it is run."""

from __future__ import annotations

from dataclasses import is_dataclass
from pathlib import Path

import pytest

from recsys.config import Settings
from recsys.data.prepare import DataConfig
from recsys.evaluation.protocol import EvaluationConfig
from recsys.evaluation.verdict import GateConfig
from recsys.pipeline import SECTIONS
from recsys.training.settings import (
    DraftConfig,
    IdsConfig,
    RecipeConfig,
    RetrievalConfig,
    SasRecConfig,
    TargetConfig,
    TeacherConfig,
)

ROOT = Path(__file__).parent.parent
SERVING = ROOT / "configs" / "serving.yaml"  # configures no run: tests/serving/test_deploy.py
LAUNCH = set((ROOT / "configs" / "accelerate").iterdir())  # tests/training/test_distributed.py
FILES = sorted(set((ROOT / "configs").rglob("*.y*ml")) - {SERVING} - LAUNCH)
READERS = {
    "data": DataConfig,
    "sasrec": SasRecConfig,
    "recipe": RecipeConfig,
    "ids": IdsConfig,
    "target": TargetConfig,
    "teacher": TeacherConfig,
    "draft": DraftConfig,
    "retrieval": RetrievalConfig,
    "evaluate": EvaluationConfig,
    "gate": GateConfig,
}
every_file = pytest.mark.parametrize(
    "file", FILES, ids=[file.relative_to(ROOT).as_posix() for file in FILES]
)


def header(file: Path) -> list[str]:
    """The comment at the top, without its signs."""
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    return lines


@every_file
def test_every_section_reads_into_its_dataclass(file):
    settings = Settings.load(file, known=SECTIONS)
    for name, reader in READERS.items():
        section = settings.section(name, reader)
        assert is_dataclass(section)
    assert isinstance(settings.seed, int)
    assert settings.minutes in ("auto", None)
    unread = set(settings.values) - set(READERS) - {"name", "seed", "minutes"}
    assert not unread, "a section that nothing here reads"


@every_file
def test_codes_that_are_learned_are_those_of_an_rq_vae(file):
    assert Settings.load(file).section("ids", IdsConfig).method in ("rq-vae", "imported")


@every_file
def test_the_header_holds_the_command_that_runs_it(file):
    path = file.relative_to(ROOT).as_posix()
    programs = ("recsys ", "python benchmarks/")
    commands = [line for line in header(file) if line.startswith(programs)]
    if file.stem in ("quickstart", "retrain"):
        assert commands[0].startswith(f"recsys {file.stem}")
    else:
        assert any(line.endswith(f"--config {path}") for line in commands)


@every_file
def test_the_run_is_named_after_its_file(file):
    # The recipes for shops have no name: a run is named after its file of events.
    name = "demo" if file.stem in ("quickstart", "shop", "retrain") else file.stem
    assert Settings.load(file).name == name
