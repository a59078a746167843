"""A recommender whose every answer can be checked against its request, and apps around it."""

from __future__ import annotations

import asyncio
import logging
import threading
import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from recsys.artifacts import Manifest, write_artifact
from recsys.catalog import Catalog
from recsys.dataset import Dataset
from recsys.interactions import Interactions
from recsys.recommender import Recommendation, RecommendRequest, RecommendResult
from serving.app import create_app
from serving.service import Phase, Service
from serving.settings import ServingSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
    from pathlib import Path

ITEMS = 300


class FakeRecommender:
    """Ranks the catalogue by a checksum of the history.

    Attributes:
        batches: size of each batch, in order.
        gate: answers wait until it is set.
        busy: whether a batch has been begun.
    """

    def __init__(self) -> None:
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
        self.catalog = Catalog(items, codes.astype(np.int32))
        self.manifest = Manifest("bundle", files={"a": "b"})
        self.batches: list[int] = []
        self.warm = False
        self.busy = False
        self.gate = threading.Event()
        self.gate.set()

    def warm_up(self) -> None:
        self.gate.wait(10)
        self.warm = True

    def recommend_batch(self, requests: Sequence[RecommendRequest]) -> list[RecommendResult]:
        self.busy = True
        self.gate.wait(10)
        self.batches.append(len(requests))
        return [self.answer(request) for request in requests]

    def answer(self, request: RecommendRequest) -> RecommendResult:
        if "poison" in request.history:
            raise ValueError("secret: /etc/model")
        start = zlib.crc32("|".join(request.history).encode())
        hidden = set(request.exclude_items) | (
            set(request.history) if request.exclude_seen else set()
        )
        order = [f"item-{(start + i) % ITEMS}" for i in range(ITEMS)]
        found = [i for i in order if i not in hidden][: request.k]
        known = set(self.catalog.item_ids)
        return RecommendResult(
            [
                Recommendation(item, -float(n), f"Thing no. {item[5:]}", (0, 0, 0))
                for n, item in enumerate(found)
            ],
            [i for i in request.history if i not in known],
            {"target_passes": 3},
        )

    def expected(self, history: Iterable[str], k: int = 10, **options: Any) -> list[str]:
        result = self.answer(RecommendRequest(list(history), k, **options))
        return [found.item_id for found in result.recommendations]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    """A server that is run inside a test redirects them."""
    loggers = [logging.getLogger(name) for name in ("serving", "uvicorn")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, handlers, propagate, level in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def recommender() -> FakeRecommender:
    return FakeRecommender()


@pytest.fixture
def write_dataset(tmp_path: Path) -> Callable[..., Path]:
    """Write events [(user, item, time)] as a canonical data set."""

    def write(events: list[tuple[str, str, int]], name: str = "shop") -> Path:
        users, items, times = zip(*events, strict=True)
        interactions = Interactions.of(list(users), list(items), list(times))
        table = pa.table(
            {c: pa.array(interactions.item_ids.tolist()) for c in ("item_id", "title", "text")}
        )
        with write_artifact(tmp_path / name, "dataset") as folder:
            Dataset(interactions, np.zeros(len(events), np.uint8), table).save(folder)
        return tmp_path / name

    return write


@pytest.fixture
def settings(
    tmp_path: Path, write_dataset: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> ServingSettings:
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path / "var"))
    histories = write_dataset([("ada", "item-1", 10), ("ada", "item-2", 20), ("bob", "gone", 5)])
    return ServingSettings(bundle=tmp_path / "bundles" / "demo", histories=histories)


@asynccontextmanager
async def run_app(
    settings: ServingSettings, *, wait: bool = True, **parts: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """A client of a started application, over ASGI."""
    app = create_app(settings, **parts)
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
    ):
        service: Service = app.state.service
        if wait:
            await wait_until(lambda: service.phase is not Phase.STARTING)
        yield client, service


async def wait_until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def running() -> Any:
    return run_app


@pytest.fixture
def until() -> Any:
    return wait_until


@pytest.fixture
async def client(
    settings: ServingSettings, recommender: FakeRecommender
) -> AsyncIterator[httpx.AsyncClient]:
    async with run_app(settings, recommender=recommender) as (client, _):
        yield client
