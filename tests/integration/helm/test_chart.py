"""The Helm chart, checked by helm, and by kubeconform with the schemas of Kubernetes, KEDA and Prometheus' operator."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kit.go_tools import MAY_BUILD, go_program
from kit.helm_chart import (
    CHART,
    KUBERNETES,
    RELEASE,
    Manifest,
    containers,
    environment,
    helm,
    of_kind,
    pods,
    rendered,
    values_file,
)
from kit.kube_schemas import kube_schemas
from kit.prometheus import RULES
from penstock.gateway import app as gateway
from penstock.gateway import side_process
from penstock.processors import app as worker

pytestmark = [pytest.mark.slow, MAY_BUILD]

KUBECONFORM = "github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0"
VALUES_FILES = sorted(path.name for path in CHART.glob("values-*.yaml"))
STOP_S = {"gateway": gateway.STOP_S, "worker": worker.STOP_S} | dict.fromkeys(
    ("bridge", "webhooks", "summarizer"), side_process.STOP_S
)
"""By command, how long a stop may take besides the drain."""
BY_SERVICE = [
    "--set=monitoring.podMonitor.enabled=false",
    "--set=monitoring.serviceMonitor.enabled=true,monitoring.serviceMonitor.labels.release=prometheus",
]


@pytest.fixture(scope="module", params=VALUES_FILES)
def manifests(request: pytest.FixtureRequest) -> list[Manifest]:
    return rendered(values_file(request.param))


def conforms(manifests: list[Manifest], folder: Path) -> dict[str, Any]:
    """What kubeconform finds."""
    path = folder / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(manifests))
    options = ["-strict", "-output=json", "-summary", f"-schema-location={kube_schemas()}"]
    command = [str(go_program(KUBECONFORM)), *options, f"-kubernetes-version={KUBERNETES}", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", VALUES_FILES)
def test_helm_lints_each_values_file(name: str) -> None:
    done = helm("lint", "--strict", str(CHART), values_file(name))
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_manifest_has_the_form_that_kubernetes_keda_and_prometheus_define(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    found = conforms(manifests, tmp_path)
    assert found["summary"] == {"valid": len(manifests), "invalid": 0, "errors": 0, "skipped": 0}, found


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("Deployment", "replica", 2),
        ("Deployment", "replicas", "many"),
        ("ScaledObject", "maxReplicas", 2),
        ("PodMonitor", "selectors", {}),
        ("ServiceMonitor", "selectors", {}),
        ("PrometheusRule", "groups", [{"rules": []}]),
    ],
)
def test_a_wrong_field_does_not_conform(kind: str, field: str, value: object, tmp_path: Path) -> None:
    options = BY_SERVICE if kind == "ServiceMonitor" else []
    (changed, *_) = of_kind(rendered(values_file("values-gpu.yaml"), *options), kind).values()
    changed["spec"][field] = value
    assert conforms([changed], tmp_path)["summary"]["invalid"] == 1


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("gateway.replica=3", "at '/gateway': additional properties 'replica' not allowed"),
        ("gateway.replicas=three", "at '/gateway/replicas': got string, want integer"),
        ("pools.gpu.gpu=1", "at '/pools/gpu': additional properties 'gpu' not allowed"),
        ("poolDefaults.cache.accessMode=rwx", "at '/poolDefaults/cache/accessMode': value must be one of"),
        (
            "monitoring.podMonitor.enabled=true,monitoring.serviceMonitor.enabled=true",
            "monitoring: podMonitor and serviceMonitor read the same pods: enable one",
        ),
        ("monitoring.alerts.enable=true", "at '/monitoring/alerts': additional properties 'enable' not allowed"),
        ("artifacts.location=/srv/artifacts", "at '/artifacts/location'"),
        ("kafka.bootstrapServers=", "kafka.bootstrapServers is required"),
        ("keys.existingSecret=", "keys.existingSecret is required"),
        ("pools.common.autoscaling.enabled=true", "pools: worker-common: autoscaling needs keda.enabled"),
        ("pools.gpu_.gpus=1", "'gpu_' does not match pattern"),
        ("pools.a_b.gpus=1,pools.a-b.gpus=1", "pools: two pools have the Deployment worker-a-b"),
        ("pools.Common.gpus=1", "pools: two pools have the Deployment worker-common"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(argument: str, words: str) -> None:
    done = helm("template", str(CHART), values_file("values-small.yaml"), "--set", argument)
    assert done.returncode != 0
    assert words in done.stderr


def test_a_value_of_a_pool_goes_before_that_of_all_pools_also_when_it_is_empty() -> None:
    all_on = ["poolDefaults.autoscaling.enabled=true", "keda.enabled=true", "poolDefaults.prepare={a}"]
    own = ["pools.common.autoscaling.enabled=false", "pools.common.autoscaling.max=9", "pools.b.gpus=2"]
    options = [*(f"--set={one}" for one in [*all_on, *own]), "--set-json=pools.common.prepare=[]"]
    found = rendered(values_file("values-small.yaml"), *options)
    assert set(of_kind(found, "ScaledObject")) == {"worker-b"}
    deployments = of_kind(found, "Deployment")
    assert deployments["worker-common"]["spec"]["replicas"] == 1
    assert "replicas" not in deployments["worker-b"]["spec"], "an upgrade must not undo what the scaler chose"
    assert "initContainers" not in pods(found)["worker-common"]
    (of_b,) = pods(found)["worker-b"]["containers"]
    assert of_b["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert environment(of_b)["PENSTOCK_WORKER__POOL"] == "b"


def test_an_upgrade_may_keep_the_values_of_a_chart_without_a_service_monitor() -> None:
    """`helm upgrade --reuse-values` does."""
    found = rendered(values_file("values-gpu.yaml"), "--set=monitoring.serviceMonitor=null")
    assert (len(of_kind(found, "PodMonitor")), of_kind(found, "ServiceMonitor")) == (1, {})


def test_an_upgrade_can_begin_with_the_topics_and_the_workers() -> None:
    upgraded = rendered(values_file("values-gpu.yaml"), "--set", "image.worker=new,image.topics=new")
    new = {name for name, pod in pods(upgraded).items() if str(pod).count("penstock:new")}
    assert new == {name for name in pods(upgraded) if name == "topics" or name.startswith("worker-")}


def test_no_pod_has_more_rights_than_it_needs(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        assert pod["automountServiceAccountToken"] is False
        assert pod["enableServiceLinks"] is False, "PENSTOCK_GATEWAY_PORT would be a variable of Kubernetes' own"
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert all("valueFrom" not in one for one in container["env"]), "secrets are mounted"


def test_every_path_of_a_container_is_on_a_volume(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        volumes = {one["name"] for one in pod["volumes"]}
        for container in containers(pod):
            mounts = [Path(one["mountPath"]) for one in container["volumeMounts"]]
            assert {one["name"] for one in container["volumeMounts"]} <= volumes
            for variable, value in environment(container).items():
                on_one = any(Path(value).is_relative_to(mount) for mount in mounts)
                assert on_one or not value.startswith("/"), f"{name}: {variable} is {value}"


def test_a_pod_may_stop_in_order(manifests: list[Manifest]) -> None:
    """SIGKILL comes when the hook, the drain and the stop have had their time."""
    deployments = of_kind(manifests, "Deployment")
    for name in deployments:
        pod = pods(manifests)[name]
        (container,) = pod["containers"]
        settings = environment(container)
        drain_s = sum(float(value) for variable, value in settings.items() if variable.endswith("__DRAIN_S"))
        hook = container.get("lifecycle", {}).get("preStop", {"sleep": {"seconds": 0}})
        takes_s = hook["sleep"]["seconds"] + drain_s + STOP_S[container["args"][0]]
        assert pod["terminationGracePeriodSeconds"] > takes_s, name


def test_every_workload_has_its_account_budget_and_network_policy(manifests: list[Manifest]) -> None:
    deployments = of_kind(manifests, "Deployment")
    for kind in ("ServiceAccount", "PodDisruptionBudget", "NetworkPolicy"):
        assert of_kind(manifests, kind).keys() == deployments.keys()
    for name, deployment in deployments.items():
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selectors = [
            deployment["spec"]["selector"]["matchLabels"],
            of_kind(manifests, "PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"],
            of_kind(manifests, "NetworkPolicy")[name]["spec"]["podSelector"]["matchLabels"],
        ]
        assert all(one.items() <= labels.items() for one in selectors)


def test_only_clients_and_prometheus_reach_a_gateway_whose_clients_are_named() -> None:
    clients = "networkPolicy.clients[0].podSelector.matchLabels.app=shop"
    policies = of_kind(rendered(values_file("values-small.yaml"), f"--set={clients}"), "NetworkPolicy")
    allowed = {name: policy["spec"]["ingress"][0]["from"] for name, policy in policies.items()}
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert allowed.pop("gateway") == [{"podSelector": {"matchLabels": {"app": "shop"}}}, prometheus]
    assert all(peers == [prometheus] for peers in allowed.values())
    assert not [rule for policy in policies.values() for rule in policy["spec"]["egress"] if "to" in rule]


def test_every_claim_of_a_pod_is_made(manifests: list[Manifest]) -> None:
    made = {f"{RELEASE}-{name}" for name in of_kind(manifests, "PersistentVolumeClaim")}
    claims = [one.get("persistentVolumeClaim") for pod in pods(manifests).values() for one in pod["volumes"]]
    assert {one["claimName"] for one in claims if one is not None} == made


def test_an_update_leaves_a_new_gateway_the_time_to_read_the_snapshot(manifests: list[Manifest]) -> None:
    waits = {name: one["spec"].get("minReadySeconds") for name, one in of_kind(manifests, "Deployment").items()}
    assert waits.pop("gateway") == 120
    assert {*waits.values()} == {None}
    (gateway,) = containers(pods(manifests)["gateway"])
    assert environment(gateway)["PENSTOCK_GATEWAY__VIEW_SNAPSHOT_S"] == "300"


def test_certificates_for_kafka_are_mounted_in_every_pod() -> None:
    found = pods(rendered(values_file("values-gpu.yaml"), "--set=kafkaTls.existingSecret=kafka-user"))
    for name, pod in found.items():
        assert {"name": "kafka-tls", "secret": {"secretName": "kafka-user"}} in pod["volumes"], name
        for container in containers(pod):
            mount = {"name": "kafka-tls", "mountPath": "/kafka-tls", "readOnly": True}
            assert mount in container["volumeMounts"], name


def test_a_service_monitor_reads_the_pods_that_a_pod_monitor_reads(tmp_path: Path) -> None:
    (by_pod,) = of_kind(rendered(values_file("values-gpu.yaml")), "PodMonitor").values()
    found = rendered(values_file("values-gpu.yaml"), *BY_SERVICE)
    assert conforms(found, tmp_path)["summary"]["valid"] == len(found)
    assert not of_kind(found, "PodMonitor")
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert monitor["spec"]["jobLabel"] == by_pod["spec"]["jobLabel"]
    assert monitor["spec"]["endpoints"] == by_pod["spec"]["podMetricsEndpoints"]
    selected = monitor["spec"]["selector"]["matchLabels"].items()
    services = of_kind(found, "Service")
    assert [name for name, one in services.items() if selected <= one["metadata"]["labels"].items()] == ["metrics"]
    service = services["metrics"]["spec"]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == by_pod["spec"]["selector"]["matchLabels"]
    assert [(one["name"], one["targetPort"]) for one in service["ports"]] == [("http", "http")]


def test_alerts_and_dashboards_are_offered_and_lead_to_the_runbook() -> None:
    assert not {"PrometheusRule", "ConfigMap"} & {
        one["kind"] for one in rendered(values_file("values-small.yaml")) if "dashboards" in str(one)
    }
    found = rendered(values_file("values-gpu.yaml"), "--set=monitoring.alerts.runbookUrl=https://wiki.example/runbook")
    (rules,) = of_kind(found, "PrometheusRule").values()
    text = RULES.read_text().replace("docs/runbook.md", "https://wiki.example/runbook")
    assert rules["spec"] == yaml.safe_load(text)
    boards = of_kind(found, "ConfigMap")["dashboards"]
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert boards["data"] == {path.name: path.read_text() for path in (RULES.parent / "grafana").glob("*.json")}
