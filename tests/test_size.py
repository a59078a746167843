"""The size of the house: a budget for each part, which only falls.

Each row has a ceiling, which the tree keeps today, and a goal. Who makes a part smaller lowers its
ceiling; who needs room says which other part goes. Lines are never made denser for it.
"""

import ast
import os
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import typer

from recsys import cli
from recsys.config import fields_of, subsection
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings

ROOT = Path(__file__).parents[1]
CODE = (".py", ".c", ".h", ".js", ".css", ".html")
PRODUCT = ("recsys", "data", "training", "serving", "benchmarks")
# part: (ceiling, goal)
LINES = {
    "recsys": (29_358, 25_000),
    "data": (11_747, 5_500),
    "training": (6_099, 6_000),
    "serving": (13_353, 13_000),
    "benchmarks": (3_357, 3_500),
    "tests": (47_760, 36_000),
}
BUDGET = {
    **{f"lines in {folder}/": limits for folder, limits in LINES.items()},
    "lines of the product": (63_914, 53_500),
    "lines of the largest file": (500, 500),
    "lines of the largest class": (350, 350),
    "words of the documents": (49_000, 50_000),
    "words of README.md": (900, 900),
    "lines of CHANGELOG.md": (60, 60),
    "commands": (23, 26),
    "settings": (135, 150),
    "HTTP operations": (30, 32),
    "extras": (5, 8),
}


def files(root, *endings):
    """Files below a folder, without those behind links."""
    for at, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] not in "._" and name != "var"]
        yield from (Path(at, name) for name in names if name.endswith(endings))


def lines(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def words(path):
    return len(path.read_text(encoding="utf-8").split())


def classes(path):
    """Lines of each class of a Python file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            yield node.end_lineno - node.lineno + 1


def commands(group):
    """Commands that do something."""
    if not hasattr(group, "list_commands"):
        return 1
    context = typer.Context(group)
    return sum(commands(group.get_command(context, name)) for name in group.list_commands(context))


def settings(section):
    """Settings of a section that a configuration may set, those of nested ones in their place."""
    inner = map(subsection, fields_of(section).values())
    return sum(1 if cls is None else settings(cls) for cls in inner)


def written(root):
    """What files have, by part."""
    code = {name: list(files(root / name, *CODE)) for name in LINES}
    product = [file for name in PRODUCT for file in code[name]]
    python = [file for file in product if file.suffix == ".py"]
    found = {f"lines in {name}/": sum(map(lines, code[name])) for name in LINES}
    return found | {
        "lines of the product": sum(map(lines, product)),
        "lines of the largest file": max(map(lines, product), default=0),
        "lines of the largest class": max((n for p in python for n in classes(p)), default=0),
        "words of the documents": sum(map(words, files(root, ".md"))),
        "words of README.md": words(root / "README.md"),
        "lines of CHANGELOG.md": lines(root / "CHANGELOG.md"),
    }


def offered():
    """What the program offers, by part."""
    sections = [point.load() for point in entry_points(group="recsys.sections")]
    paths = create_app(ServingSettings()).openapi()["paths"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return {
        "commands": commands(typer.main.get_command(cli.app)),
        "settings": sum(map(settings, [*sections, ServingSettings])),
        "HTTP operations": sum(map(len, paths.values())),
        "extras": len(project["optional-dependencies"]),
    }


def too_large(found):
    """A sentence for each part that is above its ceiling."""
    return [
        f"{part}: {found[part]:,}, and at most {ceiling:,} (goal: {goal:,}). Name what goes, and "
        f"delete it; lines are never made denser for it, and no ceiling is raised."
        for part, (ceiling, goal) in BUDGET.items()
        if part in found and found[part] > ceiling
    ]


def test_nothing_has_outgrown_its_budget():
    found = written(ROOT) | offered()
    assert found.keys() == BUDGET.keys()
    assert not too_large(found), "\n".join(too_large(found))


def test_a_ceiling_is_near_what_it_limits():
    found = written(ROOT) | offered()
    loose = {
        part: f"{found[part]:,} of {ceiling:,}"
        for part, (ceiling, goal) in BUDGET.items()
        if found[part] < 0.9 * ceiling and ceiling > goal
    }
    assert not loose, f"lower these ceilings in tests/test_size.py: {loose}"


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        (
            "serving/planted.py",
            "x = 1\n" * 30_000,
            {"lines in serving/", "lines of the largest file"},
        ),
        (
            "data/planted.py",
            "class Planted:\n" + "    x = 1\n" * 1_100,
            {"lines of the largest class"},
        ),
        ("docs/planted.md", "word " * 110_000, {"words of the documents"}),
        ("recsys/native/planted.c", "int x;\n" * 40_000, {"lines in recsys/"}),
    ],
)
def test_a_planted_file_is_noticed(tmp_path, file, text, parts):
    for name in ("README.md", "CHANGELOG.md"):
        (tmp_path / name).write_text("short\n")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    sentences = too_large(written(tmp_path))
    assert parts <= {sentence.partition(":")[0] for sentence in sentences}
    assert all(re.search(r"Name what goes", sentence) for sentence in sentences)


if __name__ == "__main__":
    for part, number in (written(ROOT) | offered()).items():
        ceiling, goal = BUDGET[part]
        print(f"{part:28} {number:>8,} {ceiling:>8,} {goal:>8,}")  # noqa: T201
