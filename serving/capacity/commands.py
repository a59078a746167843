"""`recsys benchmark capacity`. Nothing heavy is imported at the top."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recsys.benchmark.result import asked, save, show
from recsys.errors import ConfigError
from recsys.options import Json, Name, Quick, Seed

if TYPE_CHECKING:  # the command loads these when it runs
    from recsys.serving.benchmark.subject import Subject
    from recsys.serving.capacity.costs import Costs

SCHEMA = 1
COSTS = "costs.json"


def capacity(
    bundle: Annotated[
        Path | None, typer.Option(help="Bundle to plan for (default: that of --name).")
    ] = None,
    name: Name = None,
    users: Annotated[int, typer.Option(min=1, help="People with a history.")] = 1_000_000,
    items: Annotated[
        int | None, typer.Option(min=1, help="Items (default: those of the bundle).")
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=0.001, help="Requests a second at the peak.")
    ] = None,
    daily_users: Annotated[
        float | None, typer.Option(min=1, help="Instead of --rate: people who come on a day.")
    ] = None,
    daily_requests: Annotated[
        float, typer.Option(min=0.001, help="Requests of each of them on that day.")
    ] = 10.0,
    peak: Annotated[
        float, typer.Option(min=1, help="How many times a day's mean the busiest second has.")
    ] = 3.0,
    p50: Annotated[float | None, typer.Option(min=0.1, help="Target of p50, ms.")] = None,
    p99: Annotated[float | None, typer.Option(min=0.1, help="Target of p99, ms.")] = 100.0,
    hits: Annotated[
        float,
        typer.Option(min=0, max=1, help="Share of requests whose history a replica has kept."),
    ] = 0.8,
    burst: Annotated[
        float, typer.Option(min=1, help="How many times the calm rate bursts have, 2 s each.")
    ] = 1.0,
    events: Annotated[int, typer.Option(min=0, help="Events of a user's history.")] = 20,
    spare: Annotated[int, typer.Option(min=0, help="Replicas that may be lost.")] = 1,
    per_machine: Annotated[int, typer.Option(min=1, help="Replicas of a machine.")] = 1,
    k: Annotated[int, typer.Option(min=1, max=200, help="Items asked for.")] = 10,
    extra_share: Annotated[
        float, typer.Option(min=0, max=1, help="Share of requests that need another pass.")
    ] = 0.0,
    extra_ms: Annotated[
        float, typer.Option(min=0, help="What a batch takes longer with one of them.")
    ] = 0.0,
    costs: Annotated[
        Path | None,
        typer.Option(help="Cost model to use; by default one is measured (about a minute)."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="Instead: predict two replicas, run them, compare."),
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the servers, serve.key=value. Repeatable."),
    ] = None,
    quick: Quick = False,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and costs.json.")] = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """How many replicas it takes, from measured costs and a simulated fleet; or whether that holds.

    Measures one replica of the bundle under several loads, searches the rate that it bears within
    the latencies wanted, and plays the fleet with one replica dying at the peak. --check predicts
    what two replicas do at loads that were not measured, runs them, and compares p50 and p99.

    Example: recsys benchmark capacity --bundle var/bundles/demo --daily-users 1e6 --p99 60
    """
    from recsys.benchmark.environment import environment
    from recsys.progress import say
    from recsys.serving.benchmark.subject import Subject
    from recsys.serving.capacity import report
    from recsys.serving.capacity.costs import Costs
    from recsys.serving.capacity.memory import Memory
    from recsys.serving.capacity.plan import Needs, plan
    from recsys.serving.capacity.simulation import Fleet
    from recsys.serving.settings import ServingSettings

    subject = Subject.of(bundle, name, settings or ())
    serving = ServingSettings.load(None, settings or (), bundle=subject.bundle)
    document = {"benchmark": "capacity", "schema": SCHEMA, **asked(quick=quick), **subject.facts}
    if check:
        found = _checked(subject, k, seed or 0, quick=quick)
        model = found.pop("costs")
        document |= {"check": found}
    else:
        needs = Needs(
            users, items or int(subject.manifest.info["items"]),
            _rate(rate, daily_users, daily_requests, peak), p50, p99,
            new=1 - hits, burst=burst, events=events, spare=spare, per_machine=per_machine,
        )  # fmt: skip
        fleet = Fleet(
            max_batch=serving.max_batch,
            max_wait_ms=serving.max_wait_ms,
            queue_limit=serving.queue_limit,
            deadline_ms=serving.deadline_ms,
            extra_share=extra_share,
            extra_ms=extra_ms,
        )
        model = Costs.load(costs) if costs else _measured(subject, k, seed or 0, quick=quick)
        memory = Memory.of_bundle(subject.bundle, prefix_mb=serving.prefix_mb)
        document |= {"plan": plan(model, needs, memory, fleet, seed=seed or 0)}
    document |= {"costs": model.summary()}
    document |= {"environment": environment()}  # torch is imported when all is measured
    if not as_json:
        show(report.tables(document), report.sentences(document), soft_wrap=True)
    if out is not None:
        model.save(out / COSTS)
        save(out, document, {})
        say(f"written: {out}")
    typer.echo(json.dumps(document))


def _rate(
    rate: float | None, daily_users: float | None, daily_requests: float, peak: float
) -> float:
    """Requests a second at the peak, as given or of a day."""
    from recsys.serving.capacity.plan import Needs

    if (rate is None) == (daily_users is None):
        raise ConfigError("give one of --rate and --daily-users")
    return rate or Needs.rate_of(daily_users or 0.0, daily_requests, peak)


def _measured(subject: Subject, k: int, seed: int, *, quick: bool) -> Costs:
    """The cost model of one replica."""
    import asyncio

    from recsys.serving.capacity.measure import measure_one

    seconds = 0.5 if quick else 8.0
    return asyncio.run(
        measure_one(subject.bundle, k=k, seconds=seconds, settings=subject.settings, seed=seed)
    )


def _checked(subject: Subject, k: int, seed: int, *, quick: bool) -> dict[str, Any]:
    """Two replicas, as predicted and as measured."""
    import asyncio

    from recsys.serving.capacity.check import Trial, check

    trial = Trial.quick(k) if quick else Trial(k=k)
    return asyncio.run(check(subject.bundle, trial, settings=subject.settings, seed=seed))
