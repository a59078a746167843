"""The worker: free memory goes back to the kernel."""

import asyncio
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from oracles import PATIENCE_S

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


async def test_memory_is_given_back_though_nothing_is_decoded(monkeypatch: pytest.MonkeyPatch):
    trimmed = threading.Event()
    monkeypatch.setattr(worker, "TRIM_S", 0.0)
    monkeypatch.setattr(worker, "trim_memory", trimmed.set)
    decode = DecodeWorker(ServingSettings(), Metrics())
    decode.trim()
    for _ in range(2):
        assert await asyncio.to_thread(trimmed.wait, PATIENCE_S)
        trimmed.clear()
    decode.close()


@pytest.mark.parametrize("device", ["garbage", "cpux:1"])
async def test_a_device_that_is_not_there_is_named(device: str):
    there = DecodeWorker(ServingSettings(device=device), Metrics())
    with pytest.raises(ConfigError, match=rf"serve\.device '{device}': "):
        await there.load(Path("nowhere"), None)
    there.close()
