"""The package as installed: names, entry points, version, types, dependencies."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import entry_points, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import recsys
from recsys.errors import ConfigError
from recsys.pipeline import STAGES, load_stage

ROOT = Path(__file__).parent.parent
LINKED = ("data", "training", "serving")
PACKAGES = ("recsys", *LINKED)
OPTIONAL = {"triton"}  # a torch for CUDA brings it along
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
POINTS = [
    e
    for group in ("recsys.commands", "recsys.stages", "recsys.sections")
    for e in entry_points(group=group)
]


def plain(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required(requirements: list[str]) -> set[str]:
    return {plain(re.match(r"[\w.-]+", line)[0]) for line in requirements}


@pytest.fixture(scope="module")
def owners() -> dict[str, list[str]]:
    return dict(packages_distributions())


@pytest.mark.parametrize("name", LINKED)
def test_a_folder_is_imported_under_recsys_only(name, tmp_path):
    assert Path(find_spec(f"recsys.{name}").origin).samefile(ROOT / name / "__init__.py")
    assert (ROOT / "recsys" / name).readlink() == Path("..") / name
    code = f"import importlib.util; print(importlib.util.find_spec({name!r}))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "None\n", "an editable install shows only recsys"


def import_without(blocked):
    """Import all of ours anew, where these packages are missing; in a process of its own."""
    for name in [name for name in sys.modules if name.partition(".")[0] in ("recsys", *blocked)]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(blocked))
    for name in ("serving.app", "data.prepare", "training.loop", "commands", "serving.commands"):
        import_module(f"recsys.{name}")


def test_optional_packages_are_imported_on_use_only(forked):
    assert forked(import_without, ("psycopg", "ray", "locust")) == 0


def test_imports_name_the_folders_under_recsys():
    files = [
        file for name in (*PACKAGES, "tests", "benchmarks", "docs") for file in own_files(name)
    ]
    for file in files:
        assert not set(LINKED) & imported_by(file), file


@pytest.mark.parametrize("point", POINTS, ids=lambda point: f"{point.group}:{point.name}")
def test_every_entry_point_loads(point):
    loaded = point.load()
    assert callable(loaded) or isinstance(loaded, typer.Typer)


def test_the_installed_entry_points_are_the_written_ones():
    for group, written in PROJECT["project"]["entry-points"].items():
        assert {e.name: e.value for e in entry_points(group=group)} == written
    (script,) = entry_points(group="console_scripts", name="recsys")
    assert script.value == PROJECT["project"]["scripts"]["recsys"]


def test_every_stage_is_installed():
    assert {e.name for e in entry_points(group="recsys.stages")} == set(STAGES)
    for name in STAGES:
        assert callable(load_stage(name))


def test_every_stage_with_settings_has_a_section():
    sections = {e.name for e in entry_points(group="recsys.sections")}
    assert sections == {*STAGES, "teacher", "gate"}


def test_the_version_has_an_entry_in_the_changelog():
    assert re.fullmatch(r"\d+\.\d+\.\d+", recsys.__version__)
    assert version("recbeam") == recsys.__version__
    releases = re.findall(
        r"^## \[(\d[^\]]*)\] - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), flags=re.M
    )
    assert recsys.__version__ == releases[0]


@pytest.mark.parametrize(
    ("package", "reader", "call", "extra"),
    [
        ("psycopg", "serving.stores.postgres", repr, "postgres"),
        ("ray.serve", "serving.cluster.ray", lambda ray: ray.import_ray(), "ray"),
    ],
)
def test_a_missing_package_is_reported_with_its_extra(monkeypatch, package, reader, call, extra):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"recsys.{reader}", raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'recbeam\[{extra}\]'"):
        call(import_module(f"recsys.{reader}"))


def own_files(package: str) -> list[Path]:
    """Python files of a folder, without those behind links."""
    folders = os.walk(ROOT / package)
    return [Path(at) / name for at, _, names in folders for name in names if name.endswith(".py")]


def imported_by(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_a_declared_dependency(owners, package):
    project = PROJECT["project"]
    declared = required(project["dependencies"])
    for extra, lines in project["optional-dependencies"].items():
        declared |= required(lines) if extra != "dev" else set()
    ours = {*PACKAGES, *sys.stdlib_module_names, *OPTIONAL}
    for module in sorted(set().union(*map(imported_by, own_files(package))) - ours):
        assert {plain(owner) for owner in owners[module]} & declared, module


def test_every_dependency_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = required([line for line in lines if "==" in line])
    groups = [PROJECT["project"]["dependencies"]]
    groups += PROJECT["project"]["optional-dependencies"].values()
    for group in groups:
        assert required(group) <= pinned
