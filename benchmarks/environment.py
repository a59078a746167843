"""What a result must say of the machine it was measured on."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Commit, processor, versions and threads, as plain values."""
    import torch

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = {line.split(":")[1].strip() for line in lines if line.startswith("model name")}
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "cpu": ", ".join(sorted(models)) or platform.processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }
