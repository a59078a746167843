"""Subject: the bundle whose servers are put under load, and the settings that they get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsys.artifacts import Manifest, Workspace, read_manifest
from recsys.config import Settings
from recsys.errors import ConfigError

PREFIX = "serve."


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        bundle: what the servers serve.
        manifest: of the bundle.
        settings: `key=value` of the section `serve`.
    """

    bundle: Path
    manifest: Manifest
    settings: list[str]

    @classmethod
    def of(cls, bundle: Path | None, name: str | None, overrides: Sequence[str]) -> Subject:
        """As options say.

        Args:
            bundle: None for that of the name.
            name: of the run.
            overrides: `serve.key=value` strings of `--set`.

        Raises:
            ArtifactError: not a bundle.
            ConfigError: a setting of another section.
        """
        bundle = bundle or Workspace.of(Settings.load(None, name=name).name).bundle
        manifest = read_manifest(bundle, "bundle")
        for setting in overrides:
            if not setting.startswith(PREFIX):
                raise ConfigError(f"--set {setting}: this command reads serve.key=value only")
        return cls(bundle, manifest, [setting.removeprefix(PREFIX) for setting in overrides])

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says of it, plain values."""
        return {
            "bundle": {"name": self.bundle.absolute().name, "version": self.manifest.digest},
            "settings": self.settings,
        }
