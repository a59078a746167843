"""Attack a service with one client, and measure what others notice.

    OMP_NUM_THREADS=1 python tests/stress/abuse.py --seconds 10 [--proxy]

A server is started on a small random bundle and a full store, with a key for the attacker and one
for a victim; with `--proxy`, deploy/nginx.conf is in front of it. The attacks run one after the
other, in a process of their own with a lower priority and from another address, as if it were
another machine.
Meanwhile four connections of the victim ask for recommendations, and `/health/live` is asked on new
connections. Between attacks the same is measured in quiet. For each attack, the table has the
longest answer of `/health/live`, the victim's p99 and its failures, and how much the memory of the
server exceeds that before the first attack; at the end, also how much a minute later.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import multiprocessing
import random
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from attacks import ATTACKS, RECOMMEND, Target, dump, read_answer, run_attacks
from harness import ITEMS, environment, fill_store, write_bundle
from oracles import byte_level_tokenizer, tiny_model
from proxy import PROXY, make_certificate, start_proxy
from servers import Server, start_server

from recsys.serving import auth

VICTIMS, PAUSE_S, QUIET_S = 4, 0.05, 3.0
REST_S = 65.0  # in which memory is given back
VICTIM = "127.0.0.2"  # its address, another one than the attacker's; all of 127/8 is this machine


@dataclass
class Notes:
    """What was measured in a period: seconds of answers, and failures."""

    live: list[float] = field(default_factory=list)
    victim: list[float] = field(default_factory=list)
    failed: int = 0
    rss: int = 0
    rss_last: int = 0

    @property
    def p99_ms(self) -> float:
        """The victim's p99."""
        return 1000 * float(np.percentile(self.victim, 99)) if self.victim else float("nan")

    @property
    def live_ms(self) -> float:
        """The longest answer of `/health/live`."""
        return 1000 * max(self.live, default=float("nan"))


async def check_health(to: Target, notes: Notes) -> None:
    """Ask for `/health/live` on new connections; one that is not answered counts 10 s."""
    while True:
        start, status = time.perf_counter(), 0
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(10):
                reader, writer = await to.connect()
                writer.write(to.head("GET", "/health/live"))
                status = await read_answer(reader)
                writer.close()
        notes.live.append(time.perf_counter() - start if status == 200 else 10.0)
        await asyncio.sleep(0.02)


async def ask(to: Target, notes: Notes, number: int) -> None:
    """A victim: ordinary requests, one after the other, with pauses."""
    rng = random.Random(number)
    connection: Any = None
    while True:
        history = [f"B{rng.randrange(ITEMS):04d}" for _ in range(rng.randint(1, 30))]
        body = dump({"history": history, "k": 10})
        start, status = time.perf_counter(), 0
        for _ in range(2):  # a connection that was closed while it was idle is replaced, once
            fresh = connection is None
            try:
                connection = connection or await to.connect()
                connection[1].write(to.head("POST", RECOMMEND, length=len(body)) + body)
                status = await read_answer(connection[0])
                break
            except (OSError, asyncio.IncompleteReadError):
                connection = None
                if fresh:
                    break
        notes.victim.append(time.perf_counter() - start)
        notes.failed += status != 200
        await asyncio.sleep(rng.expovariate(1 / PAUSE_S))


async def watch_memory(server: Server, notes: Notes) -> None:
    """Note the largest memory."""
    while True:
        usage = server.usage()
        notes.rss_last = usage.rss_bytes if usage else 0
        notes.rss = max(notes.rss, notes.rss_last)
        await asyncio.sleep(0.05)


async def measure(server: Server, to: Target, seconds: float) -> Notes:
    """Measure for some seconds."""
    notes = Notes()
    tasks = [asyncio.create_task(ask(to, notes, number)) for number in range(VICTIMS)]
    tasks.append(asyncio.create_task(check_health(to, notes)))
    tasks.append(asyncio.create_task(watch_memory(server, notes)))
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return notes


async def compare(
    names: list[str], seconds: float, folder: Path, *, through_proxy: bool
) -> dict[str, Any]:
    """Run the attacks; their figures."""
    bundle, keys = folder / "bundle", folder / "keys.json"
    write_bundle(bundle)
    fill_store(folder / "histories.db")
    attacker, victim = (auth.create(keys, name, "write") for name in ("attacker", "victim"))
    settings = [
        f"keys={keys}",
        f"store={folder / 'histories.db'}",
        "threads=1",
        f"forwarded_allow_ips={PROXY}",
    ]
    tiny_model("llama-gqa", 352).save_pretrained(folder / "texts")
    byte_level_tokenizer(["Thing no. 1"], 330).save_pretrained(folder / "texts")
    settings.append(f"explainer={folder / 'texts'}")
    settings.append("text_formats={letters: {regex: '[a-z]{600}'}}")
    rows: dict[str, Any] = {}
    spawn = multiprocessing.get_context("spawn")
    certificate = make_certificate(folder) if through_proxy else None
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(start_server(bundle, settings))
        process, port = server.process, server.port
        assert process is not None
        if certificate is not None:
            port, _ = stack.enter_context(start_proxy(folder, certificate, port))
        to = Target(server.host, port, victim, source=VICTIM, certificate=certificate)
        orders, ordered = spawn.Pipe()
        count = spawn.Value("q", 0)
        child = spawn.Process(
            target=run_attacks,
            args=(Target(server.host, port, attacker, count, certificate=certificate), ordered),
            daemon=True,
        )
        child.start()
        while not count.value:  # it imports
            await asyncio.sleep(0.1)
        gc.collect()
        gc.freeze()  # else a collection of what is imported here counts as slow answers
        await measure(server, to, QUIET_S)  # warm up
        quiets = [await measure(server, to, 2 * QUIET_S)]
        before = quiets[0].rss
        for name in names:
            done = count.value
            orders.send(name)
            await asyncio.sleep(0.5)
            under = await measure(server, to, seconds)
            orders.send("end")
            await asyncio.sleep(0.5)
            quiets.append(await measure(server, to, QUIET_S))
            near = Notes(victim=quiets[-1].victim + quiets[-2].victim)
            rows[name] = {
                "live_ms": round(under.live_ms),
                "victim_p99_ms": round(under.p99_ms, 1),
                "quiet_p99_ms": round(near.p99_ms, 1),
                "ratio": round(under.p99_ms / near.p99_ms, 2),
                "asked": len(under.victim),
                "failed": under.failed,
                "rss_growth_mb": round((under.rss - before) / 2**20),
                "alive": process.poll() is None,
                "done": count.value - done,
            }
            row = "   ".join(f"{key} {value}" for key, value in rows[name].items())
            print(f"{name:24} {row}", flush=True)
        after = (await measure(server, to, REST_S)).rss_last - before
        print(f"memory after {REST_S:.0f} s: {round(after / 2**20):+} MB", flush=True)
        quiet = Notes(
            live=[s for q in quiets for s in q.live], failed=sum(q.failed for q in quiets)
        )
        print(f"quiet: live {quiet.live_ms:.0f} ms, failed {quiet.failed}", flush=True)
    figures = {"quiet_live_ms": round(quiet.live_ms), "rss_after_mb": round(after / 2**20)}
    return {"attacks": rows, **figures}


def main() -> None:
    """Run the attacks that are named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("attacks", nargs="*", help=f"of: {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each attack")
    parser.add_argument("--proxy", action="store_true", help="through deploy/nginx.conf")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="recsys-abuse-") as folder:
        names = options.attacks or list(ATTACKS)
        found = asyncio.run(
            compare(names, options.seconds, Path(folder), through_proxy=options.proxy)
        )
    rows = found["attacks"].values()
    worst = {
        "live_ms": max(row["live_ms"] for row in rows),
        "ratio": max(row["ratio"] for row in rows),
        "failed": sum(row["failed"] for row in rows),
        "rss_growth_mb": max(row["rss_growth_mb"] for row in rows),
        "alive": all(row["alive"] for row in rows),
    }
    print("worst: " + ", ".join(f"{name} {value}" for name, value in worst.items()))
    print(json.dumps({**found, "worst": worst, **environment()}))


if __name__ == "__main__":
    main()
