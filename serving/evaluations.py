"""Files with the measured quality of a bundle."""

import json
import logging
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from recsys.artifacts import Workspace
from recsys.bundle import EVAL, Bundle

logger = logging.getLogger("recsys.serving.evaluations")
LARGEST = 4 << 20  # largest size of a file, in bytes
REPORT = "report"  # what `recsys evaluate` writes


class Evaluations:
    """The JSON files of a bundle's folder `eval`, by name, and the workspace's report.

    The report is included if it was made from this version of the bundle. Damaged and very large
    files are left out. The text of the last bundle that was asked for is kept until a file changes.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._text = ""

    def __call__(self, bundle: Bundle) -> str:
        """The files of a bundle as the text of a JSON object."""
        files = sorted((bundle.path / EVAL).glob("*.json"))
        report = Workspace.of(bundle.path.absolute().name).report / f"{REPORT}.json"
        state = (bundle.manifest.digest, [_state(file) for file in (*files, report)])
        if state != self._state:
            read = {file.stem: _read(file) for file in files}
            found = {name: content for name, content in read.items() if content is not None}
            made = _read(report) if report.is_file() else None
            if isinstance(made, dict) and (
                made.get("made_from", {}).get("bundle") == bundle.manifest.digest
            ):
                found[REPORT] = made
            text = TypeAdapter(dict[str, Any]).dump_json(found).decode()  # NaN becomes null
            self._state, self._text = state, text
            return text
        return self._text


def _state(file: Path) -> Any:
    try:
        stat = file.stat()
    except OSError:
        return None
    return str(file), stat.st_mtime_ns, stat.st_size, stat.st_ino


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size <= LARGEST:
            return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        logger.warning("%s: %s", file, error)
    return None
