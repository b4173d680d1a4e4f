"""A process whose certificates were renewed on disk stops in order and starts again with them; nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kit.secured_kafka import SecuredKafka
from support import wait_until
from system import NOOP, Process, System, running

BEFORE, AFTER = "before", "after"


class Mounted:
    """A folder of certificates as Kubernetes mounts a secret: a change swaps one symbolic link."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        for name in ("tls.crt", "tls.key"):
            (folder / name).symlink_to(Path("..data") / name)

    @property
    def security(self) -> dict[str, str]:
        where = {"certificate": "tls.crt", "key": "tls.key"}
        return {f"ssl.{kind}.location": str(self._folder / name) for kind, name in where.items()}

    def hold(self, version: str, certificate: bytes, key: bytes) -> None:
        data = self._folder / version
        data.mkdir()
        (data / "tls.crt").write_bytes(certificate)
        (data / "tls.key").write_bytes(key)
        link = self._folder / "..new"
        link.symlink_to(version)
        link.replace(self._folder / "..data")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("guarded"), authorizer=True).running() as made:
        yield made


class Rights:
    """All rights of a user, given and taken."""

    def __init__(self, kafka: SecuredKafka) -> None:
        self._admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def give(self, user: str) -> None:
        kinds = {ResourceType.TOPIC: "*", ResourceType.GROUP: "*", ResourceType.BROKER: "kafka-cluster"}
        literal, allow = ResourcePatternType.LITERAL, AclPermissionType.ALLOW
        rules = [
            AclBinding(kind, name, literal, f"User:{user}", "*", AclOperation.ALL, allow)
            for kind, name in kinds.items()
        ]
        for made in self._admin.create_acls(rules).values():
            made.result(30)

    def take(self, user: str) -> None:
        found = AclBindingFilter(
            ResourceType.ANY,
            None,
            ResourcePatternType.ANY,
            f"User:{user}",
            None,
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        assert len(self._admin.delete_acls([found])[found].result(30)) == 3
        wait_until(lambda: not self._admin.describe_acls(found).result(30), 30, "the rights are still there")


@pytest.fixture
def mounted(tmp_path: Path) -> Mounted:
    return Mounted(tmp_path / "mounted")


@pytest.fixture
def system(guarded: SecuredKafka, mounted: Mounted, tmp_path: Path) -> Iterator[System]:
    made = System(
        guarded.bootstrap_servers,
        "renewed-",
        tmp_path / "system",
        models=[{**NOOP, "options": {"tokens": 40, "delay_ms": 50}}],
        kafka_options={
            "bootstrap_servers": guarded.at("mtls"),
            "security": guarded.security("tls") | mounted.security,
            "restart_spread_s": 1,
        },
        webhook_options={"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"},
        forked=False,
    )
    with running(made):
        yield made


def logged(process: Process, event: str) -> int:
    return process.log.read_text().count(event)


def expiring(gateway: Process) -> str:
    """Whom the problem of the certificate names; empty if there is none."""
    problems = httpx.get(f"{gateway.url}/v1/admin/problems", timeout=20).json().get("data", ())
    return ", ".join(one["affects"] for one in problems if one["problem"] == "certificate_expires")


def test_processes_restart_themselves_with_renewed_certificates(
    guarded: SecuredKafka, system: System, mounted: Mounted
) -> None:
    rights = Rights(guarded)
    for user in (BEFORE, AFTER):
        rights.give(user)
    before, after = guarded.authority.issue(BEFORE, lifetime=timedelta(days=5)), guarded.authority.issue(AFTER)
    mounted.hold("1", before.certificate.read_bytes(), before.key.read_bytes())
    processes = system.start_all(["w1", "g1", "h1"]).processes
    pids = [one.popen.pid for one in processes]
    gateway = system.process("g")
    wait_until(lambda: expiring(gateway).count(",") == 2, 30, lambda: f"not of all three: {expiring(gateway)!r}")

    # A key that does not fit its certificate is reported, and the former pair stays in use.
    mounted.hold("2", after.certificate.read_bytes(), before.key.read_bytes())
    for one in processes:
        wait_until(lambda one=one: logged(one, "kafka.renewed_files_unusable") == 1, 90, lambda one=one: one.tail())
        assert "ssl.key.location" in one.log.read_text()
    assert gateway.request(gateway.submit(), wait=60)["status"] == "completed"

    ids = [gateway.submit() for _ in range(40)]
    mounted.hold("3", after.certificate.read_bytes(), after.key.read_bytes())
    for one in processes:
        wait_until(lambda one=one: logged(one, "process.restarts") == 1, 120, lambda one=one: one.tail())
    rights.take(BEFORE)  # from here on the broker serves the new certificate alone
    for one in processes:
        one.wait_ready(180)
    assert [one.popen.pid for one in processes if one.alive()] == pids, system.logs(20)
    wait_until(lambda: not expiring(gateway), 30, lambda: f"restarted processes still have it: {expiring(gateway)}")
    ids.append(gateway.submit())
    outcomes = [gateway.request(one, wait=60) for one in ids]
    assert all(one.get("status") == "completed" for one in outcomes), (outcomes, system.logs(20))
    assert [one.stop() for one in processes] == [0, 0, 0], system.logs(20)
    assert [logged(one, "process.restarts") for one in processes] == [1, 1, 1]
