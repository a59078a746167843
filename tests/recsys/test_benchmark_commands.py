"""`recsys benchmark decode` and `constraint`: their documents, tables, pages and errors."""

import json
import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from recsys.benchmark.constraint import compare
from recsys.benchmark.decode_report import report as report_decode
from recsys.benchmark.report import Line, Panel, Plot, Report, Table, begin, show, write
from recsys.cli import app
from recsys.constraint import ItemTrie
from recsys.constraint.transitions import DeviceTrie
from recsys.errors import ConfigError


def invoke(*arguments):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(app, ["benchmark", *arguments])


@pytest.fixture(scope="module")
def decode(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "decode"
    result = invoke("decode", "--quick", "--modes", "draft,planned", "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.stdout, out


@pytest.fixture(scope="module")
def constraint(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "constraint"
    result = invoke("constraint", "--quick", "--items", "500,2000", "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.stdout, out


@pytest.mark.parametrize("command", ["decode", "constraint"])
def test_the_last_line_is_the_document_in_the_folder(command, request):
    stdout, out = request.getfixturevalue(command)
    *shown, last = stdout.splitlines()
    document = json.loads(last)
    assert document == json.loads((out / "result.json").read_text())
    assert (document["benchmark"], document["quick"]) == (command, True)
    assert document["environment"]["threads"] == torch.get_num_threads()
    assert "…" not in "".join(shown), "nothing is cut off"


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_in_place_of_the_folder_is_named_before_anything_is_measured(tmp_path, below):
    (tmp_path / "taken").write_text("")
    out = tmp_path / "taken" / below
    with pytest.raises(ConfigError, match=r"taken.*: expected a folder, and there is a file"):
        begin("decode", quick=True, out=out)


def test_words_wrap_and_numbers_stay_where_a_table_is_too_wide(capsys):
    words = "margin-kd 1.74 > tree-kd 1.54 ≈ " * 9 + "last"
    row = ["a", "10", words, "2.5"]
    show(Report("r", [], [Table("t", ["draft", "K", "order", "ms"], [row], words=3)]))
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert {"K", "10", "last", "ms", "2.5"} <= set(shown.split())


@pytest.mark.parametrize("command", ["decode", "constraint"])
def test_the_page_loads_nothing_else(command, request):
    page = (request.getfixturevalue(command)[1] / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "quick</strong> run" in page
    variables = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    assert variables <= set(re.findall(r"(--[a-z0-9-]+):", page))


def test_every_plot_is_also_a_file_of_its_own(decode):
    files = sorted(decode[1].glob("*.svg"))
    assert [file.stem for file in files] == ["cold", "warm"]
    for file in files:
        text = file.read_text()
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text


def test_decode_shows_modes_by_k_and_kind_of_prompts(decode):
    stdout, _ = decode
    assert json.loads(stdout.splitlines()[-1])["workload"]["weights"] == "random, tiny"
    for text in ("K = 5, prompts cold", "K = 5, prompts warm", "Hugging Face", "planned: "):
        assert text in stdout


def test_constraint_measures_every_part(constraint):
    document = json.loads((constraint[1] / "result.json").read_text())
    assert [(b["items"], b["levels"]) for b in document["build"]] == [
        (500, 4), (500, 3), (2000, 4), (2000, 3)
    ]  # fmt: skip
    assert len(document["step"]) == 2 * (4 + 3)
    assert {f["items"] for f in document["filter"]} == {500, 2000}
    for row in document["filter"]:
        assert abs(row["eligible"] / row["items"] - row["share"]) < 0.1
    assert [row["depth"] for row in document["huggingface"]] == [1, 2, 3]


def test_the_json_option_prints_one_line():
    options = "--quick --beams 3 --batches 1 --modes exhaustive --reuse cold --hf-repeats 0 --json"
    stdout = invoke("decode", *options.split()).stdout
    assert stdout.count("\n") == 1
    assert [row["mode"] for row in json.loads(stdout)["rows"]] == ["beam", "exhaustive"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "a", "--shape", "tiny"), "give one of --bundle, --name and --shape"),
        (("--beams", "5,x"), "--beams '5,x': expected numbers above 0"),
        (("--batches", "0"), "--batches '0': expected numbers above 0"),
        (("--nodes", ","), "--nodes ',': expected a list"),
        (("--reuse", "hot"), "--reuse 'hot' is not one of cold, warm, both"),
        (
            ("--modes", "draft,fast"),
            "--modes 'fast' is not one of exhaustive, draft, perfect, planned",
        ),
        (("--dtype", "int8"), "--dtype 'int8' is not one of float32, bfloat16, float64"),
        (("--shape", "huge"), "--shape 'huge' is not one of tiny"),
    ],
)
def test_errors_name_the_option_and_its_value(arguments, message):
    result = invoke("decode", *arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def planned(batch, ws, hugging_face=None):
    return {
        "mode": "planned", "reuse": "cold", "beams": 20, "batch": batch, "rounds": 3,
        "ms": {"p50": 1.0, "p25": 1.0, "p75": 1.0, "p99": 1.0}, "ws_beam_cpu": {"p50": 1.0},
        "ws_beam": {"p50": ws, "p25": ws, "p75": ws}, "plans": {"beam": 3},
        "ws_huggingface": hugging_face and {"p50": hugging_face}, "accepted_levels": 0,
        "drafted_nodes": 0, "passes": 4, "target_tokens": 9, "kv_to_greedy": 1.0,
        "agreement": {"requests": 1.0, "items": 1.0, "gap": 0.0},
    }  # fmt: skip


def test_sentences_give_the_worst_planned_cell_and_the_gain():
    rows = [planned(1, 1.25, 11.0), planned(2, 0.8), planned(8, 1.0, 20.0)]
    document = {"rows": rows, "workload": {"weights": "w"}, "dtype": "float32"}
    assert report_decode(document).sentences == [
        "Planned decoding takes 1.25 times as long as own beams at its worst "
        "(K = 20, B = 2, cold), 1.00 times the processor time.",
        "It is 11.0 (K = 20, B = 1, cold) to 20.0 (K = 20, B = 8, cold) times as fast as "
        "Hugging Face.",
    ]


def test_text_of_a_report_is_escaped_in_the_page(tmp_path):
    document = {"benchmark": "x", "quick": False, "command": "recsys <b>", "load_before": [0.0]}
    document["environment"] = dict.fromkeys(
        ("gpu", "cpu", "threads", "cores", "recsys", "commit", "torch", "transformers", "python"), 1
    ) | {"load": [0.0]}
    plot = Plot("p", "a plot", [Panel("t", "x", [Line("<i>", [0, 1], [1, 2])], ["a", "b"])])
    table = Table("<table>", ("<th>",), [["<td>"]])
    write(document, Report("<h1>", ["<p>"], [table], [plot]), tmp_path)
    page = (tmp_path / "report.html").read_text()
    for text in ("<b>", "<i>", "<td><"):
        assert text not in page
    assert "&lt;h1&gt;" in page


def test_tokens_that_differ_from_the_tries_are_an_error():
    trie = DeviceTrie.of(ItemTrie.build(np.array([[0, 2], [1, 3]])))
    masked = torch.tensor([[-torch.inf, -torch.inf, 0.0, -torch.inf]])
    compare(trie, 1, torch.tensor([[1]]), masked)
    with pytest.raises(RuntimeError, match="other tokens than the trie at depth 1"):
        compare(trie, 1, torch.tensor([[2]]), masked)
