"""The examples in docstrings run, and the central types have one."""

from __future__ import annotations

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
CENTRAL = [
    "recsys.catalog.Catalog",
    "recsys.constraint.boost.Boost",
    "recsys.constraint.filters.ItemFilter",
    "recsys.constraint.mask.RowMask",
    "recsys.constraint.transitions.DeviceTrie",
    "recsys.constraint.trie.ItemTrie",
    "recsys.decoding.expand.Frontier",
    "recsys.decoding.expand.Step",
    "recsys.decoding.request.SearchRequest",
    "recsys.decoding.tree.TokenTree",
    "recsys.evaluation.metrics.Hits",
    "recsys.interactions.Histories",
    "recsys.live_catalog.NewItem",
    "recsys.models.cache.SlotCache",
    "recsys.models.prefix_store.PrefixStore",
    "recsys.models.tree_forward.TreeModel",
    "recsys.prompts.PromptEncoder",
    "recsys.requests.RecommendRequest",
    "recsys.semantic_ids.rqkmeans.RQKMeans",
    "recsys.semantic_ids.rqvae.RQVAE",
    "recsys.serving.batcher.Batcher",
    "recsys.serving.limits.RateLimit",
    "recsys.text.grammar.Grammar",
    "recsys.text.titles.TitleTrie",
    "recsys.vocabulary.Vocabulary",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name: str) -> None:
    examples = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name), name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    report: list[str] = []
    for example in examples:
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).attempted
    assert not report, "".join(report)


@pytest.mark.parametrize("path", CENTRAL)
def test_central_types_have_an_example(path: str) -> None:
    module, name = path.rsplit(".", 1)
    assert ">>>" in (getattr(importlib.import_module(module), name).__doc__ or "")
