"""`TextModel`, and texts that end early or are longer than the model reads."""

import pytest
from oracles import byte_level_tokenizer, tiny_model

from recsys.errors import ArtifactError, RequestError
from recsys.text import GrammarCompiler, TextModel, regex, sample_text
from recsys.text.sample import StoppedError

TEXTS = ["Heat", "Toy Story", "because it is much like the others"]
FAST = byte_level_tokenizer(TEXTS, 330)


def text_model():
    return TextModel(tiny_model("llama-gqa", 352), FAST)


def write(model, prompts=("Why Heat? ", "Why Up? "), **options):
    constraint = GrammarCompiler(model.tokenizer).constraint(regex("[a-z ]{5,20}"))
    encoded = [model.encode(prompt) for prompt in prompts]
    return sample_text(model.model, encoded, constraint, 24, temperature=0.0, **options)


@pytest.mark.parametrize("prompt", ["<s>", "</s>", "From <s>90</s> 70", " </s></s", "é</s>é"])
def test_names_of_special_tokens_in_prompts_are_text(prompt):
    model = text_model()
    begin, *tokens = model.encode(prompt)
    parser = model.tokenizer.parser
    assert parser.is_special_token(begin)
    assert not any(map(parser.is_special_token, tokens))
    assert parser.decode_bytes(tokens) == prompt.encode()


def test_a_checkpoint_with_its_tokenizer_is_enough(tmp_path):
    tiny_model("llama-gqa", 352).save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="has no tokenizer, so it writes no text"):
        TextModel.load(tmp_path)
    FAST.save_pretrained(tmp_path)
    found = write(TextModel.load(tmp_path))
    assert [text.tokens for text in found] == [text.tokens for text in write(text_model())]


def test_a_tokenizer_that_cannot_serve_is_named(tmp_path):
    tiny_model("llama-gqa", 352).save_pretrained(tmp_path)
    fast = byte_level_tokenizer(["abc"], 260)
    fast.eos_token = None
    fast.save_pretrained(tmp_path)
    with pytest.raises(ArtifactError, match="write texts: tokenizer: it has no end token"):
        TextModel.load(tmp_path)


def test_what_is_longer_than_the_model_reads_is_refused(monkeypatch):
    model = text_model()
    monkeypatch.setattr(model.model, "max_positions", 30)
    with pytest.raises(RequestError, match=r"exact for at most 30; shorten the prompt"):
        write(model)


@pytest.mark.parametrize("passes", [0, 1, 3])
def test_it_stops_before_the_pass_at_which_it_is_told_to(passes):
    model, asked = text_model(), []
    with pytest.raises(StoppedError):
        write(model, stopped=lambda: asked.append(None) or len(asked) > passes)
    assert len(asked) == passes + 1
    assert model.model.pool.lent == 0


def test_asking_whether_to_stop_changes_nothing():
    model, asked = text_model(), []
    found = write(model, stopped=lambda: asked.append(None))
    assert [text.tokens for text in found] == [text.tokens for text in write(model)]
    assert len(asked) == sum(text.stats.target_passes for text in found)
