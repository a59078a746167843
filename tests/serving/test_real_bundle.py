"""The service with a real bundle: a small random model behind every door."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa
import pytest

from recsys import Recommender
from recsys.artifacts import write_artifact
from recsys.bundle import CATALOG, PROMPTS, TARGET
from recsys.catalog import Catalog
from recsys.errors import ArtifactError
from recsys.models.checkpoint import build, save_model
from recsys.recommender import RecommendRequest
from recsys.vocabulary import Vocabulary
from serving.server import serve
from serving.settings import ServingSettings

if TYPE_CHECKING:
    from pathlib import Path

ITEMS = 500


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    rng = np.random.default_rng(0)
    flat = rng.choice(16**3, ITEMS, replace=False)
    codes = np.stack(np.unravel_index(flat, (16, 16, 16)), axis=1).astype(np.int32)
    items = pa.table(
        {
            "item_id": [f"B{i:04d}" for i in range(ITEMS)],
            "title": [f"Thing no. {i}" for i in range(ITEMS)],
            "text": [""] * ITEMS,
        }
    )
    vocabulary = Vocabulary.from_levels([16, 16, 16])
    path = tmp_path_factory.mktemp("home") / "bundles" / "tiny"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build({"hidden_size": 32, "intermediate_size": 64}, vocabulary)
        for weight in model.parameters():
            weight.data.mul_(3)  # peaked enough that scores rarely tie
    with write_artifact(path, "bundle") as folder:
        (folder / CATALOG).mkdir()
        Catalog(items, codes).save(folder / CATALOG)
        vocabulary.save(folder)
        (folder / PROMPTS).write_text(json.dumps({"max_items": 8, "block": 4}))
        save_model(model, folder / TARGET)
    return path


@pytest.fixture
def served(bundle: Path, tmp_path: Path) -> ServingSettings:
    return ServingSettings(
        bundle=bundle, histories=None, store=tmp_path / "h.db", threads=1, deadline_ms=60_000
    )


@pytest.mark.anyio
async def test_an_answer_under_load_is_the_answer_alone(
    served: ServingSettings, bundle: Path, running: Any
) -> None:
    rng = np.random.default_rng(1)
    alone = Recommender.load(bundle)
    async with running(served) as (client, _):

        async def one(history: list[str], k: int) -> bool:
            response = await client.post(
                "/v1/recommendations",
                json={"history": history, "k": k, "include": ["timing"]},
            )
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
        together = await asyncio.gather(*(one(*request) for request in requests))
    assert any(together)


@pytest.mark.anyio
async def test_a_bare_prompt_is_answered_with_titles_and_a_note(
    served: ServingSettings, running: Any
) -> None:
    async with running(served) as (client, _):
        response = await client.post("/v1/recommendations", json={"history": [], "k": 200})
    body = response.json()
    assert body["note"]["code"] == "empty_history"
    assert [item["rank"] for item in body["items"]] == list(range(1, 201))
    assert len({item["item_id"] for item in body["items"]}) == 200
    assert all(item["title"].startswith("Thing no. ") for item in body["items"])


def test_the_command_serves_a_bundle(bundle: Path, tmp_path: Path) -> None:
    arguments = ["serve", "--bundle", str(bundle), "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from recsys.cli import main; main()", *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RECSYS_HOME": str(tmp_path)},
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"tiny \(\w+, 500 items\) answers at (http://\S+), try", line):
                break
        else:
            pytest.fail("".join(lines))
        body = {"history": ["B0001", "B0002"], "k": 3}
        response = httpx.post(f"{found.group(1)}/v1/recommendations", json=body)
        assert len(response.json()["items"]) == 3
    finally:
        process.terminate()
        process.communicate(timeout=20)
    assert (tmp_path / "serving" / "tiny" / "histories.db").is_file()


def test_a_damaged_bundle_is_refused_by_its_files_name(
    served: ServingSettings, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
