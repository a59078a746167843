"""Mutated bodies against every route that takes one: nothing may crash, hang, or answer 5xx.

In one process, over ASGI, with a small random model. Bodies begin as the OpenAPI document's own
examples and are mutated as text (bytes flipped, cut, repeated, spliced) and as values (types
swapped, huge and tiny numbers, odd text, deep nesting). Prints a table of answers by status.

    python benchmarks/fuzz_bodies.py [--bodies 50000] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parent.parent))

from recsys.serving.app import create_app
from recsys.serving.service import Phase
from recsys.serving.settings import ServingSettings
from tests.serving.test_models import make_bundle

SLOWEST_S = 20.0
CLIENTS = 8
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 0.1, -0.0, 1e308, 1e-308, "",
    "B001", "\x00", "é\u202e\ufeff", "🙂" * 50, "x" * 300, "../../etc/passwd", "' OR 1=1", [], {},
    [[]], [None], {"": ""}, {"key": "price"}, {"must": [{"key": "title", "match": "B001"}]},
    "champion", "NaN", ["B001"] * 3000, {"must": {"must": {"must": {}}}}, [[[[[[[[[[]]]]]]]]]],
]  # fmt: skip
TOKENS = [b'"', b"{", b"}", b"[", b"]", b",", b":", b"NaN", b"1e999", b"\\ud800", b"\xff", b"null"]


def mutate_value(value: Any, rng: random.Random) -> Any:
    """The value with one place changed."""
    if rng.random() < 0.3 or not isinstance(value, dict | list) or not value:
        return copy.deepcopy(rng.choice(STRANGE))
    if isinstance(value, list):
        place = rng.randrange(len(value))
        return [mutate_value(v, rng) if i == place else v for i, v in enumerate(value)]
    keys = list(value)
    key = rng.choice(keys)
    changed = dict(value)
    action = rng.random()
    if action < 0.1:
        del changed[key]
    elif action < 0.2:
        changed[rng.choice(["x", "", "__proto__", "k", "filter", "user"])] = rng.choice(STRANGE)
    else:
        changed[key] = mutate_value(value[key], rng)
    return changed


def mutate_text(body: bytes, rng: random.Random) -> bytes:
    """The text with a few bytes changed."""
    text = bytearray(body)
    for _ in range(rng.randrange(1, 6)):
        place = rng.randrange(len(text) + 1)
        action = rng.randrange(5)
        if action == 0:
            text[place:place] = rng.choice(TOKENS)
        elif action == 1:
            del text[place : place + rng.randrange(1, 20)]
        elif action == 2:
            text[place : place + 1] = bytes([rng.randrange(256)])
        elif action == 3:
            text[place:place] = text[place : place + rng.randrange(40)] * rng.randrange(1, 4)
        else:
            text[place:place] = rng.choice([b"[", b'{"a":']) * rng.choice([3, 70, 2000])
    return bytes(text)


def bodies(example: Any, rng: random.Random) -> bytes:
    """One mutated body."""
    value = example
    for _ in range(rng.randrange(4)):
        value = mutate_value(value, rng)
    body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode(errors="surrogatepass")
    return mutate_text(body, rng) if rng.random() < 0.5 else body


def routes(document: dict[str, Any]) -> list[tuple[str, str, Any]]:
    """Method, path and an example of each route with a body."""
    found = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            with suppress(KeyError):
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                if "$ref" in schema:
                    schema = document["components"]["schemas"][schema["$ref"].split("/")[-1]]
                place = path.replace("{item_id}", "new").replace("{name}", "next")
                examples = schema.get("examples") or [{"events": [{"user": "u", "item": "B001"}]}]
                found += [(method.upper(), place, example) for example in examples]
    return found


async def run(count: int, seed: int, folder: Path) -> bool:
    """Send the bodies; whether all was well."""
    make_bundle(folder / "one", 0)
    settings = ServingSettings(
        bundle=folder / "one",
        histories=None,
        store=folder / "h.db",
        threads=1,
        deadline_ms=60_000,  # of a busy machine; what hangs is told by the slowest answer
    )
    app = create_app(settings)
    statuses: Counter[tuple[str, int]] = Counter()
    bad: list[str] = []
    slowest = 0.0
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http,
    ):
        while app.state.service.phase is Phase.STARTING:
            await asyncio.sleep(0.01)
        plan = routes((await http.get("/openapi.json")).json())

        async def client(number: int) -> None:
            nonlocal slowest
            rng = random.Random(seed * 1000 + number)
            for _ in range(count // CLIENTS):
                method, path, example = rng.choice(plan)
                body = bodies(example, rng)
                start = time.perf_counter()
                async with asyncio.timeout(SLOWEST_S * 2):
                    answer = await http.request(
                        method, path, content=body, headers={"content-type": "application/json"}
                    )
                slowest = max(slowest, time.perf_counter() - start)
                statuses[path, answer.status_code] += 1
                answer.json()  # every answer is JSON
                if answer.status_code >= 500:
                    bad.append(f"{method} {path} {body[:500]!r}: {answer.text[:500]}")

        await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    for (path, status), number in sorted(statuses.items()):
        print(f"{status}  {number:7,}  {path}")
    print(f"{sum(statuses.values()):,} bodies, slowest {slowest:.2f} s, {len(bad)} with 5xx")
    for text in bad[:10]:
        print(text)
    return not bad and slowest < SLOWEST_S


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bodies", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(not asyncio.run(run(given.bodies, given.seed, Path(temporary))))
