"""Copies between host and device: one each way a decode, counted, and never read too early."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
import transformers
from decodes import DRAFT, MASKS, PROMPTS, REQUESTS, ROWS, SEARCHES, TARGET, TRIE, K, assert_same
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import Counting
from oracles import tiny_model

from recsys import transfers
from recsys.decoding import (
    ModelDrafter,
    Search,
    SearchRequest,
    expand,
)
from recsys.decoding.captured import DecodeGraphs
from recsys.decoding.captured_drafts import DraftGraphs
from recsys.decoding.captured_inputs import DecodeShape
from recsys.models.graphs import PassGraphs, PassShape, list_sizes
from recsys.models.tree_forward import TreeModel
from recsys.transfers import FixedInputs, Upload, download

POISON = 0x5A


@pytest.fixture
def as_on_a_device(monkeypatch):
    """Everything is copied as to a device, and holds other values before its copy is made."""
    add = Upload.add

    def added(upload, array):
        tensor = add(upload, array)
        upload._there[upload._sent :] = POISON
        return tensor

    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)
    monkeypatch.setattr(Upload, "add", added)


@pytest.mark.parametrize("request_", [n for n in REQUESTS if n != "sampled"])
@pytest.mark.parametrize("search", [n for n in SEARCHES if n != "relaxed"])
def test_packed_copies_change_no_answer(request, search, request_):
    models = [TreeModel(TARGET), TreeModel(DRAFT)]
    expected = SEARCHES[search](*models, REQUESTS[request_])
    request.getfixturevalue("as_on_a_device")
    for kept in (False, True, True):
        if kept and models[0].prefixes is None:
            for model in models:
                model.keep_prefixes(1 << 20)
        found = SEARCHES[search](*models, REQUESTS[request_])
        if not kept:
            assert_same(found, expected)
            assert found.stats == expected.stats
        torch.testing.assert_close(found.scores, expected.scores, atol=1e-10, rtol=0)
        assert torch.equal(found.rows, expected.rows)


@given(st.lists(st.tuples(st.integers(0, 70), st.booleans(), st.booleans()), max_size=12))
@settings(max_examples=100, deadline=None)
def test_arrays_arrive_as_they_were(parts):
    """Of any size, sent at once or in between, and larger than a copy has room for."""
    rng, added = np.random.default_rng(0), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfers, "shares_memory", lambda device: False)
        patch.setattr(transfers, "ROOM", 256)
        upload = Upload("cpu")
        for size, flags, send in parts:
            array = rng.integers(-(2**62), 2**62, (size, 2))
            array = array > 0 if flags else array
            added.append((array, upload.add(array)))
            if send:
                upload.send()
        upload.send()
    for array, tensor in added:
        assert tensor.shape == array.shape
        assert np.array_equal(tensor.numpy(), array)


def test_fixed_inputs_keep_their_addresses_and_refuse_other_arrays():
    like = {"a": np.arange(3), "b": np.array([[True, False, True]]), "c": np.zeros((2, 0), int)}
    memory = torch.empty(FixedInputs.size(like) + 8, dtype=torch.uint8)
    inputs = FixedInputs(like, memory)
    addresses = [inputs[name].data_ptr() for name in like]
    for values in (like, {name: array[::-1].copy() for name, array in like.items()}):
        memory.fill_(POISON)
        inputs.send(values)
        assert all(np.array_equal(inputs[name].numpy(), values[name]) for name in like)
        assert memory[-8:].tolist() == [POISON] * 8
    assert [inputs[name].data_ptr() for name in like] == addresses
    for wrong in ({"a": np.arange(4)}, {"b": np.zeros((1, 3), int)}, {"d": np.arange(3)}):
        with pytest.raises(ValueError, match="want"):
            inputs.send(like | wrong)


def test_arrays_on_their_way_are_found_by_their_tensors(request):
    for fixture in (None, "as_on_a_device"):
        if fixture:
            request.getfixturevalue(fixture)
        upload, arrays = Upload("cpu"), [np.arange(3), np.arange(3), np.array([True])]
        tensors = [upload.add(array) for array in arrays]
        found = [upload.host(tensor) for tensor in tensors]
        assert all(mine is theirs for mine, theirs in zip(found, arrays, strict=True))
        with pytest.raises(KeyError, match="not added"):
            upload.host(tensors[0].clone())


def test_a_download_keeps_values_types_and_shapes(monkeypatch):
    monkeypatch.setattr(transfers, "shares_memory", lambda device: False)
    tensors = [
        torch.tensor([[0.1, -torch.inf], [torch.nan, 3e-41]]),
        torch.tensor([2**53 - 1, -1]),
        torch.tensor([[True], [False]]),
        torch.rand(2, 3, 2, dtype=torch.float64),
        torch.zeros(2, 0),
    ]
    for found, given_ in zip(download(tensors), tensors, strict=True):
        assert found.dtype == given_.dtype
        assert torch.equal(found.nan_to_num(7.0), given_.nan_to_num(7.0))
    assert download([]) == []


def on_meta():
    """A model without values on captured passes that compute nothing."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(tiny_model("llama").config)
    ready = TreeModel(model.eval())
    graphs = PassGraphs.attach(ready, batch=8, slots=640, capture=lambda run: lambda: None)
    sizes = list_sizes(256)
    graphs.warm_up([PassShape(b, n, 640, n) for b in (1, 2, 4, 8) for n in sizes])
    return ready, graphs


def finished(like):
    """What a device would tell a search: all requests are done, and everything is finite."""
    values = torch.ones(like.shape, dtype=torch.float64)
    if like.dim() == 2 and like.shape[1] > 5:
        done = torch.tensor([4.0, 3, 0, 1])  # level, accepted, missing, finite
        values[:, 1:5], values[:, 0] = done, torch.arange(len(values))
    return values.to(like.dtype)


# (search, request, kept) -> most uploads and launches; launches of passes themselves are one each
BUDGETS = {
    ("beam", "plain", False): (1, 420),
    ("beam", "excluded", True): (1, 460),
    ("beam", "all", True): (1, 620),
    ("exhaustive", "excluded", True): (2, 660),
    ("draft", "excluded", True): (3, 900),
}


@pytest.mark.parametrize(
    ("search", "request_", "kept"), BUDGETS, ids=[f"{s}-{r}-{k}" for s, r, k in BUDGETS]
)
def test_a_decode_copies_once_each_way(search, request_, kept):
    """Stored prompts are all known here; new blocks take one more copy, which nothing waits for."""
    (target, graphs), (draft, _) = on_meta(), on_meta()
    if kept:
        target.keep_prefixes(1 << 20)
        draft.keep_prefixes(1 << 20)
    uploads, launches = BUDGETS[search, request_, kept]
    drafter = ModelDrafter(draft, 32)
    values = finished if search != "beam" else None
    for _ in range(2):  # the first decode also copies the catalog and stores the prompts
        with Counting(values) as counts:
            SEARCHES[search](target, drafter, REQUESTS[request_])
    assert not graphs.statistics().fallbacks
    assert counts.uploads <= uploads
    assert counts.downloads <= 1
    assert counts.launches <= launches, counts.names.most_common(12)


# (request, kept) -> most operations around the one graph of a captured decode
CAPTURED = {
    ("plain", False): 0,
    ("plain", True): 1,
    ("excluded", True): 1,
    ("masked", True): 2,
}


@pytest.mark.parametrize(("request_", "kept"), CAPTURED, ids=[f"{r}-{k}" for r, k in CAPTURED])
@pytest.mark.parametrize("search", ["beam", "draft"])
def test_a_captured_decode_is_one_upload_one_graph_and_one_download(search, request_, kept):
    (target, graphs), (draft, drafting) = on_meta(), on_meta()
    if kept:
        target.keep_prefixes(1 << 20)
        draft.keep_prefixes(1 << 20)
    launched = []
    graphs.capture = lambda run: run() or (lambda: launched.append(run))
    if search == "draft":
        drafter = ModelDrafter(draft, 32)
        decodes = DraftGraphs(graphs, drafting, drafter, TRIE, prompt=32, num_beams=K)
    else:
        decodes = DecodeGraphs(graphs, TRIE, prompt=32, num_beams=K)
    extra = (9, 40) if request_ == "masked" else (0, 0)
    decodes.warm_up([DecodeShape(8, 32, reads, *extra) for reads in {False, kept}])
    request = REQUESTS.get(request_, SearchRequest(PROMPTS, masks=MASKS, candidates=ROWS))
    for _ in range(3):  # the first ones also copy the masks and store the prompts
        launched.clear()
        with Counting(finished if search == "draft" else None) as counts:
            assert decodes.run(Search.of(request, target, TRIE), K) is not None
    assert not decodes.statistics().fallbacks
    assert not decodes.statistics().patched
    assert (counts.uploads, len(launched), counts.downloads) == (1, 1, 1)
    assert counts.launches <= CAPTURED[request_, kept], counts.names


def test_a_draft_that_is_not_accepted_costs_its_patch_pass_alone():
    """In place of the passes of a second decode; the captured pass counts as one launch."""
    (target, graphs), (draft, drafting) = on_meta(), on_meta()
    launched = []
    graphs.capture = lambda run: run() or (lambda: launched.append(run))
    drafter = ModelDrafter(draft, 32)
    decodes = DraftGraphs(graphs, drafting, drafter, TRIE, prompt=32, num_beams=K)
    decodes.warm_up([DecodeShape(8, 32)])

    def run_in_passes(search, num_beams):
        return SEARCHES["draft"](target, drafter, search)

    for way in (decodes.run, decodes.run, run_in_passes):
        launched.clear()
        downloaded = []

        def rejected_once(like, downloaded=downloaded):
            values = finished(like)
            if values.dim() == 2 and not downloaded:
                values[:, 1:4] = torch.tensor([2.0, 1, 3])  # level, accepted, missing
            downloaded.append(values)
            return values

        passes = graphs.statistics().replays
        with Counting(rejected_once) as counts:
            found = way(Search.of(REQUESTS["excluded"], target, TRIE), K)
        assert {(s.accepted_levels, s.target_passes) for s in found.stats} == {(3, 2)}
        if way == decodes.run:
            assert (counts.uploads, len(launched), counts.downloads) == (1, 1, 2)
            assert graphs.statistics().replays == passes + 1
            assert counts.launches <= 510, counts.names.most_common(12)
            one_graph = counts.launches
    assert counts.launches - one_graph >= 700
    assert (decodes.statistics().replays, decodes.statistics().patched) == (2, 2)


# most launches with the kernels of a level, which are one each
KERNEL_BUDGETS = {
    ("beam", "plain", False): 200,
    ("beam", "excluded", True): 210,
    ("exhaustive", "excluded", True): 260,
    ("draft", "excluded", True): 455,
}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("search", "request_", "kept"),
    KERNEL_BUDGETS,
    ids=[f"{s}-{r}-{k}" for s, r, k in KERNEL_BUDGETS],
)
def test_kernels_take_the_place_of_many_launches(search, request_, kept, monkeypatch):
    from recsys.decoding import level_kernel

    launched = []
    monkeypatch.setattr(expand, "find_kernels", lambda *_: level_kernel)
    monkeypatch.setattr(level_kernel, "launch", lambda kernel, *a, **k: launched.append(kernel))
    (target, _), (draft, _) = on_meta(), on_meta()
    if kept:
        target.keep_prefixes(1 << 20)
        draft.keep_prefixes(1 << 20)
    for _ in range(2):
        launched.clear()
        with Counting(finished if search != "beam" else None) as counts:
            SEARCHES[search](target, ModelDrafter(draft, 32), REQUESTS[request_])
    levels = launched.count(level_kernel.choose_best)
    assert levels == launched.count(level_kernel.score_children) >= TRIE.num_levels
    assert len(launched) <= 3 * levels
    most = KERNEL_BUDGETS[search, request_, kept]
    assert counts.launches + len(launched) <= most, counts.names.most_common(12)
