"""`recsys batch`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from recsys.errors import ConfigError
from recsys.options import ConfigFile, Json, Name, Overrides

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _batch() -> None:
    """Recommend for many users at once, without a server."""


@app.command("score")
def score(
    out: Annotated[Path, typer.Option(help="Folder for the output; its complete parts are kept.")],
    users: Annotated[
        Path | None,
        typer.Option(
            help="Parquet file or folder with columns user_id and history (default: every user of "
            "the data set)."
        ),
    ] = None,
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to answer with (default: that of --name).")
    ] = None,
    histories: Annotated[
        Path | None,
        typer.Option(
            help="Data set with the histories, if --users has none (default: the data set of the "
            "bundle's name)."
        ),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Items per user.")] = 10,
    request: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with other fields of POST /v1/recommendations, such as filter, boosts, "
            "exclude_seen."
        ),
    ] = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option(help="This process, or Ray on this machine or a cluster."),
    ] = "local",
    workers: Annotated[int, typer.Option(min=1, help="Ray actors.")] = 1,
    gpus: Annotated[float, typer.Option(min=0, help="Share of a GPU for each Ray actor.")] = 0.0,
    part_rows: Annotated[int, typer.Option(min=1, help="Users per part.")] = 1024,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an output that was made with other settings.")
    ] = False,
    name: Name = None,
    config: ConfigFile = None,
    set_: Overrides = None,
    as_json: Json = False,
) -> None:
    """Write the top-K of every user as parquet, equal to the answers of the service.

    After an interruption, run the command again: it continues with the missing parts. Bundle,
    device, data type and threads (1 by default) are settings of the service; device auto is the CPU
    here.

    Example: recsys batch score --users users.parquet --out var/batches/today
    """
    from recsys.devices import AUTO, CPU
    from recsys.serving.batch.job import Job
    from recsys.serving.batch.run import score as run
    from recsys.serving.settings import ServingSettings

    settings = ServingSettings.load(
        config, set_ or (), name=name, bundle=bundle, histories=histories
    )
    fields = {} if request is None else _read_fields(request)
    if (gpus or workers > 1) and engine != "ray":
        raise ConfigError("--workers and --gpus are of Ray's actors; add --engine ray")
    settings = settings.model_copy(
        update={
            "bundle": settings.bundle.absolute(),
            "histories": settings.histories and settings.histories.absolute(),
            "device": CPU if settings.device == AUTO else settings.device,
            "threads": settings.threads or 1,
        }
    )
    job = Job(settings, users and users.absolute(), {"k": k, **fields}, part_rows)
    summary = run(job, out, engine=engine, workers=workers, gpus=gpus, force=force)
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
        return
    typer.echo(
        f"{summary.users:,} users in {summary.parts:,} parts of {summary.out}; "
        f"{summary.scored:,} scored now in {summary.seconds:,.1f} s"
    )


def _read_fields(request: Path) -> dict[str, Any]:
    """Read the fields of a `--request` file."""
    try:
        fields = json.loads(request.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--request {request}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--request {request}: expected an object")
    return fields
