"""Weights of low precision: the arithmetic, what is refused, and answers that are scored again."""

import math
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recsys.constraint import ItemTrie
from recsys.constraint.boost import Boost
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding import (
    Engine,
    ExhaustiveDrafter,
    SearchRequest,
    beam_search,
    complete,
    score_rows,
    speculative_beam_search,
)
from recsys.decoding.planner import Plan
from recsys.decoding.score import rescore
from recsys.errors import NonFiniteError
from recsys.models import layers, low_precision
from recsys.models.low_precision import FLOAT8, Bfloat16Linear, Float8Linear, lower, quantize
from recsys.models.tree_forward import TreeModel
from recsys.modes import Mode
from recsys.testing import random_catalog, random_prompts, tiny_model

KINDS = ("float8", "int8", "bfloat16")
CPU = torch.device("cpu")
RNG = np.random.default_rng(5)
TRIE = ItemTrie.build(random_catalog(RNG, 120, 4))
REQUEST = SearchRequest(random_prompts(RNG, 5, 12))
MODEL = tiny_model("llama-gqa")


def plain_int8(row):
    """A row in int8 and its scale, in plain Python."""
    scale = max(abs(value) for value in row) / 127
    return [round(value / scale) for value in row], scale


def plain_float8(value):
    """The float8 e4m3fn next to a number of magnitude up to 448: 3 bits behind the leading one."""
    if value == 0:
        return 0.0
    exponent = max(math.frexp(abs(value))[1] - 1, -6)
    step = math.ldexp(1, exponent - 3)
    return round(value / step) * step  # round() of halves goes to the even one


def float32(value):
    return float(np.float32(value))


def test_int8_of_numbers_written_by_hand():
    rows = torch.tensor([[1.27, -0.01, 0.006, 0.004], [0.0, 0.0, 0.0, 0.0], [-5.0, 2.5, 0.0, 1.0]])
    whole, scale = quantize(rows, torch.int8)
    assert whole.tolist() == [[127, -1, 1, 0], [0, 0, 0, 0], [-127, 64, 0, 25]]
    np.testing.assert_allclose(scale[[0, 2], 0], [0.01, 5 / 127], rtol=1e-6)
    assert (whole * scale)[1].tolist() == [0, 0, 0, 0]


def test_int8_products_in_float16_are_scaled_before_they_overflow():
    """2 x 1,000 x 100 is more than 65,504, the largest number of float16; scaled it is 20,000."""
    values = torch.full((1, 2), 1000.0, dtype=torch.float16)
    weight = torch.full((1, 2), 100, dtype=torch.int8)
    product = layers.multiply_int8(values, weight, torch.tensor([[0.1]]))
    assert product.item() == pytest.approx(20_000, rel=1e-3)


def test_float8_of_numbers_written_by_hand():
    small, scale = quantize(torch.tensor([[448.0, 17.0, -18.0, 19.0, 0.001, 2.0**-9]]), FLOAT8)
    assert scale.item() == 1
    assert small.float().tolist() == [[448.0, 16.0, -18.0, 20.0, 0.001953125, 0.001953125]]
    small, scale = quantize(torch.tensor([[-896.0, 34.0]]), FLOAT8)
    assert (small.float().tolist(), scale.item()) == ([[-448.0, 16.0]], 2)


values = st.floats(-1e4, 1e4, width=32)


@given(st.lists(st.lists(values, min_size=3, max_size=3), min_size=1, max_size=4))
def test_quantized_rows_equal_plain_python_and_stay_near(rows):
    exact = torch.tensor(rows, dtype=torch.float32)
    whole, scale = quantize(exact, torch.int8)
    small, scale8 = quantize(exact, FLOAT8)
    assert whole.dtype == torch.int8
    assert scale.shape == scale8.shape == (len(rows), 1)
    for row, codes, step, codes8, step8 in zip(
        exact.tolist(), whole.tolist(), scale[:, 0].tolist(), small.float().tolist(),
        scale8[:, 0].tolist(), strict=True,
    ):  # fmt: skip
        for value, code, code8 in zip(row, codes, codes8, strict=True):
            assert abs(value - code * step) <= step * (0.5 + 1e-4)
            assert code8 == plain_float8(float32(np.float32(value) / np.float32(step8)))
            most = max(abs(value) / 16, step8 * 2**-10)
            assert abs(value - code8 * step8) <= most * (1 + 1e-5)
        if max(map(abs, row)) > 1e-30:
            expected, plain_step = plain_int8(row)
            assert step == pytest.approx(plain_step, rel=1e-6)
            assert max(abs(a - b) for a, b in zip(codes, expected, strict=True)) <= 1  # a half
            assert max(map(abs, codes)) == 127
            assert max(map(abs, codes8)) == 448


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_of_the_numbers_that_are_kept(kind, dtype, biased):
    """Summed in float64 over dequantised numbers."""
    torch.manual_seed(0)
    weight, values = torch.randn(48, 32).to(dtype), torch.randn(7, 32).to(dtype)
    bias = torch.randn(48).to(dtype) if biased else None
    product = lower(weight, bias, kind, layers)
    found = product(values)
    assert (found.shape, found.dtype) == ((7, 48), dtype)
    rows, matrix = values.double(), weight.double()
    if kind == "float8":
        rows, matrix = (
            torch.tensor([[plain_float8(v) for v in row] for row in (part / scale).tolist()])
            * scale
            for part, scale in ((p.float(), p.float().abs().amax(1, True) / 448)
                                for p in (values, weight))
        )  # fmt: skip
    elif kind == "int8":
        scales = weight.float().abs().amax(1, True) / 127
        matrix = (weight.float() / scales).round() * scales
    else:
        rows, matrix = rows.bfloat16(), matrix.bfloat16()
    expected = rows.double() @ matrix.double().t()
    if bias is not None:
        expected += bias.double()
    rounding = 1e-5 if dtype == torch.float32 and kind != "bfloat16" else 2**-6
    assert (found.double() - expected).abs().max() <= rounding * expected.abs().max()
    exact = torch.nn.functional.linear(*(p.double() for p in (values, weight)))
    exact += 0 if bias is None else bias.double()
    assert (found.double() - exact).abs().max() <= 0.06 * exact.abs().max()


def test_float8_in_plain_torch_equals_the_operator_of_torch():
    """On this CPU; on a GPU the operator runs."""
    torch.manual_seed(0)
    product = lower(torch.randn(48, 64), None, "float8", layers)
    assert isinstance(product, Float8Linear)
    rows, scale = quantize(torch.randn(5, 64), FLOAT8)
    for dtype, near in ((torch.float32, 1e-6), (torch.bfloat16, 2**-8)):
        plain, theirs = product._plain(rows, scale, dtype), product._scaled(rows, scale, dtype)
        assert (plain - theirs).abs().max() <= near * plain.abs().max()


def test_the_arguments_of_the_operator_are_those_of_a_gpu():
    """Torch checks shapes, strides and types of row-wise scales on tensors without values."""
    product = lower(
        torch.empty(48, 64, device="meta", dtype=torch.bfloat16), None, "float8", layers
    )
    assert product.weight.stride() == (64, 1)  # its transpose is column-major
    assert product.scale.is_contiguous()
    assert (product.scale.shape, product.scale.dtype) == ((1, 48), torch.float32)
    found = product(torch.empty(5, 64, device="meta", dtype=torch.bfloat16))
    assert (found.shape, found.dtype) == ((5, 48), torch.bfloat16)
    with pytest.raises(RuntimeError, match="divisible by 16"):
        lower(
            torch.empty(48, 60, device="meta", dtype=torch.bfloat16),
            None,
            "float8",
            layers,
        )(torch.empty(5, 60, device="meta", dtype=torch.bfloat16))


@pytest.mark.parametrize("kind", ["float8", "int8"])
def test_a_whole_pass_runs_on_tensors_without_values(kind):
    with torch.device("meta"):
        model = tiny_model("llama-gqa", dtype=torch.bfloat16, hidden=64, num_hidden_layers=2)
    run_on_meta(TreeModel(model, weights=kind))


def run_on_meta(ready):
    """A pass of a bfloat16 model with a vocabulary of 64."""
    places = torch.zeros(2, 4, dtype=torch.int64, device="meta")
    masks = {name: torch.zeros(2, 1, 4, 32, device="meta", dtype=torch.bfloat16)
             for name in ready.mask_kinds}  # fmt: skip
    with ready.pool.lend(2, 16, 16) as cache, torch.inference_mode():
        cache.select(places, 32)
        assert ready.run(places, places, masks, cache, places).shape == (2, 4, 64)


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "size", "reason"),
    [
        ("float4", "cpu", torch.float32, 16, "none of float8, int8, bfloat16"),
        ("int8", "mps", torch.float32, 16, "on 'mps', and only a GPU of CUDA or a CPU"),
        ("int8", "cpu", torch.float64, 16, "own weights are torch.float64"),
        ("bfloat16", "cpu", torch.bfloat16, 16, "own weights are torch.bfloat16"),
        ("float8", "cuda", torch.float16, 16, "has to be bfloat16"),
        ("float8", "cuda", torch.bfloat16, 24, "24 x 24, and sizes must be multiples of 16"),
        ("float8", "cuda", torch.bfloat16, 32, "compute capability 8.0, and float8 needs 8.9"),
        ("int8", "cuda", torch.bfloat16, 24, None),
        ("float8", "cpu", torch.float32, 24, None),
    ],
)
def test_what_cannot_work_is_refused(kind, device, dtype, size, reason, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found = low_precision.reason_against(kind, torch.device(device), dtype, [(size, size)])
    assert (found is None) if reason is None else (reason in found)


def test_a_gpu_with_float8_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert low_precision.reason_against("float8", device, torch.bfloat16, [(32, 16)]) is None


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (lambda: tiny_model("phi3"), {}, "Phi3ForCausalLM is not covered"),
        (lambda: tiny_model("llama", dtype=torch.float64), {}, "own weights are torch.float64"),
        (lambda: tiny_model("llama"), {"own_forward": False}, "only the own forward has them"),
        (lambda: tiny_model("llama"), {"weights": "int4"}, "none of float8, int8"),
    ],
)
def test_models_are_refused_with_the_field_and_the_way_out(model, options, reason):
    options = {"weights": "int8"} | options
    with pytest.raises(ValueError, match=f"weights='int[48]': .*{reason}.*; leave weights out"):
        TreeModel(model(), **options)


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-sliding", "mistral"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_have_exact_scores_and_are_not_certified(kind, name):
    model = tiny_model(name)
    low, exact = TreeModel(model, weights=kind), TreeModel(model)
    everything = beam_search(exact, REQUEST, TRIE, TRIE.num_rows)
    known = [dict(zip(rows, scores, strict=True)) for rows, scores in
             zip(everything.rows.tolist(), everything.scores.tolist(), strict=True)]  # fmt: skip
    found = Engine(low, TRIE).decode(REQUEST, 8).beams
    raw = beam_search(low, REQUEST, TRIE, 8)
    assert found.certificates == raw.certificates == ["approximate"] * 5
    assert found.is_global is None
    assert torch.equal(DeviceTrie.of(TRIE).sequences(found.rows), found.tokens)
    for i, (rows, scores) in enumerate(
        zip(found.rows.tolist(), found.scores.tolist(), strict=True)
    ):
        assert set(rows) == set(raw.rows[i].tolist())
        assert [(-s, r) for s, r in zip(scores, rows, strict=True)] == sorted(
            (-s, r) for s, r in zip(scores, rows, strict=True)
        )
        for row, score in zip(rows, scores, strict=True):
            assert score == pytest.approx(known[i][row], abs=1e-5)
    one = found.stats[0]
    assert one.target_passes == raw.stats[0].target_passes + 1
    assert one.target_tokens > raw.stats[0].target_tokens + len(REQUEST.prompts[0])


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_beam_search_to_the_sixth_digit(kind):
    """Of a model whose logits are not large, so that a score has as many digits."""
    model = tiny_model("llama")
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 0.3 if weight.dim() > 1 else 1
    exact = beam_search(TreeModel(model), REQUEST, TRIE, TRIE.num_rows)
    found = Engine(TreeModel(model, weights=kind), TRIE).decode(REQUEST, 10).beams
    for i, rows in enumerate(found.rows.tolist()):
        places = [exact.rows[i].tolist().index(row) for row in rows]
        gap = (found.scores[i] - exact.scores[i, places]).abs().max()
        assert gap <= 1e-5  # of scores of about -15


def test_boosts_candidates_and_short_lists():
    """Items by exact score and boost; candidates without room stay unscored; -1 at the end."""
    rng = np.random.default_rng(1)
    boost = Boost.of(TRIE, rng.normal(size=TRIE.num_items))
    exclude = [np.arange(5, TRIE.num_rows), [], [], [], []]
    candidates = [[3, 9], [70, 80, 90], [], [1], [2, 4]]
    request = replace(
        REQUEST, exclude=exclude, candidates=candidates, candidate_nodes=4,
        boosts=[boost, None, boost, boost, None],
    )  # fmt: skip
    low, exact = TreeModel(MODEL, weights="int8"), TreeModel(MODEL)
    raw = beam_search(low, request, TRIE, 9)
    found = Engine(low, TRIE).decode(request, 9).beams
    rows = [[r for r in line if r >= 0] for line in found.rows.tolist()]
    assert [len(line) for line in rows] == [5, 9, 9, 9, 9]
    assert found.rows[0, 5:].tolist() == found.tokens[0, 5:, 0].tolist() == [-1] * 4
    assert (found.scores[0, 5:] == -torch.inf).all()
    scores = score_rows(exact, REQUEST.prompts, TRIE, rows)
    gains = gains_of(boost, request)
    for i, line in enumerate(rows):
        torch.testing.assert_close(found.scores[i, : len(line)], scores[i, : len(line)],
                                   atol=1e-5, rtol=0)  # fmt: skip
        ranked = found.scores[i, : len(line)].numpy() + gains[i, line]
        assert (np.diff(ranked) <= 1e-6).all()
    told = found.candidate_scores
    assert told.shape == raw.candidate_scores.shape
    assert torch.equal(told == -torch.inf, raw.candidate_scores == -torch.inf)
    assert (told[1] == -torch.inf).any()  # four nodes have no room for three rows
    wanted = score_rows(exact, REQUEST.prompts, TRIE, candidates)
    known = told > -torch.inf
    torch.testing.assert_close(told[known], wanted[known], atol=1e-5, rtol=0)


def gains_of(boost, request):
    """(B, rows) boosts of the rows."""
    first = int(TRIE.depth_start[TRIE.num_levels])
    each = boost.most[first:]
    return np.stack([np.zeros_like(each) if b is None else each for b in request.boosts])


def test_equal_scores_keep_the_lower_row_first():
    """A model without values in its head gives every token the same probability."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.zero_()
    request = SearchRequest([[1, 2, 3]])
    expected = beam_search(TreeModel(model), request, TRIE, 7)
    found = Engine(TreeModel(model, weights="int8"), TRIE).decode(request, 7).beams
    assert torch.equal(found.rows, expected.rows)
    shuffled = replace(expected, rows=expected.rows.flip(1), tokens=expected.tokens.flip(1))
    again = rescore(TreeModel(model), shuffled, request, TRIE)
    assert torch.equal(again.rows, expected.rows)
    assert torch.equal(again.tokens, expected.tokens)


@pytest.mark.parametrize("mode", ["beam", "exhaustive", "draft"])
def test_every_mode_scores_again(mode):
    engine = Engine(TreeModel(MODEL, weights="int8"), TRIE, draft=tiny_model("llama", layers=1))
    found = engine.decode(REQUEST, 6, mode=mode).beams
    rows = found.rows.tolist()
    torch.testing.assert_close(found.scores, engine.score(REQUEST.prompts, rows), atol=1e-5, rtol=0)
    assert found.certificates == ["approximate"] * 5


def test_searches_without_an_engine_certify_nothing_either():
    low = TreeModel(MODEL, weights="int8")
    for found in (
        beam_search(low, REQUEST, TRIE, 4),
        speculative_beam_search(low, ExhaustiveDrafter(), REQUEST, TRIE, 4),
    ):
        assert found.certificates == ["approximate"] * 5
        with pytest.raises(ValueError, match="only an exact search can be completed"):
            complete(low, found, REQUEST, TRIE)


def test_samples_and_proofs_are_refused():
    low = TreeModel(MODEL, weights="int8")
    engine = Engine(low, TRIE)
    for request in (
        replace(REQUEST, seeds=[1, 2, 3, 4, 5]),
        replace(REQUEST, normalize="allowed"),
    ):
        with pytest.raises(ValueError, match=r"leave out its weights=\.\.\."):
            engine.decode(request, 4)
    with pytest.raises(ValueError, match="until_global: the target has weights of low precision"):
        engine.decode(REQUEST, 4, until_global=True)


def test_a_draft_of_low_precision_leaves_answers_exact():
    draft = TreeModel(tiny_model("llama", layers=1), weights="int8")
    found = Engine(MODEL, TRIE, draft=draft).decode(REQUEST, 6, mode="draft").beams
    expected = beam_search(MODEL, REQUEST, TRIE, 6)
    assert torch.equal(found.rows, expected.rows)
    assert not found.approximate


def test_a_batch_without_requests():
    found = Engine(TreeModel(MODEL, weights="int8"), TRIE).decode(SearchRequest([]), 4).beams
    assert found.rows.shape == (0, 4)


def test_kept_histories_are_kept_for_both():
    engine = Engine(TreeModel(MODEL, weights="int8"), TRIE, prefix_bytes=1 << 20)
    first = engine.decode(REQUEST, 6).beams
    again = engine.decode(REQUEST, 6).beams
    assert torch.equal(again.rows, first.rows)
    torch.testing.assert_close(again.scores, first.scores, atol=1e-5, rtol=0)
    assert again.stats[0].target_tokens < first.stats[0].target_tokens - 10
    engine.forget()
    assert torch.equal(engine.decode(REQUEST, 6).beams.scores, first.scores)


def test_the_pass_that_scores_again_is_captured():
    low = TreeModel(MODEL, weights="int8")
    low.exact = TreeModel(MODEL, own_forward=True)
    engine = Engine(low, TRIE, graphs=True, prompt_slots=12)
    engine.capture(4, 12, 5)
    rng = np.random.default_rng(0)
    for batch in (1, 2, 3, 4):
        engine.decode(random_prompts(rng, batch, 12), 5)
    for graphs in (*engine.graphs, engine.exact_graphs):
        told = graphs.statistics()
        assert told.replays >= 4
        assert told.fallbacks == {}


@pytest.mark.parametrize("plan", [Plan(), Plan(Mode.DRAFT, 40)], ids=["beam", "draft"])
def test_captured_decodes_are_scored_again(plan):
    draft = None if plan == Plan() else TreeModel(MODEL, own_forward=True)
    low = TreeModel(MODEL, weights="int8")
    engine = Engine(low, TRIE, draft=draft, draft_nodes=plan.nodes, graphs=True, prompt_slots=12)
    mode = plan.mode
    expected = engine.decode(REQUEST, 5, mode=mode).beams
    engine.capture_decodes(8, 12, 5, plans=[plan])
    found = engine.decode(REQUEST, 5, mode=mode).beams
    assert engine.decodes[plan].statistics().replays == 1
    assert torch.equal(found.rows, expected.rows)
    torch.testing.assert_close(found.scores, expected.scores, atol=1e-5, rtol=0)
    assert found.certificates == ["approximate"] * 5


def test_without_the_option_nothing_changes():
    """No second model, no copy, and the bits of a forward that never heard of it."""
    plain = TreeModel(MODEL, own_forward=True)
    assert plain.exact is None
    products = [p for layer in plain._own._layers
                for p in (layer.merged, layer.out, layer.gate_up, layer.down)]  # fmt: skip
    storages = {w.untyped_storage().data_ptr() for w in MODEL.parameters()}
    assert all(p.weight.untyped_storage().data_ptr() in storages for p in products)
    before = beam_search(plain, REQUEST, TRIE, 6)
    low = TreeModel(MODEL, weights="float8")
    assert isinstance(low._own._layers[0].down, Float8Linear)
    after = beam_search(plain, REQUEST, TRIE, 6)
    assert torch.equal(before.scores, after.scores)
    assert torch.equal(before.rows, after.rows)
    assert after.certificates == before.certificates != ["approximate"] * 5
    assert Engine(plain, TRIE).decode(REQUEST, 6).beams.scores.equal(before.scores)


def test_a_copy_follows_no_change_of_the_weights():
    model = tiny_model("llama")
    low = TreeModel(model, weights="bfloat16")
    assert isinstance(low._own._layers[0].out, Bfloat16Linear)
    before = beam_search(low, REQUEST, TRIE, 6).scores
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 2
    assert torch.equal(beam_search(low, REQUEST, TRIE, 6).scores, before)


def test_requests_without_finite_scores_are_named(monkeypatch):
    low = TreeModel(MODEL, weights="int8")
    broken = tiny_model("llama-gqa")
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    low.exact = TreeModel(broken)
    with pytest.raises(NonFiniteError):
        Engine(low, TRIE).decode(REQUEST, 4)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("kind", "kernel", "made"),
    [
        ("float8", "quantize_rows", "cvt.rn.satfinite.e4m3x2"),
        ("int8", "multiply_codes", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"),
    ],
)
def test_a_product_has_one_kernel_of_its_own(kind, kernel, made, tmp_path, monkeypatch):
    """Four a layer, and each compiles to the machine code of GPUs with float8."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from recsys.models import layer_kernels, llama

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(llama, "find_kernels", lambda *_: layer_kernels)
    found = []
    monkeypatch.setattr(layer_kernels, "launch", lambda *a, **k: found.append((a, k)))
    with torch.device("meta"):
        model = tiny_model("llama-gqa", dtype=torch.bfloat16, hidden=64, layers=3)
    run_on_meta(TreeModel(model, weights=kind))
    launched = [(a, k) for a, k in found if a[0] is getattr(layer_kernels, kernel)]
    assert len(launched) == 4 * 3
    (compiled_kernel, _, *arguments), constants = launched[0]
    warps = constants.pop("num_warps")
    kinds = [triton.runtime.jit.mangle_type(argument) for argument in arguments]
    names = compiled_kernel.arg_names
    signature = dict(zip(names, [*kinds, *["constexpr"] * len(constants)], strict=True))
    for capability in (89, 90):
        compiled = triton.compile(
            ASTSource(compiled_kernel, signature, constexprs=constants),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": warps},
        )
        assert len(compiled.asm["cubin"]) > 1000
        assert made in compiled.asm["ptx"] or capability == 90
