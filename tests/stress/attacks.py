"""The attacks of `abuse.py`, and the client that may do what HTTP clients do not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

RECOMMEND, BATCH = "/v1/recommendations", "/v1/recommendations/batch"
Attack = Callable[["Target"], Awaitable[None]]


@dataclass
class Target:
    """The server as a client sees it."""

    host: str
    port: int
    key: str
    count: Any = None  # of what was done: connections and answers
    source: str = "127.0.0.1"  # the client's address
    certificate: Path | None = None  # of the proxy in front of it, if there is one

    def did(self) -> None:
        """Count a connection or an answer."""
        if self.count is not None:
            self.count.value += 1

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection."""
        self.did()
        source = (self.source, 0)
        tls = self.certificate and trusting(self.certificate)
        return await asyncio.open_connection(self.host, self.port, local_addr=source, ssl=tls)

    def head(self, method: str, path: str, *more: str, length: int | None = None) -> bytes:
        """The head of a request."""
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *more]
        lines += [f"Authorization: Bearer {self.key}", "Content-Type: application/json"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()

    async def send(self, path: str, body: Any = None, method: str = "POST") -> None:
        """Send the same request again and again on one connection, which is replaced if closed."""
        raw = body if isinstance(body, bytes) else b"" if body is None else dump(body)
        message = self.head(method, path, length=len(raw)) + raw
        while True:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await self.connect()
                try:
                    while True:
                        writer.write(message)
                        await read_answer(reader)
                        self.did()
                finally:
                    writer.close()
            await asyncio.sleep(0.01)


@cache
def trusting(certificate: Path) -> ssl.SSLContext:
    """What TLS connections share."""
    return ssl.create_default_context(cafile=certificate)


def dump(value: Any) -> bytes:
    """JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


async def read_answer(reader: asyncio.StreamReader) -> int:
    """Read one answer; its status."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = head.partition("content-length: ")[2].split("\r\n")[0]
    await reader.readexactly(int(length or 0))
    return int(head.split()[1])


# Attacks: the first ones send the same body again and again


def batch(count: int, request: dict[str, Any]) -> dict[str, Any]:
    """The same request many times."""
    return {"requests": [request] * count}


def names_twice() -> bytes:
    """One object with 85,000 names, the last one twice."""
    names = [f'"n{i}":0' for i in range(85_000)]
    return ("{" + ",".join([*names, names[-1]]) + "}").encode()


def deep_filter() -> dict[str, Any]:
    """Groups within groups, with quotes to escape."""
    group: Any = {"key": '"\\' * 200, "any": ['"' * 100 + str(i) for i in range(500)]}
    for _ in range(15):
        group = {"must": [group]}
    return {"history": ["B0001"], "filter": group}


def upserted() -> dict[str, Any]:
    """A large change of the catalog."""
    item = {"like": "B0001", "title": "x" * 50}
    return {"items": [{"item_id": f"N{i}", **item} for i in range(1000)]}


GREEDY = {"history": ["B0001"] * 50, "k": 200, "include": ["trace"]}
GLOBAL = {"history": ["B0002"] * 50, "k": 200, "guarantee": "global"}
NAMES = [f"B{i:04d}" for i in range(1000)]
BODIES: dict[str, tuple[int, str, Any]] = {  # connections, path, body
    "names twice": (2, RECOMMEND, names_twice()),
    "deep filters": (2, RECOMMEND, deep_filter()),
    "greedy batches": (2, BATCH, batch(100, GREEDY)),
    "greedy requests": (16, RECOMMEND, GLOBAL),
    "invalid batches": (
        4, BATCH, batch(100, {"history": [1] * 240, "exclude_items": [None] * 240})
    ),
    "unknown fields": (4, BATCH, batch(100, {f"f{i}": 0 for i in range(250)})),
    "valid large batches": (
        4, BATCH, batch(99, {"history": ["ab" * 8] * 440, "exclude_items": ["B1"] * 50})
    ),
    "too many values": (4, BATCH, batch(95, {"history": ["ab"] * 1900})),
    "very many lists": (4, RECOMMEND, b"[" + b"[]," * 24_000 + b"[]]"),
    "upserts": (4, "/v1/items", upserted()),
    "event batches": (4, "/v1/events", {"events": [{"user": "u", "item": "B0001"}] * 5000}),
    "large ranks": (4, "/v1/rank", {"history": NAMES[:100], "items": NAMES}),
    "small batches": (40, BATCH, batch(100, {"history": ["B0001"], "k": 1})),
    "uncounted events": (16, RECOMMEND, {"user": "busy"}),
    "metrics": (40, "/metrics", None),  # without a body: GET
    "today": (2, "/v1/today?days=7", None),
    "trending": (2, "/v1/lists/trending", None),
}  # fmt: skip


def send_body(path: str, body: Any, to: Target) -> Awaitable[None]:
    """One of `BODIES`."""
    return to.send(path, body, "GET" if body is None else "POST")


async def wide_filters(to: Target) -> None:
    """As many clauses as a filter may have, in many boosts, different each time."""
    for number in itertools.count():
        clauses = [{"key": "price", "range": {"lt": i + number / 1000}} for i in range(150)]
        boosts = [{"filter": {"should": clauses}, "weight": i / 10} for i in range(66)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await to.send(RECOMMEND, {"history": ["B0001"], "boosts": boosts})


async def in_turn(to: Target, path: str, bodies: Iterable[Any], method: str = "POST") -> None:
    """Each body once."""
    reader, writer = await to.connect()
    for body in map(dump, bodies):
        writer.write(to.head(method, path, length=len(body)) + body)
        await read_answer(reader)
        to.did()
    writer.close()


def letters(number: int, count: int) -> str:
    """Text that no other number has."""
    return f"{number} " + "x" * count


async def replaced_items(to: Target) -> None:
    """The largest items, whose titles and texts are replaced again and again."""
    names = [f"R{place}" for place in range(7)]
    for number in itertools.count():
        items = [
            {"item_id": name, "like": "B0001", "title": letters(number, 900),
             "text": letters(number, 90_000)}
            for name in names
        ]  # fmt: skip
        await in_turn(to, "/v1/items", [{"items": items}])


async def large_titles(to: Target) -> None:
    """Small requests whose answers have the largest titles."""
    names = [f"T{place}" for place in range(200)]
    items = [{"item_id": name, "like": "B0001", "title": letters(0, 990)} for name in names]
    await in_turn(to, "/v1/items", [{"items": items}])
    wanted = {"must": [{"key": "item_id", "any": names}]}
    await to.send(BATCH, batch(100, {"history": ["B0001"], "k": 200, "filter": wanted}))


FACE = "\U0001f600"  # four bytes


async def erasures(to: Target) -> None:
    """A user with many events is erased, again and again."""
    events = {"events": [{"user": "busy", "item": "B0001", "type": "impression"}] * 5_000}
    while True:
        await in_turn(to, "/v1/users/busy", [None], "DELETE")
        await in_turn(to, "/v1/events", [events])


LARGE = [f"F{place}" for place in range(200)]
ALL_LARGE = {"must": [{"key": "item_id", "any": LARGE}]}
LISTED = [  # requests whose answers have 200 items with all their attributes
    ("GET", "/v1/items?limit=200", b""),
    ("GET", "/v1/lists/latest?k=200&include=metadata", b""),
    ("POST", RECOMMEND, dump({"history": ["B0001"], "k": 200, "filter": ALL_LARGE,
                              "include": ["metadata"]})),
]  # fmt: skip


async def large_lists(to: Target) -> None:
    """Small requests of 20 connections whose answers have the largest titles and attributes."""
    tags = {"tags": [FACE * 990] * 4}
    item = {"semantic_id": [0, 0, 0], "title": FACE * 1_000, "attributes": tags}
    for first in range(0, len(LARGE), 15):
        items = [{"item_id": name, **item} for name in LARGE[first : first + 15]]
        await in_turn(to, "/v1/items", [{"items": items}])
    requests = (to.send(path, body, method) for method, path, body in LISTED * 7)
    await asyncio.gather(*requests)


async def slow_lists(to: Target) -> None:
    """Such answers, read slowly; the items are there."""
    method, path, body = random.choice(LISTED)
    reader, writer = await to.connect()
    writer.write(to.head(method, path, length=len(body)) + body)
    while await reader.read(2_048):
        await asyncio.sleep(0.5)
    writer.close()


async def waiting_rules(to: Target) -> None:
    """Rules of almost 16 KiB, put by very many connections."""
    names = [f"{place:06}" for place in range(1_300)]
    rule = {"filter": {"must_not": [{"key": "item_id", "any": names}]}}
    await to.send(f"/v1/rules/r{random.randrange(60)}", rule, "PUT")


async def all_rules(to: Target) -> None:
    """The list of these rules."""
    await to.send("/v1/rules", method="GET")


async def long_ids(to: Target) -> None:
    """The newest events have the longest ids, and figures are made of them."""
    face = FACE * 240
    for number in itertools.count():
        names = [f"{number} {place}" for place in range(340)]
        events = [{"user": face + name, "item": face + name, "type": "click",
                   "recommendation_id": face + name} for name in names]  # fmt: skip
        await in_turn(to, "/v1/events", [{"events": events}])
        for path in ("/v1/today?days=2", "/v1/lists/trending"):
            reader, writer = await to.connect()
            writer.write(to.head("GET", path))
            await read_answer(reader)
            writer.close()


async def conflicting_events(to: Target) -> None:
    """The largest batches of events, each refused as their ids have other contents."""
    for number in itertools.count():
        event = {"user": "c", "item": "B0001", "value": number}
        events = [{"event_id": f"c{place}", **event} for place in range(5000)]
        await in_turn(to, "/v1/events", [{"events": events}])


async def replaced_rules(to: Target) -> None:
    """The largest rule, replaced again and again."""
    for number in itertools.count():
        names = [letters(number * 800 + place, 900) for place in range(800)]
        rule = {"filter": {"must_not": [{"key": "title", "any": names}]}}
        await in_turn(to, "/v1/rules/large", [rule], "PUT")


async def new_filters(to: Target) -> None:
    """Filters of almost a megabyte, each a new one."""
    for number in itertools.count():
        names = [letters(number * 800 + place, 900) for place in range(800)]
        wanted = {"must_not": [{"key": "title", "any": names}]}
        await in_turn(to, RECOMMEND, [{"history": ["B0001"], "filter": wanted}])


async def unknown_items(to: Target) -> None:
    """Deletions of items that are not there."""
    await to.send("/v1/items/unknown", method="DELETE")


async def long_texts(to: Target) -> None:
    """The longest texts after the longest prompts, each a new one."""
    for number in itertools.count():
        body = {"prompt": f"{number} {'e' * 1_900}", "format": "letters", "max_tokens": 512}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await to.send("/v1/texts", body)


async def histories(to: Target) -> None:
    """Recommendations for a user with very many events of long ids, and their longest page."""
    events = [{"user": "long", "item": f"{FACE * 240}{place}"} for place in range(340)]
    await in_turn(to, "/v1/events", [{"events": events}])
    page = "/v1/users/long/history?limit=1000", None
    await send_body(*random.choice([page, (RECOMMEND, {"user": "long"})]), to)


async def wrong_keys(to: Target) -> None:
    """Guessing keys."""
    await replace(to, key="rk_" + "x" * 43).send("/metrics", method="GET")


# These write bytes to new connections without an end


async def many_lines(to: Target) -> None:
    """Heads of very many lines, all of which end at one time."""
    reader, writer = await to.connect()
    writer.write(to.head("GET", "/").removesuffix(b"\r\n") + b"a:\r\n" * 7_900)
    await writer.drain()
    await asyncio.sleep(-time.time() % 1)
    writer.write(b"\r\n")
    await reader.read()
    writer.close()


async def slow_bodies(to: Target) -> None:
    """A body at some bytes a second, after most of it."""
    reader, writer = await to.connect()
    writer.write(to.head("POST", RECOMMEND, length=900_000) + b" " * 300_000)
    while not reader.at_eof():
        writer.write(b" ")
        await writer.drain()
        await asyncio.sleep(0.2)


async def tiny_pieces(to: Target) -> None:
    """A body in chunks of one byte."""
    reader, writer = await to.connect()
    writer.write(to.head("POST", RECOMMEND, "Transfer-Encoding: chunked"))
    writer.write(b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
    await reader.read()
    writer.close()


async def pipelines(to: Target) -> None:
    """Thousands of requests without reading an answer."""
    _, writer = await to.connect()
    for _ in range(2000):
        writer.write(to.head("GET", "/v1/items?limit=200"))
        await writer.drain()
    writer.close()


async def connections_without_end(to: Target) -> None:
    """New connections, again and again."""
    for _, writer in [await to.connect() for _ in range(20)]:
        writer.close()


async def garbage(to: Target) -> None:
    """Bytes that are not HTTP."""
    reader, writer = await to.connect()
    writer.write(random.Random(0).randbytes(200_000))
    await reader.read()
    writer.close()


async def idle_connections(to: Target) -> None:
    """Very many connections that send nothing."""
    held = []
    while True:
        with contextlib.suppress(OSError):
            held.append(await to.connect())
        if len(held) > 800:
            held.pop(0)[1].close()
        await asyncio.sleep(0.001)


async def again(attack: Attack, to: Target) -> None:
    """The attack again and again, whatever becomes of its connections."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await attack(to)
        await asyncio.sleep(0.01)


ATTACKS: dict[str, tuple[int, Attack]] = {  # connections, and what each does
    name: (connections, partial(send_body, path, body))
    for name, (connections, path, body) in BODIES.items()
}
for count_, attack_ in (
    (2, wide_filters), (3, replaced_items), (8, large_titles), (4, conflicting_events),
    (1, large_lists), (40, slow_lists), (100, waiting_rules), (20, all_rules), (2, long_ids),
    (3, replaced_rules), (4, new_filters), (2, erasures),
    (4, unknown_items), (2, long_texts), (40, histories), (4, wrong_keys),
    (60, many_lines), (1, idle_connections), (100, slow_bodies),
    (4, tiny_pieces), (4, pipelines), (4, connections_without_end), (4, garbage),
):  # fmt: skip
    ATTACKS[attack_.__name__.replace("_", " ")] = count_, partial(again, attack_)


def run_attacks(to: Target, orders: Any) -> None:
    """The attacker's process: each order is the name of an attack, the next one ends it."""
    os.nice(10)

    async def until_ordered(name: str) -> None:
        connections, function = ATTACKS[name]
        tasks = [asyncio.create_task(function(to)) for _ in range(connections)]
        await asyncio.to_thread(orders.recv)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    to.did()
    with contextlib.suppress(EOFError):  # the measurement has ended
        while (name := orders.recv()) is not None:
            asyncio.run(until_ordered(name))
