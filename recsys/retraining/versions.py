"""The versions of a run: which there are, which is served, their log, and what is removed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recsys.artifacts import Manifest, Workspace
from recsys.data import growth
from recsys.errors import ArtifactError

if TYPE_CHECKING:
    from recsys.serving.client import Client

CHAMPION = "champion"
LOG = "retraining.jsonl"
KEPT = 3  # the newest versions, whose data and models are kept beside those that aliases need


def numbers(base: Workspace) -> list[int]:
    """Numbers of the versions of a run of which anything is there, ascending."""
    numbers = set()
    for folder in ("runs", "datasets", "bundles", "reports"):
        for path in (base.home / folder).glob(f"{base.name}.*"):
            number = path.name.removeprefix(f"{base.name}.")
            if number.isdecimal() and path.is_dir():
                numbers.add(int(number))
    return sorted(numbers)


def newest(base: Workspace) -> Workspace | None:
    """The newest version for which events were taken."""
    for number in reversed(numbers(base)):
        version = replace(base, name=f"{base.name}.{number}")
        try:
            version.manifest(growth.KIND)
        except ArtifactError:
            continue
        return version
    return None


def events_of(version: Workspace, champion: Workspace) -> Manifest | None:
    """The manifest of the events of a version; None if they were taken for another champion."""
    manifest = version.manifest(growth.KIND)
    same = manifest.parents["bundle"] == champion.manifest("bundle").digest
    return manifest if same else None


def verdict_of(version: Workspace) -> dict[str, Any] | None:
    """The gate's verdict on a version's bundle; None if there is none yet."""
    from recsys.evaluation import gate

    try:
        judged, made = version.manifest("evaluation"), version.manifest("bundle")
    except ArtifactError:
        return None
    return gate.read_verdict(version.report) if judged.parents["bundle"] == made.digest else None


def champion_of(base: Workspace, clients: Sequence[Client]) -> Workspace:
    """The run whose bundle is served.

    Raises:
        ArtifactError: the service has a bundle that is not in the workspace.
    """
    if not clients:
        names = promoted(base)
        return replace(base, name=names[-1]) if names else base
    alias = clients[0].alias(CHAMPION)
    champion = replace(base, name=str(alias.bundle))
    manifest = champion.manifest("bundle")
    if manifest.digest != alias.version:
        raise ArtifactError(
            f"the service answers with version {alias.version} of bundle {alias.bundle!r}, and "
            f"{champion.bundle} is {manifest.digest}; retrain in the service's $RECSYS_HOME"
        )
    return champion


def promoted(base: Workspace) -> list[str]:
    """The versions that were promoted, in this order."""
    return [line["version"] for line in _read_log(base) if line["step"] == "promoted"]


def log_promotion(base: Workspace, version: Workspace) -> None:
    """Write down that a version was promoted, once."""
    log(base, {"step": "promoted", "version": version.name})


def _read_log(base: Workspace) -> list[dict[str, Any]]:
    file = base.run(LOG)
    if not file.is_file():
        return []
    lines = []
    for text in file.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            continue  # the last line of a process that was killed
    return lines


def log(base: Workspace, line: dict[str, Any]) -> None:
    """Append a line to the log of a run, unless it has it."""
    if any({**old, "time": None} == {**line, "time": None} for old in _read_log(base)):
        return
    file = base.run(LOG)
    torn = file.is_file() and not file.read_bytes().endswith(b"\n")
    with file.open("a", encoding="utf-8") as stream:
        stream.write(("\n" if torn else "") + json.dumps({"time": int(time.time()), **line}) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def remove_old(
    base: Workspace, version: Workspace, champion: Workspace, clients: Sequence[Client]
) -> None:
    """Remove data and models of old versions that no alias and no rollback needs; reports stay.

    Without a client it is not known what aliases need, and nothing is removed.
    """
    if not clients:
        return
    needed = {base.name, version.name, champion.name}
    for client in clients:
        for alias in client.models().aliases:
            needed |= {str(alias.bundle), str(alias.previous)}
    for number in numbers(base)[:-KEPT]:
        old = replace(base, name=f"{base.name}.{number}")
        if old.name not in needed:
            remove(old)


def remove_begun(base: Workspace) -> None:
    """Remove what is left of versions that were stopped while their events were written.

    It may be events of users, which nothing would remove later.
    """
    for number in numbers(base):
        version = replace(base, name=f"{base.name}.{number}")
        run = version.path(growth.KIND).parent
        made = (version.bundle, version.dataset, version.report, version.path(growth.KIND))
        if run.is_dir() and not any(path.exists() for path in made):
            remove(version)


def remove(version: Workspace) -> None:
    """Remove the data and models of a version; its report stays."""
    for folder in (version.bundle, version.dataset, version.home / "runs" / version.name):
        shutil.rmtree(folder, ignore_errors=True)


def is_made(version: Workspace) -> bool:
    """Whether a version's bundle is made of its data, so that nothing is left to train."""
    try:
        bundle, dataset = version.manifest("bundle"), version.manifest("dataset")
    except ArtifactError:
        return False
    return bundle.parents.get("dataset") == dataset.digest
