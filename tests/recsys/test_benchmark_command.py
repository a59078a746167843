"""`recsys benchmark decode`: tables and a JSON line, one page that stands alone, plain errors."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest
import torch
from typer.testing import CliRunner

from recsys.benchmark import report
from recsys.cli import app
from recsys.errors import ConfigError


def invoke(*arguments):
    return CliRunner(env={"NO_COLOR": "1", "TERM": "dumb"}).invoke(
        app, ["benchmark", "decode", *arguments]
    )


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "decode"
    result = invoke("--quick", "--modes", "draft,planned,bound", "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.stdout, out


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "sizes"
    result = invoke("--quick", "--sweep-sizes", "--reuse", "cold", "--json", "--out", str(out))
    assert result.exit_code == 0, result.output
    return result.stdout, out


def test_the_last_line_is_the_document_and_tables_come_before(quick):
    stdout, out = quick
    *shown, last = stdout.splitlines()
    document = json.loads(last)
    assert document == json.loads((out / "result.json").read_text())
    assert document["kind"] == "decode"
    assert document["quick"] is True
    assert document["threads"] == torch.get_num_threads()
    assert document["workload"]["weights"] == "random, tiny"
    assert {"K = 5, prompts cold", "K = 5, prompts warm"} <= {line.strip() for line in shown}
    assert any("Hugging Face" in line for line in shown)
    assert max(map(len, shown)) <= 80
    assert "…" not in "".join(shown), "nothing is cut off"
    assert re.search(r"Planned decoding at its worst takes [\d.]+ %", stdout)


def test_with_json_nothing_else_is_printed(sweep):
    stdout, _ = sweep
    document = json.loads(stdout)
    assert stdout.count("\n") == 1
    assert document["kind"] == "sizes"
    assert len(document["pays_from"]) == 6, "three modes in two precisions"


@pytest.mark.parametrize("which", ["quick", "sweep"])
def test_the_page_stands_alone(which, request):
    _, out = request.getfixturevalue(which)
    page = (out / "report.html").read_text()
    assert "<script" not in page
    assert not re.search(r'(?:src|href)="(?!#)', page), "nothing is fetched"
    assert "quick</strong> run" in page
    assert page.count("<svg") >= 1
    variables = set(re.findall(r"var\((--[a-z0-9-]+)\)", page))
    assert variables <= set(re.findall(r"(--[a-z0-9-]+):", page))


@pytest.mark.parametrize("which", ["quick", "sweep"])
def test_drawings_are_files_of_their_own(which, request):
    _, out = request.getfixturevalue(which)
    files = sorted(out.glob("*.svg"))
    assert [f.stem for f in files] == (["cold", "warm"] if which == "quick" else ["sizes"])
    for file in files:
        text = file.read_text()
        assert ET.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert "var(" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--name", "a", "--shape", "tiny"), "give one of --bundle, --name, --shape"),
        (("--beams", "5,x"), "--beams '5,x': want whole numbers above 0"),
        (("--batches", "0"), "--batches '0': want whole numbers above 0"),
        (("--nodes", ","), "--nodes ',': want a list"),
        (("--reuse", "hot"), "--reuse 'hot' is not cold, warm or both"),
        (("--modes", "draft,fast"), "--modes 'fast' is not one of exhaustive, draft, planned"),
        (("--dtype", "int8"), "--dtype 'int8' is not float32, bfloat16 or float64"),
        (("--dtype", "float32,bfloat16"), "more than one only with --sweep-sizes"),
        (("--shape", "huge"), "--shape 'huge' is not one of tiny"),
    ],
)
def test_mistakes_are_told(arguments, message):
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def planned(batch, ws, hugging_face=None):
    return {
        "mode": "planned",
        "reuse": "cold",
        "beams": 20,
        "batch": batch,
        "ws_beam": {"p50": ws},
        "ws_beam_cpu": {"p50": 1.0},
        "ws_huggingface": hugging_face and {"p50": hugging_face},
        "plans": {"beam": 3},
        "agreement": {"requests": 1.0, "items": 1.0, "gap": 0.0},
    }


def test_the_headline_is_the_worst_of_planning_and_the_range_against_hugging_face():
    rows = [planned(1, 1.25, 11.0), planned(2, 0.8), planned(8, 1.0, 20.0)]
    document = {"kind": "decode", "gpu": None, "rows": rows, "summary": report._summary(rows)}
    assert report.headline(document) == [
        "Planned decoding at its worst takes 25.0 % above own beams (K = 20, B = 2, cold, "
        "median of the ratios within rounds, 0.0 % below in processor time).",
        "Against Hugging Face it is 11.0 (K = 20, B = 1, cold) to 20.0 (K = 20, B = 8, cold) "
        "times as fast.",
    ]
