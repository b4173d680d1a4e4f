"""Faults on a real system: each has its alert fire at a real Prometheus, and no other, until it is mended.

`tests/integration/console/test_drills.py` does the same for the faults of its drills.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from confluent_kafka.admin import AdminClient

from kit.certificates import Authority
from kit.prometheus import RULES, Prometheus
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import NOOP, Process, System
from worker_requests import send

pytestmark = pytest.mark.slow

ONLY_BY_PROMTOOL = {
    "RequestsWait": "a request would have to wait for a minute",
    "NothingRuns": "no fault that is known brings it about",
    "RightsMissing": "it needs a broker with an authorizer; tests/integration/secured has one",
    "DeviceShort": "it needs a device that other processes fill",
    "WebhooksLate": "a webhook would have to wait for ten minutes",
    "FilesDiffer": "it fires after an hour",
    "NotJudged": "it is a defect of the gateway",
    "RecordsLost": "it needs a broker that has lost records; tests/integration/cluster has one",
    "AuthFailures": "it needs five calls a second for a minute",
}
"""Alerts that no fault here fires, and why; test_rules.py holds them."""
CALLS = 'penstock_http_requests_total{route="/v1/stats",status="%d",pod="g2"}'
"""Of the gateway that starts later."""
DRILLS = Path(__file__).parents[1] / "console" / "test_drills.py"


HOLD = Path(tempfile.mkdtemp()) / "hold"
"""While it is there no load of the model `held` ends, and none of its runs."""
SYSTEM = {
    "models": [
        NOOP,
        {
            **NOOP,
            "id": "held",
            "options": {"tokens": 1, "delay_ms": 1, "slots": 1, "hold": str(HOLD)},
            "preload": False,
        },
    ],
    "worker_options": {"state_interval_s": 0.5},
    "gateway_options": {"probe_s": 0.5},
    "webhook_options": {"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
    "queues": [{"topic": "not-there", "tenant": "team", "result_topic": "not-there-results"}],
    "processes": ["w1", "g1", "h1"],
}


@pytest.fixture
def alerts(prometheus: Prometheus) -> Any:
    prometheus.fires()
    yield prometheus
    prometheus.fires()


def again(process: Process, system: System) -> None:
    """The same process, at its port."""
    variable = {"gateway": "PENSTOCK_GATEWAY__PORT", "webhooks": "PENSTOCK_WEBHOOKS__HEALTH_PORT"}[process.command]
    start = {"gateway": system.gateway, "webhooks": system.webhooks}[process.command]
    started = start(process.name, env={variable: str(process.port)})
    started.port = process.port
    started.wait_ready()


def test_no_gateway_runs(system: System, alerts: Prometheus) -> None:
    gateway = system.process("g1")
    assert gateway.stop() == 0
    alerts.fires("NoGateway")
    again(gateway, system)


def test_a_gateway_finds_no_broker(system: System, alerts: Prometheus, later_gateway: int) -> None:
    gateway = system.gateway("x2", port=later_gateway, env={"PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"})
    alerts.fires("GatewayBehind")
    assert gateway.stop() == 0


def test_the_only_sender_of_webhooks_is_killed(system: System, alerts: Prometheus) -> None:
    sender = system.process("h1")
    sender.kill9()
    alerts.fires("ProcessSilent")
    again(sender, system)


def test_a_bridge_lacks_its_topics(system: System, alerts: Prometheus) -> None:
    bridge = system.bridge()
    alerts.fires("ProcessUnwell")
    assert bridge.stop() == 0


def test_a_record_cannot_be_read(system: System, client: httpx.Client, alerts: Prometheus) -> None:
    send(system, {"task": "no such task"})
    alerts.fires("DeadLetters")
    reason = client.get("/v1/admin/problems").json()["data"][0]["subject"]
    assert client.post("/v1/admin/dlq/purge", json={"filter": {"reason": reason}}).status_code == 200


def test_a_class_is_paused(client: httpx.Client, alerts: Prometheus) -> None:
    assert client.post("/v1/admin/classes/low/pause").is_success
    alerts.fires("Paused")
    assert client.post("/v1/admin/classes/low/resume").is_success


def test_the_store_of_artifacts_cannot_be_written(system: System, alerts: Prometheus) -> None:
    folder = system.folder / "artifacts"

    def replaced() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        try:
            folder.write_text("no folder")
        except IsADirectoryError:
            return False
        return True

    wait_until(replaced, 20, "a probe makes the folder again")
    alerts.fires("ArtifactsUnusable")
    folder.unlink()


def test_the_topic_of_the_audit_is_deleted(system: System, alerts: Prometheus) -> None:
    admin, topic = AdminClient({"bootstrap.servers": system.bootstrap}), system.names.audit
    admin.delete_topics([topic])[topic].result(20)
    alerts.fires("TopicUnusable")
    system.create_topics()


def test_the_keys_file_is_damaged(system: System, alerts: Prometheus, later_gateway: int, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    create_key(keys)
    whole = keys.read_text()
    gateway = system.gateway("x2", port=later_gateway, env={"PENSTOCK_AUTH__KEYS_FILE": str(keys)}).wait_ready()
    keys.write_text("{")
    alerts.fires("KeysUnusable")
    keys.write_text(whole)
    alerts.fires()
    assert gateway.stop() == 0


def test_an_authority_expires(system: System, alerts: Prometheus, later_gateway: int, tmp_path: Path) -> None:
    file = Authority(tmp_path, lifetime=timedelta(days=5)).certificate
    gateway = system.gateway(
        "x2", port=later_gateway, env={"PENSTOCK_KAFKA__SECURITY__SSL_CA_LOCATION": str(file)}
    ).wait_ready()
    alerts.fires("CertificateExpires")
    assert gateway.metric("penstock_certificate_expires_timestamp_seconds") == pytest.approx(
        time.time() + 5 * 86_400, abs=600
    )
    assert gateway.stop() == 0


def test_a_tenant_is_near_its_limit(client: httpx.Client, system: System, alerts: Prometheus) -> None:
    HOLD.touch()
    assert client.post("/v1/admin/limits/default", json={"outstanding": 20}).is_success
    for _ in range(19):
        system.process("g").submit(model="held")
    alerts.fires("TenantNearLimit")
    assert client.delete("/v1/admin/limits/default").is_success
    HOLD.unlink()


def test_a_gateway_refuses_calls(system: System, alerts: Prometheus, later_gateway: int) -> None:
    HOLD.touch()
    full = system.gateway("x2", port=later_gateway, env={"PENSTOCK_GATEWAY__MAX_HTTP": "1"}).wait_ready()
    held = system.process("g1").submit(model="held")

    def answers(calls: int) -> set[int]:
        with httpx.Client(base_url=full.url, timeout=30) as client:
            return {client.get("/v1/stats").status_code for _ in range(calls)}

    wait_until(lambda: full.request(held).get("status"), 20, full.tail)
    with httpx.stream("GET", f"{full.url}/v1/requests/{held}/events", timeout=30) as stream:
        assert stream.status_code == 200
        assert answers(1) == {503}
        # An increase is seen only behind a first sample.
        wait_until(lambda: alerts.samples(CALLS % 503), 20, full.tail)
        assert answers(30) == {503}
        alerts.fires("ServerErrors")
    HOLD.unlink()
    wait_until(lambda: answers(1) == {200}, 20, full.tail)
    wait_until(lambda: alerts.samples(CALLS % 200), 20, full.tail)
    assert answers(800) == {200}
    alerts.fires()
    assert full.stop() == 0


def test_requests_of_a_model_fail(system: System, alerts: Prometheus) -> None:
    gateway = system.process("g1")
    assert gateway.request(gateway.submit(model="held"), wait=30)["status"] == "completed"  # so it is loaded
    HOLD.touch()
    first = gateway.submit(model="held")
    wait_until(lambda: gateway.request(first)["status"] == "running", 20, gateway.tail)
    late: dict[str, Any] = {"model": "held", "ttl_ms": 200}
    assert gateway.request(gateway.submit(**late), wait=30)["status"] == "expired"
    # An increase is seen only behind a first sample.
    seen = 'penstock_model_requests_total{model="held",outcome="expired"}'
    wait_until(lambda: alerts.samples(seen), 20, gateway.tail)
    for _ in range(40):
        gateway.submit(**late)
    alerts.fires("RequestsFail")
    HOLD.unlink()
    send(system, *({"request_id": f"good-{number}", "model": "held", "priority": 9} for number in range(1_200)))


def test_each_alert_is_fired_by_a_fault_or_listed() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    named = {one for path in (DRILLS, Path(__file__)) for one in re.findall(r'\.fires\("(\w+)"', path.read_text())}
    assert not named & {*ONLY_BY_PROMTOOL}
    assert {f"Penstock{one}" for one in (*named, *ONLY_BY_PROMTOOL)} == {
        one["alert"] for one in rules if "alert" in one
    }
