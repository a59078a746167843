"""A server process to measure: started, watched through /proc, stopped."""

from __future__ import annotations

import asyncio
import os
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
from urllib.parse import urlsplit

from recsys.errors import ConfigError, RecsysError

START_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Usage:
    """What a process holds, and the CPU seconds it has used."""

    rss_bytes: int
    open_files: int
    threads: int
    cpu_s: float


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        host: that it listens on.
        port: of TCP.
        process: None for one that was there before.
        start_s: seconds from its start until it was ready; 0 for one that was there before.
    """

    host: str
    port: int
    process: subprocess.Popen[bytes] | None = None
    start_s: float = 0.0

    @classmethod
    def at(cls, url: str) -> Server:
        """One that was there before.

        Raises:
            ConfigError: `url` is not http://HOST:PORT.
        """
        where = urlsplit(url)
        if where.scheme != "http" or where.hostname is None:
            raise ConfigError(f"--url {url}: expected http://HOST:PORT")
        return cls(where.hostname, where.port or 80)

    def usage(self) -> Usage | None:
        """Of the process; None for one that we did not start."""
        if self.process is None:
            return None
        place = Path("/proc", str(self.process.pid))
        fields = (place / "stat").read_text().rpartition(")")[2].split()
        return Usage(
            rss_bytes=int((place / "statm").read_text().split()[1]) * PAGE,
            open_files=len(list((place / "fd").iterdir())),
            threads=int(fields[17]),
            cpu_s=(int(fields[11]) + int(fields[12])) / TICKS,
        )


@asynccontextmanager
async def started(bundle: Path, settings: Sequence[str] = ()) -> AsyncIterator[Server]:
    """A server of `bundle` on a free port, with a store of its own that is thrown away.

    Args:
        bundle: what it serves.
        settings: `key=value` of the section `serve`.

    Raises:
        RecsysError: it ended, or took too long, before it was ready; with what it said.
    """
    with tempfile.TemporaryDirectory(prefix="recsys-load-") as folder:
        told = Path(folder, "stderr")
        ours = (f"store={Path(folder, 'histories.db')}", "histories=null", "keys=null")
        command = [
            *(sys.executable, "-c", "from recsys.cli import main; main()", "serve"),
            *("--bundle", str(bundle), "--port", "0"),
            *(part for key in (*ours, *settings) for part in ("--set", f"serve.{key}")),
        ]
        start = time.perf_counter()
        with told.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr)  # noqa: S603
        try:
            pattern = re.compile(r"answers at http://\[?([^\]\s]+?)\]?:(\d+), try")
            while True:
                text = told.read_text(encoding="utf-8")
                if found := pattern.search(re.sub(r"\s+", " ", text)):
                    break
                if process.poll() is not None or time.perf_counter() - start > START_S:
                    raise RecsysError(f"the server did not start: {text.strip()}")
                await asyncio.sleep(0.002)
            yield Server(found[1], int(found[2]), process, time.perf_counter() - start)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
