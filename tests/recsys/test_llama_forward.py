"""The own forward of Llama-family weights: the logits of transformers, in fewer launches."""

import copy
from importlib.util import find_spec

import peft
import pytest
import torch
import transformers
from launches import Counting, machine_code
from oracles import EPSILON, assert_as_exact, exact_twin, tiny_model
from token_trees import TREES, Tree

from recsys.models import llama
from recsys.models.graphs import PassGraphs, PassShape
from recsys.models.tree_forward import TreeModel

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 1e4,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


def qwen2(**config):
    """A random Qwen2, whose biases are not zero."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    torch.manual_seed(0)
    chosen = transformers.Qwen2Config(**sizes, **heads, initializer_range=0.3, **config)
    return transformers.Qwen2ForCausalLM(chosen).eval()


VARIANTS = {
    "llama": lambda: tiny_model("llama"),
    "llama-gqa": lambda: tiny_model("llama-gqa"),
    "llama-mqa": lambda: tiny_model("llama", num_key_value_heads=1),
    "llama-tied": lambda: tiny_model("llama", tie_word_embeddings=True),
    "llama-biases": lambda: tiny_model("llama", attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: tiny_model("llama", head_dim=12),
    "llama-linear": lambda: tiny_model("llama", rope_parameters=LINEAR),
    "llama-llama3": lambda: tiny_model("llama-gqa", rope_parameters=LLAMA3),
    "llama-yarn": lambda: tiny_model("llama", rope_parameters=YARN),
    "mistral": lambda: tiny_model("mistral"),
    "mistral-full": lambda: tiny_model("mistral", sliding_window=None),
    "qwen2": qwen2,
    "qwen2-sliding": lambda: qwen2(
        use_sliding_window=True, sliding_window=6, max_window_layers=1, tie_word_embeddings=True
    ),
    "qwen3": lambda: tiny_model("qwen3"),
    "qwen3-sliding": lambda: tiny_model("qwen3-sliding", rope_parameters=YARN),
}


def shaken(model):
    """Biases and norms begin as zeros and ones: make them random, so that each counts."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant, dtype):
    exact_model = shaken(VARIANTS[variant]()).double()
    model = shaken(VARIANTS[variant]()).to(dtype)
    trees = [Tree(parents, seed) for seed, parents in enumerate(TREES.values())]
    before = [tree.by_plain_forwards(model) for tree in trees]
    ready = TreeModel(model, own_forward=True)
    assert ready.native is None
    # In float64 the other way is the exact one.
    close = {} if dtype == torch.float32 else {"ulps": 1e-12 / EPSILON}
    for tree, theirs in zip(trees, before, strict=True):
        exact = tree.by_plain_forwards(exact_model)
        assert_as_exact(tree.by_tree_passes(ready), theirs, exact, **close)
        # its parameters are views now
        assert_as_exact(tree.by_plain_forwards(model), theirs, exact, **close)


def as_transformers(ready, model):
    """Check the logits of tree passes against plain forwards of a model."""
    tree = Tree(TREES["wide"], 0)
    theirs, exact = (tree.by_plain_forwards(m) for m in (model, exact_twin(model)))
    assert_as_exact(tree.by_tree_passes(ready), theirs, exact)


@pytest.mark.parametrize("variant", ["llama-gqa", "qwen2", "qwen3-sliding"])
def test_bfloat16_logits_are_rounded_alike(variant):
    model, tree = shaken(VARIANTS[variant]()).bfloat16(), Tree(TREES["wide"], 0)
    expected = tree.by_plain_forwards(model)
    found = tree.by_tree_passes(TreeModel(model, own_forward=True))
    assert (found - expected).abs().max() <= 2**-6 * expected.abs().max()


def test_weights_are_held_once_and_followed():
    model = tiny_model("llama-gqa")
    before = sum(w.nbytes for w in model.parameters())
    first, second = (TreeModel(model, own_forward=True) for _ in range(2))
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage() for w in model.parameters()}
    assert sum(s.nbytes() for s in storages.values()) == before
    for one, two in zip(first._own._layers, second._own._layers, strict=True):
        assert one.merged.weight.data_ptr() == two.merged.weight.data_ptr()
        assert one.gate_up.weight.data_ptr() == two.gate_up.weight.data_ptr()
        assert one.merged.weight.untyped_storage().data_ptr() in storages
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 1.1
    as_transformers(first, model)


@pytest.mark.parametrize("wrapped", [False, True], ids=["wrapped-plainly", "wrapped-in-inference"])
@pytest.mark.parametrize("made", [False, True], ids=["made-plainly", "made-in-inference"])
def test_models_are_merged_in_inference_mode_too(made, wrapped):
    with torch.inference_mode(made):
        model = tiny_model("llama-gqa")
    untouched = tiny_model("llama-gqa")
    for _ in range(2):
        with torch.inference_mode(wrapped):
            ready = TreeModel(model, own_forward=True)
        as_transformers(ready, untouched)


def test_merged_models_are_saved_whole(tmp_path):
    model = tiny_model("llama-gqa", tie_word_embeddings=True)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    TreeModel(model, own_forward=True)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.state_dict().keys() == weights.keys()
    assert all(torch.equal(weights[name], w) for name, w in loaded.state_dict().items())
    size = sum(w.nbytes for w in model.parameters())
    assert (tmp_path / "model.safetensors").stat().st_size < size + 10_000


def test_captured_passes_have_the_same_logits():
    model = TreeModel(tiny_model("llama-gqa"), own_forward=True)
    tree = Tree(TREES["wide"], 0)
    expected = tree.by_tree_passes(model)
    exact = tree.by_plain_forwards(tiny_model("llama-gqa", dtype=torch.float64))
    graphs = PassGraphs.attach(model, batch=4, slots=64)
    graphs.warm_up([PassShape(4, 16, 64, 16)])
    found = tree.by_tree_passes(model)
    assert graphs.statistics().replays == 2
    assert_as_exact(found, expected, exact)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_adapters_are_not_ignored():
    tuned = peft.get_peft_model(
        tiny_model("llama"),
        peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    ).eval()
    before = copy.deepcopy(tuned)
    with pytest.raises(ValueError, match=r"own_forward=True: it has a Linear of peft\.tuners"):
        TreeModel(tuned, own_forward=True)
    as_transformers(TreeModel(tuned), before)
    as_transformers(TreeModel(tuned.merge_and_unload(), own_forward=True), before)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: tiny_model("phi3"), "Phi3ForCausalLM is not covered"),
        (lambda: tiny_model("llama", hidden_act="gelu"), "its activation is 'gelu'"),
        (
            lambda: tiny_model("llama", rope_parameters={**LINEAR, "rope_type": "dynamic"}),
            "its rotations are 'dynamic'",
        ),
    ],
    ids=["class", "activation", "rotation"],
)
def test_other_models_are_refused_with_a_reason(model, reason):
    assert reason == llama.reason_against(model())
    with pytest.raises(ValueError, match=reason.split("'")[0]):
        TreeModel(model(), own_forward=True)


def with_a_layer_of_its_own(change):
    model = tiny_model("llama")
    with torch.no_grad():
        change(model.model.layers)
    return model


def scale_one(layers):
    layers[1].self_attn.scaling *= 2


def share_one(layers):
    layers[1].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight


def bias_one(layers):
    projection = layers[0].self_attn.q_proj
    projection.bias = torch.nn.Parameter(torch.randn(len(projection.weight)))


def drop_one(layers):
    del layers[1]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scale_one, "scale their attention differently"),
        (share_one, "share parameters"),
        (bias_one, "have a bias, and others"),
        (drop_one, "it has 1 layers and its configuration 2"),
    ],
)
def test_a_changed_layer_keeps_its_modules(change, reason):
    model = with_a_layer_of_its_own(change)
    assert reason in llama.reason_against(model)
    as_transformers(TreeModel(model), model)


def test_a_model_with_a_hook_keeps_its_modules():
    model = tiny_model("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert "hooks" in llama.reason_against(model)


def test_positions_without_a_rotation_are_refused():
    model = TreeModel(tiny_model("llama", max_position_embeddings=16), own_forward=True)
    with pytest.raises(ValueError, match="exact for at most 16"):
        model.check_positions(17)


def test_a_cpu_uses_it_only_when_asked():
    assert TreeModel(tiny_model("llama"))._own is None


class LaunchesOfPass(Counting):
    """Attention is one kernel on a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.scaled_dot_product_attention.default:
            return super().__torch_dispatch__(func, types, args, kwargs)
        query, _, value = args[:3]
        self.launches += 1
        batch, heads, new, _ = query.shape  # laid out as efficient attention does
        return query.new_empty((batch, new, heads, value.shape[-1])).transpose(1, 2)


def launches(count, own, kernels, monkeypatch, **config):
    """Launches of a pass of four tokens each of two requests, on meta tensors."""
    with torch.device("meta"):
        model = tiny_model("llama", layers=count, **config)
    if kernels:
        from recsys.models import layer_kernels

        counted = []
        monkeypatch.setattr(llama, "find_kernels", lambda *_: layer_kernels)
        monkeypatch.setattr(layer_kernels, "launch", lambda kernel, *a, **k: counted.append(kernel))
    ready = TreeModel(model, own_forward=own)
    places = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    masks = {kind: torch.zeros(2, 1, 4, 32, device="meta") for kind in ready.mask_kinds}
    with ready.pool.lend(2, 16, 16) as cache, torch.inference_mode():
        cache.select(places, 32)
        with LaunchesOfPass() as found:
            ready.run(places, places, masks, cache, places)
    return found.launches + (len(counted) if kernels else 0)


# key/value heads -> launches of a layer by transformers, by the twins and with kernels
LAYER = {4: (36, 39, 9), 2: (38, 40, 10)}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("pairs", LAYER)
def test_a_layer_takes_nine_launches(pairs, monkeypatch):
    """Counted as what a layer more adds; ten with grouped queries."""
    counts = []
    for own, kernels in ((False, False), (True, False), (True, True)):
        few, many = (
            launches(n, own, kernels, monkeypatch, num_key_value_heads=pairs) for n in (2, 3)
        )
        counts.append(many - few)
    assert tuple(counts) == LAYER[pairs]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3"])
def test_kernels_compile_for_a_gpu(name, tmp_path, monkeypatch):
    """To the machine code of an H100, with the arguments of a bfloat16 model's pass."""
    from recsys.models import layer_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched = {}

    def note(kernel, grid, *arguments, **constants):
        launched[kernel, tuple(sorted(constants.items()))] = arguments

    monkeypatch.setattr(llama, "find_kernels", lambda *_: layer_kernels)
    monkeypatch.setattr(layer_kernels, "launch", note)
    ready = TreeModel(tiny_model(name, dtype=torch.bfloat16), own_forward=True)
    Tree(TREES["wide"], 0).by_tree_passes(ready)
    assert len(launched) == 4  # two norms, without and with an addition before them
    for (kernel, constants), arguments in launched.items():
        assert len(machine_code(kernel, arguments, dict(constants))) > 1000
