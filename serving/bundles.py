"""The bundles that an alias may be given: the folder of `serve.bundle` and those beside it."""

import contextlib
from pathlib import Path
from typing import NamedTuple

from recsys.artifacts import MANIFEST, read_manifest
from recsys.errors import RecsysError
from recsys.serving.settings import ServingSettings


class UnknownBundleError(LookupError):
    """No bundle has this name."""


class Version(NamedTuple):
    """A version of a bundle: made again under the same name, it has another digest."""

    bundle: str
    digest: str


class Bundles:
    """The bundles of `models_dir`, or of the folder of `settings.bundle`, by the folders' names."""

    def __init__(self, settings: ServingSettings) -> None:
        self._own = settings.bundle.absolute()
        self._folder = settings.models_dir or self._own.parent

    def names(self) -> list[str]:
        """Names of the bundles, sorted."""
        folders = [self._own]
        if self._folder.is_dir():
            folders += self._folder.iterdir()
        names = {folder.name for folder in folders if (folder / MANIFEST).is_file()}
        return sorted(name for name in names if not name.startswith("."))

    def path(self, name: str) -> Path:
        """The folder of a bundle, which is never outside of the folder of bundles."""
        if name == self._own.name:
            return self._own
        path = self._folder / name
        if path.name != name or not path.is_dir():
            raise UnknownBundleError(f"There is no bundle {name!r}; /v1/models lists them.")
        return path

    def find(self, version: Version) -> str | None:
        """The name of a bundle of this version: its own name, or one it was given since."""
        for name in dict.fromkeys([version.bundle, *self.names()]):
            with contextlib.suppress(UnknownBundleError, RecsysError):
                if read_manifest(self.path(name), "bundle").digest == version.digest:
                    return name
        return None
