"""Build the native library from its C sources, with a compiler of this machine or with ziglang.

The package's build step loads this file by its path (`hatch_build.py`), before the package and its
requirements are installed, so it imports the standard library only. After a change of the sources:

    python -m recsys.native.build
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = HERE / "_native.so"
SOURCES = ("entry.c", "search.c")
# Compiled per instruction set, with further flags. The blend has the bits of its NumPy reference.
VARIED = {"forward.c": (), "sasrec.c": (), "blend.c": ("-ffp-contract=off",)}

# -ffp-contract=fast: a product and a sum become one instruction wherever the processor has it.
_FLAGS = (
    "-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-fno-math-errno",
    "-fno-trapping-math", "-g0", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-unknown-pragmas",
)  # fmt: skip
_TIMEOUT_S = 300


class BuildError(Exception):
    """The library could not be built; the message says why."""


def own_compiler() -> list[str] | None:
    """The command of this machine's C compiler, by $CC or under a usual name; None without one."""
    if given := shlex.split(os.environ.get("CC", "")):
        return given if shutil.which(given[0]) else None
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)


def compilers() -> list[list[str]]:
    """Commands that compile C, in the order in which they are tried."""
    own = own_compiler()
    zig = [sys.executable, "-m", "ziglang", "cc"]
    return [
        *([own] if own else []),
        *([zig] if importlib.util.find_spec("ziglang") is not None else []),
    ]


def variants(zig: bool) -> dict[str, list[str]]:
    """Flags of each instruction set of this kind of processor."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return {"base": []}
    dash = "_" if zig else "-"  # zig writes x86_64_v4
    return {f"v{level}": [f"-march=x86{dash}64{dash}v{level}"] for level in (4, 3, 2)}


def compile_with(
    command: Sequence[str], out: Path, *, flags: Sequence[str] = (), main: Path | None = None
) -> None:
    """Compile a shared library; with `main`, a program around the same sources.

    Raises:
        BuildError: the compiler fails or is missing.
    """
    zig = "ziglang" in command
    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for variant, machine in variants(zig).items():
            for name, own in VARIED.items():
                objects.append(str(Path(folder, f"{variant}.{name}.o")))
                source = [f"-DVARIANT={variant}", "-c", str(HERE / name), "-o", objects[-1]]
                _run([*command, *_FLAGS, *own, *machine, *flags, *source])
        made = Path(folder, "made")
        kind = ["-shared", "-s"] if main is None else [f"-I{HERE}", str(main)]
        sources = [
            *kind,
            *(str(HERE / name) for name in SOURCES),
            *objects,
            "-o",
            str(made),
            "-lpthread",
            "-lm",
        ]
        exported = ["-fvisibility=default"]
        _run([*command, *_FLAGS, *exported, *flags, *sources])
        # Beside the target first, so that a process that uses the old file keeps it whole.
        near = out.with_name(f"{out.name}.{os.getpid()}")
        shutil.copyfile(made, near)
        near.chmod(0o755)
        near.replace(out)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")


def build(out: Path = LIBRARY) -> list[str]:
    """Build the library with the first compiler that works; returns the compiler's command.

    Raises:
        BuildError: none works.
    """
    failures = []
    for command in compilers():
        try:
            compile_with(command, out)
            return command
        except BuildError as error:
            failures.append(str(error))
    raise BuildError(
        "; ".join(failures) or "no C compiler (cc, gcc, clang or $CC) and no ziglang found"
    )


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{LIBRARY} by {shlex.join(build())}\n")
    except BuildError as error:
        sys.exit(f"the native library was not built: {error}")
