"""What is in deploy/ and what the docs say of it fits the program. No container is built here."""

import configparser
import json
import re
import shlex
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from recsys.config import Settings, fields_of
from recsys.serving.api.routes import find_route
from recsys.serving.errors import KINDS
from recsys.serving.metrics import STAGES, Metrics
from recsys.serving.models import Models
from recsys.serving.settings import ENV_PREFIX, ServingSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text(encoding="utf-8")
SERVING = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def metric_names():
    """Families, and the names that their samples have."""
    found = set()
    for family in (*Metrics().registry.collect(), *Models().collect()):
        found.add(family.name)
        endings = {
            "counter": ("_total",),
            "histogram": ("_bucket", "_sum", "_count"),
        }.get(family.type, ())
        found |= {family.name + ending for ending in endings}
    return found | {"recsys_filter_cache_total", "recsys_filter_cache_bytes"}


def environment():
    return {ENV_PREFIX + field.upper() for field in fields_of(ServingSettings)}


def test_the_example_has_every_setting_and_its_defaults():
    file = ROOT / "configs" / "serving.yaml"
    text = file.read_text(encoding="utf-8")
    given = Settings.load(file).values["serve"]
    for name, field in fields_of(ServingSettings).items():
        if name in given:
            assert given[name] == field.default, name
        elif name not in ("insecure_listen", "not_history"):
            assert re.search(rf"^  # {name}: ", text, flags=re.M), name
    assert ServingSettings.load(file).port == 8000


def instructions():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^#.*\n", "", text, flags=re.M).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def test_the_image_is_pinned_unprivileged_and_has_a_health_check():
    found = instructions()
    words = [word for word, _ in found]
    assert words.count("FROM") == 2
    (base,) = [text for word, text in found if word == "ARG"]
    assert re.fullmatch(r"PYTHON=python:\d+\.\d+\.\d+-slim-\w+", base)
    last = found[len(words) - 1 - words[::-1].index("FROM") :]
    assert [text for word, text in last if word == "USER"] == ["10001:10001"]
    assert [word for word, _ in last].index("USER") < [word for word, _ in last].index("ENTRYPOINT")
    (check,) = [text for word, text in last if word == "HEALTHCHECK"]
    assert "/health/ready" in check
    installs = [text for word, text in found if word == "RUN" and "pip install" in text]
    assert all("--no-deps" in text for text in installs)
    assert "--require-hashes" in installs[0]
    named = re.findall(rf"{ENV_PREFIX}\w+", " ".join(text for _, text in found))
    assert set(named) <= environment()


def locked():
    """Version and number of hashes of each package in the image, without torch."""
    text = (DEPLOY / "requirements.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    return {plain(line[0].split("==")[0]): (line[0], len(line) - 1) for line in lines}


def plain(name):
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_packages_of_the_image_are_complete():
    """Every dependency of what is in the image is in it, as the metadata installed here say."""
    have, to_check, seen = {*locked(), "torch"}, [("recbeam", "postgres")], set()
    while to_check:
        name, extras = to_check.pop()
        for line in requires(name) or ():
            needed = Requirement(line)
            where = [{"extra": extra} for extra in ("", *filter(None, extras.split(",")))]
            if needed.marker and not any(needed.marker.evaluate(w) for w in where):
                continue
            if plain(needed.name).startswith(("nvidia-", "cuda-", "triton")):
                continue  # of torch, which is a build without
            assert plain(needed.name) in have, f"{line} of {name}: run `make lock`"
            found = (plain(needed.name), ",".join(sorted(needed.extras)))
            if found not in seen:
                seen.add(found)
                to_check.append(found)


def test_the_image_copies_existing_files_that_are_not_ignored():
    let_through = {
        line[1:]
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = set()
    for word, text in instructions():
        if word == "COPY" and not text.startswith("--from"):
            *sources, _ = text.split()
            copied |= set(sources)
    assert copied == let_through
    assert all((ROOT / source).exists() for source in copied)


# systemd


def test_the_unit_runs_an_existing_command_and_is_hardened():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(DEPLOY / "recsys.service")
    assert "Documentation" not in unit["Unit"]  # a wheel brings none
    service = unit["Service"]
    program, *words = shlex.split(service["ExecStart"])
    assert (Path(program).name, words[0], words[1]) == ("recsys", "serve", "--config")
    assert service["User"] not in ("", "root")
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID"):
        assert service[name] == "yes"
    assert service["ProtectSystem"] == "strict"
    defaults = ServingSettings.model_fields["deadline_ms"].default
    assert int(service["TimeoutStopSec"]) > defaults / 1000 + 5


def rules():
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_use_existing_metrics_and_are_in_the_runbook(rule):
    used = set(re.findall(r"\b(?:recsys|process)_\w+", rule["expr"]))
    assert used <= metric_names() | {"up"}
    for codes in re.findall(r'code=~?"([^"]+)"', rule["expr"]):
        assert set(codes.split("|")) <= set(KINDS)
    part = RUNBOOK.partition(f"### {rule['alert']}\n")[2].partition("\n##")[0]
    assert "*Cause*:" in part
    assert "*Action*:" in part


# The dashboard

DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OF_PROMETHEUS = {"job", "instance", "le"}


def names_in(texts):
    return {name for text in texts for name in re.findall(r"\b(?:recsys|process)_\w+", text)}


def labels_of(name):
    """Labels of a metric by the name of one of its samples."""
    if name == "recsys_filter_cache_total":
        return {"result"}
    for metric, names in Metrics().registry._collector_to_names.items():
        if name in names:
            return set(metric._labelnames)
    of_models = {family.name: {*family._labelnames} for family in Models().collect()}
    return of_models.get(name, set())  # others are those of the process


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_shows_existing_metrics_labels_and_values(panel):
    for target in panel["targets"]:
        expression = target["expr"]
        metrics = names_in([expression])
        assert metrics
        assert metrics <= metric_names()
        known = OF_PROMETHEUS.union(*map(labels_of, metrics))
        kept = set(", ".join(re.findall(r"by \((.*?)\)", expression)).split(", ")) - {""}
        assert kept <= known
        for name, selectors in re.findall(r"(\w+)\{(.*?)\}", expression):
            values = dict(re.findall(r'(\w+)=~?"(.*?)"', selectors))
            assert (values.pop("job"), values.pop("instance")) == ("$job", "$instance")
            assert set(values) <= labels_of(name), name
            assert values.get("stage", "total") in STAGES
            assert values.get("code", "queue_full") in KINDS
        shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert shown <= (kept or known), "the legend names a label that the sum drops"


def test_metrics_codes_settings_and_routes_in_the_docs_exist():
    names = metric_names()
    for text in (RUNBOOK, SERVING):
        for name in re.findall(r"`(recsys_\w+)\*?`", text):
            assert any(known.startswith(name) for known in names), name
        for name in re.findall(r"`serve\.(\w+)", text):
            assert name in ServingSettings.model_fields, name
        for path in re.findall(r"localhost:8000(/[\w/.-]+)", text):
            known, _ = find_route({"type": "http", "method": "GET", "path": path})
            assert known is not None, path
    for code in re.findall(r"^\| \d[\d, ]* \| (.*?) \|", SERVING, flags=re.M):
        assert set(re.findall(r"`(\w+)`", code)) <= set(KINDS)
