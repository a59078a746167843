"""Two replicas on Ray, one killed and the model swapped while clients ask.

The clients ask over HTTP, by Ray's own proxy, as they do in a cluster. What Ray leaves in a process
is left in a copy of that of the tests, which has imported already what else takes seconds.
"""

import asyncio
import itertools
import json
import os
import re
import signal
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from oracles import PATIENCE_S

from recsys.recommender import Recommender
from recsys.serving.batch.job import Job
from recsys.serving.batch.run import score
from recsys.serving.cluster.deployment import REPLICAS
from recsys.serving.cluster.door import Handle
from recsys.serving.cluster.ray import import_ray, start_ray
from recsys.serving.cluster.replica import Call
from recsys.serving.settings import ServingSettings

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra 'ray'"),
    pytest.mark.slow,
]
ROOT = Path(__file__).parents[3]
# Ray kills a proxy that has not started in 5 seconds, which is short on a busy machine. Its workers
# give way to all other work by default, and get next to nothing beside it.
PATIENT = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "300", "RAY_worker_niceness": "0"}
CLIENTS = 4
APPLICATION = "recsys"  # of deploy/ray/serve.yaml
ATTEMPTS = 3
K = 5
RNG = np.random.default_rng(3)
HISTORIES = [[f"B{i:04d}" for i in RNG.integers(0, 300, RNG.integers(1, 12))] for _ in range(24)]


def body_of(place):
    return {"history": HISTORIES[place], "k": K}


def listed(answer):
    return [[item["item_id"], float(np.float32(item["score"]))] for item in answer["items"]]


class Load:
    """Clients that ask while the block runs, without a break or with one between two requests."""

    def __init__(self, client, right):
        self.client, self.right = client, right  # answers by model
        self.seen: list[tuple[int, int, str, Any]] = []
        self.break_s = 0.0
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
            place = number % len(HISTORIES)
            response = await self.client.post("/v1/recommendations", json=body_of(place))
            answer = response.json()
            good = response.status_code == 200
            model = answer["model"]["name"] if good else answer["code"]
            self.seen.append(
                (place, response.status_code, model, listed(answer) if good else answer)
            )
            await asyncio.sleep(self.break_s)

    def wrong(self):
        """Answers that failed, or are not those of the model that they name."""
        return [
            [place, status, model, answer]
            for place, status, model, answer in self.seen
            if status != 200 or answer != self.right[model][place]
        ]


async def until(condition, every_s=0.02):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(every_s)


async def processes(client):
    response = await client.get("/metrics")
    return {int(pid) for pid in re.findall(r'replica="[^":]*:(\d+)"', response.text)}


async def both(client, without=None):
    """The two replicas, as soon as Ray names both: one that starts or reconfigures is left out."""
    async with asyncio.timeout(PATIENCE_S):
        while len(alive := await processes(client) - {without}) < 2:
            await asyncio.sleep(0.2)
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

        asyncio.run(until(is_running, every_s=0.2))  # a call of its own process


async def served_answers(client):
    bodies = map(body_of, range(len(HISTORIES)))
    asked = (client.post("/v1/recommendations", json=body) for body in bodies)
    return [listed(response.json()) for response in await asyncio.gather(*asked)]


async def drive(cluster, right):
    """What clients see; `right` has the answers of each bundle."""
    from ray import serve

    saw: dict[str, Any] = {}
    async with httpx.AsyncClient(base_url=cluster.url, timeout=PATIENCE_S) as client:
        saw["processes"] = await both(client)
        saw["answers"] = await served_answers(client)

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
            load.break_s = 0.2  # a replica that starts needs the cores
            saw["processes_after_the_kill"] = await both(client, without=victim)
            load.break_s = 0.0
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


def job_of(bundles, scratch):
    settings = ServingSettings(bundle=bundles / "one", histories=None, device="cpu", threads=1)
    return Job(settings, scratch / "users.parquet", {"k": K}, part_rows=5)


def batch(bundles, scratch):
    """Whether both engines write the same bytes, by part."""
    score(job_of(bundles, scratch), scratch / "ray", engine="ray")
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


def work_on_ray(bundles, scratch, sessions, right):
    """What the copy of the process does: write to `seen.json` in `scratch` what was seen."""
    os.environ |= {"RAY_TMPDIR": sessions, **PATIENT}
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
        saw["batch"] = batch(bundles, scratch)
    finally:
        serve.shutdown()
        ray.shutdown()
    (scratch / "seen.json").write_text(json.dumps(saw))


def answers(bundle):
    found = Recommender.load(bundle).recommend(HISTORIES, K)
    return [[[one.item_id, float(np.float32(one.score))] for one in answer] for answer in found]


@pytest.fixture
def seen(bundles, tmp_path, forked):
    """What was seen, and the right answers of each bundle."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a replica has
    right = {name: answers(bundles / name) for name in ("one", "two")}
    names = [f"user-{n}" for n in range(len(HISTORIES))]
    table = pa.table({"user_id": names, "history": HISTORIES})
    pq.write_table(table, tmp_path / "users.parquet")
    score(job_of(bundles, tmp_path), tmp_path / "local")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="ray-") as sessions:
        assert forked(work_on_ray, bundles, tmp_path, sessions, right) == 0
    return json.loads((tmp_path / "seen.json").read_text()) | {"right": right}


def test_replicas_answer_as_one_process_through_kills_swaps_and_changes(seen):
    """One test, since each process of the suite that runs a part of it would start Ray anew."""
    # Two replicas give the local answers bit for bit.
    assert len(seen["processes"]) == 2
    assert seen["answers"] == seen["right"]["one"]
    assert seen["right"]["one"] != seen["right"]["two"]
    # A user's requests go to one replica, and users to both.
    first, again = seen["homes"]
    assert first == again
    assert len(set(first)) == 2
    # A change of the catalog reaches every replica.
    refused, put, *got = seen["items"]
    assert refused == 422, "this bundle has nothing to find codes with"
    assert put in (200, 201)
    assert got == [200] * 6
    # A killed replica loses no answer and is replaced.
    assert seen["kill"]["wrong"] == []
    assert seen["kill"]["answers"] > 20
    before, after = set(seen["processes"]), set(seen["processes_after_the_kill"])
    assert len(after) == 2
    assert len(before & after) == 1
    # A swap under load costs no answer and no process.
    assert seen["swap"]["wrong"] == []
    assert seen["swap"]["models"] == ["one", "two"]
    assert seen["processes_after_the_swap"] == seen["processes_after_the_kill"]
    # Batches on Ray are the local ones byte for byte.
    assert seen["batch"] == [True] * 5
