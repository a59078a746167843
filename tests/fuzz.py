"""New examples for every test that draws any, round after round: `make fuzz MINUTES=20`.

A round runs the tests with a seed of its own, in an order of its own, and pytest prints each
failure with what reproduces it. Correct it, then keep its values: @example(...) above @given(...).
Where atheris is installed, it first has half of the time (`fuzz_coverage.py`).
"""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parent
COVERED = ("bodies", "filters", "texts", "readers")  # targets of `test_untrusted_input.py`
LAST_TEST_S = 120  # limit for a test that began before the time was over


def main(minutes: float) -> int:
    """Run rounds until the minutes are over; the number of failures, at most 99."""
    end = time.time() + 60 * minutes
    broken = 0
    if importlib.util.find_spec("atheris") is not None:
        broken = cover(int(30 * minutes))
    files = sorted(file for file in TESTS.rglob("test_*.py") if "hypothesis" in file.read_text())
    failed: list[int] = []
    rounds = 0
    while rounds == 0 or time.time() < end:
        rounds += 1
        seed = random.SystemRandom().getrandbits(32)
        if not passes(files, seed, end):
            failed.append(seed)
    print(f"\nfuzz: {rounds} rounds, {len(failed)} failed")
    for seed in failed:
        print(f"a failure with --hypothesis-profile=fuzz --hypothesis-seed={seed}, see above")
    return min(len(failed) + broken, 99)


def cover(seconds: int) -> int:
    """Look for inputs by their coverage, all targets at once; the number that failed."""
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        running = []
        for target in COVERED:
            inputs = Path(folder, target)
            inputs.mkdir()
            command = [sys.executable, TESTS / "fuzz_coverage.py", target, str(seconds), inputs]
            with Path(folder, f"{target}.log").open("wb") as log:
                running.append(subprocess.Popen(command, stdout=log, stderr=log))
        failed = [process.wait() != 0 for process in running]
        for target, is_bad in zip(COVERED, failed, strict=True):
            lines = Path(folder, f"{target}.log").read_text(errors="replace").splitlines()
            shown = lines[-60:] if is_bad else [x for x in lines if x.startswith(("Done", "stat"))]
            print(f"coverage of {target}: {'FAILED' if is_bad else 'passed'}", *shown, sep="\n  ")
    return sum(failed)


def passes(files: list[Path], seed: int, end: float) -> bool:
    """Run the tests once; whether all of them pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-rN", "-n", "logical", "-m", "hypothesis",
               "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}", *files]  # fmt: skip
    environment = {**os.environ, "FUZZ_END": str(end)}
    limit = max(0, end - time.time()) + LAST_TEST_S
    try:
        return not subprocess.run(command, check=False, timeout=limit, env=environment).returncode
    except subprocess.TimeoutExpired:
        print(f"a test took longer than {LAST_TEST_S} s after the time was over")
        return False


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0))
