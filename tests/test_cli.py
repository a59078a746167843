"""The command line: quick to answer, explains itself, and tells mistakes in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from recsys import __version__, cli

# What a user reads, so that colours and the width of the terminal do not matter.
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
HEAVY = ("torch", "transformers", "sklearn", "faiss", "peft", "accelerate", "fastapi")
TREE = {
    "quickstart": (),
    "run": (),
    "retrain": (),
    "data": ("prepare", "download", "stats"),
    "ids": ("train",),
    "train": ("target", "teacher", "draft"),
    "bundle": (),
    "evaluate": (),
    "recommend": (),
    "serve": (),
    "keys": ("create", "list", "revoke"),
    "store": ("backup",),
    "batch": ("score",),
    "doctor": (),
}
LEAVES = [(name, *((sub,) if sub else ())) for name, subs in TREE.items() for sub in subs or ("",)]


@pytest.fixture
def invoke(monkeypatch, tmp_path, capsys):
    """Run `recsys ...` as the entry point does: status, standard output, standard error."""
    for key, value in (PLAIN | {"RECSYS_HOME": str(tmp_path / "var")}).items():
        monkeypatch.setenv(key, value)

    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["recsys", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return invoke


def commands_of(group) -> dict:
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def test_the_tree_of_commands_is_the_documented_one():
    found = commands_of(typer.main.get_command(cli.app))
    subs = {
        name: tuple(commands_of(command)) if hasattr(command, "list_commands") else ()
        for name, command in found.items()
    }
    assert subs == TREE
    assert list(found) == list(TREE), "in the order of the road"


HELP = f"""
import sys
from typer.testing import CliRunner
from recsys.cli import app
from recsys.config import Settings
from recsys.pipeline import check

check(Settings())
result = CliRunner().invoke(app, ["--help"])
assert result.exit_code == 0, result.output
print(result.output)
heavy = sorted(set(sys.modules) & set({HEAVY}))
assert not heavy, heavy
"""


def test_help_and_a_check_of_settings_import_nothing_heavy():
    process = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, env=PLAIN
    )
    assert process.returncode == 0, process.stderr
    words = process.stdout.split()
    for name in TREE:
        assert name in words


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_explains_its_options_and_has_an_example(path):
    result = CliRunner(env=PLAIN).invoke(cli.app, [*path, "--help"])
    assert result.exit_code == 0
    assert f"Example: recsys {' '.join(path)}" in " ".join(result.output.split())
    command = typer.main.get_command(cli.app)
    for name in path:
        command = commands_of(command)[name]
    assert all(parameter.help for parameter in command.params)
    lines = [line.strip() for line in command.help.splitlines()]
    example = next(line for line in lines if line.startswith("Example:"))
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in example.split() if word.startswith("-")} <= known


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--config", "gone.yaml"), "--config gone.yaml: No such file or directory"),
        (("run", "--set", "taget.epochs=3"), "unknown section: 'taget'; did you mean 'target'?"),
        (("run", "--set", "target.epoch=3"), "unknown key in 'target': 'epoch'; did you mean"),
        (
            ("run", "--set", "draft.epochs=0"),
            "draft.epochs: Input should be greater than 0, found 0",
        ),
        (("run", "--set", "target.preset=huge"), "target.preset: 'huge' is not one of tiny"),
        (("run", "--set", "target.base=gone"), "target.base: 'gone' is not a folder"),
        (
            ("run", "--set", "sasrec.epochs=0"),
            "ids.features.collaborative: sasrec needs a SASRec model; set sasrec.epochs",
        ),
        (
            ("run", "--set", "sasrec.epochs=0", "--set", "ids.features.collaborative=ppmi"),
            "target.soft_labels_from: sasrec needs a SASRec model",
        ),
        (
            ("run", "--until", "lunch"),
            "--until 'lunch' is not one of data, sasrec, recipe, ids, target, draft",
        ),
        (("data", "stats", "--name", "gone"), "datasets/gone is not an artifact"),
        (("bundle", "--name", "gone"), "datasets/gone is not an artifact"),
        (("recommend", "--name", "gone", "--history", "a"), "bundles/gone is not an artifact"),
        (("serve", "--name", "gone"), "missing; `recsys run EVENTS --name gone` makes it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_mistake_gives_one_line_and_no_traceback(invoke, arguments, message):
    status, out, err = invoke(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "var/x"), "No space left on device: var/x"),
        (OSError(27, "Error writing bytes to file"), "File too large"),
        (PermissionError(13, "Permission denied", "var/y"), "Permission denied: var/y"),
        (ValueError("Error while serializing: I/O error: ... (os error 30)"), "Read-only file"),
    ],
)
def test_a_full_disk_is_one_line_and_no_traceback(invoke, monkeypatch, error, message):
    def fail():
        raise error

    monkeypatch.setattr(cli, "app", fail)
    status, _, err = invoke("run")
    assert status == 2
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1
    assert "same command again" in err


def test_doctor_speaks_json(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    status, out, _ = invoke("doctor", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["recsys"] == __version__
    assert facts["threads"] >= 1
    assert facts["bundles"] == []
    assert facts["artifacts"] == str(tmp_path / "var")


def test_a_run_without_a_source_keeps_the_prepared_data(invoke, tmp_path):
    """It once replaced them by a made-up shop, without a word."""
    events = tmp_path / "events.csv"
    lines = [f"u{u},i{(u + n) % 7},{1_700_000_000 + n}" for u in range(8) for n in range(6)]
    events.write_text("\n".join(["user,item,timestamp", *lines]), encoding="utf-8")
    table = ("data", "prepare", "--source", "table", "--path", str(events), "--name", "neg")
    facts = json.loads(invoke("doctor", "--data", str(events), "--json")[1])
    assert min(facts["stages"]["sasrec"].values()) > 0
    said = invoke("doctor", "--data", str(events), "--minutes", "9")[2].replace("\n", " ")
    assert re.search(r"of 9 minutes Minutes and GiB of each stage: data \d\.\d, 0\.3; sasrec", said)
    assert invoke(*table)[0] == 0
    folder = tmp_path / "var" / "datasets" / "neg"
    before = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    status, out, err = invoke("run", "--until", "data", "--name", "neg")
    assert status == 0
    assert "no source is named, so the prepared data set" in out + err
    assert before == {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    status, _, err = invoke("run", "--until", "data", "--name", "neg", "--set", "data.k_core=2")
    assert status == 2
    assert "name a source: your files (`recsys run events.csv" in err.replace("\n", " ")


def test_a_run_prints_only_json_on_standard_output(invoke, tmp_path):
    small = ("source=synthetic", "synthetic.users=60", "synthetic.items=240")
    options = [word for setting in small for word in ("--set", f"data.{setting}")]
    status, out, err = invoke("run", "--until", "data", "--name", "s", *options, "--json")
    ((stage, made),) = json.loads(out)["artifacts"].items()
    assert (status, stage) == (0, "data")
    assert made["path"] == str(tmp_path / "var" / "datasets" / "s")
    assert made["seconds"] > 0
    assert "data →" in err


def test_retraining_reads_the_store_of_its_settings(invoke, tmp_path):
    (tmp_path / "own.db").touch()
    _, _, without = invoke("retrain", "--name", "shop")
    assert "there is no store" in without
    _, _, err = invoke("retrain", "--name", "shop", "--set", f"serve.store={tmp_path / 'own.db'}")
    assert "there is no store" not in err
