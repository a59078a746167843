"""Files with the measured quality of a bundle."""

import json
import logging
from pathlib import Path
from typing import Any

from recsys.artifacts import Workspace
from recsys.bundle import EVAL, Bundle

logger = logging.getLogger("recsys.serving.evaluations")
LARGEST = 4 << 20  # largest size of a file, in bytes
REPORT = "report"  # what `recsys evaluate` writes


def evaluations(bundle: Bundle) -> dict[str, Any]:
    """Read the JSON files of a bundle's folder `eval`, by name, and the workspace's report.

    The report is included if it was made from this version of the bundle. Damaged and very large
    files are left out.
    """
    read = {file.stem: _read(file) for file in sorted((bundle.path / EVAL).glob("*.json"))}
    files = {name: content for name, content in read.items() if content is not None}
    file = Workspace.of(bundle.path.absolute().name).report / f"{REPORT}.json"
    report = _read(file) if file.is_file() else None
    if (
        isinstance(report, dict)
        and report.get("made_from", {}).get("bundle") == bundle.manifest.digest
    ):
        files[REPORT] = report
    return files


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size <= LARGEST:
            return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s: %s", file, error)
    return None
