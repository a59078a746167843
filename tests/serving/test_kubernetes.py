"""The manifests of deploy/kubernetes/ are valid, and fit the image and the service."""

import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from recsys.commands import REFUSED, retrain
from recsys.serving.api.routes import find_route
from recsys.serving.auth import Scope, scope_of
from recsys.serving.settings import ENV_PREFIX, ServingSettings

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kubernetes"
VERSIONS = ("1.28", "1.32", "1.37")
MANIFESTS = [
    manifest
    for file in sorted(FOLDER.glob("*.yaml"))
    for manifest in yaml.safe_load_all(file.read_text(encoding="utf-8"))
]


def of_kind(kind, name="recsys"):
    (found,) = [m for m in MANIFESTS if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


@pytest.fixture
def pod():
    return of_kind("Deployment")["spec"]["template"]["spec"]


@pytest.fixture
def container(pod):
    (only,) = pod["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_a_manifest_follows_the_schema_of_kubernetes(manifest, version):
    checker = pytest.importorskip("kubernetes_validate")
    assert checker.validate(manifest, version, strict=True) == version


def test_the_environment_is_a_valid_configuration(container, monkeypatch, tmp_path):
    monkeypatch.setenv("RECSYS_HOME", str(tmp_path))
    given = {variable["name"]: variable for variable in container["env"]}
    for name, variable in given.items():
        if name.startswith(ENV_PREFIX):
            monkeypatch.setenv(name, variable["value"])
        if re.search("PASSWORD|SECRET|TOKEN", name):
            assert "secretKeyRef" in variable["valueFrom"]
    settings = ServingSettings.load()
    assert settings.keys is not None
    assert not settings.insecure_listen
    assert str(settings.store).startswith("postgresql://")
    assert "@" not in str(settings.store).partition("@")[2]
    assert ":" not in str(settings.store).partition("://")[2].partition("@")[0], "a password"
    assert settings.threads == int(container["resources"]["requests"]["cpu"])


def test_ports_are_those_of_the_service(container):
    (port,) = container["ports"]
    (environment,) = [v["value"] for v in container["env"] if v["name"] == f"{ENV_PREFIX}PORT"]
    (listed,) = of_kind("Service")["spec"]["ports"]
    (ingress,) = of_kind("NetworkPolicy")["spec"]["ingress"]
    assert port["containerPort"] == int(environment) == ServingSettings.model_fields["port"].default
    assert listed["targetPort"] == port["name"]
    assert [p["port"] for p in ingress["ports"]] == [port["containerPort"]]


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_ask_public_routes_on_the_open_port(container, probe):
    asked = container[probe]["httpGet"]
    route, methods = find_route({"type": "http", "method": "GET", "path": asked["path"]})
    assert route.path_format == asked["path"]
    assert "GET" in methods
    assert scope_of(route.endpoint) is Scope.PUBLIC
    assert asked["port"] == container["ports"][0]["name"]


def test_the_pod_is_unprivileged_limited_and_read_only(pod, container):
    image = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    context = pod["securityContext"]
    assert context["runAsNonRoot"] is True
    assert f"--uid {context['runAsUser']} " in image
    assert f"--gid {context['runAsGroup']} " in image
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["automountServiceAccountToken"] is False
    assert set(container["resources"]) == {"requests", "limits"}
    for amounts in container["resources"].values():
        assert set(amounts) == {"cpu", "memory"}
    assert not container["image"].endswith(":latest")


def test_the_network_policy_limits_both_directions():
    spec = of_kind("NetworkPolicy")["spec"]
    assert set(spec["policyTypes"]) == {"Ingress", "Egress"}
    for rule in (*spec["ingress"], *spec["egress"]):
        assert rule.get("from") or rule.get("to")
        assert rule["ports"]


@pytest.fixture
def nightly():
    """The pod of the nightly retraining, and its container."""
    job = of_kind("CronJob", "recsys-retrain")["spec"]["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    return job, pod, container


def test_the_nightly_job_runs_an_existing_command(nightly):
    job, _, container = nightly
    words = shlex.split(container["args"][0])
    assert words[:3] == ["exec", "recsys", "retrain"]
    command = typer.Typer()
    command.command()(retrain)
    options = {o for p in typer.main.get_command(command).params for o in p.opts}
    assert {word for word in words if word.startswith("--")} <= options
    (refused,) = [rule for rule in job["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert refused["onExitCodes"]["containerName"] == container["name"]
    assert REFUSED in refused["onExitCodes"]["values"]
    names = {variable["name"] for variable in container["env"]}
    known = {ENV_PREFIX + field.upper() for field in ServingSettings.model_fields}
    assert {name for name in names if name.startswith(ENV_PREFIX)} <= known
