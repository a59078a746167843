from pathlib import Path

import pytest

from recsys.raw_files import find_raw, raw_folders


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The parent of an empty working folder, without variables."""
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    monkeypatch.delenv("RECSYS_HOME", raising=False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_a_named_folder_comes_before_downloads(root, monkeypatch):
    assert find_raw("set/a.csv") is None
    monkeypatch.setenv("RECSYS_DATASETS", str(root / "named"))
    for folder in (Path("var/raw"), root / "named"):
        (folder / "set").mkdir(parents=True)
        (folder / "set" / "a.csv").touch()
        assert find_raw("set/a.csv") == folder / "set" / "a.csv"


def test_downloads_lie_under_the_home_of_the_artifacts(root, monkeypatch):
    assert raw_folders()[0] == Path("var/raw")
    monkeypatch.setenv("RECSYS_HOME", "elsewhere")
    assert raw_folders()[0] == Path("elsewhere/raw")
    monkeypatch.setenv("RECSYS_DATASETS", "")
    assert raw_folders()[0] == Path("elsewhere/raw")


def test_an_absolute_path_is_looked_up_as_it_is(root):
    (root / "b.csv").touch()
    assert find_raw(root / "b.csv") == root / "b.csv"
    assert find_raw(root / "c.csv") is None
