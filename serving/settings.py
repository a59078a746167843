"""Settings of the service: flags over `--set` over environment over YAML over defaults.

Environment variables are named `RECSYS_SERVE_<FIELD>`; the YAML section is `serve`. A key nobody
knows is refused wherever it comes from.
"""

# Annotations stay live here: pydantic reads them.
import difflib
import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict

from recsys.artifacts import Workspace
from recsys.config import Settings
from recsys.errors import ConfigError
from recsys.serving.stores.records import NOT_HISTORY

ENV_PREFIX = "RECSYS_SERVE_"
SECTION = "serve"


def _workspace(fields: dict[str, Any]) -> Workspace:
    """The workspace of the bundle's own name: its data set and its store lie there."""
    return Workspace.of(Path(fields["bundle"]).absolute().name)


def _default_store(fields: dict[str, Any]) -> Path:
    workspace = _workspace(fields)
    return workspace.home / "serving" / workspace.name / "histories.db"


def default_keys() -> Path:
    """Where keys lie if nothing else is said."""
    return Workspace.of("demo").home / "serving" / "keys.json"


class ServingSettings(BaseSettings):
    """Everything that configures one serving process.

    Attributes:
        host: address to listen on; beyond loopback only with `keys` or `insecure_listen`.
        port: TCP port; 0 takes a free one.
        insecure_listen: accept that whoever reaches `host` may ask anything, without a key.
        bundle: artifact to serve.
        histories: canonical data set whose histories are imported at the first start; None imports
            nothing. Default: the data set of the bundle's name, if there is one.
        store: histories and events: a SQLite file, `sqlite:///...` or `postgresql://...`. By
            default a file for each bundle's name, because user ids of different data sets have
            nothing to do with each other.
        device: where the models run.
        dtype: their arithmetic.
        threads: CPU threads of one forward pass; None leaves one core of more than two to all else,
            since threads that wait for a core hold up all others of their pass.
        mode: how to decode: `auto` plans on an accelerator and searches plainly on a CPU; `beam`,
            `exhaustive`, `draft` and `planned` insist (`recsys.decoding.Engine`).
        prefix_mb: memory for what was computed of users' histories, from which a returning user's
            next answer goes on; 0 keeps none. No answer changes by it.
        max_batch: requests computed together at most.
        max_wait_ms: how long a request may wait for company; never longer than the last batch took.
        queue_limit: requests waiting at most; more are answered 429.
        deadline_ms: a request not answered by then is answered 504.
        max_body_bytes: larger request bodies are answered 413.
        models_dir: folder of the bundles that an alias may be given, each by its folder's name;
            None for the folder that `bundle` lies in.
        history_cache: `redis://...` of a cache of histories that several processes share; None
            for none.
        not_history: types of events that are kept and are no part of a history.
        keys: file of API keys (`recsys keys`), read again when it changes. With one, every request
            needs a key with the route's scope. Default: `keys.json` beside the stores, if there
            is one.
        rate_limit: requests a second that each key, or each address without keys, may make on
            average; more are answered 429. None for no limit.
        rate_burst: requests that it may make at once.
        forwarded_allow_ips: addresses of proxies, with commas, whose `X-Forwarded-For` and
            `X-Forwarded-Proto` are believed; `*` believes everybody.
        allowed_hosts: values of the header Host that are answered, with commas; `*.example.org`
            takes subdomains; `*` takes all. By default, names of this machine where only it can
            reach the service, and all names otherwise.
        shadow_fraction: share of the requests that are run again in the background.
        shadow_alias: alias of the model that does it; None searches plainly with the model that
            answered.
        otel: send traces by OpenTelemetry (extra `otel`), configured by its own variables.
        gc_freeze: take what is loaded at the start out of the garbage collector's sight.
    """

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    insecure_listen: bool = False
    bundle: Path = Field(default_factory=lambda: Workspace.of("demo").bundle)
    histories: Path | None = Field(
        default_factory=lambda fields: (
            path if (path := _workspace(fields).dataset).is_dir() else None
        )
    )
    store: str | Path = Field(default_factory=_default_store)
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    threads: int | None = Field(None, ge=1)
    mode: Literal["auto", "beam", "exhaustive", "draft", "planned"] = "auto"
    prefix_mb: int = Field(64, ge=0)
    max_batch: int = Field(32, ge=1)
    max_wait_ms: float = Field(40.0, ge=0)
    queue_limit: int = Field(256, ge=1)
    deadline_ms: float = Field(5000.0, gt=0)
    max_body_bytes: int = Field(1024 * 1024, ge=1024)
    models_dir: Path | None = None
    history_cache: str | None = None
    not_history: tuple[str, ...] = NOT_HISTORY
    keys: Path | None = Field(
        default_factory=lambda: path if (path := default_keys()).is_file() else None
    )
    rate_limit: float | None = Field(None, gt=0)
    rate_burst: int = Field(100, ge=1)
    forwarded_allow_ips: str = "127.0.0.1"
    allowed_hosts: str | None = None
    shadow_fraction: float = Field(0.0, ge=0, le=1)
    shadow_alias: str | None = None
    otel: bool = False
    gc_freeze: bool = True

    @field_validator("bundle", "histories", "models_dir", "keys")
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

    @property
    def hosts(self) -> tuple[str, ...]:
        """Values of the header Host that are answered, lower case, without port."""
        if self.allowed_hosts is not None:
            return tuple(host.strip().lower() for host in self.allowed_hosts.split(","))
        if _is_loopback(self.host):
            return ("localhost", "127.0.0.1", "::1", self.host.lower())
        return ("*",)

    @classmethod
    def load(
        cls, config: Path | None = None, overrides: Iterable[str] = (), **flags: Any
    ) -> "ServingSettings":
        """Merge the sources.

        Args:
            config: YAML file; its section `serve` is read.
            overrides: `serve.key=value` strings of `--set`.
            **flags: fields given on the command line; None is skipped. `name` is the name of the
                run, from which the bundle's default place follows.

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
        try:
            return cls(**values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from error


def _section(settings: Settings) -> dict[str, Any]:
    section = settings.values.get(SECTION) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{SECTION}: expected a mapping, found {section!r}")
    return section


def _environment(cls: type[ServingSettings]) -> dict[str, Any]:
    for variable in os.environ:
        key = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and key not in cls.model_fields:
            raise ConfigError(f"environment variable {variable}: {_unknown(key)}")
    return EnvSettingsSource(cls)()


def _unknown(key: str) -> str:
    known = list(ServingSettings.model_fields)
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown key {key!r}; {hint}"


def _explain(error: ValidationError) -> str:
    texts = []
    for found in error.errors():
        key = ".".join(str(part) for part in found["loc"])
        if found["type"] == "extra_forbidden":
            texts.append(f"{SECTION}: {_unknown(key)}")
        elif not key:
            texts.append(f"{SECTION}: {found['msg'].removeprefix('Value error, ')}")
        else:
            texts.append(f"{SECTION}.{key}: {found['msg']}, found {found['input']!r}")
    return "; ".join(texts)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False  # a name may lead anywhere
