"""`recsys benchmark capacity`. Nothing heavy is imported at the top."""

from pathlib import Path
from typing import Annotated, Any

import typer

from recsys.benchmark.options import Out, ServerSettings
from recsys.errors import ConfigError
from recsys.options import Json, Name, Quick, Seed

COSTS = "costs.json"


def capacity(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to plan for (default: that of --name).")
    ] = None,
    name: Name = None,
    users: Annotated[int, typer.Option(min=1, help="Users with a history.")] = 1_000_000,
    items: Annotated[
        int | None, typer.Option(min=1, help="Items (default: those of the bundle).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second at the peak.")
    ] = None,
    daily_users: Annotated[
        float | None, typer.Option(min=1, help="Instead of --rate: users on a day.")
    ] = None,
    daily_requests: Annotated[
        float, typer.Option(min=0.001, help="Requests of each of them on a day.")
    ] = 10.0,
    peak: Annotated[
        float, typer.Option(min=1, help="Rate of the busiest second over the mean of a day.")
    ] = 3.0,
    p50: Annotated[float | None, typer.Option(min=0.1, help="Target of p50, ms.")] = None,
    p99: Annotated[float | None, typer.Option(min=0.1, help="Target of p99, ms.")] = 100.0,
    hits: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of requests whose history a replica has kept."),
    ] = 0.8,
    burst: Annotated[
        float, typer.Option(min=1, help="Rate of bursts of 2 s over the calm rate.")
    ] = 1.0,
    events: Annotated[int, typer.Option(min=0, help="Events of a user's history.")] = 20,
    spare: Annotated[int, typer.Option(min=0, help="Replicas that may be lost.")] = 1,
    per_machine: Annotated[int, typer.Option(min=1, help="Replicas on one machine.")] = 1,
    k: Annotated[int, typer.Option(min=1, max=200, help="Items of a recommendation.")] = 10,
    costs: Annotated[
        Path | None,
        typer.Option(help="Cost model to use; by default one is measured (about a minute)."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Instead: predict two replicas, run them, compare."),
    ] = False,
    settings: ServerSettings = None,
    quick: Quick = False,
    out: Out = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Plan replicas and memory from measured costs and a simulated fleet, or check the simulation.

    Measures one replica of the bundle under several loads, searches the rate that it answers within
    the wanted latencies, and simulates the fleet with one replica dying at the peak. --check
    predicts what two replicas do at loads that were not measured, runs them, and compares p50 and
    p99. --out also writes costs.json.

    Example: recsys benchmark capacity --bundle var/bundles/demo --daily-users 1e6 --p99 60
    """
    import asyncio

    from recsys.benchmark import report
    from recsys.serving.benchmark.process import Subject
    from recsys.serving.capacity.costs import Costs
    from recsys.serving.capacity.memory import Memory
    from recsys.serving.capacity.plan import Needs, plan
    from recsys.serving.capacity.report import report as report_capacity
    from recsys.serving.capacity.simulation import Fleet
    from recsys.serving.settings import ServingSettings

    subject = Subject.of(bundle, name, settings or ())
    servers: dict[str, Any] = {"settings": subject.settings, "seed": seed or 0}
    document = report.begin("capacity", quick=quick, out=out) | subject.facts
    if check:
        from recsys.serving.capacity.check import Trial
        from recsys.serving.capacity.check import check as check_simulation

        trial = Trial.quick(k) if quick else Trial(k=k)
        found = asyncio.run(check_simulation(subject.bundle, trial, **servers))
        model = found.pop("costs")
        document["check"] = found
    else:
        if (rate is None) == (daily_users is None):
            raise ConfigError("give one of --rate and --daily-users")
        rate = rate or Needs.rate_of(daily_users or 0.0, daily_requests, peak)
        needs = Needs(
            users, items or int(subject.manifest.info["items"]), rate, p50, p99,
            new=1 - hits, burst=burst, events=events, spare=spare, per_machine=per_machine,
        )  # fmt: skip
        serving = ServingSettings.load(None, settings or (), bundle=subject.bundle)
        names = ("max_batch", "max_wait_ms", "queue_limit", "deadline_ms")
        fleet = Fleet(**{name: getattr(serving, name) for name in names})
        if costs is not None:
            model = Costs.load(costs)
        else:
            from recsys.serving.capacity.measure import measure_one

            seconds = 0.5 if quick else 8.0
            model = asyncio.run(measure_one(subject.bundle, k=k, seconds=seconds, **servers))
        memory = Memory.of_bundle(subject.bundle, prefix_mb=serving.prefix_mb)
        document["plan"] = plan(model, needs, memory, fleet, seed=seed or 0)
    document["costs"] = model.summary()
    if out is not None:
        model.save(out / COSTS)
    report.publish(document, report_capacity(document), out, as_json=as_json)
