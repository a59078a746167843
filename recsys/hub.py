"""The Hugging Face Hub: a repository with a bundle in its folder `bundle/`.

The Hub's own client uploads it: `hf upload ORG/NAME var/bundles/shop bundle`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from recsys.artifacts import MANIFEST, read_manifest
from recsys.errors import ArtifactError

BUNDLE = "bundle"
DOWNLOADS = "hub"  # below $RECSYS_HOME
DEFAULT_REVISION = "main"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_bundle(source: Path | str, revision: str | None = None) -> Path:
    """The folder of a bundle, which is downloaded if `source` names a repository.

    Args:
        source: a bundle, a folder with `bundle/`, or the id of a repository (ORG/NAME).
        revision: branch, tag or commit of the repository; None takes `main`.

    Raises:
        ArtifactError: no such folder, not the id of a repository, or the download failed.
    """
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(str(source), revision or DEFAULT_REVISION)
    elif revision is not None:
        raise ArtifactError(f"{source} is a folder, which has no revision {revision!r}")
    return folder if (folder / MANIFEST).is_file() else folder / BUNDLE


def _download(repository: str, revision: str) -> Path:
    """Bring `$RECSYS_HOME/hub/ORG--NAME@REVISION` up to date with a repository.

    `local_dir` makes files of its own; the files of the Hub's cache are links out of their folder,
    which no artifact may have.
    """
    from huggingface_hub import snapshot_download

    if _REPOSITORY.fullmatch(repository) is None:
        raise ArtifactError(
            f"{repository!r} is neither a folder nor the id of a repository, such as ORG/NAME"
        )
    name = f"{repository}@{revision}".replace("/", "--")
    folder = Path(os.environ.get("RECSYS_HOME", "var")) / DOWNLOADS / name
    try:
        snapshot_download(
            repository, revision=revision, local_dir=folder, allow_patterns=f"{BUNDLE}/*"
        )
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{repository} at {revision} was not downloaded: {error}") from error
    _remove_others(folder / BUNDLE)
    return folder


def _remove_others(bundle: Path) -> None:
    """Remove files of an earlier revision: a bundle with files beyond its manifest is refused."""
    named = {MANIFEST, *read_manifest(bundle).files}
    for path in sorted(bundle.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif path.relative_to(bundle).as_posix() not in named:
            path.unlink()
