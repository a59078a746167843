"""A pretrained checkpoint becomes a target; drafts are aligned to it; both are served over REST."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest
import torch
from starlette.testclient import TestClient
from transformers import AutoTokenizer
from typer.testing import CliRunner

from recsys import Recommender
from recsys.artifacts import read_manifest, verify
from recsys.bundle import Bundle
from recsys.cli import app
from recsys.constraint import ItemTrie
from recsys.decoding import ModelDrafter, beam_search, speculative_beam_search
from recsys.models.checkpoint import load_model
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings
from recsys.training.supervised import Material

DRAFTS = [
    ("sft", ()),
    ("atspeed-s", ("--lambda", "0.5", "--set", "teacher.source=mixture")),
    ("atspeed-r", ()),
    ("tree-kd", ("--set", "draft.init_from_target=false")),
]


def recsys(*arguments):
    small = []
    if arguments[:2] in (("train", "target"), ("train", "draft")):
        for setting in (
            "precision=float32", "threads=1", "batch_tokens=600", "warmup_steps=5",
            "learning_rate=1.0e-2", "eval_users=20",
        ):  # fmt: skip
            small += ["--set", f"{arguments[1]}.{setting}"]
    result = CliRunner().invoke(app, [*arguments, *small, "--name", "toy"])
    if result.exception:
        raise result.exception
    return result.output


@pytest.fixture(params=[(True, "false"), (False, "true")], ids=["tied-apart", "untied-merged"])
def target(request, make_context, tmp_path, write_base):
    """The workspace of a run whose target was a pretrained checkpoint."""
    tied, merge = request.param
    words = write_base(tmp_path / "base", tied=tied)
    workspace = make_context().workspace
    recsys(
        "train", "target", "--base", str(tmp_path / "base"), "--epochs", "24",
        "--set", "target.lora.rank=8", "--set", f"target.lora.merge={merge}",
        "--set", "target.evaluate_every=24",
    )  # fmt: skip
    path = workspace.run("target")
    assert (path / "model" / "adapter").is_dir() is (merge == "false")
    assert read_manifest(path).info["validation"]["ndcg@10"] > 0.3, "chance is .17"
    return workspace, words


def test_from_a_checkpoint_to_answers_over_rest(target, tmp_path):
    workspace, words = target
    path = workspace.run("target")
    material = Material.load(workspace)
    for objective, options in DRAFTS:
        if objective != "sft":
            # The data of a mixture are made with the draft that is there: the one before.
            recsys("train", "teacher", *options[:4], "--beams", "10", "--histories", "60")
        recsys(
            "train", "draft", "--objective", objective, *options, "--epochs", "2",
            "--set", "teacher.beams=10", "--set", "teacher.histories=60",
            "--set", "draft.accept_users=5", "--set", "draft.architecture={hidden_size: 32}",
        )  # fmt: skip
        manifest = verify(workspace.run("draft"), "draft")
        assert manifest.info["objective"] == objective
        assert manifest.parents["target"] == read_manifest(path).digest
        assert ("teacher" in manifest.parents) is (objective != "sft")
        draft = load_model(workspace.run("draft") / "model", dtype=torch.float64)
        recsys("bundle")
        bundle = Bundle.load(workspace.bundle)
        model = load_model(bundle.target, dtype=torch.float64)
        trie = ItemTrie.build(bundle.encoder.item_tokens)
        prompts = bundle.encoder.encode_all(material.dataset.examples("test").histories)
        expected = beam_search(model, prompts, trie, 4)
        found = speculative_beam_search(model, ModelDrafter(draft, 8), prompts, trie, 4)
        assert torch.equal(found.tokens, expected.tokens), objective
        torch.testing.assert_close(found.scores, expected.scores, rtol=0, atol=1e-9)
        assert np.mean([s.target_passes for s in found.stats]) < 2, "two is no level accepted"
    assert AutoTokenizer.from_pretrained(bundle.target).convert_tokens_to_ids("<a_0>") == words
    assert {f.suffix for f in workspace.bundle.rglob("*") if f.is_file()} <= {
        ".json", ".safetensors", ".parquet", ".jinja",
    }  # fmt: skip
    check_served(workspace, tmp_path)


def check_served(workspace, tmp_path):
    """The service drafts, and answers what a plain search answers."""
    history = ["i3", "i4", "i5"]
    plain = Recommender.load(workspace.bundle, mode="beam").recommend([history], k=5)[0]
    settings = ServingSettings(
        bundle=workspace.bundle, histories=None, store=tmp_path / "h.db", threads=1, mode="draft"
    )
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        for _ in range(6000):  # the bundle is loaded beside the server
            if client.get("/health/ready").status_code == 200:
                break
            time.sleep(0.05)
        answer = client.post("/v1/recommendations", json={"history": history, "k": 5})
        body = answer.json()
    assert answer.status_code == 200, json.dumps(body)
    assert [item["item_id"] for item in body["items"]] == [r.item_id for r in plain]
    scores = [item["score"] for item in body["items"]]
    assert scores == pytest.approx([r.score for r in plain], abs=1e-5)
