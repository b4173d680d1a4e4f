"""The Helm chart, rendered by the real helm: its manifests, and the containers in them as plain commands."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kit.go_tools import go_program

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "penstock"
HELM = "helm.sh/helm/v3/cmd/helm@v3.22.0"
KUBERNETES = "1.37.2"
RELEASE, NAMESPACE = "penstock", "inference"
Manifest = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What helm says; its version of Kubernetes is that of the schemas."""
    command = [str(go_program(HELM)), *arguments, f"--kube-version={KUBERNETES}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def values_file(name: str) -> str:
    return f"--values={CHART / name}"


def rendered(*arguments: str) -> list[Manifest]:
    """The manifests with these values."""
    done = helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *arguments)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.safe_load_all(done.stdout) if one]


def of_kind(manifests: Sequence[Manifest], kind: str) -> dict[str, Manifest]:
    """By name, without the release's."""
    return {one["metadata"]["name"].removeprefix(f"{RELEASE}-"): one for one in manifests if one["kind"] == kind}


def pods(manifests: Sequence[Manifest]) -> dict[str, Manifest]:
    """The specifications of pods of all deployments and jobs."""
    owners = {**of_kind(manifests, "Deployment"), **of_kind(manifests, "Job")}
    return {name: owner["spec"]["template"]["spec"] for name, owner in owners.items()}


def containers(pod: Manifest) -> Iterator[Manifest]:
    yield from pod.get("initContainers", [])
    yield from pod["containers"]


@dataclass(frozen=True, kw_only=True)
class Trigger:
    """One of a ScaledObject: a query, whose value is shared by the workers."""

    query: str
    threshold: float
    ignores_null: bool
    """A query that finds nothing has the value 0; else it is an error."""


def triggers(scaled: Manifest) -> list[Trigger]:
    found = [one for one in scaled["spec"]["triggers"] if one["type"] == "prometheus"]
    assert {one["metricType"] for one in found} == {"AverageValue"}
    return [
        Trigger(
            query=one["metadata"]["query"],
            threshold=float(one["metadata"]["threshold"]),
            ignores_null=one["metadata"].get("ignoreNullValues", "true") == "true",
        )
        for one in found
    ]


def environment(container: Manifest) -> Mapping[str, str]:
    return {one["name"]: one["value"] for one in container["env"]}
