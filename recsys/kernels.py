"""Triton kernels: where those of a module can run, and how one is launched.

`recsys.decoding.level_kernel` and `recsys.models.layer_kernels` have kernels, and import triton. So
they are imported here only where it is installed.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch


@cache
def find_kernels(module: str, device: torch.device) -> Any | None:
    """A module of kernels, for tensors on a device; None where they cannot run.

    They run on a GPU if triton is installed and can compile there, for which it needs a C compiler.
    On a CPU they run only in Triton's interpreter, for tests: set TRITON_INTERPRET=1 before triton
    is first imported.

    Args:
        module: full name. Its function `try_out(device)` launches a kernel.
        device: of the tensors.
    """
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (device.type == "cuda" or interpreted) or find_spec("triton") is None:
        return None
    kernels = import_module(module)
    try:
        kernels.try_out(device)
    except Exception as error:
        warnings.warn(
            f"triton cannot compile {module}; torch takes more launches "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )
        return None
    return kernels


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument, a tensor; nothing for an empty grid."""
    if 0 in grid:
        return
    device = arguments[0].device
    with torch.cuda.device(device.index if device.type == "cuda" else -1):
        kernel[grid](*arguments, **constants)
