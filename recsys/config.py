"""Settings: one YAML file plus `--set section.key=value`, read into frozen dataclasses.

Each dataclass is defined beside the code that it configures; this module knows nothing about the
meaning of the sections. An unknown key is refused, and the error suggests the most similar one.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import yaml

from recsys.errors import ConfigError

T = TypeVar("T")

SHIPPED = Path(__file__).parent / "configs"
"""Configurations that come with the package."""


def find_config(path: Path) -> Path:
    """Find a YAML file, or the configuration of that name that comes with the package.

    `configs/beauty.yaml`, `beauty.yaml` and `beauty` all find the packaged file, unless a file
    exists at that path. A path to any other folder is never replaced.
    """
    names = (path.name, f"{path.name}.yaml") if path.parent == Path() else (path.name,)
    if path.is_file() or path.parent not in (Path(), Path("configs")):
        return path
    return next((SHIPPED / name for name in names if (SHIPPED / name).is_file()), path)


@dataclass(frozen=True)
class Settings:
    """The merged settings of one run, as plain values.

    Attributes:
        values: nested mapping: sections (`data`, `ids`, `target`, ...), `name`, `parent`, `seed`,
            `minutes`.
        given: keys such as `target.epochs` that were given besides the file.
    """

    values: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        overrides: Iterable[str] = (),
        *,
        sections: Mapping[str, Mapping[str, object]] | None = None,
        known: Iterable[str] = (),
        **top: object,
    ) -> Settings:
        """Read a YAML file and apply overrides.

        Args:
            path: YAML file, or None for an empty one; see `find_config`.
            overrides: `section.key=value` strings; the value is parsed as YAML.
            sections: section, such as `data` or `data.columns`, -> values that are applied after
                the overrides; None is skipped.
            known: allowed top-level keys; empty allows all.
            **top: top-level values that are applied last; None is skipped.

        Raises:
            ConfigError: unreadable file, unknown section, or a malformed override.
        """
        values: dict[str, Any] = {}
        if path is not None:
            path = find_config(Path(path))
            try:
                loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(f"--config {path}: {error.strerror or error}") from error
            except (yaml.YAMLError, ValueError) as error:  # 2018-13-45 is a ValueError
                raise ConfigError(f"--config {path}: not valid YAML: {error}") from error
            if loaded is not None and not isinstance(loaded, dict):
                raise ConfigError(
                    f"--config {path}: expected sections, found {type(loaded).__name__}"
                )
            values = loaded or {}
        overrides = list(overrides)
        for override in overrides:
            _apply(values, override)
        given = [override.partition("=")[0].strip() for override in overrides]
        given += _merge(values, sections or {})
        values.update({key: value for key, value in top.items() if value is not None})
        allowed = sorted({"name", "parent", "seed", "minutes", *known})
        if known:
            for key in values:
                if key not in allowed:
                    raise ConfigError(_unknown("section", str(key), allowed))
        settings = cls(values, frozenset(given))
        _ = settings.seed  # reading checks it
        return settings

    def merged(self, sections: Mapping[str, Mapping[str, object]]) -> Settings:
        """These settings with other values; sections as in `load`."""
        values = copy.deepcopy(self.values)
        given = _merge(values, sections)
        return Settings(values, self.given.union(given))

    def overridden(self, overrides: Iterable[str]) -> Settings:
        """These settings with `section.key=value` strings, as those of `--set`, applied.

        Raises:
            ConfigError: a malformed string.
        """
        values = copy.deepcopy(self.values)
        for override in overrides:
            _apply(values, override)
        return Settings(values, self.given)

    @property
    def name(self) -> str:
        """Name of the run and of its folders.

        Raises:
            ConfigError: a name with characters that a folder's name should not have.
        """
        return _plain("name", str(self.values.get("name", "demo")))

    @property
    def parent(self) -> str | None:
        """Name of the run whose bundle this run continues; None starts from nothing.

        Raises:
            ConfigError: as `name`, or the run's own name.
        """
        parent = self.values.get("parent")
        if parent is None:
            return None
        if parent == self.name:
            raise ConfigError(f"parent: {parent!r} is the run itself; give the run another --name")
        return _plain("parent", str(parent))

    @property
    def seed(self) -> int:
        """Seed of everything random in the run (default 0).

        Raises:
            ConfigError: not a whole number of at least 0 and below 2^63.
        """
        seed = int(_convert(int, self.values.get("seed", 0), "seed"))
        if not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed: expected a whole number from 0 to 2^63 - 1, got {seed}")
        return seed

    @property
    def minutes(self) -> float | Literal["auto"] | None:
        """Time budget of the whole run in minutes; `auto` follows the data; None for no budget.

        Raises:
            ConfigError: neither `auto` nor a positive number.
        """
        minutes = self.values.get("minutes")
        if minutes is None or minutes == "auto":
            return minutes
        number = float(_convert(float, minutes, "minutes"))
        if not 0 < number < math.inf:
            raise ConfigError(f"minutes: expected a number above 0, or auto, got {minutes}")
        return number

    def sets(self, section: str, *keys: str) -> bool:
        """Whether a section has a value for one of the keys."""
        values = self.values.get(section)
        return isinstance(values, dict) and any(key in values for key in keys)

    def section(self, name: str, cls: type[T]) -> T:
        """Read one section into a dataclass; missing keys take the dataclass's defaults.

        Raises:
            ConfigError: unknown key or wrong type, naming both.
        """
        values = self.values.get(name)
        return build(cls, {} if values is None else values, where=name)


def _plain(key: str, name: str) -> str:
    """A name of a run, which is also the name of its folders.

    Raises:
        ConfigError: a name with characters that a folder's name should not have.
    """
    if not name or name.startswith(".") or not all(c.isalnum() or c in "-_." for c in name):
        raise ConfigError(
            f"{key}: {name!r} is not a plain word; use letters, digits, '-', '_', '.'"
        )
    return name


def build(cls: type[T], values: Mapping[str, Any], where: str = "") -> T:
    """Make dataclass `cls` from a mapping; each value is checked and converted by its annotation.

    Raises:
        ConfigError: unknown key or wrong type; the message names `where.key`.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping, found {values!r}")
    hints = typing.get_type_hints(cls)
    names = [f.name for f in dataclasses.fields(cast("Any", cls)) if f.init]
    arguments = {}
    for key, value in values.items():
        if key not in names:
            raise ConfigError(_unknown(f"key in {where!r}", str(key), names))
        arguments[key] = _convert(hints[key], value, f"{where}.{key}")
    try:
        return cls(**arguments)
    except ConfigError as error:
        if not where or str(error).startswith(where):
            raise
        raise ConfigError(f"{where}.{error}") from error
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {error}") from error


def check_bounds(
    config: object,
    prefix: str = "",
    *,
    at_least: Mapping[str, float] | None = None,
    above_zero: Iterable[str] = (),
    below_one: Iterable[str] = (),
) -> None:
    """Check numbers of a configuration.

    Args:
        config: a dataclass.
        prefix: of the field names in messages, such as `lora.`.
        at_least: field -> smallest value.
        above_zero: fields that must be greater than 0, or None.
        below_one: fields that must be at least 0 and less than 1.

    Raises:
        ConfigError: a value out of bounds; the message names the field.
    """

    def value(name: str) -> Any:
        return getattr(config, name)

    wrong = [  # comparisons with NaN are false, so that it is out of every bound
        *((n, f"at least {m}") for n, m in (at_least or {}).items() if not value(n) >= m),
        *((n, "more than 0") for n in above_zero if value(n) is not None and not value(n) > 0),
        *((n, f"0 <= {n} < 1") for n in below_one if not 0 <= value(n) < 1),
    ]
    for name, expected in wrong:
        raise ConfigError(f"{prefix}{name}: expected {expected}, got {value(name)}")


def as_dict(config: object) -> dict[str, Any]:
    """Convert a dataclass to plain JSON values, for manifests; paths become strings."""

    def plain(value: object) -> Any:
        if isinstance(value, dict):
            return {str(k): plain(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return cast("dict[str, Any]", plain(dataclasses.asdict(cast("Any", config))))


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"--set {override!r}: expected key=value, for example target.epochs=3")
    if not text.strip():  # as of a shell variable that is not set
        raise ConfigError(f"--set {override!r}: the value is empty; write {key}=null for none")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # 2018-13-45 is a ValueError
        raise ConfigError(f"--set {override!r}: the value is not valid YAML: {error}") from error
    _put(values, key.strip().split("."), value, f"--set {override!r}")


def _merge(values: dict[str, Any], sections: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Set the values of sections that are not None, and return their keys."""
    keys = []
    for section, own in sections.items():
        for key, value in own.items():
            if value is not None:
                plain = str(value) if isinstance(value, Path) else value
                _put(values, [*section.split("."), key], plain, f"{section}.{key}={plain}")
                keys.append(f"{section}.{key}")
    return keys


def _put(values: dict[str, Any], path: list[str], value: object, what: str) -> None:
    """Set one value in nested mappings; `what` begins the error message."""
    *parents, last = path
    node = values
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{what}: {parent!r} is a value, not a section")
        node = child
    node[last] = value


def _unknown(what: str, key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(allowed)}"
    return f"unknown {what}: {key!r}; {hint}"


def _convert(hint: Any, value: Any, where: str) -> Any:
    """Convert `value` to the annotated type. Only the types that configurations use are supported.

    Raises:
        ConfigError: the value has another type.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [a for a in arguments if a is not type(None)] or [Any]
        # Of two types, such as int | tuple[int, ...], the last is that of a list.
        return _convert(options[-1 if isinstance(value, (list, tuple)) else 0], value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ConfigError(
                f"{where}: {value!r} is not one of {', '.join(repr(a) for a in arguments)}"
            )
        return value
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}: expected a list, found {value!r}")
        if origin is tuple and ... not in arguments and len(value) != len(arguments):
            raise ConfigError(f"{where}: expected {len(arguments)} values, found {value!r}")
        inner = arguments[0] if arguments else Any
        return origin(_convert(inner, v, f"{where}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: expected a mapping, found {value!r}")
        return dict(value)
    if dataclasses.is_dataclass(hint):
        return build(cast("type[Any]", hint), {} if value is None else value, where)
    if hint is Path and isinstance(value, (str, Path)):
        return Path(value).expanduser()
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML 1.1 reads 3e-3 as a string
        try:
            return float(value)
        except ValueError:
            pass
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if hint is Any:
        return value
    raise ConfigError(
        f"{where}: expected {getattr(hint, '__name__', hint)}, "
        f"found {value!r} ({type(value).__name__})"
    )
