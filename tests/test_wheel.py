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
def wheel(tmp_path_factory):
    """The wheel that the source distribution of a copy of the tree builds."""
    out, tree = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy") / "tree"
    left_out = shutil.ignore_patterns(".git", ".venv", ".*_cache", "var", "*.so", "__pycache__")
    shutil.copytree(ROOT, tree, symlinks=True, ignore=left_out)
    hatch(tree, "-t", "sdist", "-d", out)
    (source,) = out.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(out, filter="data")
    hatch(next(out.glob("recbeam-*/")), "-t", "wheel", "-d", out)
    return next(out.glob("*.whl"))


def test_a_wheel_holds_one_package_with_all_code_the_library_configs_and_page(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert len(set(names)) == len(names), "no file is packed twice"
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"recsys"}
    code = {
        (Path("recsys") / path.relative_to(ROOT / "recsys" if folder == "recsys" else ROOT))
        for folder in ("recsys", *FOLDERS)
        for path in (ROOT / folder).rglob("*.py")
        if path.resolve().is_relative_to(ROOT / folder)
    }
    assert {path.as_posix() for path in code} == {name for name in names if name.endswith(".py")}
    assert {"recsys/configs/quickstart.yaml", "recsys/serving/web/index.html"} <= set(names)
    assert any(name.endswith(".so") for name in names) == (shutil.which("cc") is not None)


def test_a_project_with_the_same_folders_keeps_its_own(wheel, tmp_path):
    site, project = tmp_path / "site", tmp_path / "project"
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
