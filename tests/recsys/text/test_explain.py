"""Explanations: valid JSON that names the item and the history, whatever the model is like."""

import json

import pytest
from oracles import byte_level_tokenizer, tiny_model

from recsys.errors import ArtifactError, RequestError
from recsys.text.explain import PROMPT, Explainer
from recsys.text.stopping import StoppedError

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


@pytest.mark.parametrize("title", ["<s>", "</s>", "From <s>90</s> 70", " </s></s", "é</s>é"])
def test_names_of_special_tokens_in_titles_are_text(title):
    model, prompts = explainer(), []
    encode = model._fill
    model._fill = lambda *titles: prompts.append(encode(*titles)) or prompts[-1]
    (found,) = model.explain([title, "Heat"], [title])
    assert found.explanation.item == title
    assert set(found.explanation.because) <= {title, "Heat"}
    assert found.written.finished
    parser = model.tokenizer.parser
    assert not any(map(parser.is_special_token, prompts[0]))
    told = PROMPT.format(history=f"{title}; Heat", item=title)
    assert parser.decode_bytes(prompts[0]) == told.encode()


def test_a_prompt_may_have_special_tokens_of_its_own():
    model = explainer(prompt="{{<s>}} {history} <s>{item}")
    assert model._fill("Heat", "Up").count(0) == 2
    assert model._fill("<s>", "Up").count(0) == 2
    assert model.tokenizer.decode(model._fill("<s>", "Up")) == "{<s>} <s> <s>Up"


def test_the_forced_item_needs_no_forward_pass():
    short, long = explainer().explain(HISTORY, ["Up", "Up " * 30])
    assert long.written.forced - short.written.forced > 20
    assert short.written.forced + short.written.stats.target_passes == len(short.written.tokens)


def test_without_history_no_titles_are_named():
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


def test_a_schema_is_compiled_once():
    writer = explainer()
    writer.explain(HISTORY, ["Up", "Toy Story"])
    writer.explain(HISTORY, ["Toy Story", "Up"])
    assert len(writer._compiler) == 1 + 2  # one at start


def test_a_checkpoint_with_its_tokenizer_is_enough(tmp_path):
    tiny_model("llama-gqa", 352).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="has no tokenizer, so it writes no text"):
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


def test_any_character_may_be_in_a_title():
    titles = [f"a{chr(code)}b" for code in (*range(0x20), 0x7F, 0x85, 0x2028, 0xFFFE)]
    for title in titles:
        (found,) = explainer(longest_reason=1).explain(titles[:3], [title])
        assert found.explanation.item == title


def test_what_is_longer_than_the_model_reads_is_refused(monkeypatch):
    writer = explainer()
    monkeypatch.setattr(writer.model, "max_positions", 30)
    with pytest.raises(RequestError, match=r"exact for at most 30; shorten the prompt"):
        writer.explain(HISTORY, ["Up"])


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_it_stops_before_the_pass_at_which_it_is_told_to(passes):
    writer, asked = explainer(), []
    with pytest.raises(StoppedError):
        writer.explain(HISTORY, ITEMS, stopped=lambda: asked.append(None) or len(asked) > passes)
    assert len(asked) == passes + 1
    assert writer.model.pool.lent == 0


def test_asking_whether_to_stop_changes_nothing():
    writer, asked = explainer(), []
    found = writer.explain(HISTORY, ITEMS, stopped=lambda: asked.append(None))
    assert [f.json for f in found] == [f.json for f in writer.explain(HISTORY, ITEMS)]
    assert len(asked) == max(f.written.stats.target_passes for f in found)


def test_an_item_needs_a_title():
    with pytest.raises(ValueError, match="items: number 1 has no title"):
        explainer().explain(HISTORY, ["Up", ""])


def test_a_tokenizer_that_cannot_serve_is_named(tmp_path):
    tiny_model("llama-gqa", 352).save_pretrained(tmp_path)
    fast = byte_level_tokenizer(["abc"], 260)
    fast.eos_token = None
    fast.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="cannot explain: end_token: the tokenizer has no end"):
        Explainer.load(tmp_path)
