"""Deploys two replicas on Ray, kills one and swaps the model while clients ask; says what it saw.

The clients ask over HTTP, by Ray's own proxy, as they do in a cluster.

A program of its own, so that what Ray leaves in a process is left in this one:
`python drive.py BUNDLES SCRATCH`. In SCRATCH lie `right.json`, the histories to ask for and what
each bundle answers, and a batch of bundle `one`: `users.parquet` and the folder `local` of what
was scored without Ray. The last line is JSON.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from recsys.serving.batch.job import Job
from recsys.serving.batch.run import score
from recsys.serving.cluster.deployment import REPLICAS
from recsys.serving.cluster.door import Handle
from recsys.serving.cluster.ray import import_ray, start_ray
from recsys.serving.cluster.replica import Call
from recsys.serving.settings import ServingSettings

ROOT = Path(__file__).parents[3]
PATIENCE_S = float(os.environ["PATIENCE_S"])
CLIENTS = 4
APPLICATION = "recsys"  # of deploy/ray/serve.yaml
ATTEMPTS = 3


class Right:
    """What to ask for, and the answers of either bundle."""

    def __init__(self, file):
        values = json.loads(file.read_text())
        self.k, self.histories = values["k"], values["histories"]
        self.answers: dict[str, list[list[list[Any]]]] = values["answers"]

    def body(self, place):
        return {"history": self.histories[place], "k": self.k}


def listed(answer):
    return [[item["item_id"], float(np.float32(item["score"]))] for item in answer["items"]]


class Load:
    """Clients that ask without a break while the block runs."""

    def __init__(self, client, right):
        self.client, self.right = client, right
        self.seen: list[tuple[int, int, str, Any]] = []
        self._stop = False

    async def __aenter__(self):
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(CLIENTS)]
        await self.answered(CLIENTS)
        return self

    async def __aexit__(self, *_):
        self._stop = True
        await asyncio.gather(*self._tasks)

    async def answered(self, more):
        goal = len(self.seen) + more
        await until(lambda: len(self.seen) >= goal)

    async def _ask(self, first):
        for number in itertools.count(first, CLIENTS):
            if self._stop:
                return
            place = number % len(self.right.histories)
            body = self.right.body(place)
            response = await self.client.post("/v1/recommendations", json=body)
            answer = response.json()
            good = response.status_code == 200
            model = answer["model"]["name"] if good else answer["code"]
            self.seen.append(
                (place, response.status_code, model, listed(answer) if good else answer)
            )

    def wrong(self):
        """Answers that failed, or are not those of the model that they name."""
        return [
            [place, status, model, answer]
            for place, status, model, answer in self.seen
            if status != 200 or answer != self.right.answers[model][place]
        ]


async def until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


async def processes(client):
    response = await client.get("/metrics")
    return {int(pid) for pid in re.findall(r'replica="[^":]*:(\d+)"', response.text)}


async def both(client, without=None):
    """The two replicas, as soon as Ray names both: one that starts or reconfigures is left out."""
    async with asyncio.timeout(PATIENCE_S):
        while len(alive := await processes(client) - {without}) < 2:
            await asyncio.sleep(0.1)
    return sorted(alive)


class Cluster:
    """The application of `deploy/ray/serve.yaml`, made small."""

    def __init__(self, bundles, scratch):
        self.config = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())
        # Ray's proxies share their port (SO_REUSEPORT); no other program gets the one that we hold.
        self.held = socket.socket()
        self.held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        self.held.bind(("127.0.0.1", 0))
        self.config["http_options"] = dict(
            zip(("host", "port"), self.held.getsockname(), strict=True)
        )
        (application,) = self.config["applications"]
        application["args"] = {
            "serve": {
                "bundle": str(bundles / "one"),
                "store": str(scratch / "h.db"),
                "deadline_ms": PATIENCE_S * 1000,
                "allowed_hosts": "127.0.0.1",
                "insecure_listen": True,
            }
        }
        application["deployments"] = [
            {"name": REPLICAS, "num_replicas": 2, "ray_actor_options": {"num_cpus": 0.5}}
        ]

    @property
    def url(self):
        return "http://127.0.0.1:{port}".format(**self.config["http_options"])

    def deploy(self):
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema(**self.config))

    def wait(self):
        from ray import serve

        def is_running():
            found = serve.status().applications.get(APPLICATION)
            assert found is None or found.status != "DEPLOY_FAILED", found
            return found is not None and found.status == "RUNNING"

        asyncio.run(until(is_running))


async def answers(client, right):
    bodies = map(right.body, range(len(right.histories)))
    asked = (client.post("/v1/recommendations", json=body) for body in bodies)
    return [listed(response.json()) for response in await asyncio.gather(*asked)]


async def drive(cluster, right):
    from ray import serve

    saw: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as client:
        saw["processes"] = await both(client)
        saw["answers"] = await answers(client, right)

        handle, homes = Handle(serve.get_deployment_handle(REPLICAS, APPLICATION)), []
        scope = {"type": "http", "method": "GET", "path": "/health/live"}
        call = Call.of({**scope, "query_string": b"", "headers": []}, b"")
        # On a busy machine Ray passes a replica that does not say in time how busy it is.
        async with asyncio.timeout(PATIENCE_S):
            while len(homes) < 2 or homes[-1] != homes[-2]:
                homes.append([(await handle.ask(call, f"user-{n}")).replica for n in range(12)])
        saw["homes"] = homes[-2:]

        new = {"item_id": "B9999", "title": "New"}
        refused = await client.post("/v1/items", json={"items": [new]})
        put = await client.post("/v1/items", json={"items": [new | {"like": "B0001"}]})
        # whoever answers, the item is there
        got = [await client.get("/v1/items/B9999", headers={"x-session-id": u}) for u in "abcdef"]
        saw["items"] = [response.status_code for response in (refused, put, *got)]
        await client.delete("/v1/items/B9999")

        async with Load(client, right) as load:
            victim = saw["processes"][0]
            os.kill(victim, signal.SIGKILL)
            await load.answered(3 * CLIENTS)
            saw["processes_after_the_kill"] = await both(client, without=victim)
            await load.answered(3 * CLIENTS)
        saw["kill"] = {"answers": len(load.seen), "wrong": load.wrong()}

        async with Load(client, right) as load:
            swapped = await client.put("/v1/aliases/champion", json={"bundle": "two"})
            assert swapped.status_code == 200, swapped.text
            await until(lambda: all(model == "two" for _, _, model, _ in load.seen[-40:]))
            await load.answered(3 * CLIENTS)
        models = [model for _, _, model, _ in load.seen]
        saw["swap"] = {
            "answers": len(models),
            "wrong": load.wrong(),
            "models": [models[0], models[-1]],
        }
        saw["processes_after_the_swap"] = await both(client)
    return saw


def batch(bundles, scratch, k):
    """Whether both engines write the same bytes, by part."""
    job = Job(
        ServingSettings(bundle=bundles / "one", histories=None, device="cpu", threads=1),
        scratch / "users.parquet",
        {"k": k},
        part_rows=5,
    )
    score(job, scratch / "ray", engine="ray")
    parts = sorted((scratch / "local").glob("part-*.parquet"))
    return [part.read_bytes() == (scratch / "ray" / part.name).read_bytes() for part in parts]


def start(ray, serve, options):
    """Start Ray and its own proxy; on a busy machine their processes can miss Ray's half minute."""
    for attempt in range(ATTEMPTS):
        try:
            start_ray(ray, num_cpus=3)  # cores are counted, not measured
            serve.start(http_options=options)
        except Exception:
            serve.shutdown()
            ray.shutdown()
            if attempt == ATTEMPTS - 1:
                raise
        else:
            return


def main():
    bundles, scratch = map(Path, sys.argv[1:])
    right = Right(scratch / "right.json")
    cluster = Cluster(bundles, scratch)
    ray = import_ray()
    from ray import serve

    start(ray, serve, cluster.config["http_options"])
    try:
        cluster.deploy()
        cluster.wait()
        saw = asyncio.run(drive(cluster, right))
        serve.delete(APPLICATION)
        serve.shutdown()
        saw["batch"] = batch(bundles, scratch, right.k)
    finally:
        serve.shutdown()
        ray.shutdown()
    print(json.dumps(saw))  # noqa: T201


if __name__ == "__main__":
    main()
