"""The file of results of the GPU benchmarks: lines of JSON, written as they are measured."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Rows:
    """Lines of JSON that are added to a file: each is on disk at once, whatever ends the run."""

    def __init__(self, path: Path) -> None:
        """Append to a file.

        Raises:
            SystemExit: it cannot be written.
        """
        self._path = path
        try:
            path.open("a", encoding="utf-8").close()
        except OSError as error:
            reason = f"--out {path}: {error.strerror}; name a file that can be written"
            raise SystemExit(reason) from error

    def add(self, **row: Any) -> None:
        """Write a line, and show it."""
        line = json.dumps(row, default=str)
        with self._path.open("a+b") as out:
            size = out.seek(0, os.SEEK_END)
            out.seek(max(0, size - 1))
            begin = b"" if out.read() in (b"", b"\n") else b"\n"  # a line that was cut off
            out.write(begin + line.encode() + b"\n")
        print(line if len(line) < 400 else line[:400] + " ...", flush=True)
