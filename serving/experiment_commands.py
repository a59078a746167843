"""`recsys experiment`. Nothing heavy is imported at the top; `recsys --help` reads this module."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer

from recsys.options import Json

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.serving.client import Client
    from recsys.serving.schemas.experiments import ExperimentInfo

app = typer.Typer(no_args_is_help=True, add_completion=False)
ExperimentName = Annotated[str, typer.Argument(help="Name of the experiment.")]
Url = Annotated[str, typer.Option(help="URL of the service.")]
Key = Annotated[str | None, typer.Option(help="API key.", envvar="RECSYS_API_KEY")]
HERE = "http://127.0.0.1:8000"
UNITS = {"m": 60, "h": 3_600, "d": 86_400}


@app.callback()
def _experiment() -> None:
    """Compare aliases of a running service on its users."""


@app.command("put")
def put(
    name: ExperimentName,
    arm: Annotated[
        list[str],
        typer.Option(
            "--arm", help="ALIAS=WEIGHT; repeatable. The others are compared with the first."
        ),
    ],
    event: Annotated[str, typer.Option(help="Type of the events that count.")] = "click",
    window: Annotated[
        str, typer.Option(help="How long after an answer they count: 30m, 12h or 7d.")
    ] = "1d",
    days: Annotated[int, typer.Option(help="How long it runs.")] = 28,
    guardrail: Annotated[
        bool, typer.Option(help="Stop an arm that is shown to be worse than the first.")
    ] = True,
    url: Url = HERE,
    key: Key = None,
) -> None:
    """Start an experiment. Requests take part if their `model` is its name.

    Example: recsys experiment put homepage --arm champion=1 --arm challenger=1 --window 1h
    """
    from recsys.serving.schemas.experiments import ExperimentInfo

    arms, seconds = _arms(arm), _seconds(window)
    with _client(url, key) as client:
        body = {
            "arms": [{"alias": alias, "weight": weight} for alias, weight in arms.items()],
            "event": event,
            "window_s": seconds,
            "days": days,
            "guardrail": guardrail,
        }
        info = client.ask(ExperimentInfo, "PUT", _path(name), json=body)
    typer.echo(_line(info))


@app.command("results")
def results(name: ExperimentName, url: Url = HERE, key: Key = None, as_json: Json = False) -> None:
    """Compare the arms with the first one. The intervals hold however often you look.

    Example: recsys experiment results homepage
    """
    from recsys.serving.schemas.experiments import ExperimentResults

    with _client(url, key) as client:
        found = client.ask(ExperimentResults, "GET", _path(name, "results"))
    if as_json:
        typer.echo(found.model_dump_json())
        return
    for arm in found.arms:
        rate = "-" if arm.rate is None else f"{arm.rate:.2%}"
        typer.echo(
            f"{arm.alias}\t{arm.observed} users\t{arm.exposures} answers\t{arm.followed} followed\t"
            f"{rate}\t{arm.verdict}"
        )
    typer.echo(found.verdict)


@app.command("delete")
def delete(name: ExperimentName, url: Url = HERE, key: Key = None) -> None:
    """Delete an experiment and its results.

    Example: recsys experiment delete homepage
    """
    with _client(url, key) as client:
        existed = client.delete(_path(name), "unknown_experiment")
    typer.echo(f"Experiment {name} {'is deleted' if existed else 'does not exist'}.")


def _path(*parts: str) -> str:
    return "/v1/experiments/" + "/".join(quote(part, safe="") for part in parts)


@contextmanager
def _client(url: str, key: str | None) -> Iterator[Client]:
    """A client of the service; its refusals are errors of the command."""
    import httpx

    from recsys.errors import ConfigError
    from recsys.serving.client import Client, ServiceError

    try:
        with Client(url, key=key) as client:
            yield client
    except ServiceError as error:
        raise ConfigError(f"{url}: {error}") from error
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise ConfigError(f"{url}: {error}; start the service, or give its --url") from error


def _arms(given: list[str]) -> dict[str, float]:
    import math

    from recsys.errors import ConfigError

    arms: dict[str, float] = {}
    for arm in given:
        alias, _, weight = arm.partition("=")
        if alias in arms:
            raise ConfigError(f"--arm {arm}: {alias} has a weight already")
        try:
            arms[alias] = float(weight)
        except ValueError:
            raise ConfigError(f"--arm {arm}: write ALIAS=WEIGHT, such as champion=1") from None
        if not math.isfinite(arms[alias]):  # JSON has no such number
            raise ConfigError(f"--arm {arm}: the weight must be a finite number")
    return arms


def _seconds(window: str) -> int:
    from recsys.errors import ConfigError

    found = re.fullmatch(r"([0-9]{1,7})([mhd])", window)
    if found is None:
        raise ConfigError(f"--window {window}: write a number and m, h or d, such as 12h")
    return int(found[1]) * UNITS[found[2]]


def _line(info: ExperimentInfo) -> str:
    arms = ", ".join(
        f"{arm.alias} {arm.share:.0%}" + (" (stopped)" if arm.stopped_ms is not None else "")
        for arm in info.arms
    )
    return f"{info.name}\t{info.status}\t{arms}\t{info.event} within {info.window_s} s"
