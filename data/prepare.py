"""Stage `data`: prepares a raw or synthetic data set as a `dataset` artifact."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from pydantic import BeforeValidator, Field, NonNegativeInt

from recsys.artifacts import MANIFEST, Output, read_manifest, sha256
from recsys.config import as_dict, internal, section
from recsys.config import build as build_section
from recsys.data import engine, growth, synthetic
from recsys.data import report as reports
from recsys.data.cleaning import CleanConfig, Duplicates, Rules, Split
from recsys.data.engine import Prepared
from recsys.data.raw import Columns, EventStream, ReaderConfig
from recsys.data.readers import READERS
from recsys.data.report import Report, sentence
from recsys.data.synthetic import SyntheticConfig
from recsys.data.time_formats import TimeUnit
from recsys.dataset import Dataset
from recsys.errors import ArtifactError, ConfigError, DataError
from recsys.interactions import Role
from recsys.pipeline import Context
from recsys.progress import say
from recsys.raw_files import find_raw, raw_folders

SYNTHETIC = "synthetic"
MIN_MEMORY_GB = 1.0
REPORT = "report.html"
OFTEN_REPEATED = 0.2  # share of events; goods that are bought again and again
LEAST_ITEMS = 2
# These settings do not change the data set, so it is not made again when they change.
MEANS = ("memory_gb",)


@section
class DataConfig:
    """Section `data`. Paths are absolute, or below a folder of raw data or the working folder."""

    source: str = SYNTHETIC
    """`synthetic`, or the name of a reader: `s3rec`, `atspeed`, `lcrec`, `movielens`, `amazon` or
    `table`."""
    path: str | None = None
    """The file of interactions or its folder, depending on the reader."""
    attributes: str | None = None
    """File of item attributes; by default the reader looks beside `path`."""
    items: str | None = None
    """File of item titles and texts; by default the reader looks beside `path`."""
    index: str | None = None
    """File of semantic IDs to import; by default the reader looks beside `path`."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Role -> column of a `table` source (`recsys.data.raw.Columns`)."""
    column_names: tuple[str, ...] = ()
    """Names of all columns of the events, in order, of a `table` source whose files have no line of
    names; of text files alone."""
    time_unit: TimeUnit = "auto"
    """Unit of numeric times: `s`, `ms`, `us`, `ns`, or `auto`, which decides by size."""
    time_zone: str = "UTC"
    """Of times without a zone in a `table` source, such as `Europe/Berlin`."""
    day_first: bool | None = None
    """Whether 03/04/2024 is the third of April, in a `table` source; by default the data decide."""
    clean: CleanConfig = Field(default_factory=CleanConfig)
    """Rules that clean a `table` source."""
    behaviours: dict[Annotated[str, BeforeValidator(str)], Role] = Field(default_factory=dict)
    """Roles of event types in a `table` source, by name: `target`, `context` or `negative`; the
    others are guessed."""
    duplicates: Duplicates = "drop-exact"
    """`keep`, `drop-exact` (rows equal in all columns including time) or `keep-first` (one event
    for each user and item)."""
    min_rating: float | None = None
    """Drop events with a lower rating."""
    k_core: NonNegativeInt = 0
    """Drop users and items with fewer events until there are none; 0 keeps all."""
    split: Split | None = None
    """`leave-one-out`, `global-temporal`, or `own` for the split of the source. The default is
    `own` if the source has one, `global-temporal` for a `table` source with times and at least 30
    validation and test users, else `leave-one-out`."""
    ratio: tuple[float, float] = internal("data.dates divides them", default=(0.8, 0.1))
    """Shares of training and validation events under `global-temporal`."""
    dates: tuple[Any, ...] | None = None
    """Start of validation and test (ISO dates in UTC, or unix seconds), instead of shares of the
    events."""
    synthetic: SyntheticConfig = Field(default_factory=SyntheticConfig)
    """Size of the synthetic shop."""
    memory_gb: Annotated[float, Field(ge=MIN_MEMORY_GB)] = engine.MEMORY_GB
    """Memory limit, in GiB; what does not fit goes to files beside the data set."""

    def __post_init__(self) -> None:
        known = [SYNTHETIC, *READERS]
        if self.source not in known:
            advice = f"; --source table --path {self.source} reads a file"
            raise ConfigError(
                f"data.source: {self.source!r} is not one of {', '.join(known)}"
                + (advice if Path(self.source).suffix else "")
            )
        if (self.path is None) != (self.source == SYNTHETIC):
            advice = "reads no file; remove the path" if self.path else "needs a path"
            raise ConfigError(f"data.path: source {self.source!r} {advice}")
        if self.dates is not None and len(self.dates) != 2:
            raise ConfigError(f"data.dates: expected two moments, found {list(self.dates)}")
        build_section(Columns, self.columns, "data.columns")  # refuses unknown roles
        try:
            ZoneInfo(self.time_zone)
        except (KeyError, ValueError, OSError) as error:
            raise ConfigError(sentence("no_time_zone", zone=self.time_zone)) from error

    def reader(self) -> ReaderConfig:
        """The configuration of the reader, with the paths on disk."""
        path = _find("path", self.path)
        if path is None:
            raise ConfigError(f"data.path: source {self.source!r} needs a path")
        same = ("column_names", "time_unit", "time_zone", "day_first", "clean")
        values: dict[str, Any] = {name: getattr(self, name) for name in same}
        values |= {n: _find(n, getattr(self, n)) for n in ("attributes", "items", "index")}
        columns = build_section(Columns, self.columns, "data.columns")
        return ReaderConfig(path, columns=columns, **values)


def stage(context: Context) -> Path:
    """Write the data set of the run, unless it is current.

    A run with a parent has the parent's data set with newer events (`recsys.data.growth`).
    Settings without a source use the data set that was prepared under the run's name. They never
    replace it, and never generate a synthetic one. A data set of another source is replaced only by
    force.

    Raises:
        ConfigError: an unknown source, a path that does not exist, no source and no data set, or a
            data set of another source.
        DataError: a malformed file, or fewer than two items; nothing is written then.
    """
    config, seed = context.settings.section("data", DataConfig), context.settings.seed
    if context.parent is not None:
        return _grown(context, config)
    if not context.settings.sets("data", "source", "synthetic"):
        return _prepared(context)
    seed = seed if config.source == SYNTHETIC else 0
    settings = as_dict(config) | {"seed": seed}
    for name in MEANS:
        del settings[name]
    parents: dict[str, str] = {}
    if config.source != SYNTHETIC:
        inputs = READERS[config.source].files(config.reader())
        for role, file in inputs.items():
            if not file.is_file():
                raise DataError(f"{file}: no such file ({config.source} reads its {role} there)")
            parents[role] = sha256(file)
    output = context.output("dataset", settings, parents)
    if output.is_current():
        return output.path
    _check_same_source(output)
    source, info = _source(config, seed), dict[str, Any]()
    with output.write(info) as folder:
        info |= engine.prepare(source, _rules(config), folder, config.memory_gb)._asdict()
        if (items := info["stats"]["items"]) < LEAST_ITEMS:  # before any model is trained
            raise DataError(sentence("few_items", items=items, least=LEAST_ITEMS))
        _write_report(source.report, info, folder, context.settings.name)
    return output.path


def _grown(context: Context, config: DataConfig) -> Path:
    """The data set of a run with a parent.

    Raises:
        ConfigError: the settings name a source of their own.
        ArtifactError: the parent has no data set, or another one than what is new was taken for.
    """
    if context.settings.sets("data", "source", "path") or context.parent is None:
        raise ConfigError(sentence("source_beside_parent"))
    parents = context.workspace.digests(growth.KIND)
    taken = context.workspace.manifest(growth.KIND)
    parents["parent"] = context.parent.manifest("dataset").digest
    if taken.parents["dataset"] != parents["parent"]:
        said = {"taken": context.workspace.path(growth.KIND), "other": context.parent.dataset}
        raise ArtifactError(sentence("taken_for_another", **said))
    config = replace(config, split="global-temporal", dates=tuple(taken.info["dates"]))
    settings = as_dict(config) | {"seed": 0}
    for name in MEANS:
        del settings[name]
    output = context.output("dataset", settings, parents)
    if output.is_current():
        return output.path
    before = Dataset.load(context.parent.dataset)
    rules = replace(_rules(config), min_rating=None, k_core=0)  # items must stay
    cleaning = context.parent.manifest("dataset").info.get("cleaning")
    new, mapping = context.workspace.path(growth.KIND), (cleaning or {}).get("mapping")
    made = growth.grow(before, new, rules, cleaned=cleaning is not None, mapping=mapping)
    info = {"stats": made.stats, "split": made.split, "decisions": made.decisions}
    with output.write(info) as folder:
        made.dataset.save(folder)
        _write_report(made.report, info, folder, context.settings.name)
    return output.path


def _write_report(report: Report | None, info: dict[str, Any], folder: Path, name: str) -> None:
    """Show the report of a cleaned source, and write it into `info` and `folder`."""
    if report is None:
        return
    share = info["stats"]["repeats"] / max(info["stats"]["interactions"], 1)
    roles = {behaviour["role"] for behaviour in report.behaviours}
    if share >= OFTEN_REPEATED and "context" not in roles:  # a view is no repeat
        report.note(sentence("often_repeated", share=share))
    info["cleaning"] = report.as_json()
    (folder / REPORT).write_text(reports.render(info["cleaning"], name), encoding="utf-8")
    reports.show(info["cleaning"])


def _prepared(context: Context) -> Path:
    """The data set of the run, for settings without a source.

    Raises:
        ConfigError: there is none, or the settings or `--force` require a new one.
    """
    path = context.workspace.dataset
    settings = context.settings.values.get("data")
    if context.force or settings or not (path / MANIFEST).is_file():
        raise ConfigError(sentence("no_source", path=path))
    say(f"data: no source is named, so the prepared data set {path} is used")
    return path


def _check_same_source(output: Output) -> None:
    """Refuse to replace a data set that was prepared from another source, unless forced.

    New content of the same file, and other filters, replace it; the same content at another path
    does too.

    Raises:
        ConfigError: the message names the setting that differs.
    """
    if output.force or not (output.path / MANIFEST).is_file():
        return
    existing = read_manifest(output.path, output.kind)
    names = ["source"]
    if existing.parents != output.parents:
        names += ["path", "items", "attributes", "index"]
    if output.config["source"] == "table":
        names.append("columns")
    for name in names:
        before, now = (of.get(name) or None for of in (existing.config, output.config))
        if before != now:
            said = [
                f"{'with' if name == 'columns' else 'from'} {value!r}" if value else "without it"
                for value in (before, now)
            ]
            raise ConfigError(sentence("another_source", name=name, path=output.path, said=said))


def build(config: DataConfig, seed: int = 0) -> Prepared:
    """Read, filter and split, in memory."""
    return engine.collect(_source(config, seed), _rules(config))


def _source(config: DataConfig, seed: int) -> EventStream:
    if config.source == SYNTHETIC:
        return synthetic.generate(config.synthetic, seed)
    source: EventStream = READERS[config.source].read(config.reader())
    return source


def _rules(config: DataConfig) -> Rules:
    return Rules(
        config.duplicates,
        config.min_rating,
        config.k_core,
        config.split,
        config.ratio,
        config.dates and (_seconds(config.dates[0]), _seconds(config.dates[1])),
        config.clean,
        config.behaviours,
    )


def _seconds(moment: object) -> int:
    """Unix seconds of a number, a date or an ISO text; without a time zone it is UTC."""
    if isinstance(moment, int) and not isinstance(moment, bool):
        return moment
    try:
        when = datetime.fromisoformat(str(moment))
    except ValueError:
        raise ConfigError(sentence("no_moment", moment=moment)) from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def _find(name: str, path: str | None) -> Path | None:
    """Find a path of the configuration on disk.

    Raises:
        ConfigError: it does not exist.
    """
    from recsys.data.download import public_sets

    if path is None:
        return None
    own = Path(path).expanduser()
    existing = find_raw(own) or (own if own.exists() else None)
    if existing is None:
        said = {"folders": ", ".join(map(str, raw_folders())), "here": Path.cwd()}
        part = own.parts[0] if own.parts else ""
        advice = f". `recsys data download {part}` fetches it" if part in public_sets() else ""
        raise ConfigError(sentence("not_found", name=name, path=path, **said) + advice)
    return existing
