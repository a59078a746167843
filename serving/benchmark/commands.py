"""`recsys benchmark serve`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from recsys.options import Json, Name, Seed

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
    quick: Annotated[
        bool, typer.Option("--quick", help="A smoke run in seconds; its figures mean nothing.")
    ] = False,
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
    from urllib.parse import urlsplit

    from recsys.artifacts import Workspace, read_manifest
    from recsys.config import Settings
    from recsys.errors import ConfigError
    from recsys.progress import say
    from serving.benchmark.measure import Bench, Options, measure
    from serving.benchmark.process import Server, started
    from serving.benchmark.soak import soak as run_soak

    bundle = bundle or Workspace.of(Settings.load(None, name=name).name).bundle
    version = read_manifest(bundle, "bundle").digest
    for setting in settings or ():
        if not setting.startswith("serve."):
            raise ConfigError(f"--set {setting}: this command reads serve.key=value only")
    told = [setting.removeprefix("serve.") for setting in settings or ()]
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
    document = {
        "benchmark": "serve",
        "schema": SCHEMA,
        "command": shlex.join(["recsys", *sys.argv[1:]]),
        "quick": quick,
        "bundle": {"name": bundle.absolute().name, "version": version},
        "settings": told,
    }

    firsts: list[dict[str, Any]] = []

    async def against(server: Server) -> dict[str, object]:
        if soak is None:
            return await measure(server, bundle, options, told, key, firsts)
        found = await run_soak(
            server, bundle, minutes=soak, clients=soak_clients, rate=soak_rate, seed=options.seed
        )
        return {"soak": found}

    async def run() -> dict[str, object]:
        if url is None:
            for _ in range(0 if quick or soak is not None else starts - 1):
                async with started(bundle, told) as server:
                    bench = Bench(server, bundle, options, None)
                    firsts.append(await bench.first_answer())
                    bench.client.close()
            async with started(bundle, told) as server:
                return await against(server)
        where = urlsplit(url)
        if where.scheme != "http" or where.hostname is None:
            raise ConfigError(f"--url {url}: expected http://HOST:PORT")
        return await against(Server(where.hostname, where.port or 80))

    document |= asyncio.run(run())
    from rich.console import Console

    from recsys.benchmark.environment import environment  # torch is imported when all is measured
    from serving.benchmark import report

    document |= {"environment": environment()}
    if not as_json:
        console = Console()
        for table in report.tables(document):
            console.print(table)
        for sentence in report.sentences(document):
            console.print(sentence, highlight=False, soft_wrap=True)
    if out is not None:
        from recsys.benchmark.report import alone

        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(document, indent=1)
        (out / "result.json").write_text(text + "\n", encoding="utf-8")
        for part, drawing in report.drawings(document).items():
            (out / f"{part}.svg").write_text(alone(drawing), encoding="utf-8")
        say(f"written: {out}")
    typer.echo(json.dumps(document))


def _numbers(option: str, text: str, kind: type) -> tuple[Any, ...]:
    from recsys.errors import ConfigError

    try:
        found = tuple(kind(word) for word in text.split(",") if word.strip())
    except ValueError:
        found = (0,)
    if any(number <= 0 for number in found):
        raise ConfigError(f"{option} {text!r} is not a list of numbers above 0")
    return found
