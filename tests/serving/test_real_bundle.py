"""The service with a real bundle: a small random model behind every door."""

import asyncio
import json
import signal
import subprocess

import httpx
import numpy as np
import pytest
from oracles import PATIENCE_S

from recsys import Recommender
from recsys.interactions import Histories
from recsys.recommender import RecommendRequest
from recsys.retrieval import ItemItem, Reranker, Retrieval

ITEMS, ROUNDS = 500, 8


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, random_bundle):
    return random_bundle(tmp_path_factory.mktemp("home") / "bundles" / "tiny", ITEMS)


@pytest.fixture
def served(bundle, settings_of):
    return settings_of(bundle=bundle)


def blended_bundle(path, random_bundle, **options):
    walks = Histories.of(np.random.default_rng(2).integers(0, ITEMS, (300, 6)).tolist())
    counts = np.bincount(walks.items, minlength=ITEMS).astype(float)
    weights = {"item_item": 1.5, "item_item.rank": -0.5, "model": 1.0, "popularity": 0.1}
    retrieval = Retrieval(ItemItem.count(walks, ITEMS), counts, reranker=Reranker(weights))
    price = [i / 4 for i in range(ITEMS)]
    return random_bundle(path / "blended", ITEMS, retrieval=retrieval, price=price, **options)


@pytest.mark.parametrize("draft", [False, True])
async def test_a_mode_changes_how_a_list_is_computed_and_not_the_list(
    tmp_path, random_bundle, served, running, draft
):
    rng = np.random.default_rng(2)
    folder = blended_bundle(tmp_path, random_bundle, draft=draft)
    filters = [None, *({"must": [{"key": "price", "range": {"lt": most}}]} for most in (60, 2))]
    async with running(served.model_copy(update={"bundle": folder})) as (client, _):

        async def answer(**body):
            history = [f"B{i:04d}" for i in rng.integers(0, ITEMS, 4)]
            bodies = {}
            for mode in ("beam", "auto", "strict"):
                asked = {"history": history, **body, "mode": mode}
                response = await client.post("/v1/recommendations", json=asked)
                assert response.status_code == 200, response.text
                bodies[mode] = response.json()
            return bodies

        blended = set()
        for wanted in filters:
            for blend in (None, True, False):
                for k, include in ((5, []), (30, ["trace"])):
                    bodies = await answer(filter=wanted, blend=blend, k=k, include=include)
                    first = bodies["beam"]["items"]
                    blended |= {(blend, item["source"]) for item in first}
                    for body in bodies.values():
                        names = ("item_id", "source", "rank")
                        assert [[i[n] for n in names] for i in body["items"]] == [
                            [i[n] for n in names] for i in first
                        ]
                        scores = [i["score"] for i in body["items"]]
                        assert scores == pytest.approx([i["score"] for i in first], abs=1e-4)
                        assert body["certificate"] == bodies["beam"]["certificate"]
    assert {blend for blend, source in blended if source == "retrieval"} == {None, True}


async def test_an_item_has_one_score_in_every_list(tmp_path, random_bundle, served, running):
    rng = np.random.default_rng(3)
    folder = blended_bundle(tmp_path, random_bundle)
    async with running(served.model_copy(update={"bundle": folder})) as (client, _):

        async def scores(path, **body):
            response = await client.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            return {item["item_id"]: item["score"] for item in response.json()["items"]}

        every = [f"B{i:04d}" for i in range(ITEMS)]
        for _ in range(ROUNDS):
            k, names = int(rng.integers(1, 100)), [f"B{i:04d}" for i in rng.integers(0, ITEMS, 40)]
            asked = {"history": names[: rng.integers(1, 8)], "k": k}
            first = await scores("recommendations", **asked)
            assert list((await scores("recommendations", **asked)).items()) == list(first.items())
            if k not in (20, 50):  # the next pool begins behind these
                longer = await scores("recommendations", **asked | {"k": k + 1})
                assert list(longer.items())[:k] == list(first.items())
            cheap = {"must": [{"key": "price", "range": {"lt": int(rng.integers(20, 120))}}]}
            limits = {"filter": cheap} if rng.random() < 0.5 else {"exclude_items": names[8:]}
            fewer = await scores("recommendations", **asked, **limits)
            both = [item for item in first if item in fewer]
            assert both == [item for item in fewer if item in first]
            assert [fewer[i] for i in both] == pytest.approx([first[i] for i in both], abs=1e-4)
            ranked = await scores("rank", history=asked["history"], items=list(first))
            assert ranked == pytest.approx(first, abs=1e-4)
            whole = asked | {"guarantee": "global", "exclude_seen": False}
            proven = (await client.post("/v1/recommendations", json=whole)).json()
            assert proven["certificate"] == "global-exact"
            best = sorted((await scores("rank", history=asked["history"], items=every)).values())
            found = [item["score"] for item in proven["items"]]
            assert found == pytest.approx(best[: -k - 1 : -1], abs=1e-4)


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


def test_the_command_serves_a_bundle_until_ctrl_c(bundle, server_process, tmp_path):
    command = "from recsys.cli import main; main()"
    options = ("serve", "--bundle", bundle, "--port", "0")
    with (
        server_process("-c", command, *options) as (started, url),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        line = started.stderr.readline().strip()
        assert line.startswith("curl http://127.0.0.1:")
        answer = subprocess.run(  # the shell reads it as a person's would
            ["bash", "-c", line.replace("curl", "curl -sS")],
            capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        )  # fmt: skip
        assert len(json.loads(answer.stdout)["items"]) == 5
        assert client.get("/health/ready").json() == {"status": "ready"}
        headers = {"content-type": "application/json", "X-Request-ID": "a"}
        large = client.post("/v1/recommendations", content=b" " * 2_000_000, headers=headers)
        assert large.json()["code"] == "body_too_large"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate(timeout=PATIENCE_S)
    assert started.returncode == 0
    lines = [json.loads(line) for line in out.splitlines()]
    requests = [line for line in lines if line["logger"] == "recsys.serving.access"]
    assert [line["status"] for line in requests] == [200, 200, 413]
    assert requests[2]["request_id"] == "a"
    assert "Stopped." in err
    assert "Traceback" not in err
    assert (tmp_path / "serving" / "tiny" / "histories.db").is_file()
