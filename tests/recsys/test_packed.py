import copy

import pytest
import torch
from oracles import assert_as_exact, exact_twin
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from recsys.models.packed import PackedLinear, pack

pytestmark = pytest.mark.usefixtures("torch_only")
SIZES = ((48, 96), (64, 200), (128, 31))


@pytest.fixture
def torch_only(monkeypatch):
    """The native forward would need no packed layers."""
    monkeypatch.setenv("RECSYS_NATIVE", "0")


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_layer_says_what_the_plain_one_says(sizes, bias):
    torch.manual_seed(1)
    plain = nn.Linear(*sizes, bias=bias)
    rows = torch.randn(7, 5, sizes[0])
    with torch.inference_mode():
        exact = copy.deepcopy(plain).double()(rows.double())
        assert_as_exact(PackedLinear(plain)(rows), plain(rows), exact)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_row_has_the_same_bits_beside_any_others(sizes):
    torch.manual_seed(2)
    layer, rows = PackedLinear(nn.Linear(*sizes, bias=False)), torch.randn(1300, sizes[0])
    with torch.inference_mode():
        whole = layer(rows)
        for count in (1, 4, 8, 20, 36, 93, 128, 333, 555):
            assert torch.equal(layer(rows[11 : 11 + count]), whole[11 : 11 + count])


def test_a_packed_model_keeps_its_weights_and_its_answers(model):
    packed, tokens = pack(copy.deepcopy(model)), torch.arange(24).view(2, 12)
    assert sum(isinstance(layer, PackedLinear) for layer in packed.modules()) == 2 * 7 + 1
    assert set(packed.state_dict()) == set(model.state_dict())
    with torch.inference_mode():
        results = (m(tokens).logits for m in (packed, model, exact_twin(model)))
        assert_as_exact(*results)


def test_other_types_are_left_as_they_are(model):
    double = pack(copy.deepcopy(model).double())
    assert not any(isinstance(layer, PackedLinear) for layer in double.modules())
