"""The documents name every route, problem and metric of the service."""

import json
import re
from inspect import signature
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from recsys.constraint.filter_cache import FilterCache
from recsys.constraint.filters import CLAUSE, MOST_DEPTH, MOST_PARTS
from recsys.devices import LARGE_BYTES
from recsys.prompts import MOST_ITEMS
from recsys.serving import bodies, catalog_changes, middleware, rules, server, service
from recsys.serving.aliases import MOST_ALIASES
from recsys.serving.api.routes import ROUTES
from recsys.serving.auth import Scope, scope_of
from recsys.serving.batcher import MUCH
from recsys.serving.catalog_changes import MOST_SHOWN
from recsys.serving.errors import KINDS
from recsys.serving.event_columns import DEPTH
from recsys.serving.experiments import MOST_EXPOSURES
from recsys.serving.limits import IN_TORCH, PROVEN, PROVEN_BLEND
from recsys.serving.metrics import Metrics
from recsys.serving.middleware import BODIES
from recsys.serving.models import Models
from recsys.serving.schemas.common import MAX_ID
from recsys.serving.schemas.items import MAX_UPSERT, ItemBody
from recsys.serving.schemas.recommendations import MAX_BATCH
from recsys.serving.schemas.texts import MAX_PROMPT, MAX_TOKENS
from recsys.serving.schemas.today import TodayQuery
from recsys.serving.settings import ServingSettings
from recsys.serving.shared_changes import LOOK_S, MAX_CHANGES
from recsys.serving.stores import postgres, served, sqlite
from recsys.serving.stores.history import CHARACTERS, NEWEST
from recsys.serving.stores.records import MOST_TYPES, NOT_HISTORY

DOCS = Path(__file__).parent.parent.parent / "docs"
SURFACES = (DOCS / "surfaces.md").read_text(encoding="utf-8")
SERVING = (DOCS / "serving.md").read_text(encoding="utf-8")


def listed(scope):
    """Routes that the table of `surfaces.md` has for a scope."""
    rest = SURFACES.split("## REST")[1].split("A refusal")[0]
    found: set[tuple[str, str]] = set()
    current = ""
    for line in rest.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 2 or not cells[1].startswith("`"):
            continue
        current = cells[0].strip("`") or current
        if current == ("none" if scope is Scope.PUBLIC else scope.word):
            method = ""
            for word in re.findall(r"`([^`]+)`", cells[1]):
                *new, path = word.split()
                method = new[0] if new else method
                found.add((method, path))
    return found


@pytest.mark.parametrize("scope", Scope)
def test_every_route_is_documented_with_its_scope(scope):
    assert listed(scope) == {
        (method, route.path_format)
        for route in ROUTES
        for method in route.methods
        if scope_of(route.endpoint) is scope
    }


def test_every_problem_is_documented_with_its_status():
    table = SURFACES.split("A refusal")[1].split("## ")[0]
    for code, kind in KINDS.items():
        (row,) = [line for line in table.splitlines() if f"`{code}`" in line]
        assert str(kind.status) in row.split("|")[1], code
        assert (kind.retry_after_s is not None) == (kind.status in (429, 503, 504)), code


def test_every_metric_is_documented():
    metrics = Metrics()
    metrics.registry.register(Models())
    text = metrics.exposition().decode()
    names = {family.name for family in text_string_to_metric_families(text)}
    ours = {name.removeprefix("recsys_") for name in names if name.startswith("recsys_")}
    assert ours
    for name in ours:
        assert re.search(rf"`{name}(_total)?`", SERVING), name


def test_documented_limits_are_those_of_the_code():
    measured = (DOCS.parent / "benchmarks" / "results" / "serve_cpu.txt").read_text().splitlines()
    rates = [f"{run['rate']:,.0f}" for run in json.loads(measured[-1])["closed"]]
    body = ServingSettings().max_body_bytes
    values = f"{bodies.MAX_VALUES:,} values, {bodies.MAX_NAMES} names in an object"
    characters = rules.MOST_CHARACTERS >> 20
    pages = ("surfaces", "serving", "threat-model", "stores", "today", "runbook")
    text = " ".join(" ".join((DOCS / f"{name}.md").read_text() for name in pages).split())
    reads = f"{server.MAX_READ >> 10} KiB of heads and chunks, or {server.LEAST_READ} bytes"
    sent = f"{middleware.PART >> 10} KiB of each answer may take {middleware.ANSWERS >> 20} MiB"
    filter_bytes = signature(FilterCache).parameters["max_bytes"].default
    title = ItemBody.model_fields["title"].metadata[0].max_length
    for words in (
        f"turn of the event loop reads {reads} of each",
        f"more than {server.MAX_WAITING >> 10} KiB behind a request is closed",
        f"those of batches take a {'quarter' * (service.BATCHED == 1 / 4)} of the queue at most",
        f"get more than {ServingSettings().rate_burst} units, a minute of",
        f"({ServingSettings().rate_burst} units at once)",
        f"a user's latest {NEWEST:,} events",
        f"among the latest {NEWEST:,} events (and {CHARACTERS:,} characters of items)",
        f"latest {NEWEST:,} events, {CHARACTERS:,} characters of their items, and {MOST_TYPES}",
        f"is idle for {server.IDLE_S} s after an answer",
        f"| answers a second | {' | '.join(rates)} |",
        f"At most {served.EXPOSURES_OF_USER} answers to a user count, and about "
        f"{MOST_EXPOSURES:,} in an experiment",
        f"504 follows at most {'half' * (middleware.ANSWER_S == 0.5)} a second later",
        f"in the batches under way may take {service.MOST_ANSWERS >> 20} MiB together",
        f"What follows the first {sent}",
        f"{MAX_CHANGES} changes of items, of rules, of experiments and of aliases each may wait",
        f"A service has at most {MOST_ALIASES} aliases",
        f"A title has at most {title:,} characters",
        f"requests of more than {'four' * (MUCH == 4)} have a queue",
        f"{'seven' * (PROVEN == 7)} times that with `guarantee: global`, "
        f"{'ten' * (PROVEN_BLEND == 10)} if blended, {'five' * (IN_TORCH == 5)} with a trace",
        f"{served.SERVED_KEPT:,} answers are stored, with {served.ITEM_BYTES >> 10} KiB of items",
        f"the last {served.SERVED_KEPT:,} answers (`answers_complete`) and the newest "
        f"{DEPTH:,} events",
        f"at once up to {sqlite.AT_ONCE_BYTES >> 20} MiB",
        f"calls fail after {postgres.CALL_S:.0f} s",
        f"up to `deadline_ms` + {server.GRACE_S} s",
        f"over {server.MAX_HEAD >> 10} KiB, is `application/problem+json`",
        f"other's changes about {'a' * (LOOK_S == 1)} second later",
        f"{filter_bytes >> 20} MB of masks of recent filters",
        f"weights of {LARGE_BYTES >> 30} GiB and more go to the GPU",
        f"a clause counts as {'ten' * (CLAUSE == 10)} values",
        f"`?days=2` to {TodayQuery.model_fields['days'].metadata[1].le}",
        f"(default: {', '.join(f'`{name}`' for name in NOT_HISTORY)})",
        f"At most {body >> 20} MiB, {values}, {bodies.MAX_DEPTH} levels",
        f"Bodies over {bodies.LARGE >> 10} KiB",
        f"together they may take {BODIES * body >> 20} MiB",
        f"of an item's attributes {MOST_SHOWN:,}",
        f"A page of `/v1/items` ends after {catalog_changes.PAGE:,} characters",
        f"takes up to {MAX_BATCH} of these",
        f"text of up to {MAX_ID} characters",
        f"up to {MAX_PROMPT:,} characters and tokens",
        f"(64 by default, up to {MAX_TOKENS})",
        f"(up to {MAX_UPSERT:,}, all or none)",
        f"at most {rules.MOST_RULES:,} rules, with {characters} million characters",
        f"a depth of {MOST_DEPTH}, with at most 1,000 clauses or {MOST_PARTS:,} values",
        f"The last {MOST_ITEMS:,} items are read as the history",
    ):
        assert words in text, words
