"""What a result must say of the machine it was measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recsys import __version__


def environment() -> dict[str, Any]:
    """Commit, processor, load, versions and threads, as plain values."""
    import torch

    return {
        "commit": _commit(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "recsys": __version__,
        **{name: version(name) for name in ("torch", "transformers")},
    }


def _commit() -> str | None:
    """Of the code that runs, wherever it is run from; None where it was installed without one."""
    here = Path(__file__).parent
    try:
        found = subprocess.run(  # noqa: S603 - a fixed command
            ["git", "-C", os.fspath(here), "describe", "--always", "--dirty", "--exclude=*"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return found.stdout.strip() or None


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    names = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor()
