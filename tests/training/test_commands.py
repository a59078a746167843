"""The commands that make models: their options and their output."""

import json

import pytest
from typer.testing import CliRunner

from recsys.cli import app
from recsys.errors import ArtifactError

RUNNER = CliRunner()
SMALL = [
    "--name", "toy", "--epochs", "1",
    "--set", "{section}.architecture={{hidden_size: 16, intermediate_size: 16}}",
    "--set", "{section}.eval_users=10", "--set", "target.precision=float32",
]  # fmt: skip


def invoke(*arguments):
    result = RUNNER.invoke(app, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def small(section):
    return [argument.format(section=section) for argument in SMALL]


def test_from_target_to_bundle_by_commands(make_context):
    make_context()
    text = invoke("train", "target", *small("target"))
    assert "1 epochs" in text
    assert "NDCG@10" in text
    document = json.loads(invoke("train", "draft", *small("draft"), "--json").splitlines()[-1])
    assert 0 <= document["validation"]["accepted_levels"] <= 2
    # The bundle is made of what lies there, whatever the settings were.
    assert "bundle:" in invoke("bundle", "--name", "toy")


def test_a_pretrained_target_and_draft_by_commands(make_context, tmp_path, write_base):
    workspace = make_context().workspace
    write_base(tmp_path / "large")
    write_base(tmp_path / "little", hidden=16, layers=1)
    invoke("train", "target", *small("target"), "--base", str(tmp_path / "large"))
    little = ["--base", str(tmp_path / "little"), "--set", "draft.lora.rank=4"]
    text = invoke("train", "draft", *small("draft"), *little, "--json")
    document = json.loads(text.splitlines()[-1])
    assert 0 < document["trained_parameters"] < document["parameters"]
    config = json.loads((workspace.run("draft") / "manifest.json").read_text())["config"]
    assert (config["base"], config["lora"]["rank"]) == (str(tmp_path / "little"), 4)
    with pytest.raises(ArtifactError, match="nowhere is not a checkpoint"):
        invoke("train", "draft", *small("draft"), "--base", str(tmp_path / "nowhere"))


def test_own_options_win_over_set(make_context):
    make_context()
    invoke("train", "target", *small("target"), "--set", "target.epochs=3")
    workspace = make_context().workspace
    config = json.loads((workspace.run("target") / "manifest.json").read_text())["config"]
    assert config["epochs"] == 1
