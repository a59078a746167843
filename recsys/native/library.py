"""Load the native library by cffi, which reads its declarations in `native.h`.

Addresses of numbers are integers (`intptr_t`) here, since those of tensors and arrays are, and a
cast of each would take longer than the call. `address` has them.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path
from typing import Any

import cffi

from recsys.native.build import HERE, LIBRARY

OFF = "RECSYS_NATIVE"
"""Environment variable; 0 leaves the library unused. Tests and comparisons set it."""

_NUMBERS = re.compile(r"(?:const )?\b(?:float|double|void|char|u?int\d+_t) \*(?:const \*)?")
_COMMENTS_AND_MACROS = re.compile(r"/\*.*?\*/|^#[^\n]*", re.DOTALL | re.MULTILINE)


def _declarations() -> str:
    """`native.h` with an integer for each pointer to numbers."""
    text = _COMMENTS_AND_MACROS.sub("", (HERE / "native.h").read_text(encoding="utf-8"))
    return _NUMBERS.sub("intptr_t ", text).replace(", *", ", ")


ffi = cffi.FFI()
ffi.cdef(_declarations())
constants: Any = ffi.dlopen(None)
"""The enumerations of native.h."""
ABI: int = constants.ABI
PANEL: int = constants.PANEL


def address(values: Any) -> int:
    """Where an array of cffi, NumPy or torch begins; 0 for None."""
    if values is None:
        return 0
    if isinstance(values, ffi.CData):
        return int(ffi.cast("intptr_t", values))
    return int(values.data_ptr() if hasattr(values, "data_ptr") else values.ctypes.data)


class Library:
    """The loaded library.

    Attributes:
        call: the functions of native.h; calls release the interpreter lock.
    """

    def __init__(self, path: Path) -> None:
        """Load the file.

        Raises:
            OSError: no library, one of another processor, or one of another version.
        """
        self.call: Any = ffi.dlopen(os.fspath(path))
        try:
            version = self.call.recsys_abi()
        except AttributeError as error:
            raise OSError(f"{path} is another library: {error}") from error
        if version != ABI:
            raise OSError(
                f"{path} has version {version}, and this code needs {ABI}; build it again"
            )

    @property
    def variants(self) -> list[str]:
        """Instruction sets that this processor has, best first: v4, v3 and v2 of x86-64; base."""
        names: list[str] = []
        while name := self.call.recsys_variant(len(names)):
            names.append(ffi.string(ffi.cast("char *", name)).decode())
        return names

    def choose(self, variant: str) -> None:
        """Use an instruction set other than the best one."""
        self.call.recsys_choose(self.variants.index(variant))


@functools.cache
def _loaded() -> Library | str:
    if not LIBRARY.is_file():
        return "the library was not built; `python -m recsys.native.build` says why"
    try:
        return Library(LIBRARY)
    except OSError as error:
        return str(error)


def find_library() -> Library | str:
    """The library; where there is none, or it is switched off, the reason."""
    if os.environ.get(OFF) == "0":
        return f"switched off by {OFF}=0"
    return _loaded()


def describe() -> str:
    """Which forward pass serves on a CPU, in words."""
    library = find_library()
    if isinstance(library, str):
        return f"torch ({library})"
    return f"native, instruction set {library.variants[0]}"
