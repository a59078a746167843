"""The folder that an export is written to."""

from __future__ import annotations

from pathlib import Path

from recsys.errors import ArtifactError


def require_new(out: Path, bundle: Path) -> None:
    """Refuse a folder in which something lies, or that would change the bundle.

    Raises:
        ArtifactError: `out` exists and is not an empty folder, or lies in `bundle`.
    """
    if out.resolve().is_relative_to(Path(bundle).resolve()):
        raise ArtifactError(f"--out {out} lies in the bundle {bundle}; name another folder")
    if out.is_symlink():
        raise ArtifactError(f"--out {out} is a link; name a folder")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ArtifactError(f"--out {out} is not empty; name another folder or remove it")


def make_folder(out: Path) -> None:
    """Make the folder if it is not there.

    Raises:
        ArtifactError: the file system does not allow it.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        text = f"--out {out} cannot be made: {error.strerror}; name another folder"
        raise ArtifactError(text) from error
