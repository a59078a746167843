"""The service with a real bundle: a small random model behind every door."""

import asyncio
import json
import os
import shutil
import signal

import httpx
import numpy as np
import pytest
from oracles import PATIENCE_S

from recsys import Recommender
from recsys.bundle import TARGET
from recsys.errors import ArtifactError
from recsys.recommender import RecommendRequest
from recsys.serving.server import serve
from recsys.serving.settings import ServingSettings

ITEMS = 500


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, random_bundle):
    return random_bundle(tmp_path_factory.mktemp("home") / "bundles" / "tiny", ITEMS)


@pytest.fixture
def served(bundle, tmp_path):
    return ServingSettings(
        bundle=bundle, histories=None, store=tmp_path / "h.db", threads=1, deadline_ms=60_000
    )


async def test_an_answer_under_load_is_the_answer_alone(served, bundle, running):
    rng = np.random.default_rng(1)
    alone = Recommender.load(bundle)
    async with running(served) as (client, _):

        async def one(number, history, k):
            response = await client.post(
                "/v1/recommendations",
                json={"history": history, "k": k, "include": ["timing"]},
                headers={"x-request-id": f"r{number}"},
            )
            assert response.headers["x-request-id"] == f"r{number}"
            body = response.json()
            (expected,) = alone.recommend_batch([RecommendRequest(history, k)])
            found = [(item["item_id"], item["title"]) for item in body["items"]]
            assert found == [(e.item_id, e.title) for e in expected.recommendations]
            scores = [item["score"] for item in body["items"]]
            assert scores == [e.score for e in expected.recommendations]
            assert body["eligible_items"] == ITEMS - len({i for i in history if i != "gone"})
            return bool(body["timing"]["batch_size"] > 1)

        requests = [
            ([f"B{i:04d}" for i in rng.integers(0, ITEMS, rng.integers(0, 12))] + ["gone"], int(k))
            for k in rng.choice([1, 10, 20, 50], 40)
        ]
        together = await asyncio.gather(*(one(n, *asked) for n, asked in enumerate(requests)))
    assert any(together)


def test_the_command_serves_a_bundle_until_a_signal(bundle, server_process, tmp_path):
    command = "from recsys.cli import main; main()"
    options = ("serve", "--bundle", bundle, "--port", "0")
    with (
        server_process("-c", command, *options) as (started, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        assert client.get("/health/ready").json() == {"status": "ready"}
        body = {"history": ["B0001", "B0002"], "k": 3}
        response = client.post("/v1/recommendations", json=body, headers={"X-Request-ID": "a"})
        assert len(response.json()["items"]) == 3
        headers = {"content-type": "application/json"}
        large = client.post("/v1/recommendations", content=b" " * 2_000_000, headers=headers)
        assert large.json()["code"] == "body_too_large"
        started.send_signal(signal.SIGTERM)
        out, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode in (0, -signal.SIGTERM)
    lines = [json.loads(line) for line in out.splitlines()]
    requests = [line for line in lines if line["logger"] == "recsys.serving.access"]
    assert [line["status"] for line in requests] == [200, 200, 413]
    assert requests[1]["request_id"] == "a"
    assert "Traceback" not in err
    assert (tmp_path / "serving" / "tiny" / "histories.db").is_file()


def test_a_damaged_bundle_is_refused_by_file_name(served, bundle, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(bundle, damaged)
    with (damaged / TARGET / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(ArtifactError, match=r"'target/model\.safetensors' does not match its"):
        serve(served.model_copy(update={"bundle": damaged, "port": 0}))
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["message"].startswith("start failed: ")
    assert "exception" not in json.loads(line)  # the text says all there is to say
