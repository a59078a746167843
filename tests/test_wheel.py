"""The wheel: one name in site-packages, beside projects that have folders of the same names."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("data", "training", "serving")


def hatch(folder: Path, *options: object) -> None:
    """Run hatchling in a folder; without optimisation, which takes most of a compiler's time."""
    environment = dict(os.environ)
    if compiler := shutil.which("cc"):
        quick = folder / "cc"
        quick.write_text(f'#!/bin/sh\nexec {compiler} "$@" -O0\n')
        quick.chmod(0o755)
        environment["CC"] = str(quick)
    command = [sys.executable, "-B", "-m", "hatchling", "build", *map(str, options)]
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A wheel and a source distribution of a copy of the tree, whose library stays as it is."""
    out, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy") / "tree"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "var", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    hatch(tree, "-d", out)
    return out


def names_of(wheel: Path) -> list[str]:
    return zipfile.ZipFile(wheel).namelist()


def test_a_wheel_holds_one_package(built):
    (wheel,) = built.glob("*.whl")
    tops = {name.partition("/")[0] for name in names_of(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"recsys"}


def test_a_wheel_holds_code_configs_and_page(built):
    (wheel,) = built.glob("*.whl")
    names = set(names_of(wheel))
    for folder in FOLDERS:
        assert f"recsys/{folder}/__init__.py" in names
    assert {"recsys/configs/quickstart.yaml", "recsys/serving/web/index.html"} <= names
    assert len(names) == len(names_of(wheel)), "no file is packed twice"


def test_a_source_distribution_builds_the_same_wheel(built, tmp_path):
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    hatch(next(tmp_path.glob("recbeam-*")), "-t", "wheel", "-d", tmp_path)
    assert sorted(names_of(next(tmp_path.glob("*.whl")))) == sorted(names_of(wheel))


def test_a_project_with_the_same_folders_keeps_its_own(built, tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    for folder in FOLDERS:
        (project / folder).mkdir(parents=True)
        (project / folder / "__init__.py").write_text("MINE = True\n")
    code = (
        "import data, training, serving, recsys.data.prepare, recsys.serving.settings, recsys\n"
        "assert data.MINE and training.MINE and serving.MINE\n"
        f"assert recsys.__file__.startswith({str(site)!r}), recsys.__file__\n"
        "from recsys.config import find_config\n"
        "from pathlib import Path\n"
        f"assert str(find_config(Path('quickstart'))).startswith({str(site)!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
