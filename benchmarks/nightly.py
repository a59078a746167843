"""One evening in one command: a service under load that is retrained every night.

    OMP_NUM_THREADS=1 python benchmarks/nightly.py

A small invented shop (`examples/shop`) is split by time. Its older visits make the first bundle,
which a server answers with. The newer visits come in days, through REST, from simulated customers:
each asks for a list, wants the product of their next held-out visit, looks at the places of the
list with falling probability, and clicks if it is found there; otherwise they find the product by
themselves. Either way the visit is sent as events. A tenth of the products are launched during the
days; they are added through REST on their day.

After each day `recsys retrain --promote` runs as the nightly job does: retrain, gate, promotion.
Meanwhile customers go on: with the visits of the night, and then with requests without events.
After the promotion of the middle night the operator rolls back.

Counted are failed requests (the client repeats none), acknowledged events that the store does not
have at the end, and quality: how often the wanted product is in the list of ten, beside the list
that the first bundle, never retrained, serves at the same moment under another alias. A product
that the customer has seen before is not counted, since both lists leave it out. The last line is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import itertools
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from recsys.artifacts import Workspace
from recsys.benchmark.report import Line, Panel, Plot, Report, Table, begin, publish
from recsys.evaluation.metrics import paired_bootstrap
from recsys.testing import Server, start_server
from recsys.serving.client import Client, ServiceError
from recsys.serving.stores import open_store

sys.path.append(str(Path(__file__).parents[1] / "examples" / "shop"))
import make_export as shop

NAME, CHAMPION, NEVER = "shop", "champion", "never"
OLD, NIGHT = 0.5, 0.3  # shares of visits: before the first day; of a day, those of its night
LAUNCHED = 0.1  # share of the products that are launched during the days
LOOK = 0.85  # probability of looking at the next place of a list
K, CUSTOMERS_AT_ONCE, THINK_S = 10, 4, 0.1
SMALL = ("recipe=null", "minutes=null", "sasrec=null", "ids.features.collaborative=ppmi",
         "target.soft_labels_from=item-item", "target.epochs=10", "target.min_steps=0",
         "draft.epochs=2", "draft.min_steps=0", "draft.accept_users=20")  # fmt: skip
GATE = ("gate.least_users=30", "gate.requests=30", "gate.margin=0.2")


# The shop


@dataclass(frozen=True)
class Visit:
    """A customer's events on one product, oldest first."""

    events: list[shop.Event]
    new: bool  # to the customer

    @property
    def user(self) -> str:
        """The customer."""
        return self.events[0].customer

    @property
    def item(self) -> str:
        """The wanted product."""
        return self.events[0].sku


@dataclass
class Shop:
    """Visits in order of time, in phases: the past, then day and night in turns."""

    phases: list[list[Visit]]
    launches: list[list[shop.Product]]  # on each day; those of the past first

    @classmethod
    def make(cls, nights: int, customers: int, items: int, seed: int) -> Shop:
        """Make the shop and split its visits by time."""
        rng = np.random.default_rng(seed)
        products = shop.make_products(items, rng)
        of = np.asarray([product.category for product in products])
        shelves = [np.flatnonzero(of == c) for c in range(len(shop.CATEGORIES))]
        shelves = [shelf if len(shelf) else np.arange(items) for shelf in shelves]
        launch = np.where(rng.random(items) < LAUNCHED, rng.integers(1, nights + 1, items), 0)
        day_of = {product.sku: int(day) for product, day in zip(products, launch, strict=True)}
        visits = []
        for number in range(customers):
            seen: set[str] = set()
            events = shop.shop_for(f"C-{number:05}", products, shelves, rng)
            known = (event for event in events if event.kind in ("view", "cart", "purchase"))
            for sku, group in itertools.groupby(known, lambda event: event.sku):
                visits.append(Visit(sorted(group, key=lambda e: e.moment), sku not in seen))
                seen.add(sku)
        visits.sort(key=lambda visit: visit.events[0].moment)
        days = np.linspace(OLD * len(visits), len(visits), nights + 1).astype(int)
        ends = [0, int(days[0])]
        for a, b in itertools.pairwise(days):
            ends += [int(b - NIGHT * (b - a)), int(b)]
        phases = [
            [v for v in visits[a:b] if day_of[v.item] <= (number + 1) // 2]
            for number, (a, b) in enumerate(itertools.pairwise(ends))
        ]
        launches: list[list[shop.Product]] = [[] for _ in range(nights + 1)]
        for product in products:
            launches[day_of[product.sku]].append(product)
        return cls(phases, launches)

    def write(self, folder: Path) -> tuple[Path, Path]:
        """Write the past as files of events and products."""
        events = (
            (e.customer, e.sku, e.moment.isoformat(), e.kind)
            for visit in self.phases[0]
            for e in visit.events
        )
        files = folder / "events.csv", folder / "products.csv"
        _write(files[0], ("customer_id", "sku", "ts", "event"), events)
        products = (
            (p.sku, p.name, " > ".join(described(p)["category"]), shop.BRANDS[p.brand], p.price)
            for p in self.launches[0]
        )
        _write(files[1], ("sku", "name", "category", "brand", "price"), products)
        return files


def described(product: shop.Product) -> dict[str, Any]:
    """Name, category, brand and price."""
    return {
        "title": product.name,
        "category": list(shop.CATEGORIES)[product.category].split(" > "),
        "brand": shop.BRANDS[product.brand],
        "price": product.price,
    }


def _write(path: Path, columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([columns, *rows])


# The load


@dataclass
class Day:
    """What customers got on one day and in its night: one entry for each wanted new product."""

    champion: list[bool] = field(default_factory=list)
    never: list[bool] = field(default_factory=list)
    clicks: int = 0
    requests: int = 0
    slowest_ms: float = 0.0
    served: set[str] = field(default_factory=set)


class Load:
    """Customers in threads, who never pause; each customer is in one thread."""

    def __init__(self, server: Server, made: Shop) -> None:
        self.server, self.made = server, made
        self.days = [Day() for _ in made.launches]
        self.acknowledged: list[str] = []
        self.failed: list[str] = []
        self.ids = itertools.count()
        self.phase = 0  # visits of this phase and of earlier ones may come
        self.finished = [0] * CUSTOMERS_AT_ONCE  # phase of each thread
        self.changed = threading.Condition()
        self.over = threading.Event()
        self.threads = [
            threading.Thread(target=self._live, args=(n,)) for n in range(CUSTOMERS_AT_ONCE)
        ]

    def __enter__(self) -> Load:
        """Start the load."""
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.over.set()
        for thread in self.threads:
            thread.join()

    def begin(self, phase: int) -> None:
        """Let the visits of a phase come."""
        self.phase = phase

    def wait(self, phase: int) -> None:
        """Return when all visits of a phase have come."""
        with self.changed:
            self.changed.wait_for(lambda: min(self.finished) >= phase)

    def _live(self, number: int) -> None:
        rng = random.Random(number)
        users = [visit.user for visit in self.made.phases[0]]
        with Client(self.server.url, retries=0, timeout_s=60) as client:
            while not self.over.is_set():
                if self.finished[number] < self.phase:
                    phase = self.finished[number] + 1
                    for visit in self.made.phases[phase]:
                        if int(visit.user[2:]) % CUSTOMERS_AT_ONCE == number:
                            self._visit(client, visit, self.days[(phase + 1) // 2], rng)
                            time.sleep(rng.expovariate(1 / THINK_S))
                    with self.changed:
                        self.finished[number] = phase
                        self.changed.notify_all()
                else:
                    day = self.days[(self.phase + 1) // 2]
                    self._ask(client, day, rng.choice(users), CHAMPION)
                    time.sleep(rng.expovariate(1 / THINK_S))

    def _visit(self, client: Client, visit: Visit, day: Day, rng: random.Random) -> None:
        """Ask for both lists, click or not, and send the events."""
        lists = [self._ask(client, day, visit.user, alias) for alias in (CHAMPION, NEVER)]
        followed = None
        if visit.new and all(lists):
            places = [_place(answer, visit.item) for answer in lists]
            day.champion.append(places[0] is not None)
            day.never.append(places[1] is not None)
            if places[0] is not None and rng.random() < LOOK ** places[0]:
                day.clicks += 1
                followed = lists[0].recommendation_id
        events = [
            {"event_id": f"e{next(self.ids)}", "user": event.customer, "item": event.sku,
             "type": event.kind, "timestamp": event.moment.timestamp(),
             "recommendation_id": followed}
            for event in visit.events
        ]  # fmt: skip
        if self._try(day, "events", lambda: client.send_events(events)):
            self.acknowledged += [str(event["event_id"]) for event in events]

    def _ask(self, client: Client, day: Day, user: str, alias: str) -> Any:
        answer = self._try(day, alias, lambda: client.recommend(user=user, k=K, model=alias))
        if answer is not None and alias == CHAMPION:
            day.served.add(answer.model.name)
        return answer

    def _try(self, day: Day, what: str, call: Any) -> Any:
        """What the call returns; None and a note where it failed."""
        start = time.perf_counter()
        day.requests += 1
        try:
            return call()
        except (ServiceError, httpx.HTTPError, ValueError) as error:
            self.failed.append(f"{what}: {type(error).__name__} {error}")
            return None
        finally:
            day.slowest_ms = max(day.slowest_ms, 1000 * (time.perf_counter() - start))


def _place(answer: Any, item: str) -> int | None:
    """Place of an item in a list, from 0; None if it is not there."""
    found = [item_.item_id for item_ in answer.items]
    return found.index(item) if item in found else None


# The nights


def recsys(*arguments: str, ok: Sequence[int] = (0,)) -> str:
    """Run a command of the package; its standard output."""
    command = [sys.executable, "-m", "recsys", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in ok:
        raise SystemExit(f"{shlex.join(command)}: status {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


def sets(settings: Sequence[str]) -> list[str]:
    """Settings as options."""
    return [part for setting in settings for part in ("--set", setting)]


def live(server: Server, store: Path, made: Shop) -> tuple[Load, list[dict[str, Any]]]:
    """All days and nights; the load, and a row for each night."""
    nights = len(made.launches) - 1
    rows: list[dict[str, Any]] = []
    rolled_back = False
    with Client(server.url) as operator:
        operator.set_alias(NEVER, NAME)
        with Load(server, made) as load:
            for night in range(1, nights + 1):
                for product in made.launches[night]:
                    fields = described(product)
                    operator.put_item(product.sku, title=fields.pop("title"), attributes=fields)
                load.begin(2 * night - 1)
                load.wait(2 * night - 1)
                load.begin(2 * night)
                start = time.monotonic()
                out = recsys(
                    "retrain", "--name", NAME, "--store", str(store), "--url", server.url,
                    "--promote", "--json", *sets(GATE), ok=(0, 3),
                )  # fmt: skip
                outcome = json.loads(out.strip().splitlines()[-1])
                seconds = time.monotonic() - start
                back = outcome["promoted"] and not rolled_back and night >= (nights + 1) // 2
                if back:
                    found = operator.rollback(CHAMPION).bundle
                    assert found == outcome["parent"], (found, outcome["parent"])
                    rolled_back = True
                load.wait(2 * night)
                rows.append(
                    {"night": night, "retrain_s": round(seconds, 1), "rolled_back": back,
                     **{key: outcome[key] for key in ("version", "parent", "offered", "promoted",
                                                      "reasons")}}
                )  # fmt: skip
                print(f"{rows[-1]}, {len(load.failed)} requests failed", flush=True)
    return load, rows


async def run(made: Shop, folder: Path) -> tuple[Load, list[dict[str, Any]], int]:
    """Start the server and let it live; also the number of lost events."""
    base, store = Workspace.of(NAME), folder / "histories.db"
    async with start_server(
        base.bundle, [f"store={store}", f"histories={base.dataset}", "threads=1"]
    ) as server:
        load, rows = await asyncio.to_thread(live, server, store, made)
    kept = open_store(store)
    try:
        stored = {event.event_id for event in kept.export()}
    finally:
        kept.close()
    return load, rows, sum(event_id not in stored for event_id in load.acknowledged)


def summarise(load: Load, rows: list[dict[str, Any]], lost: int) -> dict[str, Any]:
    """What was found, and the verdicts."""
    for row, day in zip(rows, load.days[1:], strict=True):
        row |= {
            "visits": len(day.champion), "champion": float(np.mean(day.champion)),
            "never": float(np.mean(day.never)), "clicks": day.clicks, "requests": day.requests,
            "slowest_ms": round(day.slowest_ms), "served": sorted(day.served),
        }  # fmt: skip
    after = load.days[2:] or load.days[1:]  # on the first day both are the same bundle
    both = [[hit for day in after for hit in getattr(day, name)] for name in ("champion", "never")]
    return {
        "nights": rows,
        "requests": sum(row["requests"] for row in rows),
        "failed": len(load.failed), "failures": load.failed[:10],
        "acknowledged": len(load.acknowledged), "lost": lost,
        "hit_rates": [float(np.mean(hits)) for hits in both],
        "champion_minus_never": list(vars(paired_bootstrap(*both)).values()),
        "verdicts": {
            "no_request_failed": not load.failed,
            "no_event_lost": not lost,
            "promoted": any(row["promoted"] for row in rows),
            "rolled_back": any(row["rolled_back"] for row in rows),
        },
    }  # fmt: skip


def report(found: dict[str, Any]) -> Report:
    """Table, sentences and drawing."""
    rows = found["nights"]
    words = {True: "promoted", False: "refused", None: "nothing decided"}
    table = [
        [str(row["night"]), ", ".join(row["served"]), str(row["visits"]), f"{row['champion']:.3f}",
         f"{row['never']:.3f}", str(row["requests"]), f"{row['slowest_ms']:,}",
         f"{row['retrain_s']:.0f}", str(row["version"]),
         words[row["offered"]] + (", rolled back" if row["rolled_back"] else "")]
        for row in rows
    ]  # fmt: skip
    columns = ["night", "served", "visits", "hit rate", "never", "requests", "slowest, ms",
               "retrain, s", "version", "verdict"]  # fmt: skip
    gap, rates = found["champion_minus_never"], found["hit_rates"]
    sentences = [
        f"{found['requests']:,} requests, {found['failed']} failed; {found['acknowledged']:,} "
        f"events acknowledged, {found['lost']} lost",
        f"hit rate at {K} from the second day on: {rates[0]:.4f}, never retrained {rates[1]:.4f}: "
        f"{gap[0]:+.4f} ({gap[1]:+.4f} to {gap[2]:+.4f})",
        *(f"FAILED: {text}" for text in found["failures"]),
    ]
    x = [float(row["night"]) for row in rows]
    names = {"champion": "as served", "never": "never retrained"}
    lines = [Line(name, x, [row[key] for row in rows]) for key, name in names.items()]
    plot = Plot("nightly", "Hit rate of the served lists, by day.",
                [Panel(f"hit rate of lists of {K}", "day", lines)])  # fmt: skip
    note = "served: bundles that answered as champion; version, verdict: of the night after the day"
    return Report("A service that is retrained every night", sentences,
                  [Table("", columns, table, note, words=2)], [plot])  # fmt: skip


def main() -> int:
    """Run it; 1 if a verdict is bad."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nights", type=int, default=10)
    parser.add_argument("--customers", type=int, default=1_000)
    parser.add_argument("--items", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the report and its drawing")
    given = parser.parse_args()
    document = begin("nightly", quick=False)
    document["command"] = shlex.join(["python", "benchmarks/nightly.py", *sys.argv[1:]])
    made = Shop.make(given.nights, given.customers, given.items, given.seed)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="nightly-") as name:
        folder = Path(name)
        os.environ["RECSYS_HOME"] = str(folder / "home")
        events, products = made.write(folder)
        files = "run", str(events), "--items", str(products)
        recsys(*files, "--name", NAME, "--until", "bundle", *sets(SMALL))
        print(f"the first bundle took {time.monotonic() - start:.0f} s", flush=True)
        found = summarise(*asyncio.run(run(made, folder)))
    document |= {**found, "seconds": round(time.monotonic() - start)}
    publish(document, report(found), given.out, as_json=False)
    return int(not all(found["verdicts"].values()))


if __name__ == "__main__":
    sys.exit(main())
