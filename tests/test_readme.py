"""The README's Python runs, and its links and make targets exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_the_search_example_runs(capsys):
    (example,) = [e for e in EXAMPLES if "speculative_beam_search" in e]
    exec(compile(example, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[3, 3]")


def test_every_example_compiles():
    assert EXAMPLES
    for example in EXAMPLES:
        compile(example, "README.md", "exec")


@pytest.mark.parametrize("document", sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md")))
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_tree_names_what_is_there():
    section = README.split("## Where things are")[1].split("```")[1]
    top = ""
    for line in section.strip().splitlines():
        name = line.split()[0]
        top, path = (name, name) if not line.startswith(" ") else (top, top + name)
        assert (ROOT / path).exists(), path
