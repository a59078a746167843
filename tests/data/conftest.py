from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsys.config import Settings
from recsys.data.prepare import stage
from recsys.dataset import Dataset
from recsys.pipeline import Context


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty $RECSYS_HOME; data is found under `raw`, beside it."""
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RECSYS_DATASETS", str(tmp_path / "raw"))
    (tmp_path / "raw").mkdir()
    return tmp_path / "home"


@pytest.fixture
def raw(home: Path) -> Path:
    """Where the raw files of a test go."""
    return home.parent / "raw"


@pytest.fixture
def prepare(home: Path) -> Callable[..., Dataset]:
    """Run the stage on a `data` section and load what it wrote."""

    def run(*, force: bool = False, **section: Any) -> Dataset:
        settings = Settings({"name": "t", "data": section})
        return Dataset.load(stage(Context.of(settings, force=force)))

    return run


@pytest.fixture(scope="session")
def datasets() -> Path:
    """The folder of public data sets."""
    folder = Path(os.environ.get("RECSYS_DATASETS", "var/raw")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no public data sets at {folder} (set RECSYS_DATASETS)")
    return folder
