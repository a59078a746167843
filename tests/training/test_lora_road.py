"""From text checkpoints to REST answers and reasons, against transformers with peft."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface import huggingface_beam_search
from oracles import same_list
from peft import PeftModel
from starlette.testclient import TestClient
from toy_bundle import wait_until_ready
from transformers import AutoModelForCausalLM

from recsys import cli
from recsys.artifacts import Workspace
from recsys.models.checkpoint import quiet
from recsys.serving.app import create_app
from recsys.serving.settings import ServingSettings
from recsys.text import GrammarCompiler, TextModel, choice, sample_text

HISTORIES, K = 12, 10
BEAMS = 20  # of the service, where k is not larger
CONFIG = Path(__file__).parents[2] / "configs" / "lora.yaml"
TOY = (
    "target.epochs=2", "target.learning_rate=0.01", "target.batch_tokens=600",
    "target.evaluate_every=2", "target.eval_users=20", "target.precision=float32",
    "target.prompt={max_items: 8, block: 1}", "target.lora={rank: 4, merge: false}",
    "teacher.beams=5", "teacher.histories=60",
    "draft.epochs=1", "draft.learning_rate=0.01", "draft.batch_tokens=600",
    "draft.evaluate_every=0", "draft.accept_users=0", "draft.lora={rank: 4, merge: false}",
)  # fmt: skip


def ask_peft(folder, histories, codes, dtype):
    """The K best items of each history, by transformers with peft's adapter, in plain terms."""
    words = json.loads((folder / "vocabulary.json").read_text(encoding="utf-8"))
    rows = codes + np.asarray(words["level_offsets"])
    base = AutoModelForCausalLM.from_pretrained(folder / "target", local_files_only=True)
    with quiet():
        model = PeftModel.from_pretrained(base, folder / "target" / "adapter").eval().to(dtype)
    item_of = {tuple(row): f"i{number}" for number, row in enumerate(rows.tolist())}
    for history in histories:
        prompt = np.concatenate([words["prefix"], rows[history].reshape(-1)]).astype(np.int64)
        left = np.delete(rows, history, axis=0)
        (found,) = huggingface_beam_search(model, [prompt], left, BEAMS)
        yield [(item_of[row], score) for row, score in found[:K]]


@pytest.mark.slow
def test_lists_of_the_service_are_those_of_peft(
    make_context, shop, write_base, monkeypatch, capsys, tmp_path
):
    make_context()  # the data set and its ids
    write_base(tmp_path / "large", tied=True)
    write_base(tmp_path / "small", tied=False, hidden=16, layers=1)

    def recsys(*words):
        monkeypatch.setattr(sys, "argv", ["recsys", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert not caught.value.code, err
        return out

    changes = [word for setting in TOY for word in ("--set", setting)]
    shown = [
        recsys(*words, "--config", CONFIG, "--name", "toy", *changes)
        for words in (
            ("train", "target", "--set", f"target.base={tmp_path / 'large'}"),
            ("train", "draft", "--set", f"draft.base={tmp_path / 'small'}", "--json"),
            ("bundle",),
        )
    ]
    assert "epochs 2," in shown[0]
    assert "ndcg@10" in shown[0]
    assert json.loads(shown[1].splitlines()[-1])["epochs"] == 1
    assert "bundle:" in shown[2]

    bundle = Workspace.of("toy").bundle
    assert (bundle / "draft" / "adapter").is_dir()
    rng = np.random.default_rng(0)
    histories = [rng.permutation(shop.ITEMS)[: rng.integers(1, 9)] for _ in range(HISTORIES)]
    codes = np.stack(np.unravel_index(np.arange(shop.ITEMS), (3, 3, 3)), axis=1)
    theirs, exact = (
        list(ask_peft(bundle, histories, codes, dtype)) for dtype in (torch.float32, torch.float64)
    )
    differing = {"beam": 0, "draft": 0}
    for mode in differing:
        settings = ServingSettings(
            bundle=bundle, histories=None, store=tmp_path / f"{mode}.db", threads=1,
            deadline_ms=60_000, mode=mode,
        )  # fmt: skip
        with TestClient(create_app(settings), base_url="http://localhost") as client:
            wait_until_ready(client)
            for place, history in enumerate(histories):
                body = {"history": [f"i{item}" for item in history], "k": K}
                response = client.post("/v1/recommendations", json=body)
                assert response.status_code == 200, response.text
                mine = [(item["item_id"], item["score"]) for item in response.json()["items"]]
                differing[mode] += not same_list(mine, theirs[place], exact[place])
    assert differing == {"beam": 0, "draft": 0}

    writer, best = TextModel.load(bundle / "target"), ["a cup", "a mug"]
    constraint = GrammarCompiler(writer.tokenizer).constraint(choice(best))
    (text,) = sample_text(writer.model, [writer.encode("Next: ")], constraint, 20)
    assert writer.tokenizer.decode(text.tokens) in best
