"""Settings of the service, from flags, `--set`, environment, YAML and defaults, in this order.

Environment variables are named `RECSYS_SERVE_<FIELD>`; the YAML section is `serve`. Every source
refuses unknown keys.
"""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from recsys.artifacts import Workspace
from recsys.config import Settings, explain, internal, refuse_unknown
from recsys.devices import AUTO
from recsys.errors import ConfigError
from recsys.modes import check_capture
from recsys.serving.auth import marker
from recsys.serving.stores.records import NOT_HISTORY

ENV_PREFIX = "RECSYS_SERVE_"
SECTION = "serve"
DAY_MS = 86_400_000
FormatName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
_HOST = r"(\*\.)?[A-Za-z0-9.-]+(:[0-9]+)?"


def _workspace(fields: dict[str, Any]) -> Workspace:
    """The workspace with the name of the bundle, which has its data set and its store."""
    return Workspace.of(Path(fields["bundle"]).absolute().name)


def _default_store(fields: dict[str, Any]) -> Path:
    workspace = _workspace(fields)
    return workspace.home / "serving" / workspace.name / "histories.db"


def default_keys() -> Path:
    """The file of keys that is used if no other is named: `keys.json` beside the stores."""
    return Workspace.of("demo").home / "serving" / "keys.json"


def _keys_in_use() -> Path | None:
    """The default file of keys if it is there, or was: then the service does not start without."""
    path = default_keys()
    return path if path.is_file() or marker(path).exists() else None


class TextFormat(BaseModel):
    """A form of texts: one of its fields, as the constructor of this name in `recsys.text`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    json_schema: dict[str, JsonValue] = {}
    """JSON of a schema."""
    regex: str = ""
    """Texts that match a regular expression as a whole."""
    lark: str = ""
    """Texts of a context-free grammar in Lark's syntax."""

    @model_validator(mode="before")
    @classmethod
    def _has_one_field(cls, value: Any) -> Any:
        if isinstance(value, dict) and not (
            len(value) == 1 and value.keys() <= cls.model_fields.keys()
        ):
            raise ValueError(f"give exactly one of {', '.join(cls.model_fields)}")
        return value


class ServingSettings(BaseSettings):
    """The configuration of a serving process."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """Address to listen on; beyond loopback only with `keys` or `insecure_listen`."""
    port: int = Field(8000, ge=0, le=65535)
    """TCP port; 0 takes a free one."""
    insecure_listen: bool = False
    """Accept requests without a key from everyone who can reach `host`."""
    bundle: Path = Field(default_factory=lambda: Workspace.of("demo").bundle)
    """Bundle to serve."""
    histories: Path | None = Field(
        default_factory=lambda fields: (
            path if (path := _workspace(fields).dataset).is_dir() else None
        )
    )
    """Canonical data set whose histories are imported at a start, once for each of its versions;
    None imports nothing. Default: the data set of the bundle's name, if there is one."""
    store: str | Path = Field(default_factory=_default_store)
    """Store of histories and events: a SQLite file, `sqlite:///...` or `postgresql://...`. Default:
    one file for each bundle name, because user ids of different data sets are unrelated."""
    device: str = AUTO
    """Device of the models, such as `cpu` or `cuda`. `auto` is a GPU, where there is one and it
    answers sooner than the CPU; both times are logged when a model is loaded."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Data type of the models. `bfloat16` rounds the weights, and is faster on a GPU only."""
    threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of a forward pass; None leaves one core free if there are more than two, because
    a thread that waits for a core delays the whole pass."""
    mode: Literal["auto", "beam", "exhaustive", "draft", "planned"] = "auto"
    """Decoding mode: `auto` plans on an accelerator and uses plain beam search on a CPU; `beam`,
    `exhaustive`, `draft` and `planned` are fixed (`recsys.decoding.Engine`)."""
    capture: Literal["passes", "decodes"] = "passes"
    """What is captured as graphs on a GPU when a model is loaded: its `passes` where the mode
    plans, or passes and whole `decodes` in each mode but `exhaustive`."""
    prefix_mb: int = Field(64, ge=0, le=2**20)
    """Memory of the prefix cache in MiB, which speeds up the next answer for a returning user; 0
    turns it off. Answers do not depend on it."""
    max_batch: int = Field(32, ge=1)
    """Maximum number of requests in a batch."""
    max_wait_ms: float = internal(default=40.0, ge=0)
    """Maximum time that a request waits for others; also limited by the duration of the last
    batch."""
    queue_limit: int = Field(256, ge=1)
    """Maximum number of waiting requests; more are refused with 429."""
    deadline_ms: float = Field(5000.0, gt=0, le=DAY_MS)
    """A request without an answer by then fails with 504. It counts from the head of the request,
    and a body that has not arrived by then fails as well."""
    max_body_bytes: int = internal(default=1024 * 1024, ge=1024)
    """Larger request bodies are refused with 413."""
    models_dir: Path | None = None
    """Folder of the bundles that an alias may be given, by the names of their folders; None for the
    folder that contains `bundle`."""
    ready_without_store: bool = False
    """Whether `/health/ready` stays 200 while the store cannot be reached and only requests with an
    inline history are answered."""
    not_history: tuple[str, ...] = NOT_HISTORY
    """Types of events that are stored and are not part of a history."""
    keys: Path | None = Field(default_factory=_keys_in_use)
    """File of API keys (`recsys keys`), read again when it changes. With one, every request needs a
    key with the route's scope. None serves this machine without keys. Default: `keys.json` beside
    the stores, if there is one or keys were in use before."""
    rate_limit: float | None = Field(None, ge=0.001)
    """Average work per second for each key, or without keys for each address, in units of an
    ordinary request (`limits.work_of`), at least .001; more is refused with 429. None for no
    limit."""
    rate_burst: int = internal(default=100, ge=1)
    """Units of work at once."""
    forwarded_allow_ips: str = "127.0.0.1"
    """Addresses of trusted proxies, separated by commas, whose `X-Forwarded-For` and
    `X-Forwarded-Proto` are used; `*` trusts every address."""
    allowed_hosts: str | None = None
    """Accepted values of the header Host, separated by commas; `*.example.org` accepts subdomains;
    `*` accepts all. Default: names of this machine if the service listens on loopback, and all
    names otherwise."""
    image_hosts: str | None = Field(None, pattern=rf"^{_HOST}( *, *{_HOST})*$")
    """Hosts from which the page may show pictures of items, separated by commas; `*.example.org`
    accepts subdomains. None: pictures in data URLs only."""
    explainer: Path | None = None
    """Folder of a text model with its tokenizer, which answers `/v1/texts`; None does not. It runs
    on `device`, with `auto` on the CPU."""
    text_formats: dict[FormatName, TextFormat] = {}
    """Formats of `/v1/texts` by their names, each with one of `json_schema`, `regex` and `lark`.
    They are compiled at the start."""
    gc_freeze: bool = internal(default=True)
    """Exclude the objects of loaded models from garbage collection, and collect less often."""

    @field_validator("bundle", "histories", "models_dir", "keys", "explainer")
    @classmethod
    def _expand(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @field_validator("store")
    @classmethod
    def _url_or_path(cls, store: str | Path) -> str | Path:
        if isinstance(store, str) and "://" in store:
            return store
        return Path(store).expanduser()

    @model_validator(mode="after")
    def _stay_on_this_machine(self) -> Self:
        if self.keys is None and not self.insecure_listen and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host!r} can be reached from other machines and the service has no "
                "keys; make one with `recsys keys create`, listen on 127.0.0.1 behind a proxy that "
                "authenticates, or accept the risk with --insecure-listen"
            )
        return self

    @model_validator(mode="after")
    def _capture_what_can_be(self) -> Self:
        check_capture(self.capture, self.device, self.mode)
        return self

    @model_validator(mode="after")
    def _write_with_a_model(self) -> Self:
        if self.text_formats and self.explainer is None:
            raise ValueError(
                "text_formats needs a text model that writes them; explainer names its folder"
            )
        return self

    @property
    def hosts(self) -> tuple[str, ...]:
        """Accepted values of the header Host, in lower case, without port."""
        if self.allowed_hosts is not None:
            return tuple(host.strip().lower() for host in self.allowed_hosts.split(","))
        if _is_loopback(self.host):
            return ("localhost", "127.0.0.1", "::1", self.host.lower())
        return ("*",)

    @property
    def pictures(self) -> tuple[str, ...]:
        """Hosts from which the page may show pictures, in lower case."""
        return tuple(host.strip().lower() for host in (self.image_hosts or "").split(",") if host)

    @classmethod
    def load(
        cls, config: Path | None = None, overrides: Iterable[str] = (), **flags: Any
    ) -> "ServingSettings":
        """Merge the sources.

        Args:
            config: YAML file; its section `serve` is read.
            overrides: `serve.key=value` strings of `--set`.
            **flags: fields from the command line; None is skipped. `name` is the name of the run,
                which determines the default bundle.

        Raises:
            ConfigError: an unknown key or a value out of range, naming it.
        """
        name = flags.pop("name", None)
        file = Settings.load(config, name=name)
        explicit = Settings.load(None, overrides)
        for key in explicit.values:
            if key not in (SECTION, "name"):
                raise ConfigError(f"--set {key}: this command reads {SECTION}.key=value only")
        name = explicit.values.get("name") or file.values.get("name")
        values: dict[str, Any] = {}
        if name is not None:
            values["bundle"] = Workspace.of(Settings({"name": name}).name).bundle
        values |= _section(file) | _environment(cls) | _section(explicit)
        values |= {key: value for key, value in flags.items() if value is not None}
        refuse_unknown(cls, values, SECTION)
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, cls, SECTION)) from error


def _section(settings: Settings) -> dict[str, Any]:
    section = settings.values.get(SECTION) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION}: expected a mapping, found {section!r}")
    return section


def _environment(cls: type[ServingSettings]) -> dict[str, Any]:
    for variable in os.environ:
        key = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX):
            refuse_unknown(cls, {key: None}, f"environment variable {variable}")
        if variable.startswith(ENV_PREFIX) and not os.environ[variable].strip():
            raise ConfigError(f"environment variable {variable} is empty; give a value or unset it")
    return EnvSettingsSource(cls)()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # the address of a name is not known
