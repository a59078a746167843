"""Names, paths, commands and options that the documents mention exist."""

import re
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer

from recsys.cli import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "data/README.md"]
DOCUMENTS += sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))
EACH = pytest.mark.parametrize("document", DOCUMENTS)
NAME = r"(?<![\w./-])recsys(?:\.[A-Za-z_]\w*)+(?![\w/(-])"
FOLDERS = "recsys|data|training|serving|benchmarks|configs|deploy|docs|tests"
PATH = rf"(?<![\w./:-])(?:{FOLDERS})/[\w./-]+(?![\w*<{{])"
GROUPS = (
    "recsys.commands",
    "recsys.stages",
    "recsys.sections",
)  # of entry points
PLUGINS = ("recsys.plugins.sglang", "recsys.plugins.vllm")  # import engines that are not installed


def code_of(document):
    """Texts in backticks, and lines of code blocks with their continuations."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`]+)`", prose) + "".join(blocks).splitlines()


@EACH
def test_python_names_exist(document):
    for code in code_of(document):
        for name in set(re.findall(NAME, code)).difference(GROUPS, PLUGINS):
            resolve_name(name)


def test_plugins_exist():
    assert all(find_spec(name) for name in PLUGINS)


@EACH
def test_paths_exist(document):
    for code in code_of(document):
        for path in re.findall(PATH, code):
            assert "NAME" in path or (ROOT / path.rstrip(".")).exists(), path


@EACH
def test_commands_and_their_options_exist(document):
    for code in code_of(document):
        found = re.match(r"(?:OMP_NUM_THREADS=1 )?recsys (?=[a-z])([^#|;]*)", code.strip())
        command, words = typer.main.get_command(app), found[1].split() if found else []
        while words and hasattr(command, "list_commands"):
            command, *words = command.get_command(typer.Context(command), words[0]), *words[1:]
            assert command is not None, code
        known = {"--help"}.union(*(part.opts + part.secondary_opts for part in command.params))
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-zA-Z]", word)}
        assert given <= known, f"{code}: {given - known}"
