"""New examples for every test that draws any, round after round: `make fuzz MINUTES=20`.

A round runs the tests with a seed of its own, in an order of its own, and pytest prints each
failure with what reproduces it. Correct it, then keep its values: @example(...) above @given(...).
"""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parent
LAST_TEST_S = 120  # limit for a test that began before the time was over


def main(minutes: float) -> int:
    """Run rounds until the minutes are over; the number of failures, at most 99."""
    end = time.time() + 60 * minutes
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
    return min(len(failed), 99)


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
