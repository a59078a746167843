"""A pretrained checkpoint with a real tokenizer learns semantic tokens."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recsys.artifacts import read_manifest, verify
from recsys.errors import ArtifactError, ConfigError
from recsys.models.checkpoint import load_model
from recsys.vocabulary import Vocabulary
from training.pretrained import LoraSettings, add_lora, load_base, semantic_tokens
from training.target import stage

TEXT = ["the customer has bought these items before", "what will the customer buy next?"]


def write_base(folder, *, tied=False, bos=True, rows=None, extra=()):
    """A small LLaMA checkpoint with a byte-level BPE tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", *extra],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(TEXT, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>" if bos else None, eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=rows or len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return len(tokenizer)


def test_semantic_tokens_are_named_by_level_and_code():
    assert semantic_tokens([2, 3]) == ["<a_0>", "<a_1>", "<b_0>", "<b_1>", "<b_2>"]


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_a_contiguous_range_and_old_rows_stay(tmp_path, tied):
    words = write_base(tmp_path, tied=tied)
    before = load_model(tmp_path).get_input_embeddings().weight
    model, tokenizer, vocabulary = load_base(tmp_path, [3, 4], "the customer")
    assert vocabulary.level_offsets == (words, words + 3)
    assert vocabulary.size == model.get_input_embeddings().num_embeddings >= words + 7
    assert vocabulary.size % 8 == 0
    assert tokenizer.encode("<a_2><b_3>", add_special_tokens=False) == [words + 2, words + 6]
    assert torch.equal(model.get_input_embeddings().weight[:words], before[:words])
    assert vocabulary.prefix[0] == tokenizer.bos_token_id
    assert tokenizer.decode(vocabulary.prefix[1:]) == "the customer"


def test_an_embedding_with_spare_rows_keeps_ids_where_the_tokenizer_puts_them(tmp_path):
    words = write_base(tmp_path, rows=400)
    model, _, vocabulary = load_base(tmp_path, [3], "x")
    assert vocabulary.level_offsets == (words,)
    assert model.get_input_embeddings().num_embeddings == 400


def test_reading_a_base_twice_gives_the_same_new_rows(tmp_path):
    write_base(tmp_path)
    a, b = (load_base(tmp_path, [3], "x")[0].get_input_embeddings().weight for _ in range(2))
    assert torch.equal(a, b)


def test_padding_falls_back_on_the_end_token(tmp_path):
    write_base(tmp_path)
    _, tokenizer, vocabulary = load_base(tmp_path, [3], "x")
    assert vocabulary.pad == tokenizer.eos_token_id


def test_a_tokenizer_that_knows_semantic_tokens_is_refused(tmp_path):
    write_base(tmp_path, extra=["<a_0>"])
    with pytest.raises(ConfigError, match="<a_0>"):
        load_base(tmp_path, [3], "x")


def test_a_prompt_must_begin_with_something(tmp_path):
    write_base(tmp_path, bos=False)
    assert load_base(tmp_path, [3], "the")[2].prefix
    with pytest.raises(ConfigError, match="instruction"):
        load_base(tmp_path, [3], "")


def test_a_base_without_a_tokenizer_or_weights_is_refused(tmp_path):
    write_base(tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_base(tmp_path, [3], "x")
    with pytest.raises(ArtifactError, match="not a checkpoint"):
        load_base(tmp_path / "nowhere", [3], "x")


def test_an_unknown_lora_module_is_refused(tmp_path):
    write_base(tmp_path)
    model, _, vocabulary = load_base(tmp_path, [3], "x")
    with pytest.raises(ConfigError, match="lora"):
        add_lora(model, vocabulary, LoraSettings(modules=("nothing_like_it",)))


@pytest.mark.parametrize("tied", [True, False])
def test_one_step_moves_the_new_rows_of_embedding_and_head_and_no_old_ones(tmp_path, tied):
    words = write_base(tmp_path, tied=tied)
    model, _, vocabulary = load_base(tmp_path, [3, 4], "x")
    old = {
        "embedding": model.get_input_embeddings().weight.detach().clone(),
        "head": model.get_output_embeddings().weight.detach().clone(),
    }
    adapted = add_lora(model, vocabulary, LoraSettings(rank=2))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    tokens = torch.tensor([[0, *range(words, words + 7), words]])
    adapted(tokens, labels=tokens).loss.backward()
    optimizer.step()
    merged = adapted.merge_and_unload()
    for name, matrix in (
        ("embedding", merged.get_input_embeddings().weight),
        ("head", merged.get_output_embeddings().weight),
    ):
        moved = (matrix != old[name]).any(dim=1)
        assert moved[words : words + 7].all(), name
        assert not moved[:words].any(), name


def train(make_context, base, **target):
    return stage(
        make_context(
            target={"base": str(base), "epochs": 2, "lora": {"rank": 4, **target.pop("lora", {})},
                    "learning_rate": 1e-2, **target}
        )
    )  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("merge", [True, False])
def test_a_trained_base_is_one_checkpoint_with_its_tokenizer(make_context, tmp_path, tied, merge):
    words = write_base(tmp_path / "base", tied=tied)
    path = train(make_context, tmp_path / "base", lora={"merge": merge})
    verify(path, "target")
    folder = path / "model"
    assert (folder / "adapter").is_dir() is not merge
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert tokenizer.convert_tokens_to_ids("<a_0>") == words
    vocabulary = Vocabulary.load(path)
    assert vocabulary.level_offsets == (words, words + 3, words + 6)
    model = load_model(folder)
    assert model.get_output_embeddings().weight.shape[0] == vocabulary.size
    assert read_manifest(path).info["trained_parameters"] < read_manifest(path).info["parameters"]
    for file in [*folder.rglob("*.json"), folder / "tokenizer_config.json"]:
        assert str(tmp_path) not in file.read_text(), file


@pytest.mark.parametrize("tied", [True, False])
def test_merged_and_adapter_answer_alike_and_both_moved_the_new_rows(make_context, tmp_path, tied):
    words = write_base(tmp_path / "base", tied=tied)
    logits, rows = {}, {}
    tokens = torch.tensor([[0, words, words + 3, words + 6, words + 1]])
    for merge in (True, False):
        path = train(make_context, tmp_path / "base", lora={"merge": merge},
                     init_from_centroids=False)  # fmt: skip
        model = load_model(path / "model", dtype=torch.float64)
        with torch.no_grad():
            logits[merge] = model(tokens).logits
        rows[merge] = model.get_output_embeddings().weight[words : words + 9].detach()
        rows[merge, "in"] = model.get_input_embeddings().weight[words : words + 9].detach()
    torch.testing.assert_close(logits[True], logits[False], rtol=0, atol=1e-5)
    fresh = load_base(tmp_path / "base", [3, 3, 3], "x")[0]
    start_in = fresh.get_input_embeddings().weight[words : words + 9]
    start_out = fresh.get_output_embeddings().weight[words : words + 9]
    for merge in (True, False):
        assert ((rows[merge] - start_out).abs().amax(1) > 1e-3).all()
        assert ((rows[merge, "in"] - start_in).abs().amax(1) > 1e-3).all()


def test_an_adapter_leaves_the_base_weights_as_they_were(make_context, tmp_path):
    words = write_base(tmp_path / "base")
    path = train(make_context, tmp_path / "base", lora={"merge": False})
    before = load_file(tmp_path / "base" / "model.safetensors")
    after = load_file(path / "model" / "model.safetensors")
    for name, value in before.items():
        kept = after[name][:words] if value.shape[0] == words else after[name]
        assert torch.equal(kept, value), name
