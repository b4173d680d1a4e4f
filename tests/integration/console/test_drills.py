"""The drills: the first screen tells each fault within ten seconds, with its cause and what mends it, and nothing else.

All settings are the defaults. What mends it is done as the screen says; the screen is well again ten seconds later.
A real Prometheus has its alert fire, and no other, until it is mended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka import Producer

from kit.console import TELLS_S, Opener
from kit.helm_chart import NAMESPACE
from kit.prometheus import Prometheus, scraping
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.faults.disks import SmallDisk, why_no_disk
from penstock.cli.paths import free_port
from support import engine_processes, wait_until
from system import BROKERS, NOOP, System, running
from worker_requests import send

GB = 10**9
FLOOD = 4_000
DISK_BYTES = 1 << 26
SETTLED_S = 90.0
"""For what is no part of a drill: a worker that starts, an engine that is loaded."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedKafka]:
    """One that may stand still."""
    own = EmbeddedKafka(tmp_path_factory.mktemp("kafka"), free_port())
    own.start()
    BROKERS.append(own)
    yield own
    BROKERS.remove(own)
    own.kill()


@pytest.fixture(scope="module")
def system(broker: EmbeddedKafka, tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    card = {"kind": "simulated", "name": "card", "total_bytes": 24 * GB}
    models = [
        {**NOOP, "options": {"tokens": 20, "delay_ms": 50, "slots": 4}},
        {**NOOP, "id": "huge", "device": "simulated", "vram_bytes": 60 * GB, "preload": False},
        {**NOOP, "id": "real", "source": str(tiny_lm), "engine": "text", "options": {}},
    ]
    folder = tmp_path_factory.mktemp("system")
    made = System(broker.bootstrap_servers, "drill-", folder, models=models, devices=[{"kind": "cpu"}, card])
    with running(made):
        yield made.start_all(["w1", "g1"])


@pytest.fixture(scope="module")
def later_gateway() -> int:
    """The port of a gateway that starts later."""
    return free_port()


@pytest.fixture(scope="module")
def alerts(system: System, later_gateway: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    ports = {one.name: one.port for one in system.processes}
    with scraping(tmp_path_factory.mktemp("prometheus"), ports, NAMESPACE, {"g2": later_gateway}) as found:
        yield found


class Screen:
    """The first screen of a gateway."""

    def __init__(self, page: Any) -> None:
        self.page = page

    def state(self) -> str:
        return self.page.inner_text("section[aria-label=State]")

    def tells(self, *words: str) -> None:
        """Within `TELLS_S` the one problem that is told has all these words."""

        def told() -> bool:
            found = [one.inner_text() for one in self.page.locator("article.problem").all()]
            return len(found) == 1 and all(word in found[0] for word in words)

        wait_until(told, TELLS_S, self.state, promised=True)

    def tells_nothing_else(self, problem: str) -> None:
        """What a fault brings about is not told as a fault of its own, for as long as others take to be told."""
        ends = time.monotonic() + TELLS_S
        while time.monotonic() < ends:
            found = self.page.locator("article.problem").all_inner_texts()
            assert [problem in one for one in found] == [True], self.state()
            self.page.wait_for_timeout(200)

    def is_well(self, within_s: float = TELLS_S) -> None:
        wait_until(lambda: "All well" in self.state(), within_s, self.state, promised=True)

    def press(self, button: str) -> None:
        self.page.get_by_role("button", name=button).click()


@pytest.fixture
def screen(system: System, open_page: Opener, alerts: Prometheus) -> Iterator[Screen]:
    page = open_page(system.process("g1"))
    page.on("dialog", lambda dialog: dialog.accept())
    found = Screen(page)
    found.is_well(SETTLED_S)
    alerts.fires()
    yield found
    alerts.fires()
    open_page.expect("503", "ERR_")  # the browser reports such answers


def test_a_broker_that_stands_still(system: System, broker: EmbeddedKafka, screen: Screen, alerts: Prometheus) -> None:
    assert broker.process is not None
    with stopped(broker.process.pid):
        screen.tells("kafka_away", broker.bootstrap_servers, "no broker answers", "penstock doctor")
        screen.tells_nothing_else("kafka_away")
        alerts.fires("KafkaAway")
    screen.is_well()


def test_an_open_transaction(system: System, screen: Screen, alerts: Prometheus) -> None:
    config = {"bootstrap.servers": system.bootstrap, "transactional.id": "left-open"}
    producer = Producer({**config, "transaction.timeout.ms": 120_000})
    producer.init_transactions(30)
    producer.begin_transaction()
    topic = system.names.request("text_generation", 5)
    producer.produce(topic, b'{"task": "text_generation", "payload": {"prompt": "x"}}', partition=1)
    producer.flush()
    screen.tells("transaction_open", "offset 0", f"partition 1 of {topic}", "kafka-transactions.sh", "--start-offset 0")
    alerts.fires("TransactionOpen")
    producer.abort_transaction(30)
    screen.is_well()


def test_a_model_that_does_not_fit(system: System, screen: Screen, alerts: Prometheus) -> None:
    httpx.post(f"{system.process('g').url}/v1/admin/models/huge/load").raise_for_status()
    screen.tells("model_too_large", "huge needs", "MiB on card")
    alerts.fires("ModelUnavailable")
    screen.press("do not load it")
    screen.is_well()


def test_a_model_whose_source_is_wrong(system: System, tiny_lm: Path, screen: Screen, alerts: Prometheus) -> None:
    url = f"{system.process('g').url}/v1/admin/models"
    entry = {"id": "typo", "engine": "text", "device": "cpu"}
    httpx.post(url, json={**entry, "source": "/no/such/model"}).raise_for_status()
    screen.tells("model_failed", "neither a folder", "correct its entry", "models add typo --replace --engine text")
    assert screen.page.get_by_role("button", name="load it again").count() == 0
    alerts.fires("ModelUnavailable")
    httpx.post(f"{url}?replace=true", json={**entry, "source": str(tiny_lm)}).raise_for_status()
    screen.is_well(SETTLED_S)
    httpx.delete(f"{url}/typo").raise_for_status()
    screen.is_well()


def test_an_engine_that_dies_again_and_again(system: System, screen: Screen, alerts: Prometheus) -> None:
    worker, gateway = system.process("w").popen.pid, system.process("g1")
    with repeated(lambda: [killed for engine in engine_processes(worker) if (killed := kill(engine))]) as deaths:
        asked = [gateway.submit(model="real") for _ in range(3)]
        screen.tells("model_failed", "3 loads in a row failed", "the process of real ended")
    assert sum(len(one) for one in deaths) >= 3
    alerts.fires("ModelUnavailable")
    screen.press("load it again")
    screen.is_well(SETTLED_S)
    gateway.submit(model="real")
    assert {gateway.request(one, wait=30)["status"] for one in asked} <= {"completed", "failed", "dead_lettered"}


def test_a_tenant_who_floods(system: System, screen: Screen, alerts: Prometheus) -> None:
    send(system, *({"request_id": f"flood-{number}", "model": "noop", "priority": 1} for number in range(FLOOD)))
    screen.tells("tenant_floods", "default", "min of work or more", "requests/s of these classes came", "--to low")
    alerts.fires("TenantFloods")
    screen.press("move them to the class low")
    screen.is_well()
    url = f"{system.process('g').url}/v1/requests/cancel"
    assert httpx.post(url, json={"class": "low"}, timeout=60).json()["count"] > FLOOD // 2


def test_a_full_disk(system: System, open_page: Opener, tmp_path: Path, alerts: Prometheus, later_gateway: int) -> None:
    if reason := why_no_disk():
        pytest.skip(reason)
    disk = SmallDisk(tmp_path / "small", size_bytes=DISK_BYTES)
    try:
        place = {"PENSTOCK_GATEWAY__VIEW_PATH": str(disk.path / "view.sqlite")}
        gateway = system.gateway("g2", port=later_gateway, env=place).wait_ready()
        screen = Screen(open_page(gateway))
        screen.is_well(SETTLED_S)
        disk.fill()
        screen.tells("disk_low", str(disk.path), "df -h")
        alerts.fires("DiskLow")
        disk.make_room()
        screen.is_well()
        alerts.fires()
        screen.page.close()
        assert gateway.stop() == 0, gateway.tail()
    finally:
        disk.make_room()
        disk.remove()
        open_page.expect("503", "ERR_")


def test_a_worker_that_is_killed(system: System, screen: Screen, alerts: Prometheus) -> None:
    system.process("w").kill9()
    screen.tells("no_worker", "stopped reporting", "penstock worker")
    alerts.fires("NoWorker")
    system.worker("w2").wait_ready()
    wait_until(lambda: "no_worker" not in screen.state(), SETTLED_S, screen.state)
    screen.tells("worker_silent", "others have its partitions")
    alerts.fires("ProcessSilent", within_s=SETTLED_S)


def kill(process: psutil.Process) -> bool:
    """Whether it still lived: an engine may end by itself while the processes are listed."""
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def repeated(act: Callable[[], list[Any]]) -> Iterator[list[list[Any]]]:
    """Do it again and again; what each gave."""
    ended, done = threading.Event(), list[list[Any]]()

    def run() -> None:
        while not ended.wait(0.2):
            done.append(act())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield done
    finally:
        ended.set()
        thread.join()
