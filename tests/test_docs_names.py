"""Names, paths, commands and options that the documents mention exist."""

import re
from pathlib import Path
from pkgutil import resolve_name

import pytest
import typer

from recsys.cli import app
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings

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
PRODUCT = ("recsys", "data", "training", "serving")


def code_of(document):
    """Texts in backticks, and lines of code blocks with their continuations."""
    text = (ROOT / document).read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return re.findall(r"`([^`]+)`", prose) + "".join(blocks).splitlines()


@EACH
def test_python_names_exist(document):
    for code in code_of(document):
        for name in set(re.findall(NAME, code)).difference(GROUPS):
            resolve_name(name)


@EACH
def test_paths_exist(document):
    for code in code_of(document):
        for path in re.findall(PATH, code):
            assert "NAME" in path or (ROOT / path.rstrip(".")).exists(), path


@pytest.fixture(scope="module")
def operations():
    """Method and parts of the path of each operation."""
    paths = create_app(ServingSettings()).openapi()["paths"]
    return [(method.upper(), path.split("/")) for path in paths for method in paths[path]]


def test_operations_that_documents_and_messages_name_exist(operations):
    sources = [ROOT / document for document in DOCUMENTS if document != "docs/surfaces.md"]
    sources += [path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")]
    sources += (ROOT / "serving" / "web").rglob("*.js")
    for source in sources:
        text = source.read_text(encoding="utf-8")
        named = re.findall(r"\b(GET|POST|PUT|PATCH|DELETE) (/v1/[\w/{}.%-]+)", text)
        named += [("GET", path) for path in re.findall(r"(/v1/[\w/{}-]+) lists", text)]
        for method, path in named:
            parts = path.rstrip("./").split("/")
            assert any(
                method == known and len(parts) == len(shape)
                and all(a == b or b[0:1] == "{" for a, b in zip(parts, shape, strict=True))
                for known, shape in operations
            ), f"{source}: {method} {path}"  # fmt: skip


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
