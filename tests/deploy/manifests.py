"""Reading what is shipped for Kubernetes, Docker and systemd."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart import render_chart
from tests.deploy.promql import DEPLOY

KUBERNETES = DEPLOY / "kubernetes"
GUIDES = Path(__file__).with_name("guides")
EVERYTHING = {
    "model": "meta-llama/Llama-3.1-8B-Instruct",
    "autoscaling": {"enabled": True},
    "serviceMonitor": {"enabled": True},
    "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "args": ["--max-num-seqs", "256"],
}
NOTHING = {
    "gpus": 0,
    "replicas": 3,
    "networkPolicy": {"enabled": False},
    "storage": {"models": "", "kernels": ""},
}
CHARTS = {"as it comes": dict[str, Any](), "everything on": EVERYTHING, "everything off": NOTHING}


def documents(text: str) -> list[dict[str, Any]]:
    """The resources of a YAML text."""
    return [document for document in yaml.safe_load_all(text) if document]


def manifests() -> list[dict[str, Any]]:
    """Those that `kubectl apply -k deploy/kubernetes` applies."""
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [document for name in names for document in documents((KUBERNETES / name).read_text())]


def sets_of_resources() -> dict[str, list[dict[str, Any]]]:
    """Everything that is meant to run together, by where it comes from."""
    charts = {f"chart, {name}": documents(render_chart(values)) for name, values in CHARTS.items()}
    return {"manifests": manifests(), **charts}


def of_kind(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The only one of a kind."""
    (found,) = (resource for resource in resources if resource["kind"] == kind)
    return found


def container(resources: list[dict[str, Any]]) -> dict[str, Any]:
    """The server's container."""
    (found,) = of_kind(resources, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(found)


def served_flags() -> Iterator[tuple[str, list[str]]]:
    """Every list of flags of `quire serve` in deploy/ and in the guides' manifests, with where it stands."""
    for name, resources in sets_of_resources().items():
        yield name, container(resources)["args"]
    yield "guides", container(documents((GUIDES / "deployment.yaml").read_text()))["args"]
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yml").read_text())
    yield "compose", compose["services"]["quire"]["command"]
    unit = (DEPLOY / "systemd" / "quire.service").read_text()
    words = re.findall(r"^ExecStart=\S+ serve (.*)$", unit, re.M)[0].split()
    yield "systemd", [str(DEPLOY / "systemd" / "serve.yaml") if w == "/etc/quire/serve.yaml" else w for w in words]
