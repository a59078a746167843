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

from gpu_rows import Rows

HERE = Path(__file__).resolve().parent
SECONDS = 480.0  # of all parts
LEAST = 5.0  # seconds that a part is worth starting for
TAIL = 1500  # characters
STOPS = (signal.SIGTERM, signal.SIGHUP)  # the latter as a connection is lost
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
    seconds: int
    command: Sequence[str]
    hidden: bool = False  # no GPU is visible to it
    unless: Path | None = None  # it is not run if this is there


class Visit:
    """Runs parts one after the other and keeps what they say.

    Attributes:
        failures: parts that failed or were stopped so far.
    """

    def __init__(self, rows: Rows, seconds: float, environment: Mapping[str, str]) -> None:
        """Add rows, for so many seconds from now."""
        self._rows, self._environment = rows, environment
        self._end = time.monotonic() + seconds
        self.failures = 0

    def run(self, part: Part) -> bool:
        """Run a part to its end or limit; whether it ended well."""
        left = self._end - time.monotonic()
        if left < LEAST:
            row = {"status": "skipped", "reason": "the time of the visit is spent"}
        else:
            row = self._run(part, min(part.seconds, left))
        self._rows.add(kind="part", part=part.name, **row)
        ended = row["status"] == "ended"
        self.failures += not ended
        return ended

    def _run(self, part: Part, limit: float) -> dict[str, Any]:
        """How a part ended within its limit."""
        start, code = time.monotonic(), None
        environment = {**self._environment, **({"CUDA_VISIBLE_DEVICES": ""} if part.hidden else {})}
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
    shop = ["-m", "recsys", "quickstart", "--name", "demo", *settings]
    bundle = home / "bundles/demo"
    service = [str(HERE / "gpu_service.py"), str(bundle), "--out", str(out)]
    few = ["--requests", "50", "--clients", "4"] if quick else []
    parts = [
        Part("tests", 60, ["-m", "pytest", *tests]),
        gpu("float32", 40, "--quick", "--float32", "--cases", "cold:1", "kept:3"),  # all ways
        gpu("1.1B", 70, "--model", "1.1B", *cases),
        gpu("7B", 110, "--model", "7B", *cases),
        Part("quickstart", 90, shop),
        # The service is measured all the same.
        Part("quickstart without the GPU", 90, shop, hidden=True, unless=bundle),
        Part("service", 60, [*service, *few]),
        gpu("1.1B, wide", 70, "--model", "1.1B", "--beams", "20", "256", *both, *beams),
        gpu("10 million items", 70, "--model", "1.1B", "--items", "10000000", *beams),
        gpu("7B, wide", 80, "--model", "7B", "--beams", "256", *both, *beams),
    ]
    return parts if wheels is None else [install(wheels, home / "site"), *parts]


def install(wheels: Path, site: Path) -> Part:
    """Wheels go into a folder of their own, so what the machine has stays as it is."""
    files = [str(file) for file in sorted(wheels.resolve().glob("*.whl"))]
    pip = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(site)]
    return Part("install", 60, [*pip, *files])


def visit(out: Path, seconds: float, wheels: Path | None, *, quick: bool) -> int:
    """Run all parts; the number of those that failed."""
    with tempfile.TemporaryDirectory(prefix="recsys-visit-") as folder:
        # The folder of the parts is the checkout, whose packages are not those of a wheel.
        folders = [f"{folder}/site", str(HERE), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, folders))
        own = {"RECSYS_HOME": folder, "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
        parts = Visit(Rows(out), seconds, {**os.environ, **own})
        for part in list_parts(out, Path(folder), wheels, quick=quick):
            if part.unless is None or not part.unless.exists():
                parts.run(part)
        return parts.failures


def stop(*_: object) -> None:
    """End the visit, and with it the running part; a second signal does not interrupt that."""
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    sys.exit("stopped")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit ({SECONDS:g})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, on a CPU too")
    parser.add_argument("--out", type=Path, required=True, help="rows are added to this file")
    args = parser.parse_args()
    if args.wheels and not any(args.wheels.glob("*.whl")):
        raise SystemExit(f"--wheels {args.wheels}: no wheels; docs/gpu.md says how to get them")
    for number in STOPS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, stop)
    if failures := visit(args.out.resolve(), args.seconds, args.wheels, quick=args.quick):
        raise SystemExit(f"{failures} parts failed, or were stopped or left out")


if __name__ == "__main__":
    main()
