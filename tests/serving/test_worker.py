"""The worker: free memory goes back to the kernel, at most once a minute."""

import asyncio
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recsys.errors import ConfigError
from recsys.serving import worker
from recsys.serving.metrics import Metrics
from recsys.serving.settings import ServingSettings
from recsys.serving.worker import DecodeWorker


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has malloc_trim")
def test_trim_returns_free_pages_between_live_blocks_and_behind_them():
    program = """if True:
        import ctypes, threading
        from recsys.serving.memory import keep_memory, trim_memory
        keep_memory()
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
        resident = lambda: int(open("/proc/self/statm").read().split()[1]) * 4 >> 10
        def work():
            blocks = [ctypes.memset(libc.malloc(64 << 10), 1, 64 << 10) for _ in range(400)]
            libc.free(ctypes.memset(libc.malloc(30 << 20), 1, 30 << 20))
            for block in blocks[::2]:
                libc.free(block)
            freed.wait()
            trimmed.wait()  # the threads of a service stay, too
        freed, trimmed = threading.Barrier(4), threading.Event()
        before = resident()
        for _ in range(3):
            threading.Thread(target=work).start()
        freed.wait()
        trim_memory()
        print(resident() - before)
        trimmed.set()
    """
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert int(done.stdout) < 60  # MB, of 3 x 55, of which 3 x 12.5 are live


def test_memory_is_trimmed_once_a_minute(monkeypatch: pytest.MonkeyPatch):
    clock, trimmed = [1000.0], []
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(worker, "trim_memory", lambda: trimmed.append(clock[0]))
    decode = DecodeWorker(ServingSettings(), Metrics())
    monkeypatch.setattr(decode, "read", lambda function: function())  # a thread reads a later clock
    model: Any = SimpleNamespace(recommend_batch=lambda batch: batch)
    for clock[0] in (1000.0, 1059.0, 1060.5, 1061.0, 1119.0, 1121.0, 1300.0):
        asyncio.run(decode.run(model, []))
    decode.close()
    assert trimmed == [1060.5, 1121.0, 1300.0]


def test_what_a_model_captured_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(worker, "warm_up", lambda recommender: None)
    told = SimpleNamespace(passes=9, decodes=4, seconds=2.345, device_bytes=1000)
    engine = SimpleNamespace(captures=SimpleNamespace(statistics=lambda: told))
    gpu = SimpleNamespace(type="cuda")
    model: Any = SimpleNamespace(engine=engine, device=gpu)
    decode = DecodeWorker(ServingSettings(device="cuda", capture="decodes"), Metrics())
    with caplog.at_level("INFO", "recsys.serving.worker"):
        assert decode._load(Path("bundles/shop"), model) is model
    decode.close()
    (line,) = caplog.records
    assert line.getMessage() == "captured"
    assert vars(line)["fields"] == {
        "bundle": "shop", "passes": 9, "decodes": 4, "seconds": 2.3, "device_bytes": 1000,
    }  # fmt: skip


@pytest.mark.parametrize("device", ["garbage", "cpux:1"])
async def test_a_device_that_is_not_there_is_named(device: str):
    there = DecodeWorker(ServingSettings(device=device), Metrics())
    with pytest.raises(ConfigError, match=rf"serve\.device '{device}': "):
        await there.load(Path("nowhere"), None)
    there.close()
