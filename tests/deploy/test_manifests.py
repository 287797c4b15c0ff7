"""What is shipped for Kubernetes, Docker and systemd fits together, and fits the server."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.flags import parse_config
from quire.foundation.config import Config
from quire.serving.api.auth import PUBLIC
from tests.deploy.chart import render_chart
from tests.deploy.manifests import (
    GUIDES,
    KUBERNETES,
    container,
    documents,
    of_kind,
    served_flags,
    sets_of_resources,
)
from tests.deploy.promql import DEPLOY, ROOT

DOCKERFILES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))
SETS = sets_of_resources()
each_set = pytest.mark.parametrize("resources", SETS.values(), ids=SETS.keys())


def config_of(flags: list[str]) -> Config:
    return parse_config(flags, "quire serve", "")


# --- the server ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("place", "flags"), [pytest.param(*entry, id=entry[0]) for entry in served_flags()])
def test_flags_are_those_of_the_command_line(place: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(flags)
    assert config.server.port == 8000
    assert config.observability.log_format == ("text" if place == "guides" else "json")
    assert "has no effect" not in capsys.readouterr().err


@each_set
def test_open_requests_finish_before_the_pod_is_killed(resources: list[dict[str, Any]]) -> None:
    server = config_of(container(resources)["args"]).server
    grace = of_kind(resources, "Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= server.shutdown_delay + server.shutdown_timeout + 10
    readiness = container(resources)["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < server.shutdown_delay


@each_set
def test_probes_ask_open_routes(resources: list[dict[str, Any]]) -> None:
    """Without a key, on the port that is served."""
    server = container(resources)
    (port,) = server["ports"]
    assert port == {"name": "http", "containerPort": config_of(server["args"]).server.port}
    asked = {name: server[name]["httpGet"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert {name: probe["path"] for name, probe in asked.items()} == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert {probe["port"] for probe in asked.values()} == {"http"}
    assert {probe["path"] for probe in asked.values()} | {"/metrics"} <= PUBLIC


# --- Kubernetes ----------------------------------------------------------------------------------------------------


@each_set
def test_resources_find_each_other(resources: list[dict[str, Any]]) -> None:
    deployment = of_kind(resources, "Deployment")
    pod = deployment["spec"]["template"]
    labels, name = pod["metadata"]["labels"], deployment["metadata"]["name"]
    selectors = [deployment["spec"]["selector"]["matchLabels"], of_kind(resources, "Service")["spec"]["selector"]]
    selectors.append(of_kind(resources, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"])
    for resource in resources:
        if resource["kind"] == "HorizontalPodAutoscaler":
            assert resource["spec"]["scaleTargetRef"]["name"] == name
            assert "replicas" not in deployment["spec"]
        elif resource["kind"] == "NetworkPolicy":
            selectors.append(resource["spec"]["podSelector"]["matchLabels"])
        elif resource["kind"] == "ServiceMonitor":
            selectors.append(resource["spec"]["selector"]["matchLabels"])
            assert (
                resource["spec"]["selector"]["matchLabels"].items()
                <= of_kind(resources, "Service")["metadata"]["labels"].items()
            )
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    assert pod["spec"]["serviceAccountName"] == of_kind(resources, "ServiceAccount")["metadata"]["name"]
    claims = {r["metadata"]["name"] for r in resources if r["kind"] == "PersistentVolumeClaim"}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    claimed = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
    assert claimed == claims
    assert {mount["name"] for mount in container(resources)["volumeMounts"]} == volumes.keys()


@each_set
def test_a_container_may_do_nothing_that_it_need_not(resources: list[dict[str, Any]]) -> None:
    pod = of_kind(resources, "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    security = container(resources)["securityContext"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    uid = pod["securityContext"]["runAsUser"]
    for path in DOCKERFILES:
        assert f"USER {uid}:{uid}\n" in path.read_text()


def test_autoscalers_ask_for_metrics_that_the_adapter_has() -> None:
    rules = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    offered = {rule["name"]["as"] for rule in rules}
    files = [KUBERNETES / "autoscaling.yaml", GUIDES / "deployment.yaml", GUIDES / "autoscaler.yaml"]
    texts = [path.read_text() for path in files] + [render_chart({"autoscaling": {"enabled": True}})]
    scalers = [of_kind(documents(text), "HorizontalPodAutoscaler") for text in texts]
    asked = {metric["pods"]["metric"]["name"] for scaler in scalers for metric in scaler["spec"]["metrics"]}
    assert asked == {"vllm_num_requests_waiting", "gpu_utilization"}
    assert asked <= offered


def test_the_chart_as_it_comes_is_the_manifests() -> None:
    """But for names and labels, and what is off at first."""
    changes = {"model": "meta-llama/Llama-3.1-8B-Instruct", "serviceMonitor": {"enabled": True}}
    chart = documents(render_chart({**changes, "autoscaling": {"enabled": True}}, release="quire"))
    label = "app.kubernetes.io/instance: quire\n"
    for resource in SETS["manifests"]:
        same = of_kind([r for r in chart if r["metadata"]["name"] == resource["metadata"]["name"]], resource["kind"])
        if same["kind"] == "Deployment":
            assert same["spec"]["template"]["spec"]["containers"][0].pop("imagePullPolicy") == "IfNotPresent"
        if same["kind"] == "Service":
            assert same["spec"].pop("type") == "ClusterIP"
        text = yaml.safe_dump(same)
        plain = re.sub(rf" *{label}", "", text)
        assert yaml.safe_load(plain) == resource
    assert len(chart) == len(SETS["manifests"])


def test_helm_renders_the_same() -> None:
    """Where there is a helm; otherwise the chart is rendered by the part of its language that tests/deploy knows."""
    program = shutil.which("helm")
    if program is None:
        pytest.skip("helm is not installed")
    done = subprocess.run([program, "template", "chat", DEPLOY / "helm" / "quire"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_name = {(r["kind"], r["metadata"]["name"]): r for r in documents(done.stdout)}
    assert by_name == {(r["kind"], r["metadata"]["name"]): r for r in documents(render_chart({}))}


# --- Docker and systemd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_there_is_and_installs_the_torch_of_the_makefile(path: Path) -> None:
    text = path.read_text()
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [word for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M) for word in line.split()]
    assert set(copied) == allowed
    assert all((ROOT / name).exists() for name in copied)
    assert "torch==$version" in text
    for expression, variable in re.findall(r"sed -n '(s/\^(\w+) := //p)' Makefile", text):
        found = subprocess.run(["sed", "-n", expression, "Makefile"], cwd=ROOT, capture_output=True, text=True)
        assert len(found.stdout.split()) == 1, variable
    assert ":latest" not in text
    assert 'ENTRYPOINT ["quire", "serve"]' in text
    assert "http://127.0.0.1:8000/health" in re.findall(r"HEALTHCHECK(?s:.*?)\n(?! )", text)[0]


def test_a_dockerfile_installs_what_the_project_names() -> None:
    """The line that reads pyproject.toml, as the build runs it."""
    for path in DOCKERFILES:
        (script,) = re.findall(r'^RUN python -c "(.*)" > requirements.txt', path.read_text(), re.M)
        done = subprocess.run(["python", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
        listed = done.stdout.splitlines()
        assert any(line.startswith("torch>=") for line in listed)
        assert any(line.startswith("opentelemetry-sdk") for line in listed)
        assert not any(line.startswith("pytest") for line in listed)


def test_compose_mounts_what_there_is() -> None:
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yml").read_text())
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / "docker" / source).is_dir(), volume
    targets = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert targets["static_configs"][0]["targets"][0].split(":")[0] in compose["services"]


def test_the_unit_is_valid(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    unit = (DEPLOY / "systemd" / "quire.service").read_text()
    (tmp_path / "quire.service").write_text(unit.replace("/opt/quire/bin/quire", "/bin/true"))
    done = subprocess.run([program, "verify", tmp_path / "quire.service"], capture_output=True, text=True, timeout=60)
    assert "quire.service" not in done.stderr, done.stderr
    assert done.returncode == 0
