"""Passes on graphs equal passes without: padding, static buffers, fallbacks. Replays on a CPU."""

import gc
from contextlib import ExitStack
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ARCHITECTURES, RecordedRun, random_catalog, random_prompts, tiny_model

from recsys.constraint import ItemTrie
from recsys.decoding import beam_search
from recsys.decoding.tree import ROOT, PromptBatch, TokenTree
from recsys.models.graphs import CudaCapture, PassGraphs, PassShape
from recsys.models.tree_forward import TreeModel

BATCH, SLOTS = 8, 128
MODELS = {name: tiny_model(name, dtype=torch.float64) for name in ARCHITECTURES}
LLAMA = MODELS["llama-gqa"]
CLOSE = {"atol": 1e-10, "rtol": 1e-8}
# cold, step and patch passes of up to 32 tokens and 80 slots
SHAPES = [PassShape(b, new, 80, new) for b in (1, 2, 4, 8) for new in (8, 16, 32)]


def graphed(model, shapes=SHAPES, *, batch=BATCH, slots=SLOTS, **store):
    """A fresh model on graphs, over the weights of `model`."""
    tree_model = TreeModel(model, **store)
    graphs = PassGraphs.attach(tree_model, batch=batch, slots=slots)
    graphs.warm_up(shapes)
    return tree_model, graphs


GRAPHED = {name: graphed(model) for name, model in MODELS.items()}


def walk(tree, seed, widths):
    """Grow `tree` at random; logits of each pass. The same growth for the same seed."""
    rng = np.random.default_rng(seed)
    passes = [tree.forward()]
    depth = tree.lengths.new_zeros(len(tree.lengths), 0)
    for width in widths:
        drawn = rng.integers(ROOT, tree.nodes, (len(depth), width))
        parents, tokens = (
            torch.from_numpy(values).to(depth.device)
            for values in (drawn, rng.integers(1, 64, drawn.shape))
        )
        below = torch.cat([depth, depth.new_zeros(len(depth), 1)], dim=1)
        new = below.gather(1, torch.where(parents == ROOT, depth.shape[1], parents)) + 1
        tree.add(tokens, parents, new)
        depth = torch.cat([depth, new], dim=1)
        passes.append(tree.forward())
    return passes


def plain_and_graphed(model, on_graphs, prompts, seed, widths):
    both = []
    for tree_model in (TreeModel(model), on_graphs):
        ready = PromptBatch.of(prompts, tree_model)
        with TokenTree(tree_model, ready, sum(widths)) as tree:
            both.append(walk(tree, seed, widths))
    return both


@given(
    seed=st.integers(0, 100_000),
    architecture=st.sampled_from(ARCHITECTURES),
    batch=st.integers(1, BATCH),
    longest=st.integers(1, 32),
    widths=st.lists(st.integers(1, 14), max_size=3),
)
def test_a_pass_on_graphs_gives_the_logits_of_one_without(
    seed, architecture, batch, longest, widths
):
    """Buffers are dirty from the examples before, in every slot and static tensor."""
    on_graphs, graphs = GRAPHED[architecture]
    prompts = random_prompts(np.random.default_rng(seed), batch, longest)
    before = graphs.statistics()
    plain, found = plain_and_graphed(MODELS[architecture], on_graphs, prompts, seed, widths)
    after = graphs.statistics()
    for theirs, ours in zip(plain, found, strict=True):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    assert after.replays == before.replays + 1 + len(widths)
    assert after.fallbacks == before.fallbacks
    assert graphs.pool.lent == 0
    assert (
        graphs.pool.storage.values.isfinite().all()
    )  # a NaN would survive the masks of later decodes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_replay_needs_no_python_and_no_value_of_the_capture(architecture):
    model = TreeModel(MODELS[architecture])
    graphs = PassGraphs.attach(
        model, batch=BATCH, slots=SLOTS, capture=lambda run: RecordedRun(run).replay
    )
    graphs.warm_up([PassShape(b, n, 80, n) for b in (2, 4) for n in (8, 32)])
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prompts = random_prompts(rng, int(rng.integers(1, 5)), 32)
        plain, found = plain_and_graphed(MODELS[architecture], model, prompts, seed, [7, 5])
        for theirs, ours in zip(plain, found, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert graphs.statistics().replays == 18


def test_requests_that_fill_up_a_batch_leave_nothing_behind():
    """Their old masks would see nothing but slots out of view, and store the NaN of no softmax."""
    plain_model = tiny_model("mistral-window", dtype=torch.float64)
    plain_model.set_attn_implementation("eager")  # others give 0 where a row sees nothing
    model, graphs = graphed(plain_model, [PassShape(4, 32, 32, 8)])
    for batch, length in ((4, 32), (3, 3), (4, 3)):
        prompts = [np.arange(length) + b for b in range(batch)]
        plain, found = plain_and_graphed(plain_model, model, prompts, 0, [])
        torch.testing.assert_close(found, plain, **CLOSE)
    assert graphs.statistics().replays == 3


def test_only_one_of_two_interleaved_decodes_uses_the_storage():
    model, graphs = graphed(LLAMA)
    plain = TreeModel(LLAMA)
    rng = np.random.default_rng(0)
    prompts = [random_prompts(rng, 2, 12) for _ in range(2)]
    with ExitStack() as stack:
        first, second, *expected = [
            stack.enter_context(TokenTree(m, PromptBatch.of(p, m), 8))
            for m in (model, plain)
            for p in prompts
        ]
        assert graphs.pool.pinned is first.cache
        for tree in (first, second, *expected):
            tree.add(torch.full((2, 4), 7), torch.full((2, 4), ROOT), 1)
        for _ in range(2):
            for ours, theirs in zip((first, second), expected, strict=True):
                torch.testing.assert_close(ours.forward(), theirs.forward(), **CLOSE)
                for tree in (ours, theirs):
                    tree.add(torch.tensor([[3, 9], [5, 8]]), torch.tensor([[0, 1], [2, 3]]), 2)
    told = graphs.statistics()
    assert (told.replays, told.fallbacks) == (2, {"cache": 2})
    assert graphs.pool.lent == 0


def test_decodes_share_one_address_and_free_it_on_failure():
    model, graphs = graphed(LLAMA)
    address = graphs.pool.storage.values.data_ptr()
    for batch in (1, 5, 8):
        ready = PromptBatch.of(random_prompts(np.random.default_rng(batch), batch, 9), model)
        with pytest.raises(KeyError), TokenTree(model, ready, 30) as tree:  # noqa: PT012
            tree.forward()
            tree.keep(torch.arange(batch)[-1:])
            assert tree.cache.buffer.data_ptr() == address
            raise KeyError
        assert graphs.pool.pinned is None


def test_remaining_requests_move_to_the_front_of_the_storage():
    widths = [6, 5]
    prompts = random_prompts(np.random.default_rng(3), 5, 12)
    answers = []
    for model in (TreeModel(LLAMA), graphed(LLAMA)[0]):
        with TokenTree(model, PromptBatch.of(prompts, model), sum(widths) + 4) as tree:
            walk(tree, 0, widths)
            tree.keep(torch.tensor([1, 4]))
            tree.add(torch.tensor([[3, 9], [5, 8]]), torch.tensor([[0, 10], [2, 8]]), 3)
            answers.append(tree.forward())
    torch.testing.assert_close(answers[1], answers[0], **CLOSE)


def test_what_was_returned_outlives_the_next_pass():
    model, _ = graphed(LLAMA, [PassShape(1, 8, 64, 8)])
    with TokenTree(model, PromptBatch.of([np.arange(1, 6)], model), 8) as tree:
        first = tree.forward()
        kept = first.clone()
        tree.add(torch.tensor([[3]]), torch.tensor([[ROOT]]), 1)
        tree.forward()
    assert torch.equal(first, kept)


def test_passes_without_a_graph_are_counted_and_captured_later():
    model, graphs = graphed(LLAMA, [])
    trie = ItemTrie.build(random_catalog(np.random.default_rng(0), 60, 4))
    prompts = random_prompts(np.random.default_rng(5), 3, 12)
    expected = beam_search(model, prompts, trie, 5)
    assert graphs.statistics().fallbacks == {"shape": 4}
    # a prompt of up to 12 tokens for one row; then 5 beams over 16, 16 and 32 slots
    graphs.warm_up([PassShape(4, 16, 16, 8), PassShape(4, 8, 32, 8)])
    found = beam_search(model, prompts, trie, 5)
    told = graphs.statistics()
    assert (told.graphs, told.replays, told.fallbacks) == (2, 4, {"shape": 4})
    assert torch.equal(found.rows, expected.rows)


def test_the_graph_with_the_least_padding_runs_a_pass():
    model, graphs = graphed(
        LLAMA, [PassShape(8, 64, 64, 8), PassShape(1, 32, 64, 32), PassShape(1, 32, 32, 8)]
    )

    def choice(batch, new, view, rows):
        tokens = torch.zeros((batch, new), dtype=torch.int64)
        wanted = torch.zeros((batch, rows), dtype=torch.int64)
        with graphs.pool.lend(batch, view, 0) as cache:
            found = graphs.find(tokens, cache, view, wanted)
        return found and found.shape

    assert choice(1, 3, 16, 2) == PassShape(1, 32, 32, 8)
    assert choice(1, 3, 48, 2) == choice(1, 3, 16, 9) == PassShape(1, 32, 64, 32)
    assert choice(7, 60, 48, 8) == PassShape(8, 64, 64, 8)
    assert choice(2, 3, 16, 2) is None  # 512 tokens for 6
    assert choice(1, 33, 16, 2) is None
    assert choice(1, 3, 80, 2) is None
    assert model.pool.lent == 0


def test_what_cannot_be_captured_is_refused():
    model, graphs = graphed(LLAMA, [])
    with pytest.raises(ValueError, match="8 requests with 128 slots"):
        graphs.warm_up([PassShape(9, 8, 16, 8)])
    with pytest.raises(ValueError, match="make it larger"):
        graphs.warm_up([PassShape(1, 8, 129, 8)])
    with model.pool.lend(1, 8, 8), pytest.raises(RuntimeError, match="warm up before decoding"):
        graphs.warm_up(SHAPES)
    with pytest.raises(ValueError, match="rope_type 'dynamic'"):
        PassGraphs(TreeModel(dynamic_rope()), batch=1, slots=16)


def dynamic_rope():
    """A model whose positions decide on the host what is computed."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return tiny_model(rope_parameters=rope)


def test_cuda_graphs_are_asked_for_as_torch_has_them():
    """Calls and keyword arguments against torch's own signatures; no GPU is needed."""
    names = ("device", "Stream", "graph_pool_handle", "current_stream", "stream", "CUDAGraph")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(torch.cuda, name, autospec=True))
        waits = ("synchronize", "empty_cache")  # they would stop live traffic
        stops = [stack.enter_context(mock.patch.object(torch.cuda, name)) for name in waits]
        run, graph = mock.Mock(), torch.cuda.CUDAGraph.return_value
        capture = CudaCapture(torch.device("cuda", 0))
        assert capture(run) is graph.replay
        begin = graph.capture_begin.call_args.kwargs
        assert begin["pool"] is torch.cuda.graph_pool_handle.return_value
        assert run.call_count == 4
        run.side_effect = [None, None, None, RuntimeError("broken")]
        with pytest.raises(RuntimeError, match="broken"):
            capture(run)
        assert graph.capture_end.call_count == 2
    assert not any(stop.called for stop in stops)
    assert gc.isenabled()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "architecture",  # a GPU that is only claimed runs the same Python as the tests above
    list(ARCHITECTURES)[: None if torch.cuda.is_available() else 1],
)
def test_cuda_graphs_give_the_logits_of_eager_passes(architecture):
    model = tiny_model(architecture, dtype=torch.float64).cuda()
    on_graphs, graphs = graphed(model)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        prompts = random_prompts(rng, int(rng.integers(1, 9)), 32)
        plain, found = plain_and_graphed(model, on_graphs, prompts, seed, [12, 7])
        for theirs, ours in zip(plain, found, strict=True):
            torch.testing.assert_close(ours, theirs, **CLOSE)
    assert graphs.statistics().replays == 12
