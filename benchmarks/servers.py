"""Starts `recsys serve` as a process, and reads what the process uses."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from recsys.errors import RecsysError

START_S = 300.0
ADDRESS = re.compile(r"answers at http://\[?([^\]\s]+?)\]?:(\d+), try")


@dataclass(frozen=True)
class Usage:
    """The memory that a process holds, and the processor seconds that it has used."""

    rss_bytes: int
    cpu_s: float


@dataclass(frozen=True)
class Server:
    """A server that answers; `process` is None for one that we did not start."""

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Its address, without a path."""
        return f"http://{self.host}:{self.port}"

    def usage(self) -> Usage | None:
        """Usage of the process; None for a server that we did not start."""
        if self.process is None:
            return None
        process = psutil.Process(self.process.pid)
        times = process.cpu_times()
        return Usage(process.memory_info().rss, times.user + times.system)


@asynccontextmanager
async def start_server(bundle: Path, settings: Sequence[str] = ()) -> AsyncIterator[Server]:
    """Start a server on a free port, with a store of its own that is deleted afterwards.

    `settings` are `key=value` of the section `serve`.

    Raises:
        RecsysError: it ended, or took too long, before it was ready; with its error output.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-load-") as folder:
        log = Path(folder, "stderr")
        own = (f"store={Path(folder, 'histories.db')}", "histories=null", "keys=null")
        command = [
            *(sys.executable, "-m", "recsys", "serve", "--bundle", str(bundle), "--port", "0"),
            *(part for key in (*own, *settings) for part in ("--set", f"serve.{key}")),
        ]
        end = time.monotonic() + START_S
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)
        try:
            while True:
                text = re.sub(r"\s+", " ", log.read_text(encoding="utf-8"))
                if found := ADDRESS.search(text):
                    break
                if process.poll() is not None or time.monotonic() > end:
                    raise RecsysError(f"the server did not start: {text.strip()}")
                await asyncio.sleep(0.05)
            yield Server(found[1], int(found[2]), process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
