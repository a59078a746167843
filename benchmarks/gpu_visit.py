"""Everything that is worth measuring on a GPU, in eight minutes at most.

    python benchmarks/gpu_visit.py --wheels wheels --out visit.jsonl

For a bare machine with torch, transformers and triton. `--wheels` is a folder of wheels, this
project's own among them (docs/gpu.md), which are installed offline into a temporary folder. Each
part is a process with a time limit, and ends when that is over or the whole time is spent; a part
that fails costs the others nothing. Rows are added to `--out` as they are measured, as lines
of JSON: those of a part, then one of the kind `part` that says how it ended, with the end of its
output. The limits of the parts add up to more than the whole: they stop a part that hangs, and
parts usually end sooner; the last ones are left out if the time is spent. `--quick` runs toy sizes,
on a CPU too. The status is 1 if a part failed or was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
SECONDS = 480.0  # of all parts
LEAST = 5.0  # seconds that a part is worth starting for
TAIL = 4000  # characters, room for the document of `serve.py`
GPU_TESTS = [
    f"tests/recsys/test_{name}.py"
    for name in ("graphs", "captured", "captured_drafts", "level_kernel")
]
WAYS = ("graphs", "decode-graph", "draft", "draft-graph")
TOY = ("--model", "tiny", "--quick", "--cases", "cold:1", "--beams", "5", "--history", "6",
       "--items", "300", "--rounds", "2")  # fmt: skip
SHOP = (
    "data.synthetic.users=60", "data.synthetic.items=240", "sasrec.epochs=1", "sasrec.min_steps=0",
    "target.epochs=1", "draft.epochs=1", "draft.objective=sft",
)  # fmt: skip


class Part(NamedTuple):
    """A process that adds rows: its time limit, and arguments of Python."""

    name: str
    seconds: float
    command: Sequence[str]


def add_row(out: Path, **row: Any) -> None:
    """Add a line of JSON to a file, and show it: it is on disk at once, whatever ends the run."""
    line = json.dumps(row, default=str)
    with out.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    print(line if len(line) < 400 else line[:400] + " ...", flush=True)


def list_parts(out: Path, home: Path, wheels: Path | None, *, quick: bool) -> list[Part]:
    """All parts, the most important ones first."""

    def gpu(name: str, seconds: int, *options: str) -> Part:
        command = [str(HERE / "gpu.py"), *options, *(TOY if quick else ()), "--out", str(out)]
        return Part(name, seconds, command)

    cases = ("--cases", "cold:1", "kept:1", "cold:32", "kept:32", "--ways", *WAYS, "--rounds", "10")
    beams = ("--cases", "cold:1", "--ways", *WAYS[:2], "--rounds", "10")
    both = ("--history", "50", "250")
    tests = ["-q", "-p", "no:cacheprovider", "-m", "gpu", *GPU_TESTS]
    settings = [option for setting in SHOP for option in ("--set", setting)] if quick else []
    serve = ["--bundle", str(home / "bundles/demo"), "--concurrency", "1", "32", "--settings"]
    serve += ["rate_limit=null", *([] if quick else ["device=cuda", "capture=decodes"])]
    parts = [
        Part("tests", 60, ["-m", "pytest", *tests]),
        gpu("float32", 40, "--quick", "--float32", "--cases", "cold:1", "kept:3"),  # all ways
        gpu("1.1B", 70, "--model", "1.1B", *cases),
        gpu("7B", 110, "--model", "7B", *cases),
        Part("quickstart", 90, ["-m", "recsys", "quickstart", "--name", "demo", *settings]),
        Part("service", 90, [str(HERE / "serve.py"), *serve, *(["--quick"] if quick else [])]),
        gpu("1.1B, wide", 70, "--model", "1.1B", "--beams", "20", "256", *both, *beams),
        gpu("10 million items", 70, "--model", "1.1B", "--items", "10000000", *beams),
        gpu("7B, wide", 80, "--model", "7B", "--beams", "256", *both, *beams),
    ]
    if wheels is None:
        return parts
    # They go into a folder of their own, so what the machine has stays as it is.
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(home / "site")]
    files = [str(file) for file in sorted(wheels.resolve().glob("*.whl"))]
    return [Part("install", 60, [*pip, *files]), *parts]


def visit(parts: Sequence[Part], out: Path, seconds: float, environment: Mapping[str, str]) -> int:
    """Run parts one after the other, for so many seconds; the number of those that failed."""
    end, failures = time.monotonic() + seconds, 0
    for part in parts:
        left = end - time.monotonic()
        row = {"status": "skipped", "reason": "the time of the visit is spent"}
        if left >= LEAST:
            row = run(part, min(part.seconds, left), environment)
        add_row(out, kind="part", part=part.name, **row)
        failures += row["status"] != "ended"
    return failures


def run(part: Part, limit: float, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run a part to its end or limit: how it ended."""
    start, code = time.monotonic(), None
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, *part.command], cwd=HERE.parent, env=environment,
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the part has started
            process.wait()
        log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
        tail = log.read().decode(errors="replace")
    status = "stopped" if code is None else "failed" if code else "ended"
    seconds = round(time.monotonic() - start, 1)
    return {"status": status, "seconds": seconds, "limit": limit, "code": code, "tail": tail}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    if args.wheels and not any(args.wheels.glob("*.whl")):
        raise SystemExit(f"--wheels {args.wheels}: no wheels; docs/gpu.md says how to get them")
    out = args.out.resolve()
    with tempfile.TemporaryDirectory(prefix="recsys-visit-") as home:
        # The folder of the parts is the checkout, whose packages are not those of a wheel.
        folders = [f"{home}/site", str(HERE), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, folders))
        own = {"RECSYS_HOME": home, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
        parts = list_parts(out, Path(home), args.wheels, quick=args.quick)
        failures = visit(parts, out, SECONDS, {**os.environ, **own})
    if failures:
        raise SystemExit(f"{failures} parts failed, or were stopped or left out")


if __name__ == "__main__":
    main()
