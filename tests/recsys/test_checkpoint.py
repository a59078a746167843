"""Model sizes, and checkpoint folders written and read."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from oracles import assert_as_exact, exact_twin
from safetensors.torch import load_file, save_file

from recsys.errors import ArtifactError, ConfigError
from recsys.models.architecture import PRESETS, Architecture, architecture
from recsys.models.checkpoint import build, load_model, quiet, save_model
from recsys.vocabulary import Vocabulary

VOCABULARY = Vocabulary.from_levels([8, 8, 8])
TOKENS = torch.tensor([[1, 2, 11, 20, 3]])


def small(**sizes):
    torch.manual_seed(0)
    return build({"hidden_size": 16, "intermediate_size": 32, **sizes}, VOCABULARY)


@pytest.mark.parametrize(("preset", "millions"), [("tiny", 0.6), ("small", 3.2), ("base", 20)])
def test_a_preset_has_the_parameters_its_help_promises(preset, millions):
    model = build(preset, Vocabulary.from_levels([256] * 4))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, rel=0.1)
    assert set(PRESETS) == {"tiny", "small", "base"}


def test_overrides_replace_single_sizes_of_a_preset():
    sizes = architecture("small", {"layers": 7, "tied": True})
    assert sizes == Architecture(256, 512, 7, 4, None, tied=True)


@pytest.mark.parametrize(
    ("preset", "overrides", "says"),
    [
        ("huge", {}, "tiny, small, base"),
        ("tiny", {"layer": 3}, "did you mean 'layers'"),
        ("tiny", {"layers": 0}, "architecture.layers"),
        ("tiny", {"hidden_size": 100, "heads": 3}, "architecture.hidden_size"),
        ("tiny", {"heads": 2, "kv_heads": 3}, "architecture.kv_heads"),
    ],
)
def test_impossible_sizes_are_refused_by_name(preset, overrides, says):
    with pytest.raises(ConfigError, match=says):
        architecture(preset, overrides)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_model_loads_with_the_same_logits(tmp_path, tied, capsys):
    model = small(tied=tied).eval()
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert not loaded.training
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    assert "shards" not in capsys.readouterr().err


def test_a_checkpoint_names_no_place_on_this_machine(tmp_path):
    save_model(small(), tmp_path / "a")
    save_model(load_model(tmp_path / "a"), tmp_path / "b")
    for file in (tmp_path / "b").glob("*.json"):
        assert str(tmp_path) not in file.read_text()


def with_adapter(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    with quiet():
        return get_peft_model(model, config).eval()


@pytest.mark.parametrize("merge", [True, False])
def test_an_adapter_gives_the_same_logits_merged_and_beside(tmp_path, merge):
    model = with_adapter(small())
    expected = model(TOKENS).logits
    assert not torch.allclose(expected, small().eval()(TOKENS).logits)
    save_model(model, tmp_path, merge=merge)
    assert (tmp_path / "adapter").exists() is not merge
    exact = exact_twin(model)(TOKENS).logits
    assert_as_exact(load_model(tmp_path)(TOKENS).logits, expected, exact)
    assert load_model(tmp_path, dtype=torch.float64)(TOKENS).logits.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_adapters_are_merged_before_weights_are_converted(tmp_path, dtype):
    save_model(with_adapter(small(tied=True)), tmp_path / "apart", merge=False)
    save_model(with_adapter(small(tied=True)), tmp_path / "merged")
    apart, merged = (load_model(tmp_path / kind, dtype=dtype) for kind in ("apart", "merged"))
    assert apart.state_dict().keys() == merged.state_dict().keys()
    for name, value in merged.state_dict().items():
        assert torch.equal(apart.state_dict()[name], value), name
    assert apart.get_input_embeddings().weight is apart.get_output_embeddings().weight
    for (name, a), (_, b) in zip(apart.named_buffers(), merged.named_buffers(), strict=True):
        assert a.dtype == b.dtype, name


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("base_model_name_or_path", "../../elsewhere", "belongs to '../../elsewhere'"),
        ("base_model_name_or_path", "someone/a-model", "belongs to 'someone/a-model'"),
        ("base_model_name_or_path", None, "belongs to None"),
        ("peft_type", "XLORA", "'XLORA' adapters"),
        ("r", 3, "size mismatch"),
    ],
)
def test_an_adapter_of_other_weights_is_refused(tmp_path, key, value, says):
    save_model(with_adapter(small()), tmp_path, merge=False)
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ArtifactError, match=says):
        load_model(tmp_path)


def test_an_adapter_folder_can_move(tmp_path):
    save_model(with_adapter(small()), tmp_path / "a", merge=False)
    (tmp_path / "a").rename(tmp_path / "b")
    load_model(tmp_path / "b")
    assert str(tmp_path) not in (tmp_path / "b" / "adapter" / "adapter_config.json").read_text()


def spoil(file, name, value):
    """Write one value into a tensor of a safetensors file."""
    tensors = load_file(file)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_finite_are_refused(tmp_path, value, tied):
    save_model(small(tied=tied), tmp_path)
    for name in ("model.norm.weight", "model.layers.1.self_attn.k_proj.weight"):
        spoil(tmp_path / "model.safetensors", name, value)
    with pytest.raises(ArtifactError, match=r"layers\.1\.self_attn\.k_proj\.weight .*not finite"):
        load_model(tmp_path)  # the first of the two in the order of the layers


def test_a_stored_buffer_that_is_not_finite_is_refused(tmp_path):
    config = transformers.Dots1Config(
        vocab_size=8, hidden_size=8, intermediate_size=8, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2,
        num_experts_per_tok=1, n_shared_experts=1, first_k_dense_replace=0,
    )  # fmt: skip
    save_model(transformers.Dots1ForCausalLM(config), tmp_path)
    load_model(tmp_path)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    spoil(tmp_path / "model.safetensors", name, float("nan"))
    with pytest.raises(ArtifactError, match=r"e_score_correction_bias .*not finite"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("factors", "value", "says"),
    [
        (["lora_B"], float("nan"), r"adapter: .*q_proj\.lora_B\.weight .*not finite"),
        (["lora_A", "lora_B"], 3e38, r"layers\.1\.self_attn\.q_proj\.weight .*not finite"),
    ],
    ids=["adapter", "sum"],
)
def test_an_adapter_that_is_not_finite_is_refused(tmp_path, factors, value, says):
    save_model(with_adapter(small()), tmp_path, merge=False)
    for factor in factors:
        name = f"base_model.model.model.layers.1.self_attn.q_proj.{factor}.weight"
        spoil(tmp_path / "adapter" / "adapter_model.safetensors", name, value)
    with pytest.raises(ArtifactError, match=says):
        load_model(tmp_path)


def test_weights_too_large_for_the_asked_type_are_refused(tmp_path):
    save_model(small(), tmp_path)
    spoil(tmp_path / "model.safetensors", "lm_head.weight", 1e30)
    load_model(tmp_path)
    with pytest.raises(ArtifactError, match=r"lm_head\.weight \(torch\.float16\).*wider dtype"):
        load_model(tmp_path, dtype=torch.float16)


def test_pickled_weights_are_refused(tmp_path):
    model = small()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="only safetensors"):
        load_model(tmp_path)


def test_a_pickled_adapter_is_refused(tmp_path):
    save_model(with_adapter(small()), tmp_path, merge=False)
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(
        tmp_path / "adapter" / "adapter_model.bin"
    )
    with pytest.raises(ArtifactError, match=r"adapter.*only safetensors"):
        load_model(tmp_path)


def test_sizes_that_a_config_does_not_have_are_those_of_its_architecture(tmp_path):
    save_model(small(), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # of 7 billion weights
    with pytest.raises(ArtifactError, match=r"config\.json: \w+ \d+ does not fit the weights"):
        load_model(tmp_path)


def test_the_file_of_settings_for_generation_is_not_read(tmp_path):
    save_model(small(), tmp_path)
    settings = {"num_beams": 7, "watermarking_config": {"context_width": 10**9}}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    assert load_model(tmp_path).generation_config.num_beams in (None, 1)


def test_code_beside_the_weights_is_never_run(tmp_path):
    save_model(small(), tmp_path)
    trace = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(trace)!r}, 'w')\nclass Evil: pass\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="not a loadable checkpoint"):
        load_model(tmp_path)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("config.json", "attn_implementation", "a/b@c"),
        ("config.json", "_attn_implementation", "a/b@c"),
        ("config.json", "quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": 1}),
        ("config.json", "auto_map", {"AutoModelForCausalLM": "a/b--evil.Evil"}),
        ("config.json", "num_labels", 10**9),
        ("config.json", "dtype", "load"),
        ("config.json", "text_config", {"quantization_config": {}}),
        ("config.json", "hidden_act", {"kernel": "a/b"}),
        ("config.json", "rope_parameters", {"rope_type": {"a": "b"}}),
        ("config.json", "n_routed_experts", 10**9),
        ("adapter/adapter_config.json", "target_modules", "(a+)+$"),
        ("adapter/adapter_config.json", "loftq_config", {"loftq_bits": 4}),
        ("adapter/adapter_config.json", "layer_replication", [[0, 10**9]]),
        ("model.safetensors.index.json", "weight_map", {"lm_head.weight": "../secret.safetensors"}),
    ],
)
def test_a_field_that_leads_elsewhere_is_refused_before_transformers_sees_it(
    tmp_path, monkeypatch, file, field, value
):
    save_model(with_adapter(small()), tmp_path, merge=False)
    path = tmp_path / file
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {field: value}))
    monkeypatch.setattr("recsys.models.checkpoint.AutoModelForCausalLM", None)  # is not asked
    with pytest.raises(ArtifactError, match=rf"{path.name}: {field}"):
        load_model(tmp_path)


def test_fields_of_other_tools_that_name_nothing_are_ignored(tmp_path):
    save_model(small(), tmp_path)
    path = tmp_path / "config.json"
    added = {"use_mrope": False, "unsloth_fixed": True, "n_ctx": 1024, "rope_theta": 5e5}
    path.write_text(json.dumps(json.loads(path.read_text()) | added))
    assert load_model(tmp_path).config.model_type == "llama"


def test_an_adapter_config_beside_the_weights_is_refused(tmp_path):
    """Transformers would load the model that it names."""
    save_model(small(), tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    with pytest.raises(ArtifactError, match=r"adapter_config\.json: move the adapter"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "nobody-knows"}'])
def test_a_folder_without_a_readable_config_is_no_checkpoint(tmp_path, content):
    save_model(small(), tmp_path)
    config = Path(tmp_path / "config.json")
    config.unlink() if content is None else config.write_text(content)
    with pytest.raises(ArtifactError, match="checkpoint"):
        load_model(tmp_path)
