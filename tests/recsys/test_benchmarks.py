"""`benchmarks/decode.py`: it runs, and times nothing but right answers."""

import json
from dataclasses import replace

import decode
import pytest
import torch
import workload
from answers import Agreement
from decode import Options, measure
from measuring import Side, compare_times, time_interleaved

from recsys.decoding import speculative_beam_search
from recsys.errors import RecsysError
from recsys.models.architecture import Architecture
from recsys.vocabulary import Vocabulary

SETUP = workload.Setup(6, "cpu", torch.float32)
SMALL = Options(
    beams=(3,), batches=(2,), nodes=(40,), modes=("exhaustive",), repeats=1, hf_repeats=0
)


def small_workload():
    sizes = Architecture(64, 64, 1, 2)
    levels = Vocabulary.from_levels([16] * 4)
    return workload.make_random_workload((sizes, sizes), levels, SETUP, items=400, history=5)


def test_a_program_writes_what_it_shows(tmp_path, capsys):
    options = "--quick --modes draft planned --beams 3 --batches 2 --nodes 40 --reuse cold --out"
    decode.main([*options.split(), str(tmp_path)])
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document == json.loads((tmp_path / "result.json").read_text())
    assert "\n".join(shown).strip() == (tmp_path / "report.txt").read_text().strip()
    assert document["quick"]
    assert document["rows"]


def test_a_wrong_answer_stops_the_benchmark(monkeypatch):
    def lies(target, drafter, prompts, trie, beams, **options):
        found = speculative_beam_search(target, drafter, prompts, trie, beams, **options)
        return replace(found, rows=found.rows.flip(1), tokens=found.tokens.flip(1))

    monkeypatch.setattr(decode, "speculative_beam_search", lies)
    with pytest.raises(RecsysError, match="exhaustive at K = 3, B = 2, cold"):
        measure(small_workload(), replace(SMALL, reuse=("cold",)))


def test_agreement_counts_lists_items_and_the_gap():
    expected = [[((1,), -1.0), ((2,), -2.0)], [((3,), -1.0), ((4,), -2.0)]]
    found = [[((1,), -1.0), ((2,), -2.00001)], [((3,), -1.25), ((5,), -2.0)]]
    agreement = Agreement.of(found, expected, tolerance=1e-4, tie=1e-5)
    assert (agreement.requests, agreement.items, agreement.gap) == (0.5, 0.75, 0.25)
    other = Agreement(1.0, 1.0, 0.5)
    assert Agreement.join([agreement, other]) == Agreement(0.75, 0.875, 0.5)


def test_every_side_runs_once_a_round_and_its_preparation_is_not_timed(monkeypatch):
    now, runs = [0.0], {"a": [], "b": []}
    monkeypatch.setattr("measuring.time.perf_counter", lambda: now[0])

    def take(seconds, name, number):
        now[0] += seconds
        runs[name].append(number)

    sides = {
        "a": Side(lambda r: take(2.0, "a", r), lambda r: take(100.0, "a", -r)),
        "b": Side(lambda r: take(3.0, "b", r), rounds=2),
    }
    times = time_interleaved(sides, 3)
    assert (times["a"], times["b"]) == ([2.0] * 3, [3.0] * 2)
    assert runs == {"a": [0, 0, -1, 1, -2, 2], "b": [0, 1]}
    assert compare_times([10, 30], [1, 1, 500])["p50"] == pytest.approx(20)
