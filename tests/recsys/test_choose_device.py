"""Device `auto`: the faster one of two measured times, and the CPU without a GPU."""

import logging
import math

import pytest
import torch

from recsys import devices
from recsys.devices import choose_device, is_large


def never(device):
    pytest.fail(f"{device} is measured")


def test_without_a_gpu_it_is_the_cpu_and_nothing_is_measured(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for large in (False, True):
        assert choose_device("auto", "work", never, large=large) == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda:1", "meta"])
def test_a_device_that_is_named_is_not_measured(claimed_gpu, device):
    with claimed_gpu():
        assert choose_device(device, "work", never, large=False) == device


@pytest.mark.parametrize(
    ("cpu_s", "gpu_s", "chosen"), [(0.0023, 0.00505, "cpu"), (0.9, 0.009, "cuda"), (1, 1, "cpu")]
)
def test_the_faster_one_is_taken_and_the_times_are_logged(
    claimed_gpu, caplog, cpu_s, gpu_s, chosen
):
    with claimed_gpu(), caplog.at_level(logging.INFO, "recsys.devices"):
        measure = {"cpu": cpu_s, "cuda": gpu_s}.__getitem__
        shown = []
        found = choose_device("auto", "work", measure, large=False, show=shown.append)
    assert found == chosen
    assert shown == [f"{1000 * cpu_s:.1f} ms on cpu, {1000 * gpu_s:.1f} ms on cuda"]
    (line,) = caplog.records
    assert vars(line)["fields"] == {
        "work": "work", "large": False, "device": chosen,
        "cpu_ms": 1000 * cpu_s, "cuda_ms": 1000 * gpu_s,
    }  # fmt: skip


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: no kernel image"), torch.OutOfMemoryError("out of memory")]
)
def test_a_gpu_that_raises_is_not_taken_and_a_warning_names_the_error(claimed_gpu, caplog, error):
    def measure(device):
        if device == "cuda":
            raise error
        return 0.003

    with claimed_gpu(), caplog.at_level(logging.INFO, "recsys.devices"):
        assert choose_device("auto", "work", measure, large=False) == "cpu"
    (line,) = caplog.records
    assert line.levelname == "WARNING"
    for text in (f"{type(error).__name__}: {error}", "device=cuda", "device=cpu"):
        assert text in line.getMessage()


def test_large_weights_are_not_measured(tmp_path, claimed_gpu, monkeypatch, caplog):
    monkeypatch.setattr(devices, "LARGE_BYTES", 1000)
    for size in (999, 1000):
        (tmp_path / "model.safetensors").write_bytes(bytes(size))
        assert is_large(tmp_path) == (size == 1000)
    with claimed_gpu(), caplog.at_level(logging.INFO, "recsys.devices"):
        assert choose_device("auto", "work", never, large=True) == "cuda"
    assert len(caplog.records) == 1


def test_a_large_model_does_not_take_a_gpu_that_cannot_be_used(claimed_gpu, monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")

    with claimed_gpu(), caplog.at_level(logging.INFO, "recsys.devices"):
        monkeypatch.setattr(torch, "zeros", refuse)
        assert choose_device("auto", "work", never, large=True) == "cpu"
    assert "busy or unavailable" in caplog.text


@pytest.mark.parametrize(
    ("times", "limit_s", "typical"),
    [
        ([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0], math.inf, 4.0),
        ([9.0, 4.0, 0.5, 0.6, 0.7, 0.8], 2, 0.65),  # a GPU's first step
        ([3.0, 3.1, 3.2], 2, 3.2),
    ],
)
def test_a_typical_time_is_the_median_of_warm_runs(monkeypatch, times, limit_s, typical):
    clock = [0.0]
    monkeypatch.setattr("recsys.devices.time.perf_counter", lambda: clock[0])

    def run():
        clock[0] += times.pop(0)

    assert devices.typical_seconds(run, limit_s) == pytest.approx(typical)
    assert not times
