"""What each process does whose login is refused: one line with the setting, and then as without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kit.cli import invoke
from kit.secured_kafka import SecuredKafka
from support import wait_until
from system import Process, System, running

WRONG = 'check kafka.security."sasl.password"'


@pytest.fixture
def refused(secured: SecuredKafka, tmp_path: Path) -> Iterator[System]:
    security = secured.security("sasltls", "SCRAM-SHA-512") | {"sasl.password": "wrong"}
    made = System(
        secured.bootstrap_servers,
        "refused-",
        tmp_path / "system",
        kafka_options={"bootstrap_servers": secured.at("sasltls"), "security": security},
        webhook_options={"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
        queues=[{"topic": "in", "result_topic": "out", "format": "penstock", "tenant": "default"}],
    )
    with running(made):
        yield made


def readyz(process: Process) -> str:
    """Empty while its port is not open yet."""
    try:
        answer = httpx.get(f"{process.url}/readyz", timeout=10)
    except httpx.HTTPError:
        return ""
    assert answer.status_code == 503
    return answer.json().get("reason") or answer.text


def test_a_wrong_password(refused: System, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = refused.worker()
    waiting = [refused.gateway(), refused.webhooks(), refused.summarizer(), refused.bridge()]
    assert worker.wait_dead(90) == 3
    assert worker.log.read_text().count(WRONG) == 1, worker.tail()
    for one in waiting:
        wait_until(lambda one=one: "sasl.password" in readyz(one), 90, lambda one=one: f"{readyz(one)}\n{one.tail()}")
    answer = httpx.post(f"{waiting[0].url}/v1/requests", json={"task": "text_generation"}, timeout=30)
    assert answer.status_code == 503
    monkeypatch.setenv("PENSTOCK_CONFIG", str(refused.config()))
    listed = invoke("topics", "list")
    assert (listed.exit_code, listed.output.count(WRONG)) == (3, 1), listed.output
    for one in waiting:
        assert 1 <= one.log.read_text().count(WRONG) <= 3, one.tail()
        assert one.stop() == 0, one.tail()
