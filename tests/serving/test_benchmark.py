from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG
from recsys.catalog import Catalog
from recsys.constraint.filters import ItemFilter
from recsys.errors import ConfigError, RecsysError
from recsys.serving.benchmark import report
from recsys.serving.benchmark.client import Client, ConnectionLostError, Request
from recsys.serving.benchmark.commands import serve
from recsys.serving.benchmark.load import Load, Run
from recsys.serving.benchmark.measure import Bench, Options, _middle, verdicts
from recsys.serving.benchmark.process import Server, started
from recsys.serving.benchmark.soak import drift
from recsys.serving.benchmark.workload import Workload

anyio = pytest.mark.anyio
GET = Request("GET", "/")


@asynccontextmanager
async def answering(answer: Callable[[str, bytes], bytes]) -> AsyncIterator[Client]:
    """A client of a server that answers (head, body) with bytes; an empty answer hangs up."""

    serving: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.append(asyncio.current_task())
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = head.lower().partition("content-length: ")[2].split("\r\n")[0]
                said = answer(head, await reader.readexactly(int(length or 0)))
                for part in (said[:20], said[20:]):  # an answer may come in pieces
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0)
                if not said:
                    break
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = Client(host, port, key="rk_x")
    try:
        yield client
    finally:
        client.close()
        server.close()
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving)
        await asyncio.sleep(0)  # for the transports' last words


def reply(body: bytes = b"{}", status: int = 200, extra: str = "") -> bytes:
    return f"HTTP/1.1 {status} OK\r\nContent-Length: {len(body)}{extra}\r\n\r\n".encode() + body


# The client


@anyio
async def test_the_client_sends_a_request_as_it_is_and_keeps_its_connection() -> None:
    heard = []

    def answer(head: str, body: bytes) -> bytes:
        heard.append((head, body))
        return reply(b'{"n": 1}')

    async with answering(answer) as client:
        first = await client.send(Request.post("/v1/x", {"a": [1]}))
        assert (first.status, first.json()) == (200, {"n": 1})
        assert len(client._free) == 1
        assert (await client.send(GET)).status == 200
        assert len(client._free) == 1
    assert heard[0][0].startswith("POST /v1/x HTTP/1.1\r\nHost: 127.0.0.1:")
    assert "Authorization: Bearer rk_x\r\n" in heard[0][0]
    assert json.loads(heard[0][1]) == {"a": [1]}
    assert "Content-Type" not in heard[1][0]


@anyio
async def test_an_empty_answer_is_one_and_a_closing_server_is_believed() -> None:
    async with answering(lambda head, body: reply(b"", 204, "\r\nconnection: close")) as client:
        assert (await client.send(GET)).status == 204
        assert client._free == []


@anyio
async def test_a_connection_that_breaks_is_an_error_and_counted() -> None:
    async with answering(lambda head, body: b"") as client:
        with pytest.raises(ConnectionLostError):
            await client.send(GET)
        run = await Load(client).closed(iter([GET] * 3), 1)
    assert (run.statuses, run.errors, run.latency_ms) == ({0: 3}, 3, [])


# Loops


@anyio
async def test_a_closed_loop_asks_each_request_once_from_so_many_clients() -> None:
    seen = []
    async with answering(lambda head, body: reply(body)) as client:
        requests = [Request.post("/", i) for i in range(40)]
        load = Load(client, lambda request, reply: seen.append((request, reply.json())))
        run = await load.closed(iter(requests), 4)
        assert len(client._free) == 4
    assert sorted(number for _, number in seen) == list(range(40))
    assert all(json.loads(request.body) == number for request, number in seen)
    assert (run.errors, len(run.latency_ms)) == (0, 40)
    assert 0 < run.percentile(50) <= run.percentile(99)  # type: ignore[operator]


@anyio
async def test_bad_answers_are_counted_by_status_and_not_timed() -> None:
    codes = iter([200, 429, 500, 200])
    async with answering(lambda head, body: reply(status=next(codes))) as client:
        run = await Load(client).closed(iter([GET] * 4), 1)
    assert run.statuses == {200: 2, 429: 1, 500: 1}
    assert (run.errors, len(run.latency_ms)) == (2, 2)


@anyio
async def test_an_open_loop_asks_at_its_rate_whatever_the_answers_do() -> None:
    async with answering(lambda head, body: reply()) as client:
        run = await Load(client).open(iter([GET] * 10_000), 400, seconds=0.5, seed=3)
    due = np.random.default_rng(3).exponential(1 / 400, 10_000).cumsum()
    assert len(run.latency_ms) == (due < 0.5).sum()


# Requests


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    table = pa.table(
        {
            "item_id": [f"i{i}" for i in range(50)],
            "title": ["t"] * 50,
            "text": [""] * 50,
            "price": [i / 2 for i in range(50)],
            "brand": ["a" if i % 2 else "b" for i in range(50)],
            "tags": [["x", "y"][: i % 3] for i in range(50)],
            "nothing": pa.array([None] * 50, pa.string()),
        }
    )
    path = tmp_path_factory.mktemp("bundles") / "tiny"
    with write_artifact(path, "bundle") as folder:
        (folder / CATALOG).mkdir()
        codes = np.stack(np.unravel_index(np.arange(50), (4, 4, 4)), axis=1)
        Catalog(table, codes.astype(np.int32)).save(folder / CATALOG)
    return path


def bodies(requests: Any, count: int) -> list[Any]:
    return [json.loads(request.body) for request in islice(requests, count)]


def test_requests_are_the_same_for_a_seed_and_differ_from_each_other(bundle: Path) -> None:
    first, again = (bodies(Workload(bundle, 1).mixed(), 50) for _ in range(2))
    assert first == again
    assert first != bodies(Workload(bundle, 2).mixed(), 50)
    assert len({json.dumps(body) for body in first}) == 50


def test_mixed_requests_ask_for_everything_and_are_valid(bundle: Path) -> None:
    found = bodies(Workload(bundle).mixed(), 300)
    keys = {clause["key"] for body in found for clause in body.get("filter", {}).get("must", [])}
    assert keys == {"price", "brand", "tags"}
    for body in found:
        ItemFilter.parse(body.get("filter", {}))
    assert {body["k"] for body in found} == {1, 5, 10, 20, 50}
    assert any(not body["history"] for body in found)
    assert any("no-such-item" in body["history"] for body in found)
    assert any("exclude_items" in body for body in found)
    assert {body["exclude_seen"] for body in found} == {True, False}


def test_events_have_ids_of_their_own_and_times_in_order(bundle: Path) -> None:
    batches = list(islice(Workload(bundle).events(3), 30))
    assert [user[-2:] for user, _ in batches] == ["-0", "-1", "-2"] * 10
    events = [event for _, batch in batches for event in batch]
    assert len({event["event_id"] for event in events}) == len(events)
    times = [event["timestamp"] for event in events]
    assert times == sorted(times)


# A whole phase, on a server that is not one


class Fake:
    """Answers as the service does, from its memory; may lie."""

    def __init__(self) -> None:
        self.events: dict[str, list[Any]] = {}
        self.ids: set[str] = set()
        self.asked = 0
        self.lie_from = self.lose = 10**9

    def __call__(self, head: str, body: bytes) -> bytes:
        method, path, _ = head.split(" ", 2)
        if path == "/v1/recommendations":
            self.asked += 1
            history = json.loads(body)["history"]
            score = len(history) + (self.asked > self.lie_from)
            items = [{"item_id": "i0", "score": score}]
            return reply(json.dumps({"items": items, "eligible_items": 3}).encode())
        if path == "/v1/events":
            events = json.loads(body)["events"]
            new = [event for event in events if event["event_id"] not in self.ids]
            for event in new:
                self.ids.add(event["event_id"])
                if len(self.ids) != self.lose:
                    self.events.setdefault(event["user"], []).append(event)
            told = {"accepted": len(new), "duplicates": len(events) - len(new)}
            return reply(json.dumps(told).encode())
        user = path.split("/")[3]
        if method == "DELETE":
            del self.events[user]
            return reply(b"", 204)
        return reply(json.dumps({"events": self.events.get(user, [])}).encode())


async def equality(fake: Fake, bundle: Path) -> Any:
    options = Options(checks=40, check_clients=8, events=3)
    async with answering(fake) as client:
        bench = Bench(Server(client._host, client._port), bundle, options, None)
        found = await bench.equality()
        bench.client.close()
    return found


@anyio
async def test_equal_answers_and_whole_histories_are_found_so(bundle: Path) -> None:
    fake = Fake()
    found = await equality(fake, bundle)
    assert (found["compared"], found["different"], found["errors"]) == (40, 0, 0)
    events = found["events"]
    assert events["accepted"] == len(fake.ids)
    assert events["duplicates"] > 0
    assert (events["users"], events["wrong_histories"], events["failed"]) == (3, 0, 0)
    assert fake.events == {}  # they were erased


@anyio
async def test_an_answer_that_changes_under_load_is_shown(bundle: Path) -> None:
    fake = Fake()
    fake.lie_from = 79  # the last one
    found = await equality(fake, bundle)
    assert found["different"] == 1
    assert found["first_different"]["field"] == "items"


@anyio
async def test_a_lost_event_is_noticed(bundle: Path) -> None:
    fake = Fake()
    fake.lose = 5
    assert (await equality(fake, bundle))["events"]["wrong_histories"] == 1


# What is made of it


def row(clients: int, rate: float, p50: float = 10.0, p99: float = 20.0) -> dict[str, Any]:
    return {
        "clients": clients, "asked_rate": rate, "answers": 100, "rate": rate, "p50_ms": p50,
        "p95_ms": p99, "p99_ms": p99, "errors": 0, "generator_cpu": 0.1, "server_cpu": 0.9,
        "server_cpu_ms": 9.0,
    }  # fmt: skip


def test_verdicts_are_against_the_bounds() -> None:
    single = {"service_p50_ms": 15.1, "bound_ms": 15.0}
    found = {
        "first": {"first_ms": 30.0, "median_ms": 15.0},
        "single": single,
        "closed": [row(1, 50.0), row(8, 120.0), row(32, 200.0)],
        "open": [row(0, 10.0), row(0, 140.0, 10.0, 41.0)],
        "equality": {
            "requests": 40,
            "compared": 38,
            "refused_alone": {"invalid_filter": 2},
            "different": 0,
            "events": {"wrong_histories": 0, "failed": 0},
            "before": {"open_files": 20, "threads": 9},
            "after": {"open_files": 22, "threads": 10},
        },
    }
    told = {verdict["name"]: (verdict["figure"], verdict["met"]) for verdict in verdicts(found)}
    assert list(told.values()) == [
        (2.0, True),
        (15.1, False),
        (4.0, True),
        (4.1, False),
        (0, True),
        (0, True),
        (0, True),
        (0, True),
        (1, False),
    ]
    for table in report.tables({**found, "verdicts": list(verdicts(found))}):
        assert table.row_count >= 2
    assert set(report.drawings(found)) == {"latency"}


def test_of_several_starts_the_middle_one_counts() -> None:
    starts = [{"first_ms": ms, "median_ms": 10.0} for ms in (30.0, 12.0, 15.0)]
    assert _middle(starts) == {"first_ms": 15.0, "median_ms": 10.0, "starts": 3}
    assert _middle(starts[:2])["first_ms"] == 30.0  # not the flattering one


def samples(rss: list[float]) -> list[dict[str, Any]]:
    return [
        {"s": float(i), "rss_mb": mb, "open_files": 9, "threads": 4} for i, mb in enumerate(rss)
    ]


def test_memory_is_flat_after_the_warm_up_or_is_not() -> None:
    found = drift(samples([10.0, 60.0, *[100.0] * 8]))
    assert (found["rss_change"], found["flat"], found["rss_mb"]) == (0.0, True, 100.0)
    found = drift(samples([100.0 + i for i in range(10)]))
    assert found["rss_change"] == pytest.approx(7 / 105.5, abs=1e-4)  # from 102 to 109
    assert not found["flat"]
    with pytest.raises(ConfigError, match="too short"):
        drift(samples([1.0, 2.0]))


def test_a_run_without_answers_has_no_percentile() -> None:
    assert (Run().percentile(50), Run().rate) == (None, 0.0)


# The command


@anyio
async def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RecsysError, match=r"did not start: .*nothing is not an artifact"):
        async with started(tmp_path / "nothing"):
            pass


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"concurrency": "0"}, "--concurrency '0' is not a list of numbers above 0"),
        ({"rates": "fast"}, "--rates 'fast' is not a list"),
        ({"settings": ["port=1"]}, "this command reads serve.key=value only"),
        ({"url": "https://x"}, "expected http://HOST:PORT"),
    ],
)
def test_wrong_options_are_told(bundle: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        serve(bundle=bundle, **options)
