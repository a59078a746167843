"""The examples in docstrings run."""

import doctest
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(("recsys", *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__")
    for folder in (ROOT / "recsys",)
    for part in (folder, *(path for path in folder.iterdir() if path.is_symlink()))
    for file in part.rglob("*.py")
    if ">>>" in file.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    examples = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for example in examples:
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).attempted
    assert not report, "".join(report)
