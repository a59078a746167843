"""Hatchling's build hook: build the native library for wheels and editable installs.

Without a compiler on this machine, pip brings ziglang for the build. Where the build fails the
install goes on: the library is missing, torch serves, and `recsys doctor` says so.
"""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import sys_tags

# Processors for which the package index has ziglang; elsewhere pip would fail to find it.
_ZIG = ("x86_64", "amd64", "aarch64", "arm64")


class NativeLibrary(BuildHookInterface[Any]):
    """Builds the library in the source tree, where git ignores it."""

    def dependencies(self) -> list[str]:
        """Requirements of the build: ziglang if there is no compiler."""
        compiler = self._build_module().own_compiler()
        return [] if compiler or platform.machine().lower() not in _ZIG else ["ziglang>=0.13"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build, and add the library to the wheel. A source distribution has the sources only."""
        if self.target_name != "wheel":
            return
        module = self._build_module()
        try:
            module.build()  # replaces the file at once: running processes keep the one they have
        except (module.BuildError, OSError) as error:
            module.LIBRARY.unlink(missing_ok=True)  # of other sources, perhaps
            self.app.display_warning(f"the native library was not built: {error}")
            return
        build_data["artifacts"].append(module.LIBRARY.relative_to(self.root).as_posix())
        if version == "standard":  # for any Python 3, on this kind of machine
            build_data["pure_python"] = False
            tags = (tag.platform for tag in sys_tags())
            own = next(tag for tag in tags if not tag.startswith(("manylinux", "musllinux")))
            build_data["tag"] = f"py3-none-{own}"

    def _build_module(self) -> ModuleType:
        """`recsys/native/build.py`, by its path: the package is not installed yet."""
        path = Path(self.root, "recsys", "native", "build.py")
        spec = importlib.util.spec_from_file_location("recsys_native_build", path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
