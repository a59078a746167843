"""Explanations: valid JSON that names the item and the history, whatever the model is like."""

from __future__ import annotations

import json

import pytest

from recsys.errors import ArtifactError
from recsys.explain import Explainer
from recsys.testing import byte_level_tokenizer, tiny_model

HISTORY = ["Heat", 'Say "Hi" \\', "Häuser 🎬", "Alien", "Heat"]
ITEMS = ["Toy Story", "Up {really}", "Ünder\nlines 🎬 \\", "Toy Story"]
FAST = byte_level_tokenizer([*HISTORY, *ITEMS, "because it is much like the others"], 330)


def explainer(seed=0, **options):
    """A random model that may write twenty characters."""
    return Explainer(
        tiny_model("llama-gqa", 352, seed=seed), FAST, **{"longest_reason": 20, **options}
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("temperature", [0.0, 1.0, 5.0])
def test_a_random_model_writes_valid_explanations(seed, temperature):
    found = explainer(seed).explain(HISTORY, ITEMS, temperature=temperature, seed=seed)
    assert [f.explanation.item for f in found] == ITEMS
    for f in found:
        assert f.written.finished
        value = json.loads(f.json)
        assert list(value) == ["item", "because", "reason"]
        assert set(value["because"]) <= set(HISTORY)
        assert len(set(value["because"])) == len(value["because"]) <= 3
        assert 1 <= len(value["reason"]) <= 20
        assert value == vars(f.explanation)


def test_the_item_costs_no_forward():
    short, long = explainer().explain(HISTORY, ["Up", "Up " * 30])
    assert long.written.forced - short.written.forced > 20
    assert short.written.forced + short.written.stats.target_passes == len(short.written.tokens)


def test_nothing_is_named_where_there_is_no_history():
    (found,) = explainer().explain([], ["Up"])
    assert found.explanation.because == []
    (found,) = explainer(most_because=0).explain(HISTORY, ["Up"])
    assert found.explanation.because == []


def test_only_the_end_of_the_history_is_shown():
    seen = set()
    for seed in range(5):
        found = explainer(longest_history=2).explain(HISTORY, ITEMS, temperature=3, seed=seed)
        seen |= {title for f in found for title in f.explanation.because}
    assert seen <= {"Häuser 🎬", "Alien"}  # the second Heat is the first one's


def test_no_items_need_no_explanation():
    assert explainer().explain(HISTORY, []) == []


def test_a_schema_is_compiled_once():
    writer = explainer()
    writer.explain(HISTORY, ["Up", "Toy Story"])
    writer.explain(HISTORY, ["Toy Story", "Up"])
    assert (writer._compiler.statistics.hits, writer._compiler.statistics.misses) == (2, 2)


def test_a_checkpoint_with_its_tokenizer_is_enough(tmp_path):
    tiny_model("llama-gqa", 352).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="no readable tokenizer; only a text model explains"):
        Explainer.load(tmp_path)
    FAST.save_pretrained(tmp_path)
    (found,) = Explainer.load(tmp_path, longest_reason=20).explain(HISTORY, ["Up"])
    assert found.explanation == explainer().explain(HISTORY, ["Up"])[0].explanation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest_reason": 0}, "longest_reason must be at least 1"),
        ({"most_because": -1}, "most_because must be at least 0"),
        ({"longest_history": 0}, "longest_history must be at least 1"),
    ],
)
def test_limits_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        explainer(**options)


def test_an_item_needs_a_title():
    with pytest.raises(ValueError, match="items: number 1 has no title"):
        explainer().explain(HISTORY, ["Up", ""])
