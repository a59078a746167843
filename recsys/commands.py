"""Commands of the library: the whole pipeline, evaluation, one recommendation, a check-up.

Nothing heavy is imported at the top, because `recsys --help` reads this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recsys import __version__
from recsys.options import (
    ColumnNames,
    Json,
    Name,
    RunOptions,
    Seed,
    expand_options,
    read_columns,
)

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.pipeline import Context
    from recsys.retraining import Sources

SERVICE = "http://127.0.0.1:8000"
REFUSED = 3  # exit status of a retraining whose result is refused by the gate
BundleFolder = Annotated[
    Path | None, typer.Option(help="Bundle directory; by default that of --name.")
]
DatasetFolder = Annotated[
    Path | None, typer.Option(help="Canonical data set; by default that of --name.")
]
ItemsFile = Annotated[str | None, typer.Option("--items", help="File that describes the items.")]
Minutes = Annotated[
    float | None, typer.Option(help="Time budget of the whole run (default: by data size).")
]
Length = Annotated[int, typer.Option("-k", "--k", min=1, max=200, help="Items wanted.")]


@dataclass(frozen=True)
class SourceOptions:
    """Options of `recsys run`: where events and items are read from, and for how long it runs."""

    events: Annotated[
        str | None,
        typer.Argument(
            metavar="EVENTS",
            help="File of events (csv, tsv, parquet, jsonl, xlsx), or a folder; "
            "without it, the data prepared under --name.",
        ),
    ] = None
    items: ItemsFile = None
    column: ColumnNames = None
    drop_items: Annotated[
        list[str] | None,
        typer.Option(
            "--drop-items",
            help="Lines that are no products, such as shipping: an id, a pattern with *, or "
            "COLUMN=VALUE. They are in no history and never recommended. 'none' keeps those that "
            "are recognised. Repeatable.",
        ),
    ] = None
    minutes: Minutes = None

    def context(self, run: RunOptions) -> Context:
        """The context of a run; without a configuration it follows the recipe for shops.

        Raises:
            ConfigError: options that do not fit each other, or files that are not there.
        """
        from recsys.errors import ConfigError
        from recsys.fitting import RECIPE, check_settings, table_sections

        columns = read_columns(self.column or ())
        run = replace(run, config=run.config or RECIPE)
        if self.events is None:
            if self.items or columns or self.drop_items:
                raise ConfigError(
                    "EVENTS: missing beside --items, --column or --drop-items; for example "
                    "recsys run events.csv --items products.csv"
                )
            return run.context(minutes=self.minutes)
        from recsys.data.sources import find_tables, name_of

        run = replace(run, name=run.name or name_of(self.events))
        settings = run.context(minutes=self.minutes).settings
        check_settings(settings, columns)
        tables = find_tables(self.events, self.items)
        sections = table_sections(tables, columns)
        if self.drop_items:
            sections["data.clean"] = {"drop_items": list(self.drop_items)}
        return run.context(minutes=self.minutes, **sections)


@dataclass(frozen=True)
class NewsOptions:
    """Options of `recsys retrain`: where new events and items are read from."""

    events: Annotated[
        str | None,
        typer.Argument(
            metavar="EVENTS",
            help="File or folder of events, also a full export: what is older than the served "
            "bundle's data is left out. Without it, the events of the service's store.",
        ),
    ] = None
    items: ItemsFile = None
    column: ColumnNames = None
    store: Annotated[
        str | None,
        typer.Option(help="Store of the service: a path or URL; 'none' for files alone."),
    ] = None

    def sources(self, run: RunOptions) -> Sources:
        """The store of the service of a run, if it is there, and the files.

        Raises:
            ConfigError: neither is there.
        """
        from recsys.errors import ConfigError
        from recsys.retraining import Sources
        from recsys.serving.settings import ServingSettings

        serve = [text for text in run.set_ or () if text.startswith("serve.")]
        served = ServingSettings.load(
            run.config, serve, name=run.name, store=self.store, insecure_listen=True
        )
        store: str | Path | None = served.store
        if self.store == "none" or (isinstance(store, Path) and not store.is_file()):
            if self.store not in (None, "none"):
                raise ConfigError(f"--store {self.store}: there is no such file")
            store = None
        if store is None and self.events is None:
            raise ConfigError(
                f"there is no store {served.store}; name it by --store, or give a file of events"
            )
        columns = read_columns(self.column or ())
        events, items = (None if path is None else Path(path) for path in (self.events, self.items))
        return Sources(store, served.not_history, events, items, columns)


@expand_options
def run(
    *,
    source: SourceOptions,
    run: RunOptions,
    until: Annotated[
        str,
        typer.Option(
            help="Last stage: data, sasrec, recipe, ids, target, draft, retrieval, bundle or "
            "evaluate."
        ),
    ] = "evaluate",
    as_json: Json = False,
) -> None:
    """Run the pipeline from a shop's export to a report: data, IDs, models, bundle, evaluation.

    The run is named after the file (or --name). Stages that are up to date are skipped, so a run
    that was stopped continues where it stopped.

    Example: recsys run events.csv --items products.csv
    """
    from recsys.errors import ConfigError
    from recsys.pipeline import STAGES
    from recsys.pipeline import run as run_stages

    if until not in STAGES:
        raise ConfigError(f"--until {until!r} is not one of {', '.join(STAGES)}")
    context = source.context(run)
    results = run_stages(context, STAGES[: STAGES.index(until) + 1])
    _end(context, results, as_json=as_json)


@expand_options
def retrain(
    *,
    news: NewsOptions,
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of the running service, which says what it serves; repeat it for each of its "
            f"processes. Default with --promote: {SERVICE}, otherwise the version that was "
            "promoted last."
        ),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option(help="API key with scope admin for the service.", envvar="RECSYS_API_KEY"),
    ] = None,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote", help="If the gate offers the new version, swap the alias 'champion'."
        ),
    ] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Time budget of the training (default: none).")
    ] = None,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Continue the served bundle with new events and items, and compare both on the newest events.

    Makes the next version, NAME.2, NAME.3 and so on. Old items keep their semantic IDs. A
    retraining that was stopped continues when the same command is given again. The status is 3 if
    the gate refuses the new version.

    Example: recsys retrain --name shop --promote
    """
    from contextlib import ExitStack
    from dataclasses import asdict

    import httpx

    from recsys.config import Settings
    from recsys.errors import ConfigError
    from recsys.pipeline import SECTIONS
    from recsys.progress import working
    from recsys.retraining import retrain as make
    from recsys.serving.client import Client, ServiceError

    settings = Settings.load(
        run.config,
        run.set_ or (),
        known=SECTIONS,
        name=run.name,
        seed=run.seed,
        minutes=minutes,
    )
    sources = news.sources(replace(run, name=settings.name))
    urls = url or ([SERVICE] if promote else [])
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(one, key=key)) for one in urls]
        try:
            with working("retrain"):
                outcome = make(settings, sources, clients=clients, promote=promote, force=run.force)
        except (ServiceError, httpx.TransportError) as error:
            raise ConfigError(f"--url {', '.join(urls)}: {error}; what is made stays") from error
    if as_json:
        typer.echo(json.dumps(asdict(outcome), default=str, ensure_ascii=False))
    if outcome.offered is False:
        raise typer.Exit(REFUSED)


@expand_options
def quickstart(run: RunOptions, as_json: Json = False) -> None:
    """Run the whole pipeline on a synthetic shop in a few minutes, then recommend.

    Example: recsys quickstart
    """
    from recsys.pipeline import run as run_stages

    context = replace(run, config=run.config or Path("configs/quickstart.yaml")).context()
    results = run_stages(context)
    user, items = _find_history(context.workspace.dataset, None, seed=0)
    _show(context.workspace.bundle, user, items, k=10, to_stderr=as_json)
    _end(context, results, as_json=as_json)


def _end(context: Context, results: dict[str, tuple[Path, float]], *, as_json: bool) -> None:
    """Say where the report is and how to serve, or print artifacts and seconds as JSON, too."""
    from recsys.progress import say

    if "evaluate" in results:
        say(f"Report: {results['evaluate'][0] / 'report.html'}")
    if "bundle" in results:
        say(f"Serve it: recsys serve --name {context.settings.name}")
    if as_json:
        artifacts = {
            stage: {"path": str(path), "seconds": seconds}
            for stage, (path, seconds) in results.items()
        }
        typer.echo(json.dumps({"artifacts": artifacts}, ensure_ascii=False))


@expand_options
def evaluate(
    *,
    bundle: BundleFolder = None,
    dataset: DatasetFolder = None,
    out: Annotated[Path | None, typer.Option(help="Where the report goes.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Folder of a report on the same users to compare with.")
    ] = None,
    run: RunOptions,
    as_json: Json = False,
) -> None:
    """Measure Recall@K, NDCG@K and more by full ranking, next to baselines, with 95 % intervals.

    With --against, also prints paired differences to another report, with 95 % intervals.

    Example: recsys evaluate --config configs/beauty.yaml --set evaluate.split=valid
    """
    from recsys.evaluation.compare import compare
    from recsys.evaluation.run import stage

    path = stage(run.context(), bundle=bundle, dataset=dataset, out=out)
    if path is None:
        raise typer.Exit(2)
    if against is None:
        report = (path / "report.json").read_text(encoding="utf-8")
        typer.echo(report if as_json else f"report: {path / 'report.html'}")
        return
    comparison = compare(path, against)
    if as_json:
        typer.echo(json.dumps(comparison))
        return
    a, b = (f"{comparison[side]['report']} ({comparison[side]['ranker']})" for side in "ab")
    typer.echo(f"{a} against {b}, {comparison['users']:,} users:")
    for row in comparison["rows"]:
        typer.echo(
            f"{row['metric']}@{row['k']} of {row['targets']} items, seen items {row['seen']}: "
            f"{row['a']:.4f} against {row['b']:.4f}, {row['mean']:+.4f} "
            f"({row['low']:+.4f} to {row['high']:+.4f})"
        )


def recommend(
    *,
    user: Annotated[
        str | None,
        typer.Option(help="Outside id of a user of the data set; default: a random one."),
    ] = None,
    history: Annotated[
        str | None,
        typer.Option(help="Item ids instead of a user, oldest first, comma-separated."),
    ] = None,
    bundle: BundleFolder = None,
    dataset: DatasetFolder = None,
    name: Name = None,
    seed: Seed = None,
    k: Length = 10,
    as_json: Json = False,
) -> None:
    """Print one user's history and top-K, with titles.

    Example: recsys recommend --name beauty --user 42 -k 5
    """
    context = RunOptions(name=name, seed=seed).context()
    items = history.split(",") if history else []
    if not items:
        folder = dataset or context.workspace.dataset
        user, items = _find_history(folder, user, context.settings.seed)
    _show(bundle or context.workspace.bundle, user, items, k=k, as_json=as_json)


def _show(
    bundle: Path,
    user: str | None,
    history: list[str],
    *,
    k: int,
    as_json: bool = False,
    to_stderr: bool = False,
) -> None:
    """Recommend for a history and print the result, as tables or as JSON."""
    from rich.console import Console
    from rich.table import Table

    from recsys.devices import CPU
    from recsys.recommender import Recommender, RecommendRequest

    recommender = Recommender.load(bundle, device=CPU)  # for one list, nothing is measured
    result = recommender.recommend_batch([RecommendRequest(history, k)])[0]
    if as_json:
        document: dict[str, Any] = {
            "user": user,
            "history": history,
            "unknown_items": result.unknown_items,
            "recommendations": [vars(r) for r in result.recommendations],
            "stats": result.stats,
        }
        typer.echo(json.dumps(document, ensure_ascii=False))
        return
    catalog = recommender.catalog
    console = Console(stderr=to_stderr)
    past = Table("item", "title", title=f"History of {user or 'this session'} (newest last)")
    for item_id, item in zip(history, catalog.index(history), strict=True):
        past.add_row(item_id, catalog.titles[item] if item >= 0 else "[i]not in the catalog[/i]")
    top = Table("#", "item", "title", "score", "semantic ID", title=f"Top {k}")
    for rank, r in enumerate(result.recommendations, 1):
        codes = "-".join(str(c) for c in r.semantic_id)
        top.add_row(str(rank), r.item_id, r.title, f"{r.score:.3f}", codes)
    console.print(past, top)


def _find_history(dataset: Path, user: str | None, seed: int) -> tuple[str, list[str]]:
    """The whole history of a user of a data set, or of a random one with at least three events."""
    import numpy as np

    from recsys.dataset import Dataset
    from recsys.errors import DataError

    data = Dataset.load(dataset)
    histories, ids = data.interactions.histories, data.interactions.user_ids
    if user is None:
        long_enough = np.flatnonzero(histories.lengths >= 3)
        index = int(np.random.default_rng(seed).choice(long_enough))
    else:
        matches = np.flatnonzero(ids == user)
        if not len(matches):
            raise DataError(f"--user {user!r} is not in {dataset}; it has ids like {str(ids[0])!r}")
        index = int(matches[0])
    return str(ids[index]), [str(i) for i in data.item_ids[histories[index]]]


def doctor(
    data: Annotated[
        str | None, typer.Option(help="Events, to estimate the time and memory of a run on them.")
    ] = None,
    items: ItemsFile = None,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Check this machine: versions, threads, bf16, devices, folders. Prints the next step.

    Example: recsys doctor --data events.csv --items products.csv --minutes 20
    """
    import platform
    from importlib.metadata import version

    import torch

    from recsys.artifacts import Workspace
    from recsys.native.library import describe
    from recsys.pipeline import default_minutes, estimate, foresee

    home = Workspace.of("x").home
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "recsys": __version__,
        **{p: version(p) for p in ("torch", "transformers", "peft", "accelerate")},
        "threads": torch.get_num_threads(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "forward on a cpu": describe(),
        "bf16 in hardware": bool(torch.cpu._is_avx512_bf16_supported()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "artifacts": str(home.resolve()),
        "bundles": sorted(p.name for p in (home / "bundles").glob("[!.]*")),
    }
    sizes = _sizes(SourceOptions(data, items)) if data is not None else None
    if as_json:
        if sizes is not None:
            facts["stages"] = estimate(*sizes)
        typer.echo(json.dumps(facts))
        return
    for key, value in facts.items():
        typer.echo(f"{key:>18}  {value if value not in (None, []) else '-'}")
    if not facts["bundles"]:
        typer.echo(
            "\nNo bundle yet: run `recsys run events.csv --items products.csv` with your files, or "
            "`recsys quickstart` with a synthetic shop."
        )
    if sizes is not None:
        foresee(*sizes, minutes or default_minutes(sizes[0]))


def _sizes(source: SourceOptions) -> tuple[int, int]:
    """Numbers of events and items of files, which are read once, as a run would."""
    import pyarrow as pa

    from recsys.data.prepare import DataConfig
    from recsys.data.readers import table

    config = source.context(RunOptions()).settings.section("data", DataConfig).reader()
    stream, events, items = table.read(config), 0, set[str]()
    for part in stream.events:
        events += part.num_rows
        items.update(part["item"].unique().to_pylist())
    return events, len(stream.read_items(pa.table({"item": sorted(items)})).items)
