"""The native forward against its torch twin, and the bits of a request in any company."""

import copy
import os

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import (
    ARCHITECTURES,
    assert_as_exact,
    exact_twin,
    random_catalog,
    random_prompts,
    tiny_model,
)
from torch import nn
from torch.nn.functional import linear

from recsys.constraint import ItemTrie
from recsys.decoding import Engine, SearchRequest, beam_search
from recsys.decoding.tree import ROOT, PromptBatch, TokenTree
from recsys.errors import RecsysError
from recsys.models.tree_forward import TreeModel
from recsys.native import coverage, library
from recsys.native import decoder as native

pytestmark = pytest.mark.skipif(
    isinstance(library.find_library(), str), reason=f"{library.find_library()}"
)
VOCABULARY = 64


def torch_twin(model):
    """The same model on the torch path."""
    before = os.environ.get(library.OFF)
    os.environ[library.OFF] = "0"
    try:
        return TreeModel(model)
    finally:
        if before is None:
            del os.environ[library.OFF]
        else:
            os.environ[library.OFF] = before


def native_of(model):
    ready = TreeModel(model)
    assert ready.native is not None
    return ready


def random_tree(seed, batch, widths):
    """Tokens, parents and depths of levels of nodes."""
    rng = np.random.default_rng(seed)
    levels, above, first = [], 0, 0
    for depth, width in enumerate(widths, start=1):
        tokens = torch.from_numpy(rng.integers(1, VOCABULARY, (batch, width)))
        parents = torch.full((batch, width), ROOT)
        if depth > 1:
            parents = torch.from_numpy(rng.integers(first - above, first, (batch, width)))
        levels.append((tokens, parents, depth))
        above, first = width, first + width
    return levels


def logits_of(model, prompts, levels, *, slots=0):
    """Logits of the prompts and of all nodes: the first level with the prompts, then by level."""
    found = []
    batch = PromptBatch.of(prompts, model, slots=slots)
    with TokenTree(model, batch, sum(tokens.shape[1] for tokens, *_ in levels)) as tree:
        for tokens, parents, depth in levels:
            tree.add(tokens, parents, depth)
            found.append(tree.forward())
            tree.note(found[-1].logsumexp(-1))
    return torch.cat(found, dim=1)


def check_against_torch(found, model, prompts, levels):
    """Logits against those of torch, both compared with float64."""
    theirs, exact = (logits_of(torch_twin(m), prompts, levels) for m in (model, exact_twin(model)))
    assert_as_exact(found, theirs, exact)


@st.composite
def models(draw):
    """Random shapes of the covered families, most of them no multiple of a vector."""
    family = draw(st.sampled_from(["Llama", "Mistral", "Qwen2", "Qwen3"]))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    size = 2 * draw(st.integers(1, 20))
    values = {
        "vocab_size": VOCABULARY,
        "hidden_size": heads * (size if family == "Qwen2" else draw(st.integers(1, 30))),
        "intermediate_size": draw(st.integers(1, 150)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": size,
        "max_position_embeddings": 512,
        "initializer_range": draw(st.sampled_from([0.02, 0.2])),
        "tie_word_embeddings": draw(st.booleans()),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "Llama":
        values |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
        values["rope_parameters"] = draw(
            st.sampled_from(
                [
                    {"rope_type": "default", "rope_theta": 1e4},
                    {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
                    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
                    {
                        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
                        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                        "original_max_position_embeddings": 64,
                    },
                ]
            )
        )  # fmt: skip
    if family == "Mistral":
        values["sliding_window"] = draw(st.sampled_from([None, 5]))
    if family in ("Qwen2", "Qwen3"):
        values |= {"use_sliding_window": draw(st.booleans()), "sliding_window": 6}
        values["max_window_layers"] = draw(st.integers(0, 2))
    config = getattr(transformers, f"{family}Config")(**values)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(draw(st.integers(0, 1000)))
        made = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in made.named_parameters():
            if "norm" in name or "bias" in name:  # not all ones and zeros, as they start
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return made.eval()


@settings(max_examples=40)
@given(
    models(), st.integers(0, 10_000), st.lists(st.integers(1, 40), min_size=1, max_size=5),
    st.lists(st.integers(1, 25), min_size=1, max_size=3),
)  # fmt: skip
def test_random_shapes_equal_torch_and_a_request_has_the_same_bits_alone(
    model, seed, lengths, widths
):
    """Without reserved slots, too: other slots do not change the order in which sums run."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, VOCABULARY, length) for length in lengths]
    levels = random_tree(seed, len(prompts), widths)
    ready = native_of(model)
    beside = logits_of(ready, prompts, levels)
    check_against_torch(beside, model, prompts, levels)
    for i, prompt in enumerate(prompts):
        own = [(tokens[i : i + 1], parents[i : i + 1], depth) for tokens, parents, depth in levels]
        assert torch.equal(logits_of(ready, [prompt], own)[0], beside[i])
        assert torch.equal(logits_of(ready, [prompt], own, slots=60)[0], beside[i])


def test_all_modes_give_the_bits_of_beam_search():
    """A node's bits do not depend on its slot, so the slots that drafts leave do not matter."""
    target, draft = tiny_model("llama", seed=1), tiny_model("llama", seed=2)
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 300, 4))
    engine = Engine(target, trie, draft=draft, prompt_slots=40)
    prompts = random_prompts(np.random.default_rng(5), 5, 40)
    expected = engine.decode(prompts, 8, mode="beam").beams
    for mode in ("draft", "exhaustive"):
        for batch in (prompts, prompts[2:3]):
            found = engine.decode(batch, 8, mode=mode).beams
            rows = slice(None) if len(batch) > 1 else slice(2, 3)
            assert torch.equal(found.rows, expected.rows[rows])
            assert torch.equal(found.scores, expected.scores[rows])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_torch_path_keeps_its_bits_in_a_batch(architecture):
    """Decision 2, for models that the library does not cover: with slots reserved."""
    rows, weights = torch.randn(64, 32), torch.randn(32, 32)
    every = linear(rows, weights)
    if not all(torch.equal(linear(rows[:n], weights), every[:n]) for n in range(4, 64, 4)):
        pytest.skip("the sums of this processor's matrix kernels depend on the number of rows")
    ready = torch_twin(tiny_model(architecture))
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 200, 4))
    prompts = random_prompts(np.random.default_rng(3), 5, 40)
    beside = beam_search(ready, SearchRequest(prompts, prompt_slots=48), trie, 8)
    for i, prompt in enumerate(prompts):
        alone = beam_search(ready, SearchRequest([prompt], prompt_slots=48), trie, 8)
        assert torch.equal(alone.scores[0], beside.scores[i])
        assert torch.equal(alone.rows[0], beside.rows[i])


def test_positions_beyond_the_first_table_are_added():
    model = tiny_model("llama", max_position_embeddings=4096)
    prompts = [*random_prompts(np.random.default_rng(1), 1, 10), np.full(700, 5)]
    levels = random_tree(1, 2, [3])
    found = logits_of(native_of(model), prompts, levels)
    check_against_torch(found, model, prompts, levels)


@pytest.mark.parametrize("way", ["in place", "data", "swapped", "negative", "fused", "replaced"])
def test_changed_weights_are_packed_again_for_a_new_user(way):
    model = tiny_model("llama")
    ready = native_of(model)
    prompts, levels = [np.arange(1, 9)], random_tree(1, 1, [4])
    before = logits_of(ready, prompts, levels)
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        if way == "in place":
            weight.mul_(0.5)
        elif way == "data":
            weight.data[3, 3] += 1
        elif way == "swapped":
            weight.data[[0, 1]] = weight.data[[1, 0]]
        elif way == "negative":
            weight.data.neg_()
        elif way == "fused":
            weight.grad = torch.ones_like(weight)
            torch.optim.AdamW([weight], fused=True).step()
        else:
            model.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(weight * 2)
    found = logits_of(native_of(model), prompts, levels)
    assert not torch.equal(found, before)
    check_against_torch(found, model, prompts, levels)


def hooked(model):
    model.model.norm.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: tiny_model("llama", dtype=torch.float64),
        lambda: tiny_model("llama", dtype=torch.bfloat16),
        lambda: tiny_model("llama", hidden_act="gelu"),
        lambda: hooked(tiny_model("llama")),
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=2)
        ).eval(),
    ],
)
def test_torch_runs_what_is_not_covered(make):
    model = make()
    assert TreeModel(model).native is None
    logits_of(TreeModel(model), [np.arange(1, 9)], random_tree(1, 1, [4]))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("token", {"tokens": torch.tensor([[3, VOCABULARY]])}),
        ("token", {"tokens": torch.tensor([[-1, 3]])}),
        ("position", {"positions": torch.tensor([[0, -1]])}),
        ("position", {"positions": torch.tensor([[0, 1 << 40]])}),
        ("slot to write", {"write": torch.tensor([0, 32])}),
        ("slot to write", {"write": torch.tensor([-1, 0])}),
        ("row", {"rows": torch.tensor([[2]])}),
        ("row", {"rows": torch.tensor([[-1]])}),
    ],
)
def test_indices_outside_are_refused(name, change):
    model = tiny_model("llama", rope_parameters={
        "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0,
    })  # fmt: skip
    ready = native_of(model).native
    with pytest.raises(IndexError, match=name):
        ready.run(**one_pass(**change))


@pytest.mark.parametrize(
    "change",
    [
        {"positions": torch.tensor([[0]])},
        {"tokens": torch.tensor([[0, 1]], dtype=torch.int32)},
        {"masks": {"sliding_attention": torch.zeros(1, 1, 2, 8)}},
        {"buffer": torch.zeros(2, 2, 1, 32, 2, 8)},
        {"buffer": torch.zeros((2, 2, 1, 32, 4, 8), device="meta")},
        {"view": 33},
        {"rows": torch.tensor([0])},
    ],
)
def test_sizes_that_do_not_fit_are_refused(change):
    ready = native_of(tiny_model("llama")).native
    with pytest.raises(ValueError, match="do not fit together"):
        ready.run(**one_pass(**change))


def test_large_vocabularies_have_no_table_and_the_same_bits(monkeypatch):
    model = tiny_model("llama")
    expected = native_of(model).native.run(**one_pass())
    monkeypatch.setattr(native, "_MOST_PROJECTED", 0)
    ready = native_of(copy.deepcopy(model)).native
    assert not ready._model.projected
    assert torch.equal(ready.run(**one_pass()), expected)


def one_pass(**change):
    """The arguments of a small pass over a prompt of two tokens."""
    arguments = {
        "tokens": torch.tensor([[3, 4]]),
        "positions": torch.tensor([[0, 1]]),
        "masks": {"sliding_attention": torch.zeros(1, 1, 2, 16)},
        "buffer": torch.zeros(2, 2, 1, 32, 4, 8),
        "write": torch.tensor([0, 1]),
        "view": 16,
        "rows": torch.tensor([[1]]),
    }
    return arguments | change


def test_gates_that_are_very_negative_let_nothing_through():
    """SiLU of -3e38 is 0; a product of -3e38 and a small number would not be."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, mlp_bias=True, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).eval()
    torch.nn.init.constant_(model.model.layers[0].mlp.gate_proj.bias, -3e38)
    prompts, levels = [np.array([5, 6, 7])], random_tree(0, 1, [2])
    check_against_torch(logits_of(native_of(model), prompts, levels), model, prompts, levels)


def test_an_old_library_is_refused(monkeypatch):
    monkeypatch.setattr(library, "ABI", library.ABI + 1)
    with pytest.raises(OSError, match="build it again"):
        library.Library(library.LIBRARY)


def test_packed_weights_go_with_their_model():
    model = tiny_model("llama")
    native_of(model)
    count = len(native._models)
    other = copy.deepcopy(model)
    native_of(other)
    assert len(native._models) == count + 1
    del other
    assert len(native._models) == count


@pytest.mark.parametrize("count", [1, 7, 16, 33, 1000])
def test_sums_of_probabilities_equal_torch(count):
    logits = torch.randn(5, 2, count) * 20
    logits[0, 0] = -torch.inf
    logits[1, 0, count // 2] = torch.nan
    logits[2, 0, 0] = -torch.inf
    found = native.log_sum_exp(logits)
    assert_as_exact(found, logits.logsumexp(-1), logits.double().logsumexp(-1))
    assert torch.equal(native.log_sum_exp(logits[3:4]), found[3:4])
    assert torch.equal(
        native.log_sum_exp(logits.expand(3, -1, -1, -1)[:, 3:, 1])[2, 0], found[3, 1]
    )


def widen_head(model):
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size + 7, bias=False)


def give_head_a_bias(model):
    model.lm_head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=True)


def cut_embedding(model):
    model.model.embed_tokens = nn.Embedding(model.config.vocab_size - 5, model.config.hidden_size)


def change_activation(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def change_epsilon(model):
    model.model.norm.variance_epsilon = 0.1


def change_mlp(model):
    class Doubled(type(model.model.layers[0].mlp)):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    Doubled.__module__ = "elsewhere"
    model.model.layers[0].mlp.__class__ = Doubled


@pytest.mark.parametrize(
    "change",
    [widen_head, give_head_a_bias, cut_embedding, change_activation, change_epsilon, change_mlp],
)
def test_a_model_with_parts_of_its_own_runs_in_torch(change):
    model = tiny_model("llama")
    assert coverage.reason_against(model) is None
    change(model)
    assert coverage.reason_against(model) is not None


def test_a_weight_that_changes_under_a_packed_model_is_an_error():
    model, prompts = tiny_model("llama"), [[1, 2, 3]]
    ready, levels = native_of(model), random_tree(1, 1, [4])
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    with pytest.raises(RecsysError, match="changed after it was packed; make a new TreeModel"):
        logits_of(ready, prompts, levels)
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 9, 2))
    with pytest.raises(RecsysError, match="changed after it was packed"):
        beam_search(ready, prompts, trie, 2)
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)  # as it was: counted all the same
    check_against_torch(logits_of(native_of(model), prompts, levels), model, prompts, levels)
