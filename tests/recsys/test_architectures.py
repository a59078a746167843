"""Every causal LM of transformers: tree passes against the model's own plain forward.

An architecture is right if all of its tiny configurations here are. `VERIFIED` and the table in
docs/architectures.md say which ones are, and these tests that both still agree with the installed
transformers. A failure names the architecture and says what to change.
"""

import functools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from oracles import tiny_model
from token_trees import PROMPTS, TREES, VOCABULARY, Tree
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from recsys.models.architectures import FIXED_POSITIONS, VERIFIED
from recsys.models.tree_forward import TreeModel

ALL = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {"gpt-sw3"})  # another name of gpt2
REFUSED = sorted(set(ALL) - VERIFIED)
POSITIONS = 40
# Of the largest logit: a wrong mask or position changes it by a hundredth at least. Models are in
# float64, and the parts of some in float32, so rounding is a few millionths on any processor.
TOLERANCE = 1e-4

# What these names mean is the same in all configurations that have them.
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "decoder_layers"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "v_head_dim", "kv_channels"), 8),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
    "encoder_layers": 1,
    "attention_types": [[["global", "local"], 1]],
    "vocab_size": VOCABULARY,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "tie_word_embeddings": False,
}


def rope(kind, **values):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


LONGROPE = {
    "short_factor": [1.0, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 3.0, 5.0, 8.0],
    "original_max_position_embeddings": 20,
}
MIXED = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
# What an architecture cannot do without at small sizes.
NEEDED = {
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        **rope("default"),
    },
}
# Configurations of an architecture that take other paths in its code; {} is added to each.
VARIANTS = {
    "cohere": [{"use_qk_norm": True}],
    "doge": [{"keep_window_size": 8}],
    "dots1": [MIXED],
    "falcon": [
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "num_kv_heads": 4},
    ],
    "gemma3_text": [{"final_logit_softcapping": 20.0, "attn_logit_softcapping": 20.0}],
    "gpt2": [{"scale_attn_by_inverse_layer_idx": True}],
    "gpt_bigcode": [{"multi_query": False}],
    "gpt_neox": [{"use_parallel_residual": False}],
    "granite": [{"logits_scaling": 2.0, "embedding_multiplier": 3.0}],
    "granite_swa": [{"logits_scaling": 2.0}],
    "granitemoe": [{"logits_scaling": 2.0}],
    "granitemoe_swa": [{"logits_scaling": 2.0}],
    "granitemoeshared": [{"logits_scaling": 2.0, "shared_intermediate_size": 16}],
    "hunyuan_v1_dense": [rope("dynamic", factor=2.0, alpha=100.0)],
    "hyperclovax": [{"logits_scaling": 2.0}],
    "laguna": [MIXED],
    "llama": [
        rope("linear", factor=2.0),
        rope("yarn", factor=4.0, original_max_position_embeddings=10),
        rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=10,
        ),
        rope("dynamic", factor=2.0),
        rope("longrope", **LONGROPE),
    ],
    "mellum": [MIXED],
    "ministral3": [
        rope("yarn", factor=4.0, original_max_position_embeddings=4, llama_4_scaling_beta=0.5)
    ],
    "mistral": [{"sliding_window": None}],
    "opt": [{"do_layer_norm_before": False, "word_embed_proj_dim": 16}],
    "phi": [{"qk_layernorm": True}],
    "phi3": [{**rope("longrope", **LONGROPE), "original_max_position_embeddings": 20}],
    "phimoe": [rope("longrope", **LONGROPE, short_mscale=1.2, long_mscale=1.5)],
    "qwen2": [MIXED],
    "qwen2_moe": [MIXED],
    "qwen3": [MIXED],
    "smollm3": [MIXED],
    "stablelm": [{"use_parallel_residual": True, "qk_layernorm": True}],
    "starcoder2": [{"sliding_window": None}],
}


def tiny_config(name, **values):
    """The architecture's own defaults with small sizes, and one layer of each type at least."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    small = {k: v for k, v in SMALL.items() if hasattr(default, k) and not fixed(kind, k)}
    names = getattr(kind, "attribute_map", {})
    small = {k: v for k, v in small.items() if names.get(k, k) == k or names[k] not in small}
    if name == "gpt_bigcode":
        del small["num_key_value_heads"]  # it follows from `multi_query`
    for field in ("layer_types", "mlp_layer_types"):
        types = None if fixed(kind, field) else getattr(default, field, None)
        if types is not None:
            seen = list(dict.fromkeys(types))
            small[field] = seen * 2 if len(seen) == 1 else seen
            if field == "layer_types":
                small["num_hidden_layers"] = len(small[field])
    return kind(**{**small, **NEEDED.get(name, {}), **values})


def fixed(kind, field):
    """Whether a configuration computes the field and takes no value for it."""
    found = getattr(kind, field, None)
    return isinstance(found, property) and found.fset is None


def tiny(name, attention=None, **values):
    """A random model whose every weight counts, in float64 where its code allows that."""
    config = tiny_config(name, **values)
    options = {} if attention is None else {"attn_implementation": attention}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        # grouped products of experts have no float64
        model = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager", **options
        )
        model = model.to(torch.float32 if name == "xglm" else torch.float64).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@functools.cache
def plain(name):
    """The first configuration's model, for tests that do not change it."""
    return tiny(name)


def distance(found, expected):
    """Largest difference, as a share of the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


def error_of(model):
    """Largest error of tree passes over both trees; what the model raises, if it does."""
    ready, worst = TreeModel(model), 0.0
    for seed, parents in enumerate(TREES.values()):
        tree = Tree(parents, seed)
        worst = max(worst, distance(tree.by_tree_passes(ready), tree.by_plain_forwards(model)))
    return worst


def cases():
    return [
        pytest.param(name, values, id=f"{name}-{place}" if place else name)
        for name in sorted(VERIFIED & set(ALL))
        for place, values in enumerate([{}, *VARIANTS.get(name, [])])
    ]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "values"), cases())
def test_tree_passes_equal_the_plain_forward(name, values, attention):
    try:
        model = tiny(name, attention, **values)
    except ValueError as error:
        if "does not support an attention implementation" not in str(error):
            raise
        pytest.skip(f"{name} has no {attention} attention")
    assert error_of(model) < TOLERANCE


@pytest.mark.parametrize(
    "name",
    sorted(n for n in VERIFIED & set(ALL) if not hasattr(CONFIG_MAPPING[n], "layer_types")),
)
def test_fields_that_the_architecture_does_not_know_change_nothing(name):
    """Converted checkpoints keep such fields; the model's own code ignores them."""
    kind = CONFIG_MAPPING[name]
    stray = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
    stray = {field: value for field, value in stray.items() if not hasattr(kind(), field)}
    assert error_of(tiny(name, **stray)) < TOLERANCE


@pytest.mark.parametrize("name", sorted(VERIFIED & set(ALL)))
def test_the_comparison_would_see_a_wrong_order(name):
    """Otherwise a model that ignores positions, or a mask, would pass."""
    model, tree = plain(name), Tree(TREES["wide"], 0)
    swapped = [[*p[:-3], p[-2], p[-3], p[-1]] for p in PROMPTS]
    expected = tree.by_plain_forwards(model)
    assert distance(tree.by_plain_forwards(model, swapped), expected) > 100 * TOLERANCE


@pytest.mark.parametrize("name", [*REFUSED, "nobody-knows"])
def test_other_architectures_are_refused_in_words(name):
    model = SimpleNamespace(config=SimpleNamespace(model_type=name))  # nothing else is asked for
    with pytest.raises(
        ValueError, match=rf"'{name}' has not been verified.*docs/architectures\.md"
    ):
        TreeModel(model)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("falcon", "alibi", True),
        ("gemma3_text", "use_bidirectional_attention", True),
        ("gpt2", "add_cross_attention", True),
        ("llama", "is_causal", False),
    ],
)
def test_options_that_change_the_mask_are_refused(name, option, value):
    model = SimpleNamespace(config=tiny_config(name, **{option: value}))
    with pytest.raises(ValueError, match=rf"{option}={value}.*not supported"):
        TreeModel(model)


def test_a_fields_meaning_is_not_guessed():
    model = tiny_model()
    model.config.logits_scaling = 2.0
    with pytest.raises(ValueError, match=r"'llama' with logits_scaling=2\.0"):
        TreeModel(model)


def test_the_documented_table_is_the_verified_set():
    text = (Path(__file__).parents[2] / "docs/architectures.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"^\| yes \| (.+) \|$", text, re.MULTILINE)
    assert set(re.findall(r"`([^`]+)`", names)) == VERIFIED


@pytest.mark.parametrize("name", sorted(VERIFIED & set(ALL)))
def test_a_table_of_positions_is_known_by_its_end(name):
    model = plain(name)
    beyond = torch.ones((1, POSITIONS + 1), dtype=torch.int64)
    with torch.inference_mode():
        model(beyond[:, 1:], use_cache=False)
        if name not in FIXED_POSITIONS:
            model(beyond, use_cache=False)
            assert TreeModel(model).max_positions is None
            return
        with pytest.raises((IndexError, RuntimeError)):
            model(beyond, use_cache=False)
    ready = TreeModel(model)
    ready.check_positions(POSITIONS)
    with pytest.raises(ValueError, match=f"{POSITIONS + 1} positions"):
        ready.check_positions(POSITIONS + 1)
