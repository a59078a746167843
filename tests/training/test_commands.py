"""The commands that make models: their options and their output."""

import json

from typer.testing import CliRunner

from recsys.cli import app

RUNNER = CliRunner()
SMALL = [
    "--name", "toy", "--set", "{section}.epochs=1",
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
    assert "epochs 1," in text
    assert "ndcg@10" in text
    document = json.loads(invoke("train", "draft", *small("draft"), "--json").splitlines()[-1])
    assert 0 <= document["validation"]["accepted_levels"] <= 2
    # The bundle is made of what lies there, whatever the settings were.
    assert "bundle:" in invoke("bundle", "--name", "toy")
