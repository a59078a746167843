"""Files with the measured quality of a bundle."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from recsys.artifacts import Workspace
from recsys.bundle import EVAL, Bundle

logger = logging.getLogger("recsys.serving.evaluations")
LARGEST = 4 << 20  # largest size of a file, in bytes
REPORT = "report"  # what `recsys evaluate` writes
RETRAINING = "retraining"  # what `recsys retrain` writes, in `runs` of the first version
GATE = "gate.json"  # in `reports` of each version
NIGHTS = 50  # of the retrainings, the last ones


class Evaluations:
    """The JSON files of a bundle's folder `eval`, by name, and what the workspace has about it.

    The report is included if it was made from this version of the bundle; as `retraining` the last
    lines of the log of `recsys retrain`, each verdict with its `gate`. Damaged and very large files
    are left out. The text of the last bundle that was asked for is kept until a file changes.
    """

    def __init__(self) -> None:
        self._state: Any = None
        self._text = ""

    def __call__(self, bundle: Bundle) -> str:
        """The files of a bundle as the text of a JSON object."""
        files = sorted((bundle.path / EVAL).glob("*.json"))
        report = Workspace.of(bundle.path.absolute().name).report / f"{REPORT}.json"
        log = _log(bundle)
        state = (bundle.manifest.digest, [_state(file) for file in (*files, report, log)])
        if state != self._state:
            read = {file.stem: _read(file) for file in files}
            found = {name: content for name, content in read.items() if content is not None}
            made = _read(report) if report.is_file() else None
            if isinstance(made, dict) and (
                made.get("made_from", {}).get("bundle") == bundle.manifest.digest
            ):
                found[REPORT] = made
            if nights := _nights(log):
                found[RETRAINING] = nights
            text = TypeAdapter(dict[str, Any]).dump_json(found).decode()  # NaN becomes null
            self._state, self._text = state, text
            return text
        return self._text


def _log(bundle: Bundle) -> Path:
    first = re.sub(r"\.[0-9]+$", "", bundle.path.absolute().name)  # `shop` of `shop.7`
    return Workspace.of(first).run(f"{RETRAINING}.jsonl")


def _nights(log: Path) -> list[dict[str, Any]]:
    """Verdicts and promotions, newest first, each verdict with what it is based on as `gate`."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(0, log.stat().st_size - LARGEST))
            texts = stream.read().splitlines()
    except OSError:
        return []
    found = []
    for text in texts[-NIGHTS:]:
        try:
            line = json.loads(text)
            version = line["version"]
        except (ValueError, KeyError, TypeError):  # a line that was cut off
            continue
        if line.get("step") == "judged":
            is_name = re.fullmatch(r"\w[\w.-]*", str(version)) is not None
            file = Workspace.of(str(version)).report / GATE
            line["gate"] = _read(file) if is_name and file.is_file() else None
        found.append(line)
    return found[::-1]


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
