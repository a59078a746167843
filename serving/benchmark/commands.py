"""`recsys benchmark serve`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recsys.benchmark.result import asked, save, show
from recsys.errors import ConfigError
from recsys.options import Json, Name, Quick, Seed

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.serving.benchmark.measure import Options
    from recsys.serving.benchmark.process import Server
    from recsys.serving.benchmark.subject import Subject

SCHEMA = 1


def serve(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to serve (default: that of --name).")
    ] = None,
    name: Name = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask a server that runs already, http://HOST:PORT, and serves --bundle."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="API key for --url.", envvar="RECSYS_API_KEY")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the server, serve.key=value. Repeatable."),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Clients of the closed loops, a list; empty for none.")
    ] = "1,8,32,64",
    rates: Annotated[
        str,
        typer.Option(help="Requests a second of open loops, a list; 70 % of the peak is added."),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.5, help="Of each loop.")] = 10.0,
    k: Annotated[int, typer.Option(min=1, max=200, help="Items asked for.")] = 10,
    singles: Annotated[
        int, typer.Option(min=0, help="Requests of one client beside as many direct calls.")
    ] = 200,
    starts: Annotated[
        int, typer.Option(min=1, help="Servers started for the first answer; the middle counts.")
    ] = 3,
    checks: Annotated[
        int, typer.Option(min=0, help="Mixed requests compared, under load against alone.")
    ] = 5000,
    check_clients: Annotated[int, typer.Option(min=1, help="Clients that ask them.")] = 64,
    events: Annotated[
        int, typer.Option(min=0, help="Users whose events are sent meanwhile; 0 sends none.")
    ] = 20,
    soak: Annotated[
        float | None, typer.Option(min=0.05, help="Only this: so many minutes of mixed requests.")
    ] = None,
    soak_clients: Annotated[int, typer.Option(min=1, help="Clients of --soak.")] = 8,
    soak_rate: Annotated[
        float | None, typer.Option(min=0.1, help="An open loop of this rate for --soak instead.")
    ] = None,
    quick: Quick = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and plots.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """A service under load: p50, p99, throughput, answers compared with those alone, soaks.

    Starts a server of the bundle with a store of its own, or asks one that runs. Server and load
    share the machine; the load's share of it is told. Prints tables, and one JSON line last.

    Example: recsys benchmark serve --bundle var/bundles/demo --set serve.threads=1
    """
    import asyncio

    from recsys.benchmark.environment import environment
    from recsys.progress import say
    from recsys.serving.benchmark import report
    from recsys.serving.benchmark.measure import Options
    from recsys.serving.benchmark.subject import Subject

    subject = Subject.of(bundle, name, settings or ())
    options = Options(
        concurrencies=_numbers("--concurrency", "1,8" if quick else concurrency, int),
        rates=_numbers("--rates", rates, float),
        seconds=1.0 if quick else seconds,
        k=k,
        singles=25 if quick else singles,
        checks=30 if quick else checks,
        check_clients=check_clients,
        events=2 if quick else events,
        seed=seed or 0,
    )
    document = {"benchmark": "serve", "schema": SCHEMA, **asked(quick=quick), **subject.facts}
    if soak is None:
        document |= asyncio.run(_phases(url, key, subject, options, 1 if quick else starts))
    else:
        found = _soaked(url, subject, soak, soak_clients, soak_rate, options.seed)
        document |= {"soak": asyncio.run(found)}
    document |= {"environment": environment()}  # torch is imported when all is measured
    if not as_json:
        show(report.tables(document), report.sentences(document), soft_wrap=True)
    if out is not None:
        save(out, document, report.drawings(document))
        say(f"written: {out}")
    typer.echo(json.dumps(document))


@asynccontextmanager
async def _server(url: str | None, subject: Subject) -> AsyncIterator[Server]:
    """One that runs already, or one of ours."""
    from recsys.serving.benchmark.process import Server, started

    if url is None:
        async with started(subject.bundle, subject.settings) as server:
            yield server
    else:
        yield Server.at(url)


async def _phases(
    url: str | None, key: str | None, subject: Subject, options: Options, starts: int
) -> dict[str, Any]:
    """First answers of so many servers of ours, and everything else of the last of them."""
    from recsys.serving.benchmark.measure import first_answer, measure

    firsts = []
    for _ in range(starts - 1 if url is None else 0):
        async with _server(None, subject) as server:
            firsts.append(await first_answer(server, subject.bundle, options))
    async with _server(url, subject) as server:
        return await measure(server, subject.bundle, options, subject.settings, key, firsts)


async def _soaked(
    url: str | None,
    subject: Subject,
    minutes: float,
    clients: int,
    rate: float | None,
    seed: int,
) -> dict[str, Any]:
    from recsys.serving.benchmark.soak import soak

    async with _server(url, subject) as server:
        return await soak(
            server, subject.bundle, minutes=minutes, clients=clients, rate=rate, seed=seed
        )


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    try:
        found = tuple(kind(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = (0,)
    if any(number <= 0 for number in found):
        raise ConfigError(f"{option} {text!r} is not a list of numbers above 0")
    return found
