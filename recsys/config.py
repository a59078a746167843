"""Settings: one YAML file plus `--set section.key=value`, read into frozen dataclasses of pydantic.

Each dataclass is defined beside the code that it configures (`section`); this module knows nothing
about the meaning of the sections. An unknown key is refused, and the error suggests the most
similar one.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
)

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic import dataclasses as dataclasses_of_pydantic

from recsys.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

T = TypeVar("T")
CHECKED = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)
INTERNAL = "internal"
BRANCHES = ("int", "str", "path")  # in the place of an error: the type that was tried
UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")  # in dataclasses, and in models
Share = Annotated[float, Field(ge=0, lt=1)]
"""A number of at least 0 and less than 1."""
Folder = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path, in which `~` is the home folder."""

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
        explicit_keys: keys such as `target.epochs` that were given besides the file.
        internals: whether `values` may hold `internal` fields, as those that Python sets.
    """

    values: dict[str, Any] = field(default_factory=dict)
    explicit_keys: frozenset[str] = frozenset()
    internals: bool = True

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
        names = [override.partition("=")[0].strip() for override in overrides]
        names += _merge(values, sections or {})
        values.update({key: value for key, value in top.items() if value is not None})
        allowed = sorted({"name", "parent", "seed", "minutes", *known})
        if known:
            for key in values:
                if key not in allowed:
                    raise ConfigError(_unknown("section", str(key), allowed))
        settings = cls(values, frozenset(names), internals=False)
        _ = settings.seed  # reading checks it
        return settings

    def merged(self, sections: Mapping[str, Mapping[str, object]]) -> Settings:
        """These settings with other values; sections as in `load`."""
        values = copy.deepcopy(self.values)
        merged_keys = _merge(values, sections)
        return Settings(values, self.explicit_keys.union(merged_keys), self.internals)

    def overridden(self, overrides: Iterable[str]) -> Settings:
        """These settings with `section.key=value` strings, as those of `--set`, applied.

        Raises:
            ConfigError: a malformed string.
        """
        values = copy.deepcopy(self.values)
        for override in overrides:
            _apply(values, override)
        return Settings(values, self.explicit_keys, self.internals)

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
        seed = self.values.get("seed", 0)
        if type(seed) is not int or not 0 <= seed < 1 << 63:
            raise ConfigError(f"seed: expected a whole number from 0 to 2^63 - 1, got {seed!r}")
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
        if type(minutes) not in (int, float) or not 0 < minutes < math.inf:
            raise ConfigError(f"minutes: expected a number above 0, or auto, got {minutes!r}")
        return float(minutes)

    def sets(self, section: str, *keys: str) -> bool:
        """Whether a section has a value for one of the keys."""
        values = self.values.get(section)
        return isinstance(values, dict) and any(key in values for key in keys)

    def section(self, name: str, cls: type[T]) -> T:
        """Read one section; missing keys take the defaults of its class.

        Raises:
            ConfigError: unknown key or wrong value, naming both.
        """
        values = self.values.get(name)
        return build(cls, {} if values is None else values, name, internals=self.internals)


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


def internal(instead: str = "its value is right for all users", **options: Any) -> Any:
    """A field that Python may set and no configuration.

    Args:
        instead: why, or what a configuration sets instead; part of an error.
        **options: `default` or `default_factory`, and others of pydantic's `Field`.
    """
    return Field(json_schema_extra={INTERNAL: instead}, **options)


@dataclass_transform(frozen_default=True, field_specifiers=(Field, internal))
def section(cls: type[T]) -> type[T]:
    """Make a class a section of the settings: a frozen dataclass that pydantic checks.

    The docstring under each field is its description, from which the reference page is made.
    Python may construct it with any field; a configuration may not set those of `internal`.
    """
    return cast("type[T]", dataclasses_of_pydantic.dataclass(frozen=True, config=CHECKED)(cls))


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """The fields of a section, or of another model of pydantic, that a configuration may set."""
    return {name: info for name, info in _fields(cls).items() if not _is_internal(info)}


def subsection(info: FieldInfo) -> type | None:
    """The class of a field that is a section itself, needed or not; None for a plain value."""
    hints = (info.annotation, *get_args(info.annotation))
    classes = (hint for hint in hints if isinstance(hint, type))
    return next((cls for cls in classes if dataclasses.is_dataclass(cls)), None)


def build(cls: type[T], values: Mapping[str, Any], where: str = "", *, internals: bool = True) -> T:
    """Make a section from a mapping; each value is checked and converted by its annotation.

    Args:
        cls: the class, made by `section`.
        values: field -> value; of a section, None stands for its defaults.
        where: begins the messages.
        internals: whether `internal` fields may be set.

    Raises:
        ConfigError: unknown key or wrong value; the message names `where.key`.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a mapping, found {values!r}")
    values = _with_defaults(cls, values)
    if not internals:
        refuse_unknown(cls, values, where)
    try:
        return TypeAdapter(cls).validate_python(values)
    except ValidationError as error:
        raise ConfigError(explain(error, cls, where)) from error


def explain(error: ValidationError, cls: type, where: str) -> str:
    """The mistakes that pydantic found in a section, each with its key, its value and a way out."""
    return "; ".join(dict.fromkeys(_explain(detail, cls, where) for detail in error.errors()))


def _explain(detail: ErrorDetails, cls: type, where: str) -> str:
    path, at = where, cls
    for part in detail["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part in _fields(at):
            path, at = f"{path}.{part}", subsection(_fields(at)[part]) or at
        elif detail["type"] in UNKNOWN:
            return _unknown(f"key in {path!r}", str(part), list(fields_of(at)))
        elif part not in BRANCHES and "[" not in part:
            path += f".{part}"  # the key of a mapping
    said = detail["msg"].removeprefix("Value error, ")
    if detail["type"] != "value_error":
        return f"{path}: {said}, found {detail['input']!r}"
    if said.startswith((f"{path}.", "unknown key")):
        return said
    named = re.match(r"(\w+)[\w.]*: ", said)  # some messages begin with a field
    return f"{path}.{said}" if named and named[1] in _fields(at) else f"{path}: {said}"


def _fields(cls: type) -> dict[str, FieldInfo]:
    if issubclass(cls, BaseModel):
        return cls.model_fields
    return cast("dict[str, FieldInfo]", getattr(cls, "__pydantic_fields__"))  # noqa: B009


def _is_internal(info: FieldInfo) -> bool:
    return isinstance(info.json_schema_extra, dict) and INTERNAL in info.json_schema_extra


def _with_defaults(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those of sections that say nothing."""
    values_by_name = {}
    for key, value in values.items():
        inner = subsection(_fields(cls)[key]) if key in _fields(cls) else None
        if inner is None:
            values_by_name[key] = value
        elif value is not None:
            values_by_name[key] = (
                _with_defaults(inner, value) if isinstance(value, Mapping) else value
            )
    return values_by_name


def refuse_unknown(cls: type, values: Mapping[str, Any], where: str) -> None:
    """Refuse keys that a configuration may not set.

    Raises:
        ConfigError: such a key; the message names `where` and the key.
    """
    known = fields_of(cls)
    for key, value in values.items():
        if key not in known:
            extra = _fields(cls)[key].json_schema_extra if key in _fields(cls) else None
            if isinstance(extra, dict):
                raise ConfigError(f"{where}.{key} is no setting ({extra[INTERNAL]}); remove it")
            raise ConfigError(_unknown(f"key in {where!r}", str(key), list(known)))
        inner = subsection(known[key])
        if inner is not None and isinstance(value, Mapping):
            refuse_unknown(inner, value, f"{where}.{key}")


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


def _put(values: dict[str, Any], path: list[str], value: object, origin: str) -> None:
    """Set one value in nested mappings; `origin` begins the error message."""
    *parents, last = path
    node = values
    for parent in parents:
        child = node.get(parent)
        if child is None:
            child = node[parent] = {}
        if not isinstance(child, dict):
            raise ConfigError(f"{origin}: {parent!r} is a value, not a section")
        node = child
    node[last] = value


def _unknown(kind: str, key: str, allowed: list[str]) -> str:
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(allowed)}"
    return f"unknown {kind}: {key!r}; {hint}"
