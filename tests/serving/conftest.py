"""A recommender whose every answer can be checked against its request, and apps around it."""

import asyncio
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pyarrow as pa
import pytest
from oracles import PATIENCE_S, interactions_of
from scipy import sparse

from recsys.artifacts import Manifest, write_artifact
from recsys.bundle import Bundle
from recsys.catalog import Catalog
from recsys.dataset import Dataset
from recsys.errors import NonFiniteError
from recsys.live import Epochs
from recsys.modes import Trace, TraceNode
from recsys.prompts import PromptConfig
from recsys.recommender import Recommendation, RecommendRequest, RecommendResult
from recsys.retrieval import ItemItem, Retrieval
from recsys.serving.app import create_app
from recsys.serving.server import http_server
from recsys.serving.service import Phase, Service
from recsys.serving.settings import ServingSettings
from recsys.serving.sockets import bind
from recsys.serving.stores import open_store
from recsys.vocabulary import Vocabulary

ITEMS = 300


def chain(items):
    """Retrieval in which each item leads to the next two, and more to the first of them."""
    after = sparse.diags_array([1.0, 0.5], offsets=[1, 2], shape=(items, items))
    return Retrieval(ItemItem(sparse.csr_array(after).astype(np.float32), 0.6), np.ones(items))


class FakeRecommender:
    """Ranks the catalog by a checksum of the history. The catalog is a real one, and live.

    Attributes:
        batches: size of each batch, in order.
        gate: answers wait until it is set.
        busy: whether a batch has been begun.
    """

    retrieval: Any = chain(ITEMS)
    exclude_seen = True
    blends = staticmethod(lambda request: False)
    device = SimpleNamespace(type="cpu")

    def __init__(self, name="demo"):
        ids = [f"item-{i}" for i in range(ITEMS)]
        items = pa.table(
            {
                "item_id": ids,
                "title": [f"Thing no. {i}" for i in range(ITEMS)],
                "text": [""] * ITEMS,
                "price": [float("nan") if i == 0 else i / 2 for i in range(ITEMS)],
                "categories": [["odd" if i % 2 else "even"] for i in range(ITEMS)],
            }
        )
        codes = np.stack(np.unravel_index(np.arange(ITEMS), (4, 9, 9)), axis=1)
        self.manifest = Manifest("bundle", files={name: "b"})
        self.bundle = Bundle(
            Path("nowhere"),
            self.manifest,
            Catalog(items, codes.astype(np.int32)),
            Vocabulary.from_levels([4, 9, 9]),
            PromptConfig(),
        )
        self.epochs = Epochs(self.bundle)
        self.batches: list[int] = []
        self.warm = False
        self.busy = False
        self.gate = threading.Event()
        self.gate.set()

    capture, mode = "passes", "beam"
    engine = SimpleNamespace(forget=lambda: None)
    types = SimpleNamespace(
        seen=lambda events: [item for item, name in events if name in (None, "order", "like")]
    )

    @contextmanager
    def aside(self):
        yield self

    @property
    def epoch(self):
        return self.epochs.current

    @property
    def catalog(self):
        return self.epoch.catalog

    def recommend(self, histories, k):
        """Asked for by `warm_up` alone."""
        self.gate.wait(PATIENCE_S)
        self.warm = True

    def close(self):
        pass

    def recommend_batch(self, requests):
        self.busy = True
        self.gate.wait(PATIENCE_S)
        self.batches.append(len(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request):
        if "poison" in request.history:
            raise ValueError("secret: /etc/model")
        if "not-finite" in request.history:
            raise NonFiniteError([0])
        catalog = self.catalog
        start = zlib.crc32("|".join(request.history).encode())
        hidden = set(request.exclude_items) | (
            set() if request.exclude_seen is False else set(request.history)
        )
        rows = np.flatnonzero(self.allowed(request)).tolist()
        order = [catalog.item_id(rows[(start + i) % len(rows)]) for i in range(len(rows))]
        pinned = [i for i in request.pin if i in order and i not in hidden]
        found = [*pinned, *(i for i in order if i not in {*hidden, *pinned})][: request.k]
        known = catalog.known(request.history)
        return RecommendResult(
            recommendations=[self.named(item, -float(n)) for n, item in enumerate(found)],
            unknown_items=[i for i, row in zip(request.history, known, strict=True) if row < 0],
            epoch=self.epoch,
            eligible_items=len(set(order) - hidden),
            stats={"target_passes": 3, "accepted_levels": 1, "drafted_nodes": 5},
            trace=self.trace() if request.trace else None,
        )

    def allowed(self, request):
        epoch = self.epoch
        found = epoch.alive.copy()
        if request.filter is not None:
            inside = np.zeros_like(found)
            inside[epoch.trie.row_items[epoch.filters.mask(request.filter).items]] = True
            found &= inside
        return found

    def named(self, item, score):
        catalog = self.catalog
        row = catalog.find(item)
        codes = tuple(catalog.codes[row].tolist())
        return Recommendation(item, score, catalog.title(row), codes, because="item-1")

    def trace(self):
        first = TraceNode(-1, 1, 2, 1, 1, -0.5, -0.25, "accepted", 0, 81)
        second = TraceNode(0, 2, 6 + 3, 5, 2, None, -1.0, "patched", 3, 9)
        return Trace([first, second], {1: 3, 2: 4, 3: 0})

    def eligible(self, request):
        epoch = self.epoch
        if request.boosts:
            epoch.filters.boost(request.item_boosts)
        if request.filter is None:
            return None
        return epoch.filters.mask(request.item_filter).eligible

    def upsert(self, items):
        return self.epochs.upsert(items)

    def remove(self, item_ids):
        return self.epochs.remove(item_ids)

    def rank(self, requests, items):
        return [
            [-float(len(request.history) + int(item[5:])) for item in some]
            for request, some in zip(requests, items, strict=True)
        ]

    def similar(self, item_id, k):
        row = self.catalog.find(item_id)
        return [(self.catalog.item_id((row + i) % ITEMS), 1 / i) for i in range(1, k + 1)]

    def fallback(self, request):
        rows = np.flatnonzero(self.allowed(request)).tolist()
        names = [self.catalog.item_id(row) for row in rows]
        found = [name for name in names if name not in request.exclude_items]
        return RecommendResult(
            recommendations=[
                replace(self.named(name, 100.0 - i), source="popular", because=None)
                for i, name in enumerate(found[: request.k])
            ],
            unknown_items=list(request.history),
            epoch=self.epoch,
            eligible_items=len(found),
            certificate="approximate",
        )

    def expected(self, history, k=10, **options):
        result = self.answer(RecommendRequest(list(history), k, **options))
        return [found.item_id for found in result.recommendations]


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture(autouse=True)
def loggers_as_before():
    """A server that is run inside a test redirects them."""
    loggers = [logging.getLogger(name) for name in ("recsys", "uvicorn")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def left_frozen(monkeypatch):
    """What the engine does with the garbage collector, without its walk over all there is."""
    told = SimpleNamespace(calls=[], thresholds=[])
    told.get_threshold = lambda: (700, 10, 10)
    told.set_threshold = lambda *counts: told.thresholds.append(counts)
    for name in ("collect", "freeze", "unfreeze"):
        setattr(told, name, partial(told.calls.append, name))
    monkeypatch.setattr("recsys.serving.worker.gc", told)
    return told


@pytest.fixture
def recommender():
    return FakeRecommender()


@pytest.fixture(scope="session")
def fake():
    return FakeRecommender


def write_bundle(path, items, *, seed=0, codes=16, draft=False, retrieval=None, **columns):
    """A bundle of a random model; its catalog is the same whatever the seed."""
    import torch
    import toy_bundle
    from toy_bundle import items_table

    from recsys.models.checkpoint import build

    rng = np.random.default_rng(0)
    flat = rng.choice(codes**3, items, replace=False)
    semantic_ids = np.stack(np.unravel_index(flat, (codes,) * 3), axis=1).astype(np.int32)
    titles = [f"Thing no. {i}" for i in range(items)]
    table = items_table([f"B{i:04d}" for i in range(items)], titles, **columns)
    vocabulary = Vocabulary.from_levels([codes] * 3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build({"hidden_size": 32, "intermediate_size": 64}, vocabulary)
        for weight in model.parameters():
            weight.data.mul_(3)  # peaked enough that scores rarely tie
        small = build({"hidden_size": 16, "intermediate_size": 32}, vocabulary)

    return toy_bundle.write_bundle(
        path, table, semantic_ids, [codes] * 3, target=model, draft=small if draft else None,
        retrieval=retrieval, prompts=json.dumps({"max_items": 8, "block": 4}),
    )  # fmt: skip


@pytest.fixture(scope="session")
def random_bundle():
    return write_bundle


def save_dataset(path, events, nanosecond=None):
    users, items, times = zip(*events, strict=True)
    interactions = interactions_of(list(users), list(items), list(times))
    interactions = replace(interactions, nanosecond=nanosecond)
    table = pa.table(
        {c: pa.array(interactions.item_ids.tolist()) for c in ("item_id", "title", "text")}
    )
    with write_artifact(path, "dataset") as folder:
        Dataset(interactions, np.zeros(len(events), np.uint8), table).save(folder)
    return path


@pytest.fixture
def write_dataset(tmp_path):
    def write(events, name="shop", nanosecond=None):
        return save_dataset(tmp_path / name, events, nanosecond)

    return write


@pytest.fixture(scope="session")
def imported(tmp_path_factory):
    """A data set that no test changes, and a store that has imported it."""
    folder = tmp_path_factory.mktemp("imported")
    events = [("ada", "item-1", 10), ("ada", "item-2", 20), ("bob", "gone", 5)]
    dataset = save_dataset(folder / "shop", events)
    open_store(folder / "histories.db", histories=dataset).close()
    return dataset, folder / "histories.db"


@pytest.fixture
def settings_of(tmp_path):
    """Makes settings of a service of a real bundle, with an empty store."""
    options = {"store": tmp_path / "h.db", "threads": 1, "deadline_ms": 60_000}
    return partial(ServingSettings, histories=None, **options)


@pytest.fixture
def settings(tmp_path, imported, monkeypatch):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    dataset, store = imported
    made = ServingSettings(
        bundle=tmp_path / "bundles" / "demo", histories=dataset, deadline_ms=60_000.0
    )
    made.store.parent.mkdir(parents=True)
    shutil.copy(store, made.store)
    return made


@contextmanager
def serve_in_thread(settings, seen=None, **parts):
    """The service behind its own HTTP server; `seen` gets the paths of its requests."""
    app, ready = create_app(settings, **parts), threading.Event()
    service = app.state.service
    service.on_phase = lambda service: ready.set()

    async def noted(scope, receive, send):
        if seen is not None and scope["type"] == "http":
            seen.append(scope["path"])
        await app(scope, receive, send)

    server = http_server(noted, settings)
    listener, url = bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    with listener:
        thread.start()
        try:
            assert ready.wait(PATIENCE_S)
            assert service.phase is Phase.READY, service.failure
            yield url
        finally:
            server.should_exit = True
            thread.join()


class ShopClient(httpx.AsyncClient):
    """A client of the service; the service lists what these methods return one of."""

    async def put_item(self, item_id, fields):
        """Add or replace one item."""
        return await self.post("/v1/items", json={"items": [{"item_id": item_id, **fields}]})

    async def named(self, kind, name):
        """One of the `aliases` or `experiments` of this name, or None."""
        listed = (await self.get("/v1/models")).json()[kind]
        return next((one for one in listed if one["name"] == name), None)

    async def rule(self, name):
        """The rule of this name, or None."""
        listed = (await self.get("/v1/rules", params={"limit": 200})).json()["rules"]
        return next((one for one in listed if one["name"] == name), None)


@asynccontextmanager
async def run_app(settings, *, wait=True, **parts):
    app = create_app(settings, **parts)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        ShopClient(transport=transport, base_url="http://localhost") as client,
    ):
        service: Service = app.state.service
        if wait:
            await wait_until(lambda: service.phase is not Phase.STARTING)
            if service.phase is Phase.READY and hasattr(parts.get("recommender"), "batches"):
                parts["recommender"].batches.clear()  # of the warm-up
                parts["recommender"].busy = False
        yield client, service


async def wait_until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def running():
    return run_app


@pytest.fixture(scope="session")
def serving():
    return serve_in_thread


@pytest.fixture
def until():
    return wait_until


@pytest.fixture
async def client(settings, recommender):
    async with run_app(settings, recommender=recommender) as (client, _):
        yield client


@pytest.fixture
def service(client):
    return client._transport.app.state.service


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "OMP_NUM_THREADS": "1", "RECSYS_HOME": str(tmp_path)}


@pytest.fixture
def python(environment):
    def run(*arguments, **more):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment | more
        )

    return run


@pytest.fixture
def server_process(environment):
    """Starts Python with these arguments; yields the server and its address, once it answers."""

    @contextmanager
    def start(*arguments):
        command = [sys.executable, *map(str, arguments)]
        pipe = subprocess.PIPE
        started = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
        try:
            lines = []
            for line in started.stderr:  # a person reads these
                lines.append(line)
                if found := re.search(r"answers at (http://\S+), try", line):
                    yield started, found.group(1)
                    return
            pytest.fail(f"the server did not start: {''.join(lines)}")
        finally:
            started.kill()
            started.communicate()

    return start
