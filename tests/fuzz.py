"""Fresh examples for every test that takes any, round after round: `make fuzz MINUTES=20`.

A round runs the tests with a seed of its own, in an order of its own. Each failure is printed with
what reproduces it. Mend it, then keep its values: @example(...) above @given(...).
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
LAST_TEST_S = 120  # what a test may take that began before the time was over


def main(minutes: float) -> int:
    """Run rounds until the minutes are over; the number of failures, at most 99."""
    end = time.time() + 60 * minutes
    files = sorted(file for file in TESTS.rglob("test_*.py") if "hypothesis" in file.read_text())
    failures: dict[str, str] = {}
    rounds = examined = 0
    while rounds == 0 or time.time() < end:
        rounds += 1
        examined += round_(files, random.SystemRandom().getrandbits(32), end, failures)
    print(f"\nfuzz: {rounds} rounds, {examined} tests passed, {len(failures)} failed")
    for text in failures.values():
        print(f"\n{text}")
    return min(len(failures), 99)


def round_(files: list[Path], seed: int, end: float, failures: dict[str, str]) -> int:
    """Run the tests once; how many passed. Failures are added under their tests' names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-rN", "-n", "logical", "-m", "hypothesis",
                   "--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}",
                   f"--junitxml={report}", *files]  # fmt: skip
        patience = max(0, end - time.time()) + LAST_TEST_S
        try:
            done = subprocess.run(
                command, check=False, timeout=patience, env={**os.environ, "FUZZ_END": str(end)}
            )
            error = f"pytest ended with {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            error = f"a test took longer than {LAST_TEST_S} s after the time was over"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    passed, before = 0, len(failures)
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        passed += problem is None and case.find("skipped") is None
        if problem is not None:
            failures[name] = f"--- {name}, --hypothesis-seed={seed}\n{reproducer(problem.text)}"
    if error and len(failures) == before:
        failures[f"round {seed}"] = f"--- --hypothesis-seed={seed}: {error}; see above"
    return passed


def reproducer(text: str | None) -> str:
    """What a failure says from the example on."""
    lines = (text or "").splitlines()
    found = [n for n, line in enumerate(lines) if "Failing test case" in line]
    return "\n".join(lines[found[-1] :] if found else lines[-30:])


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]) if len(sys.argv) > 1 else 5.0))
