"""`recsys benchmark constraint`: a smoke run, its document, and others that must agree."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recsys.benchmark.constraint import _compare, _follow, _nested, _SortedTable
from recsys.cli import app
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "constraint"
    command = ["benchmark", "constraint", "--quick", "--items", "500,2000", "--out", str(out)]
    result = CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, command)
    assert result.exit_code == 0, result.output
    return result.stdout, out


def test_the_last_line_is_the_document_and_tables_come_before(quick):
    stdout, out = quick
    *shown, last = stdout.splitlines()
    document = json.loads(last)
    assert document == json.loads((out / "result.json").read_text())
    assert document["kind"] == "constraint"
    assert document["threads"] == torch.get_num_threads() == 1
    assert max(map(len, shown)) <= 80
    assert "…" not in "".join(shown), "nothing is cut off"
    assert "Hugging Face's processor with a nested dict takes" in stdout


def test_every_part_is_measured(quick):
    document = json.loads((quick[1] / "result.json").read_text())
    assert [(b["items"], b["levels"]) for b in document["build"]] == [
        (500, 4), (500, 3), (2000, 4), (2000, 3)
    ]  # fmt: skip
    assert len(document["step"]) == 2 * (4 + 3) * 3 * 2
    assert {f["items"] for f in document["filter"]} == {500, 2000}
    for row in document["filter"]:
        assert abs(row["eligible"] / row["items"] - row["share"]) < 0.1
    ways = {"trie", "nested dict", "sorted table"}
    assert {(p["depth"], p["way"]) for p in document["peers"]} == {
        (d, way) for d in (1, 2, 3) for way in ways
    }
    assert document["decode"]["decode_ms"]["p50"] > document["decode"]["steps_ms"]["p50"]


def test_the_drawing_is_a_file_of_its_own(quick):
    root = ET.fromstring((quick[1] / "constraint.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"


def test_others_allow_what_they_should():
    tokens = np.array([[1, 5, 9], [1, 5, 8], [1, 6, 9], [2, 5, 7]], np.int32)
    table, nested = _SortedTable(tokens), _nested(tokens)
    for prefix, expected in (([], [1, 2]), ([1], [5, 6]), ([1, 5], [8, 9]), ([2, 5], [7])):
        assert table.allowed(prefix) == sorted(_follow(nested, prefix)) == expected


def test_a_disagreement_stops_the_benchmark():
    trie = ItemTrie.build(np.array([[0, 2], [1, 3]]))
    masked = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    _compare(DeviceTrie.of(trie), 1, torch.tensor([[1]]), masked, "it")
    with pytest.raises(RuntimeError, match="it allows other tokens than the trie at depth 1"):
        _compare(DeviceTrie.of(trie), 1, torch.tensor([[2]]), masked, "it")
