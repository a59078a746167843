"""The Triton kernels of a level: in the interpreter, and compiled for a GPU that is not here."""

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from launches import machine_code

from recsys.constraint import ItemTrie
from recsys.constraint.mask import RowMask
from recsys.constraint.restrictions import Allowed, Excluded
from recsys.constraint.transitions import DeviceTrie
from recsys.decoding.expand import Frontier, Step, TokenLogits
from recsys.kernels import find_kernels
from recsys.transfers import Upload

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
KERNELS = ("recsys.decoding.level_kernel", "recsys.models.layer_kernels")


def test_kernels_equal_the_tensor_code_in_the_interpreter():
    """Those of a level and those of a layer, in one process."""
    files = (str(HERE / f"{name}_interpreted.py") for name in ("level_kernel", "layer_kernels"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_kernels_compile_for_a_gpu(masked, tmp_path, monkeypatch):
    """To the machine code of an H100, with the arguments of a level."""
    from recsys.decoding import level_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launched = []
    monkeypatch.setattr(
        level_kernel,
        "launch",
        lambda kernel, grid, *arguments, **constants: launched.append(
            (kernel, arguments, constants)
        ),
    )
    host = ItemTrie.build(np.stack(np.divmod(np.arange(300 * 16), 16), axis=1))
    trie, upload, allowed = DeviceTrie.of(host), Upload("cpu"), None
    if masked:
        allowed = Allowed.of(host, upload, [RowMask.of(host, np.arange(host.num_items) > 9)])
    upload.send()
    states = torch.arange(1, 301)[None]
    sums = torch.zeros(1, 300)
    frontier = Frontier(states, sums, states, states, sums, sums[:, :1])
    logits = TokenLogits(torch.zeros(1, 300, 300), level_kernel.log_sum_exp(torch.zeros(1, 300, 9)))
    for depth, beams in ((0, Frontier.root(1, torch.float32, sums.device)), (1, frontier)):
        parts = (beams.states, beams.log_probs, beams.rest)
        level_kernel.expand_level(trie, depth, 20, parts, logits, None, allowed)
    assert len(launched) == 5
    for kernel, arguments, constants in launched:
        assert len(machine_code(kernel, arguments, constants)) > 1000


def test_on_a_cpu_no_kernel_is_used(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    find_kernels.cache_clear()
    for module in KERNELS:
        assert find_kernels(module, torch.device("cpu")) is None


@pytest.mark.parametrize("module", KERNELS)
def test_a_machine_without_a_compiler_uses_the_tensor_code(module, monkeypatch):
    """Found with the first launch; here because the driver of a GPU is not found either."""
    import_module(module)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # after the import, so triton compiles
    find_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match=f"triton cannot compile {module}; torch takes more"):
            assert find_kernels(module, torch.device("cpu")) is None
    finally:
        find_kernels.cache_clear()


class TensorStep(Step):
    """A step without kernels."""

    def _kernels(self, frontier, logits, depth):
        return None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("batch", "width"), [(1, 20), (32, 20), (8, 256)])
@torch.inference_mode()
def test_kernels_on_a_gpu_have_the_bits_of_the_tensor_code(batch, width):
    """At each depth, called and replayed from a CUDA graph, on random logits and on ties."""
    rng, device = np.random.default_rng(0), torch.device("cuda")
    assert find_kernels(KERNELS[0], device) is not None
    codes = rng.integers(0, 256, (12_000, 4)) + 256 * np.arange(4)
    host, upload = ItemTrie.build(codes), Upload(device)
    rows = [rng.integers(0, host.num_rows, 50) for _ in range(batch)]
    trie, excluded = DeviceTrie.of(host, device), Excluded.of(host, upload, rows)
    upload.send()
    steps = Step(trie, excluded), TensorStep(trie, excluded)
    for depth in range(4):
        first, last = host.depth_start[depth : depth + 2]
        beams = min(width, last - first)
        chosen = [rng.permutation(last - first)[:beams] + first for _ in range(batch)]
        states = torch.from_numpy(np.sort(np.stack(chosen))).to(device)
        sums = -torch.rand(states.shape, device=device)
        frontier = Frontier(states, sums, states, states, sums, sums[:, :1] - 30)
        random = torch.randn((*states.shape, 33_024), device=device)
        given = [TokenLogits.of(values, trie) for values in (random, random.mul(2).round())]
        expected = [steps[1].expand(frontier, logits, depth, width) for logits in given]
        for logits, found in zip(given, expected, strict=True):
            assert_same_bits(steps[0].expand(frontier, logits, depth, width), found)
        fixed, graph = TokenLogits(*(part.clone() for part in given[0])), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            captured = steps[0].expand(frontier, fixed, depth, width)
        for logits, found in zip(given, expected, strict=True):
            for part, new in zip(fixed, logits, strict=True):
                part.copy_(new)
            graph.replay()
            assert_same_bits(captured, found)


def assert_same_bits(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)
