"""The tests of exactness under the instruction sets of other processors.

They are chosen when a process starts, so each has one of its own: the kernels of torch, those of
oneDNN, MKL and OpenBLAS, and the native library. The best ones of this processor are those that the
tests use when they run as usual.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles import PATIENCE_S

ROOT = Path(__file__).parents[2]
HERE = "tests/recsys"
FILES = (
    "test_llama_forward.py", "native/test_native_forward.py", "native/test_native_search.py",
    "test_beam_search.py",
)  # fmt: skip
# They are exact in float64, run in an interpreter, choose instruction sets themselves, or count
# launches, packed weights or threads, which no instruction set changes; or an architecture whose
# computations are those of the others.
WITHOUT = (
    "not float64 and not kernels and not every_instruction_set and not launches "
    "and not packed and not threads and not mistral and not phi3 and not qwen2"
)
# What torch calls a level, and the names elsewhere; the native library has those of x86-64.
LEVELS = {
    "default": {"oneDNN": "SSE41", "MKL": "SSE4_2", "OpenBLAS": "Nehalem", "native": "v2"},
    "avx2": {"oneDNN": "AVX2", "MKL": "AVX2", "OpenBLAS": "Haswell", "native": "v3"},
    "avx512": {"oneDNN": "AVX512_CORE", "MKL": "AVX512", "OpenBLAS": "SkylakeX", "native": "v4"},
}
RUN = """
import sys
import pytest, torch
from recsys.native.library import find_library
library = find_library()
if not isinstance(library, str):
    library.choose(sys.argv[1])
print("torch has", torch.backends.cpu.get_cpu_capability())
sys.exit(pytest.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_exactness_does_not_depend_on_the_processor(level):
    best = torch.backends.cpu.get_cpu_capability().lower()
    if best not in LEVELS or list(LEVELS).index(level) >= list(LEVELS).index(best):
        pytest.skip(f"this processor has {best}, and nothing better than {level}")
    names = LEVELS[level]
    done = subprocess.run(
        [sys.executable, "-c", RUN, names["native"], "-q", "-n", "0", "-p", "no:cacheprovider",
         "-k", WITHOUT, *(f"{HERE}/{name}" for name in FILES)],
        cwd=ROOT,
        env=os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "ATEN_CPU_CAPABILITY": level,
            "ONEDNN_MAX_CPU_ISA": names["oneDNN"],
            "MKL_ENABLE_INSTRUCTIONS": names["MKL"],
            "OPENBLAS_CORETYPE": names["OpenBLAS"],
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert f"torch has {level.upper()}" in done.stdout
    assert " passed" in done.stdout
