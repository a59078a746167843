"""The native library: how it is built, and the kernels under sanitizers."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from recsys.native import build, library

MAIN = Path(__file__).with_name("sanitize.c")
COMPILER = shutil.which("gcc") or shutil.which("clang")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no gcc and no clang")


@needs_compiler
# Three instruction sets are compiled; only the thread sanitizer runs so long that -O1 pays.
@pytest.mark.parametrize(
    ("sanitizers", "optimisation", "cases"),
    [("address,undefined", "-O0", 60), ("thread", "-O1", 30)],
)
def test_sanitizers_find_nothing(sanitizers, optimisation, cases, tmp_path):
    probe = [COMPILER, f"-fsanitize={sanitizers}", "-x", "c", "-", "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, input=b"int main(void) { return 0; }", capture_output=True).returncode:
        pytest.skip(f"{COMPILER} has no {sanitizers} sanitizer")
    flags = [optimisation, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    program = tmp_path / "program"
    build.compile_with([COMPILER], program, flags=["-DLEAST_PRODUCTS=1", *flags], main=MAIN)
    done = subprocess.run([program, str(cases)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{cases} cases\n"), done.stderr[-4000:]


@needs_compiler
def test_the_library_is_built_and_loaded(tmp_path, monkeypatch):
    quick = tmp_path / "cc"  # without optimisation, which takes most of the time
    quick.write_text(f'#!/bin/sh\nexec {COMPILER} "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    out = tmp_path / "built" / "native.so"
    out.parent.mkdir()
    build.build(out)
    assert library.Library(out).variants
    assert [file.name for file in out.parent.iterdir()] == ["native.so"]


def test_without_any_compiler_the_build_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "compilers", list)
    with pytest.raises(build.BuildError, match="no C compiler"):
        build.build(tmp_path / "native.so")


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    broken = [sys.executable, "-c", "import sys; sys.exit('no such header')"]
    monkeypatch.setattr(build, "compilers", lambda: [broken])
    with pytest.raises(build.BuildError, match="no such header"):
        build.build(tmp_path / "native.so")


def test_the_reason_for_torch_is_given(monkeypatch, tmp_path):
    monkeypatch.delenv(library.OFF, raising=False)
    monkeypatch.setattr(library, "LIBRARY", tmp_path / "none.so")
    library._loaded.cache_clear()
    try:
        assert "was not built" in library.describe()
    finally:
        library._loaded.cache_clear()
    monkeypatch.setenv(library.OFF, "0")
    assert library.describe() == "torch (switched off by RECSYS_NATIVE=0)"
