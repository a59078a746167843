"""The example of docs/surfaces.md runs, and what its comments say of the results is so."""

import re
from pathlib import Path

import numpy as np
from oracles import byte_level_tokenizer, random_catalog, random_prompts, tiny_model
from toy_bundle import counted_codes, items_table, write_bundle

from recsys.interactions import Histories
from recsys.retrieval import ItemItem, Retrieval

PAGE = Path(__file__).parent.parent / "docs" / "surfaces.md"
IDS, LEVELS = [f"B{number:04d}" for number in range(100)], (5, 5, 8)


def test_the_example_of_python_runs(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.S)
    rng, bundles = np.random.default_rng(0), tmp_path / "var" / "bundles"
    table = items_table(IDS, price=[*map(float, range(100))], brand=["Acme", "Bolt"] * 50)
    walks = Histories.of(rng.integers(0, 100, (60, 6)).tolist())
    retrieval = Retrieval(ItemItem.count(walks, 100), np.ones(100))
    write_bundle(bundles / "demo", table, counted_codes(100, LEVELS), LEVELS, retrieval=retrieval)
    tiny_model("llama-gqa", 352).save_pretrained(bundles / "text" / "target")
    byte_level_tokenizer(["Top coat"], 330).save_pretrained(bundles / "text" / "target")
    names = {"seen": [[0], [1, 2]], "rows": [[3, 4], [5, 6]], "prompts": random_prompts(rng, 2, 8)}
    names |= dict.fromkeys(("model", "target"), tiny_model("llama-gqa"))
    names |= dict.fromkeys(("draft", "drafter"), tiny_model(layers=1, seed=9))
    names["tokens"] = random_catalog(rng, 60, 3)
    monkeypatch.chdir(tmp_path)
    exec(compile(example.replace("=500", "=5"), str(PAGE), "exec"), names)
    epoch, beams, texts = names["rec"].epoch, names["beams"], names["texts"]
    assert (epoch.number, epoch.item("B0034"), names["result"].epoch_number) == (2, None, 2)
    assert beams.tokens.shape == (*beams.scores.shape, 3) == (2, 20, 3)
    assert all(stats.target_passes and stats.kv_slots for stats in beams.stats)
    assert {*beams.certificates} <= {"global-exact", "beam-exact", "approximate"}
    assert beams.candidate_scores.shape == (2, 2)
    assert texts.tokens.shape[:2] == texts.lengths.shape == texts.scores.shape
