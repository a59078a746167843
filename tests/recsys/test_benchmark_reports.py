"""What all benchmarks share, and the documents and tables of `decode.py` and `constraint.py`."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import constraint
import decode
import pytest
import torch
from reporting import Report, Table, begin, read_options, show

from recsys.errors import ConfigError

DECODE = ["--quick", "--modes", "draft", "planned"]
CONSTRAINT = ["--quick", "--items", "500", "2000"]


@dataclass(frozen=True)
class Options:
    """Options of a test."""

    bundle: Path | None = field(default=None, metadata={"type": Path})
    ks: tuple[int, ...] = (1, 2)
    rates: tuple[float, ...] = field(default=(), metadata={"type": float})
    most_users: int = 7
    way: str = field(default="a", metadata={"choices": ("a", "b")})


def read(*argv):
    return read_options(Options, "about", {"ks": (9,), "most_users": 1}, argv)


def test_options_are_the_fields_of_their_class():
    assert read()[0] == Options()
    given = read("--ks", "3", "4", "--most-users", "5", "--bundle", "x", "--way", "b")[0]
    assert given == Options(Path("x"), (3, 4), (), 5, "b")
    assert read("--rates", "2", "0.5")[0].rates == (2.0, 0.5)


def test_a_quick_run_has_small_options_which_a_command_may_change():
    options, run = read("--quick", "--ks", "3")
    assert (options.ks, options.most_users, run.quick) == ((3,), 1, True)


@pytest.mark.parametrize("argv", [("--ks", "x"), ("--way", "c"), ("--unknown", "1")])
def test_options_that_cannot_be_are_refused(argv, capsys):
    with pytest.raises(SystemExit):
        read(*argv)
    assert argv[0] in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "folder"])
def test_a_file_in_place_of_the_folder_is_named_before_anything_is_measured(tmp_path, below):
    (tmp_path / "taken").write_text("")
    options, run = read("--out", str(tmp_path / "taken" / below))
    with pytest.raises(ConfigError, match=r"taken.*: expected a folder, and it is a file"):
        begin("decode", options, run)


def test_words_wrap_and_numbers_stay_where_a_table_is_too_wide():
    words = "margin-kd 1.74 > tree-kd 1.54 ≈ " * 9 + "last"
    row = ["a", "10", words, "2.5"]
    shown = show(Report([Table("t", ["draft", "K", "order", "ms"], [row], "[note]", words=3)]))
    assert "…" not in shown
    assert "[note]" in shown, "text is no markup"
    assert {"K", "10", "last", "ms", "2.5"} <= set(shown.split())


def measured(program, argv, out, capsys):
    program.main([*argv, "--out", str(out)])
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document == json.loads((out / "result.json").read_text())
    assert "\n".join(shown).strip() == (out / "report.txt").read_text().strip()
    assert document["quick"]
    assert document["environment"]["threads"] == torch.get_num_threads()
    return document, "\n".join(shown)


@pytest.mark.slow
def test_decode_shows_modes_by_k_and_kind_of_prompts(tmp_path, capsys):
    document, shown = measured(decode, DECODE, tmp_path / "a" / "b", capsys)
    assert (document["benchmark"], document["workload"]["weights"]) == ("decode", "random, tiny")
    for text in ("K = 5, prompts cold", "K = 5, prompts warm", "Hugging Face", "planned: "):
        assert text in shown


@pytest.mark.slow
def test_constraint_measures_every_part(tmp_path, capsys):
    document, shown = measured(constraint, CONSTRAINT, tmp_path, capsys)
    assert [(row["items"], row["levels"], len(row["step_ms"])) for row in document["trie"]] == [
        (500, 4, 4), (500, 3, 3), (2000, 4, 4), (2000, 3, 3)
    ]  # fmt: skip
    assert {f["items"] for f in document["filter"]} == {500, 2000}
    for row in document["filter"]:
        assert abs(row["eligible"] / row["items"] - row["share"]) < 0.1
    assert "4 x 256" in shown


def planned(batch, ws):
    return {
        "mode": "planned", "reuse": "cold", "beams": 20, "batch": batch, "rounds": 3,
        "ms": {"p50": 1.0, "p25": 1.0, "p75": 1.0, "p99": 1.0}, "ws_beam_cpu": {"p50": 1.0},
        "ws_beam": {"p50": ws, "p25": ws, "p75": ws}, "plans": {"beam": 3},
        "ws_huggingface": None, "accepted_levels": 0, "drafted_nodes": 0, "passes": 4,
        "target_tokens": 9, "kv_to_greedy": 1.0,
        "agreement": {"requests": 1.0, "items": 1.0, "gap": 0.0},
    }  # fmt: skip


def test_a_sentence_gives_the_worst_planned_cell():
    rows = [planned(1, 1.25), planned(2, 0.8), planned(8, 1.0)]
    report = decode.report({"rows": rows, "workload": {"weights": "w"}})
    assert report.sentences[-1] == (
        "Planned decoding takes 1.25 times as long as own beams at its worst "
        "(K = 20, B = 2, cold), 1.00 times the processor time."
    )
