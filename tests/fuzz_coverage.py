"""Inputs found by their coverage, for the functions of `test_untrusted_input.py`.

    python tests/fuzz_coverage.py TARGET SECONDS FOLDER

`fuzz.py` runs it for every target where atheris is installed (`pip install atheris`). It ends with
an error at the first input whose cost is beyond the bounds or that raises what it must not; the
input is printed and belongs into `EXPENSIVE`.
"""

import runpy
import sys
from pathlib import Path

import atheris
from hypothesis import HealthCheck, given, seed, settings

SEEDS = 300


def write_seeds(inputs, folder: Path, target: str) -> None:
    """Write inputs that hypothesis draws, from which the search begins."""

    @seed(0)
    @settings(
        max_examples=SEEDS, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(inputs[target])
    def write(data: bytes) -> None:
        (folder / f"{hash(data):x}").write_bytes(data)

    write()


def main(target: str, seconds: str, folder: Path) -> None:
    """Fuzz one target with the inputs in a folder; libFuzzer ends the process."""
    with atheris.instrument_imports(include=["recsys"]):
        known = runpy.run_path(str(Path(__file__).parent / "test_untrusted_input.py"))
    write_seeds(known["INPUTS"], folder, target)

    def check(data: bytes) -> None:
        known["check"](target, data)

    options = [f"-max_total_time={seconds}", f"-max_len={known['MOST']}", "-print_final_stats=1",
               f"-artifact_prefix={folder}/", "-rss_limit_mb=4096", str(folder)]  # fmt: skip
    atheris.Setup([sys.argv[0], *options], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
