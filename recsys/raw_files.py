"""Raw files: where data sets lie as they were published, before `data` makes them canonical.

It knows folders, not what is in them.
"""

from __future__ import annotations

import os
from pathlib import Path


def raw_folders() -> list[Path]:
    """Where raw data sets are looked for, the first first; downloads go to the first.

    `$RECSYS_DATASETS` if it is set, and `raw` under `$RECSYS_HOME` (default `var/raw`).
    """
    named = os.environ.get("RECSYS_DATASETS")
    home = Path(os.environ.get("RECSYS_HOME", "var"))
    return [*([Path(named)] if named else []), home / "raw"]


def find_raw(path: Path | str) -> Path | None:
    """A file or folder below the first of `raw_folders` that has it, or None.

    Args:
        path: relative to those folders; an absolute one is looked up as it is.
    """
    candidates = (folder / path for folder in raw_folders())
    return next((candidate for candidate in candidates if candidate.exists()), None)
