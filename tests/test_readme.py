"""Examples in the README and the docs compile and run; links, folders and make targets exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("docs/**/*.md"))


def examples(document):
    return re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), flags=re.S)


def test_the_search_example_runs(capsys):
    (example,) = [e for e in examples(ROOT / "docs/decoding.md") if "LlamaForCausalLM" in e]
    exec(compile(example, "docs/decoding.md", "exec"), {})
    assert capsys.readouterr().out.startswith("[3, 3]")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_example_compiles(document):
    for example in examples(document):
        compile(example, str(document), "exec")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document):
    for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if not link.startswith("http"):
            assert (document.parent / link).exists(), link


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"\bmake ([a-z-]+)", README):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def test_the_tree_names_what_is_there():
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = architecture.split("## Where things are")[1].split("```")[1]
    top = ""
    for line in section.strip().splitlines():
        name = line.split()[0]
        top, path = (name, name) if not line.startswith(" ") else (top, top + name)
        assert (ROOT / path).exists(), path


def test_the_walk_of_a_request_is_through_files_that_are_there():
    architecture = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = architecture.split("## One request")[1].split("A user's request reads")[0]
    hops = re.findall(r"^ *(\d+) +((?:recsys|serving)/\S+)", section, flags=re.M)
    beside = re.findall(r"`((?:recsys|serving)/\S+\.[ch]?p?y?)`", section)
    files = {path for _, path in hops} | {*beside}
    assert [int(number) for number, _ in hops] == list(range(1, 17))
    assert len(files) == 28
    assert not [path for path in files if not (ROOT / path).is_file()]
