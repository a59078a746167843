"""Everything that is worth measuring on a GPU, in eight minutes at most.

    python benchmarks/gpu_visit.py --wheels wheels --out visit.jsonl

For a bare machine with torch, transformers and triton. `--wheels` is a folder of wheels, this
project's own among them, which are installed into a temporary folder without the network. Each part
is a process with a time limit of its own, and ends when that is over or the whole time is spent; a
part that fails costs the others nothing. Rows are added to `--out` as they are measured, as lines
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SECONDS = 480.0  # of all parts
SPARE = 8.0  # seconds before its limit at which a benchmark begins nothing new
LEAST = 5.0  # seconds that a part is worth starting for
TAIL = 1500  # characters
GPU_TESTS = ("test_graphs.py", "test_captured.py", "test_captured_drafts.py")
WAYS = ("graphs", "decode-graph", "draft", "draft-graph")
TOY = ("--model", "toy", "--quick", "--cases", "cold:1", "--ways", "graphs", "--beams", "5",
       "--history", "6", "--items", "300", "--rounds", "2")  # fmt: skip
SHOP = (
    "data.synthetic.users=60", "data.synthetic.items=240", "sasrec.epochs=1", "sasrec.min_steps=0",
    "ids.rqvae.steps=20", "target.epochs=1", "draft.epochs=1",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A process that adds rows.

    Attributes:
        name: in its rows.
        seconds: its time limit.
        command: arguments of Python.
        hidden: whether no GPU is visible to it.
    """

    name: str
    seconds: float
    command: Sequence[str]
    hidden: bool = False


class Visit:
    """Runs parts one after the other and keeps what they say.

    Attributes:
        failures: parts that failed or were stopped so far.
    """

    def __init__(self, out: Path, seconds: float, environment: Mapping[str, str]) -> None:
        """Add rows to a file, for so many seconds from now."""
        self._out, self._environment = out, environment
        self._end = time.monotonic() + seconds
        self.failures = 0

    def run(self, part: Part) -> bool:
        """Run a part to its end or limit; whether it ended well."""
        left = self._end - time.monotonic()
        if left < LEAST:
            return self._add(part, status="skipped", reason="the time of the visit is spent")
        start, limit = time.monotonic(), min(part.seconds, left)
        environment = {**self._environment, **({"CUDA_VISIBLE_DEVICES": ""} if part.hidden else {})}
        with tempfile.TemporaryFile() as log:
            try:
                process = subprocess.Popen(
                    [sys.executable, *part.command], cwd=HERE.parent, env=environment,
                    stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return self._add(part, status="failed", reason=str(error))
            try:
                code: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # and what the part has started
                process.wait()
            log.seek(max(0, log.seek(0, os.SEEK_END) - TAIL))
            tail = log.read().decode(errors="replace")
        status = "stopped" if code is None else "failed" if code else "ended"
        seconds = round(time.monotonic() - start, 1)
        return self._add(part, status=status, seconds=seconds, limit=limit, code=code, tail=tail)

    def _add(self, part: Part, **row: Any) -> bool:
        line = json.dumps({"kind": "part", "part": part.name, **row})
        with self._out.open("a", encoding="utf-8") as out:
            print(line, file=out)
        print(line, flush=True)
        good: bool = row["status"] == "ended"
        self.failures += not good
        return good


def benchmarks(out: Path, *, quick: bool) -> dict[str, Part]:
    """The parts that decode with random weights, and the tests, by name."""

    def gpu(name: str, seconds: float, *options: str) -> Part:
        command = [str(HERE / "gpu.py"), *options, "--budget", str(seconds - SPARE)]
        return Part(name, seconds, [*command, *(TOY if quick else ()), "--out", str(out)])

    cases = ("--cases", "cold:1", "kept:1", "cold:32", "kept:32", "--ways", *WAYS, "--rounds", "10")
    beams = ("--cases", "cold:1", "--ways", *WAYS[:2], "--rounds", "10")
    tests = [f"tests/recsys/{name}" for name in GPU_TESTS]
    many = ("--items", "10000000")
    both = ("--history", "50", "250")
    found = [
        Part("tests", 60, ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", *tests]),
        gpu("1.1B", 70, "--model", "1.1B", *cases),
        gpu("7B", 110, "--model", "7B", *cases),
        gpu("1.1B, wide", 70, "--model", "1.1B", "--beams", "20", "256", *both, *beams),
        gpu("10 million items", 70, "--model", "1.1B", *many, *beams),
        gpu("7B, wide", 80, "--model", "7B", "--beams", "256", *both, *beams),
    ]
    return {part.name: part for part in found}


def install(wheels: Path, site: Path) -> Part:
    """Wheels go into a folder of their own, so what the machine has stays as it is."""
    files = [str(file) for file in sorted(wheels.glob("*.whl"))]
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    return Part("install", 60, [*pip, *files])


def shop(name: str, *, quick: bool, hidden: bool) -> Part:
    """The whole road, of a toy shop if it is to be quick."""
    settings = [option for setting in SHOP for option in ("--set", setting)] if quick else []
    command = ["-m", "recsys", "quickstart", "--name", name, *settings]
    return Part("quickstart without the GPU" if hidden else "quickstart", 90, command, hidden)


def visit(out: Path, seconds: float, wheels: Path | None, *, quick: bool) -> int:
    """Run all parts, the most important ones first; the number of those that failed."""
    with tempfile.TemporaryDirectory(prefix="recsys-visit-") as folder:
        # The folder of the parts is the checkout, whose packages are not those of a wheel.
        environment = {**os.environ, "RECSYS_HOME": folder, "PYTHONSAFEPATH": "1"}
        if wheels is not None:
            known = os.environ.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{folder}/site", known)))
        parts = Visit(out, seconds, environment)
        if wheels is not None:
            parts.run(install(wheels, Path(folder, "site")))
        first, *others = benchmarks(out, quick=quick).values()
        for part in (first, *others[:2]):
            parts.run(part)
        name = "demo"
        if not parts.run(shop(name, quick=quick, hidden=False)):
            name = "demo-cpu"  # the service is measured all the same
            parts.run(shop(name, quick=quick, hidden=True))
        few = ["--requests", "50", "--clients", "4"] if quick else []
        service = [
            str(HERE / "gpu_service.py"),
            f"{folder}/bundles/{name}",
            *few,
            "--out",
            str(out),
        ]
        for part in (Part("service", 60, service), *others[2:]):
            parts.run(part)
        return parts.failures


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit ({SECONDS:g})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    try:
        args.out.open("a", encoding="utf-8").close()
    except OSError as error:
        reason = f"--out {args.out}: {error.strerror}; name a file that can be written"
        raise SystemExit(reason) from error
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # ends the running part, too
    if failures := visit(args.out.resolve(), args.seconds, args.wheels, quick=args.quick):
        raise SystemExit(f"{failures} parts failed, or were stopped or left out")


if __name__ == "__main__":
    main()
