"""A pretrained checkpoint with a real tokenizer learns semantic tokens."""

import json

import pytest
import torch
from oracles import assert_as_exact, exact_twin
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from recsys import Recommender
from recsys.artifacts import read_manifest, verify
from recsys.errors import ArtifactError, ConfigError
from recsys.models.checkpoint import load_model, quiet
from recsys.training import bundle, draft
from recsys.training.pretrained import add_lora, load_base
from recsys.training.settings import DraftConfig, LoraSettings
from recsys.training.supervised import Material
from recsys.training.target import TrainedTarget, stage
from recsys.vocabulary import Vocabulary


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_are_a_contiguous_range_and_old_rows_stay(tmp_path, tied, write_base):
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


def test_spare_embedding_rows_do_not_move_token_ids(tmp_path, write_base):
    words = write_base(tmp_path, rows=400)
    model, _, vocabulary = load_base(tmp_path, [3], "x")
    assert vocabulary.level_offsets == (words,)
    assert model.get_input_embeddings().num_embeddings == 400


def test_a_tokenizer_that_knows_semantic_tokens_is_refused(tmp_path, write_base):
    write_base(tmp_path, extra=["<a_0>"])
    with pytest.raises(ConfigError, match="<a_0>"):
        load_base(tmp_path, [3], "x")


def test_a_prompt_must_begin_with_something(tmp_path, write_base):
    write_base(tmp_path, bos=False)
    assert load_base(tmp_path, [3], "the")[2].prefix
    with pytest.raises(ConfigError, match="instruction"):
        load_base(tmp_path, [3], "")


def test_a_base_without_a_tokenizer_or_weights_is_refused(tmp_path, write_base):
    write_base(tmp_path)
    for file in tmp_path.glob("token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        load_base(tmp_path, [3], "x")
    with pytest.raises(ArtifactError, match="not a checkpoint"):
        load_base(tmp_path / "nowhere", [3], "x")


@pytest.mark.parametrize(
    ("modules", "says"),
    [(("q_proj", "k_porj"), "'k_porj'"), (("input_layernorm",), r"lora\.modules")],
)
def test_a_wrong_lora_module_is_refused(tmp_path, write_base, modules, says):
    write_base(tmp_path)
    model, _, vocabulary = load_base(tmp_path, [3], "x")
    with pytest.raises(ConfigError, match=says):
        add_lora(model, vocabulary, LoraSettings(modules=modules))


def lora_context(make_context, base, draft=None, **target):
    lora = {"rank": 4, **target.pop("lora", {})}
    section = {"base": str(base), "epochs": 2, "learning_rate": 1e-2, "lora": lora}
    sections = {"draft": draft, "teacher": {"beams": 5, "histories": 60}} if draft else {}
    return make_context(target={**section, **target}, **sections)


def train(make_context, base, **target):
    return stage(lora_context(make_context, base, **target))


def weights_of(path):
    files = read_manifest(path).files
    return {name: files[name] for name in files if name.endswith(".safetensors")}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("merge", [True, False])
def test_a_trained_base_is_one_checkpoint_with_its_tokenizer(
    make_context, tmp_path, tied, merge, write_base
):
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
def test_training_changes_only_new_embedding_and_head_rows(
    make_context, tmp_path, tied, write_base
):
    words = write_base(tmp_path / "base", tied=tied)
    fresh = load_base(tmp_path / "base", [3, 3, 3], "x")[0]
    path = train(make_context, tmp_path / "base", init_from_centroids=False)
    trained = load_model(path / "model")
    ends = {
        "embedding": (trained.get_input_embeddings(), fresh.get_input_embeddings()),
        "head": (trained.get_output_embeddings(), fresh.get_output_embeddings()),
    }
    for name, (end, start) in ends.items():
        assert (end.weight - start.weight)[words : words + 9].abs().amax(1).min() > 1e-3, name
        assert torch.equal(end.weight[:words], start.weight[:words]), name
    assert (ends["embedding"][0].weight is ends["head"][0].weight) is tied


@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_kept_apart_answers_as_the_merged_weights(
    make_context, tmp_path, tied, write_base
):
    words = write_base(tmp_path / "base", tied=tied)
    tokens = torch.tensor([[0, words, words + 3, words + 6, words + 1]])
    merged = load_model(train(make_context, tmp_path / "base") / "model")
    apart = train(make_context, tmp_path / "base", lora={"merge": False}) / "model"
    added_in = load_model(apart)
    # As any program would read a peft adapter, without this one's help.
    active = AutoModelForCausalLM.from_pretrained(apart, local_files_only=True)
    untrained = active(tokens).logits
    with quiet():
        active = PeftModel.from_pretrained(active, apart / "adapter").eval()
    with torch.inference_mode():
        expected = merged(tokens).logits
        theirs, exact = (model(tokens).logits for model in (active, exact_twin(active)))
        assert_as_exact(expected, theirs, exact)
        assert_as_exact(added_in(tokens).logits, theirs, exact)
    assert (untrained - expected).abs().max() > 0.1
    suffixes = {file.suffix for file in apart.rglob("*") if file.is_file()}
    assert suffixes <= {".json", ".safetensors", ".jinja"}


def test_rank_alpha_dropout_and_modules_reach_the_adapter(make_context, tmp_path, write_base):
    write_base(tmp_path / "base")
    section = {"rank": 3, "alpha": 7, "dropout": 0.25, "modules": ["v_proj"], "merge": False}
    folder = train(make_context, tmp_path / "base", lora=section) / "model" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (3, 7, 0.25)
    tensors = load_file(folder / "adapter_model.safetensors")
    matrices = {name: value for name, value in tensors.items() if "lora_" in name}
    assert len(matrices) == 4, "A and B of two layers"
    assert all("v_proj" in name and 3 in value.shape for name, value in matrices.items())


RESUMED = {"lora": {"dropout": 0.2}, "checkpoint_minutes": 0.0, "evaluate_every": 1}


@pytest.mark.parametrize(("tied", "merge"), [(True, False), (False, True)])
def test_a_run_killed_by_sigkill_ends_with_the_same_bits(
    make_context, tmp_path, write_base, killed, tied, merge
):
    write_base(tmp_path / "base", tied=tied)
    context = lora_context(make_context, tmp_path / "base", **RESUMED)
    context.settings.values["target"]["lora"]["merge"] = merge
    straight = weights_of(stage(context))
    context.workspace.run("target").rename(context.workspace.run("elsewhere"))
    killed(stage, context, steps=7)
    assert weights_of(stage(context)) == straight
    assert len(straight) == (1 if merge else 2)


def with_draft(make_context, target_base, **section):
    """A run with a target adapted from a checkpoint, and settings of its draft."""
    short = {"epochs": 2, "accept_users": 5, "learning_rate": 1e-2, "objective": "tree-kd"}
    return lora_context(make_context, target_base, draft={**short, **section})


@pytest.mark.parametrize(
    ("lora", "tied"), [(None, True), ({"rank": 4, "merge": False}, False), ({"rank": 4}, True)]
)
def test_a_pretrained_draft_is_trained_and_recommends(
    make_context, tmp_path, write_base, tied, lora
):
    words = write_base(tmp_path / "large")
    write_base(tmp_path / "small", tied=tied, hidden=16, layers=1)
    before = load_model(tmp_path / "small").state_dict()
    context = with_draft(make_context, tmp_path / "large", base=str(tmp_path / "small"), lora=lora)
    stage(context)
    path = draft.train(context)
    folder = path / "model"
    assert (folder / "adapter").is_dir() is (lora is not None and not lora.get("merge", True))
    info = read_manifest(path).info
    assert (info["trained_parameters"] < info["parameters"]) is (lora is not None)
    model = load_model(folder)
    assert model.config.hidden_size == 16
    weights, vocabulary = model.get_input_embeddings().weight, Vocabulary.load(path)
    assert len(weights) == vocabulary.size
    assert (model.get_output_embeddings().weight is weights) is tied
    words_before = before["model.embed_tokens.weight"][:words]
    assert torch.equal(weights[:words], words_before) is (lora is not None)
    layer = "model.layers.0.self_attn.v_proj.weight"
    assert not torch.equal(model.state_dict()[layer], before[layer])
    made = bundle.stage(context)
    lists = [
        [r.item_id for r in Recommender.load(made, mode=mode).recommend([["i3", "i4"]], k=5)[0]]
        for mode in ("beam", "draft")
    ]
    assert lists[0] == lists[1]


@pytest.mark.parametrize("lora", [None, {"rank": 4, "merge": False}])
def test_a_run_with_a_parent_continues_a_pretrained_draft(make_context, tmp_path, write_base, lora):
    write_base(tmp_path / "large")
    write_base(tmp_path / "small", hidden=16, layers=1)
    context = with_draft(make_context, tmp_path / "large", base=str(tmp_path / "small"), lora=lora)
    for make in (stage, draft.train, bundle.stage):
        served = make(context)
    (tmp_path / "small").rename(tmp_path / "moved")  # the base is not needed any more
    config = context.settings.section("draft", DraftConfig)
    vocabulary, workspace = Vocabulary.load(served), context.workspace
    parts = TrainedTarget.load(workspace), Material.load(workspace)
    model, tokenizer = draft.start(config, *parts, served / "draft")
    prompt = torch.arange(12)[None]
    with torch.inference_mode():
        before = load_model(served / "draft")(prompt).logits
        assert_as_exact(model(prompt).logits, before, exact_twin(model)(prompt).logits)
    assert len(tokenizer) <= vocabulary.size
    assert any("lora" in name for name, _ in model.named_parameters()) is (lora is not None)


def test_a_draft_with_another_vocabulary_is_refused(make_context, tmp_path, write_base):
    write_base(tmp_path / "large")
    write_base(tmp_path / "other", words=290)
    context = with_draft(make_context, tmp_path / "large", base=str(tmp_path / "other"))
    stage(context)
    with pytest.raises(ConfigError, match=r"other has other tokens than the target's base; "):
        draft.train(context)


def test_a_pretrained_draft_needs_a_target_with_a_tokenizer(make_context, tmp_path, write_base):
    write_base(tmp_path / "small")
    context = make_context(draft={"base": str(tmp_path / "small")})
    stage(context)
    with pytest.raises(ConfigError, match=r"the target has no tokenizer; .*leave draft"):
        draft.train(context)


def test_a_missing_base_of_a_draft_is_named_first(make_context):
    settings = make_context(draft={"base": "nowhere"}).settings
    with pytest.raises(ConfigError, match=r"draft\.base: 'nowhere' is not a folder"):
        settings.section("draft", DraftConfig).check_with(settings)
    with pytest.raises(ConfigError, match=r"draft\.lora: .*give draft\.base"):
        make_context(draft={"lora": {"rank": 2}}).settings.section("draft", DraftConfig)


def test_padding_falls_back_on_the_end_token(tmp_path, write_base):
    write_base(tmp_path)
    _, tokenizer, vocabulary = load_base(tmp_path, [3], "x")
    assert vocabulary.pad == tokenizer.eos_token_id
