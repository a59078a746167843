"""The command line: quick to answer, explains itself, and tells mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from recsys import __version__, cli
from recsys.artifacts import write_artifact

# What a user reads, so that colours and the width of the terminal do not matter.
PLAIN = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
HEAVY = ("torch", "transformers", "sklearn", "matplotlib", "faiss", "peft", "accelerate", "fastapi")
TREE = {
    "quickstart": (),
    "run": (),
    "data": ("prepare", "download", "synth", "stats"),
    "ids": ("train", "report"),
    "train": ("sasrec", "target", "teacher", "draft", "retrieval"),
    "bundle": (),
    "evaluate": (),
    "compare": (),
    "recommend": (),
    "explain": (),
    "benchmark": ("serve", "atspeed", "capacity", "constraint", "decode"),
    "serve": (),
    "keys": ("create", "list", "revoke"),
    "store": ("export", "import"),
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

result = CliRunner().invoke(app, ["--help"])
assert result.exit_code == 0, result.output
print(result.output)
heavy = sorted(set(sys.modules) & set({HEAVY}))
assert not heavy, heavy
"""


def test_help_lists_all_commands_and_imports_nothing_heavy():
    process = subprocess.run(
        [sys.executable, "-c", HELP], capture_output=True, text=True, env=PLAIN
    )
    assert process.returncode == 0, process.stderr
    words = process.stdout.split()
    for name in TREE:
        assert name in words


@pytest.mark.parametrize("name", [name for name, subs in TREE.items() if subs])
def test_a_group_lists_its_commands(name):
    result = CliRunner(env=PLAIN).invoke(cli.app, [name, "--help"])
    assert result.exit_code == 0
    assert set(TREE[name]) <= set(result.output.split())


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_command_has_an_example_in_its_help(path):
    result = CliRunner(env=PLAIN).invoke(cli.app, [*path, "--help"])
    assert result.exit_code == 0
    assert f"Example: recsys {' '.join(path)}" in " ".join(result.output.split())


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_example_names_only_options_that_exist(path):
    command = typer.main.get_command(cli.app)
    for name in path:
        command = commands_of(command)[name]
    example = next(
        line.strip() for line in command.help.splitlines() if line.strip().startswith("Example:")
    )
    known = {option for parameter in command.params for option in parameter.opts}
    used = {word for word in example.split() if word.startswith("-")}
    assert used <= known


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_option_has_a_help_text(path):
    command = typer.main.get_command(cli.app)
    for name in path:
        command = commands_of(command)[name]
    for parameter in command.params:
        assert parameter.help, parameter.name


def test_the_version_is_the_packages(invoke):
    assert invoke("--version") == (0, f"{__version__}\n", "")


def test_no_command_shows_the_help(invoke):
    _, out, err = invoke()
    assert "quickstart" in out + err


def test_an_unknown_command_is_refused(invoke):
    status, out, err = invoke("quikstart")
    assert (status, out) == (2, "")
    assert "No such command 'quikstart'" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--config", "gone.yaml"), "--config gone.yaml: No such file or directory"),
        (("run", "--set", "taget.epochs=3"), "unknown section: 'taget'; did you mean 'target'?"),
        (
            ("run", "--set", "seed=dice", "--until", "data"),
            "seed: expected int, found 'dice' (str)",
        ),
        (
            ("run", "--until", "lunch"),
            "--until 'lunch' is not one of data, sasrec, ids, target, draft",
        ),
        (("run", "--name", "../a"), "name: '../a' is not a plain word"),
        (("data", "stats", "--name", "gone"), "datasets/gone is not an artifact"),
        (("ids", "report", "--name", "gone"), "runs/gone/ids is not an artifact"),
        (("bundle", "--name", "gone"), "datasets/gone is not an artifact"),
        (("recommend", "--name", "gone"), "datasets/gone is not an artifact"),
        (("recommend", "--name", "gone", "--history", "a"), "bundles/gone is not an artifact"),
        (("explain", "--name", "gone"), "bundles/gone is not an artifact"),
        (("explain", "--name", "gone", "--model", "gone"), "gone has no tokenizer, so it writes"),
        (("evaluate", "--name", "gone"), "bundles/gone is not an artifact"),
        (("serve", "--name", "gone"), "bundles/gone is not an artifact"),
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


def test_a_mistake_gives_status_two_in_a_process(tmp_path):
    program = "from recsys.cli import main; main()"
    process = subprocess.run(
        [sys.executable, "-c", program, "run", "--config", str(tmp_path / "gone.yaml")],
        capture_output=True,
        text=True,
        env=PLAIN,
    )
    assert process.returncode == 2
    assert process.stderr == f"error: --config {tmp_path}/gone.yaml: No such file or directory\n"


def test_serve_refuses_another_artifact_before_loading_models(invoke, tmp_path):
    with write_artifact(tmp_path / "ids", "ids"):
        pass
    status, _, err = invoke("serve", "--bundle", str(tmp_path / "ids"))
    assert (status, err) == (2, f"error: {tmp_path}/ids is a ids, expected a bundle\n")


def test_doctor_speaks_json(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECSYS_DATASETS", str(tmp_path / "nowhere"))
    status, out, _ = invoke("doctor", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["recsys"] == __version__
    assert facts["threads"] >= 1
    assert facts["bundles"] == []
    assert facts["real data"] is None
    assert facts["artifacts"] == str(tmp_path / "var")


def test_doctor_prints_the_next_step(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RECSYS_DATASETS", str(tmp_path / "nowhere"))
    _, out, _ = invoke("doctor")
    assert "run `recsys quickstart`" in out
    assert "set RECSYS_DATASETS" in out
    with write_artifact(tmp_path / "var" / "bundles" / "shop", "bundle"):
        pass
    monkeypatch.setenv("RECSYS_DATASETS", str(tmp_path))
    _, out, _ = invoke("doctor")
    assert "['shop']" in out
    assert "recsys quickstart" not in out
    assert "set RECSYS_DATASETS" not in out


def test_doctor_finds_raw_data_in_the_default_folder(invoke, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RECSYS_DATASETS", raising=False)
    assert json.loads(invoke("doctor", "--json")[1])["real data"] is None
    raw = tmp_path / "var" / "raw"
    raw.mkdir(parents=True)
    assert json.loads(invoke("doctor", "--json")[1])["real data"] == str(raw)


def test_synthetic_data_are_printed_as_table_and_json(invoke, tmp_path):
    status, out, _ = invoke("data", "synth", "--users", "60", "--items", "240", "--name", "s")
    assert status == 0
    assert str(tmp_path / "var" / "datasets" / "s") in out.replace("\n", "")
    status, out, _ = invoke("data", "stats", "--name", "s", "--json")
    assert status == 0
    assert json.loads(out)["stats"]["users"] == 60


def test_a_run_without_a_source_keeps_the_prepared_data(invoke, tmp_path):
    """It once replaced them by a made-up shop, without a word."""
    events = tmp_path / "events.csv"
    lines = [f"u{u},i{(u + n) % 7},{1_700_000_000 + n}" for u in range(8) for n in range(6)]
    events.write_text("\n".join(["user,item,time", *lines]), encoding="utf-8")
    table = ("data", "prepare", "--source", "table", "--path", str(events), "--name", "neg")
    assert invoke(*table)[0] == 0
    folder = tmp_path / "var" / "datasets" / "neg"
    before = {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    status, out, err = invoke("run", "--until", "data", "--name", "neg")
    assert status == 0
    assert "no source is named, so the prepared data set" in out + err
    assert before == {file.name: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    status, _, err = invoke("run", "--until", "data", "--name", "neg", "--set", "data.k_core=2")
    assert status == 2
    assert "name a source and its path" in err.replace("\n", " ")


def test_a_run_without_source_and_data_is_refused(invoke, tmp_path):
    status, _, err = invoke("run", "--until", "data", "--name", "new")
    assert status == 2
    assert "recsys quickstart" in err
    assert not (tmp_path / "var" / "datasets" / "new").exists()


def test_a_run_prints_only_json_on_standard_output(invoke, tmp_path):
    small = ("source=synthetic", "synthetic.users=60", "synthetic.items=240")
    options = [word for setting in small for word in ("--set", f"data.{setting}")]
    status, out, err = invoke("run", "--until", "data", "--name", "s", *options, "--json")
    ((stage, made),) = json.loads(out)["artifacts"].items()
    assert (status, stage) == (0, "data")
    assert made["path"] == str(tmp_path / "var" / "datasets" / "s")
    assert made["seconds"] > 0
    assert "data →" in err
