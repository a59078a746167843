"""`recsys benchmark serve`. Nothing heavy is imported at the top."""

from pathlib import Path
from typing import Annotated

import typer

from recsys.benchmark.options import Out, ServerSettings, numbers
from recsys.options import Json, Name, Quick, Seed


def serve(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to serve (default: that of --name).")
    ] = None,
    name: Name = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server that runs already, http://HOST:PORT, and serves --bundle."),
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="API key for --url.", envvar="RECSYS_API_KEY")
    ] = None,
    settings: ServerSettings = None,
    concurrency: Annotated[
        str, typer.Option(help="Clients of the closed loops, a list; empty for none.")
    ] = "1,8,32,64",
    rates: Annotated[
        str,
        typer.Option(help="Requests a second of open loops, a list; 70 % of the peak is added."),
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.5, help="Duration of each loop.")] = 10.0,
    k: Annotated[int, typer.Option(min=1, max=200, help="Items of a recommendation.")] = 10,
    checks: Annotated[
        int,
        typer.Option(
            min=0,
            help="Mixed requests compared, under load against alone; fewer if they would take "
            "longer alone than three loops.",
        ),
    ] = 5000,
    soak: Annotated[
        float | None, typer.Option(min=0.05, help="Only this: so many minutes of mixed requests.")
    ] = None,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Measure a service under load: latency, throughput, equal answers under load, soaks.

    Starts a server of the bundle with a store of its own, or uses one that runs. Server and load
    generator share the machine; the last column is the generator's share of it. Prints tables, and
    one JSON line last.

    Example: recsys benchmark serve --bundle var/bundles/demo --set serve.threads=1
    """
    import asyncio

    from recsys.benchmark import report
    from recsys.serving.benchmark import measure
    from recsys.serving.benchmark.process import Server, Subject, start_server
    from recsys.serving.benchmark.report import report as report_serve

    subject = Subject.of(bundle, name, settings or ())
    clients = "1,8" if quick else concurrency
    options = measure.Options(
        concurrencies=numbers("--concurrency", clients) if clients else (),
        rates=numbers("--rates", rates, float) if rates else (),
        seconds=1.0 if quick else seconds,
        k=k,
        checks=30 if quick else checks,
        seed=seed or 0,
    )

    async def run(server: Server) -> report.Document:
        if soak is None:
            return await measure.measure(server, subject.bundle, options, key)
        found = await measure.soak(server, subject.bundle, minutes=soak, seed=options.seed)
        return {"soak": found}

    async def start_and_run() -> report.Document:
        async with start_server(subject.bundle, subject.settings) as server:
            return await run(server)

    document = report.begin("serve", quick=quick, out=out) | subject.facts
    document |= asyncio.run(start_and_run() if url is None else run(Server.at(url)))
    report.publish(document, report_serve(document), out, as_json=as_json)
