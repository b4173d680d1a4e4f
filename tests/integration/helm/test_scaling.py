"""The queries of the ScaledObjects, which a real Prometheus evaluates over real gateways, and scaling by them."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kit.go_tools import MAY_BUILD
from kit.helm_chart import NAMESPACE, RELEASE, of_kind, rendered, triggers, values_file
from kit.prometheus import Prometheus, scraping
from kit.scaler import Scaler
from penstock.schemas.topics import CLASSES
from support import create_topics, wait_until
from system import NOOP, Process, System

pytestmark = [pytest.mark.slow, MAY_BUILD]

SELECTOR = re.compile(r"(penstock_\w+)\{([^}]*)\}")
OF_KUBERNETES = {"namespace", "pod"}
OPTIONS = {"slots": 4, "tokens": 4, "load_ms": 3_000}
RUN_MS = {"chat": 400, "images": 12_000}
"""By pool, how long a run of its model takes: of each worker four at a time."""


@pytest.fixture
def system(make_system: Callable[..., System]) -> System:
    """Two gateways of an installation whose pools never had a worker."""
    models = [
        {**NOOP, "id": f"{pool}-model", "pool": pool, "options": {**OPTIONS, "delay_ms": run_ms // 4}}
        for pool, run_ms in RUN_MS.items()
    ]
    made = make_system(models=models)
    for pool in RUN_MS:
        create_topics(made.bootstrap, made.prefix, pool=pool)
    return made.start_all(["g1", "g2"])


@pytest.fixture
def prometheus(system: System, tmp_path: Path) -> Iterator[Prometheus]:
    ports = {f"{RELEASE}-gateway-{one.name}": one.port for one in system.processes}
    with scraping(tmp_path, ports, NAMESPACE) as found:
        yield found


def submit(gateway: Process, model: str, priority: int) -> str:
    return gateway.submit(model=model, priority=priority)


def known(value: float | None) -> float:
    assert value is not None, "a query found nothing"
    return value


def worker(system: System, name: str, pool: str) -> Process:
    return system.worker(name, env={"PENSTOCK_WORKER__POOL": pool, "PENSTOCK_WORKER__WORKER_ID": name})


def test_the_queries_name_metrics_and_labels_that_a_gateway_exports(system: System) -> None:
    page = httpx.get(f"{system.process('g1').url}/metrics", timeout=20).text
    families = list(text_string_to_metric_families(page))
    declared = {family.name for family in families}
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    labels["penstock_batch_size"] = {"model", "pool"}  # nothing runs
    named = 0
    for scaled in of_kind(rendered(values_file("values-gpu.yaml")), "ScaledObject").values():
        for trigger in triggers(scaled):
            for metric, matchers in SELECTOR.findall(trigger.query):
                named += 1
                assert metric in declared
                assert set(re.findall(r"(\w+)=", matchers)) - OF_KUBERNETES <= labels[metric], trigger.query
    assert named > 10


def test_a_model_without_any_worker_is_what_starts_one(system: System, prometheus: Prometheus) -> None:
    """Each of two gateways reports the whole; the queries count it once."""
    targets = json.dumps([{"class": klass, "depth": 8, "oldestSeconds": 1} for klass in CLASSES])
    option = f"--set-json=pools.images.autoscaling.targets={targets}"
    scaled = of_kind(rendered(values_file("values-gpu.yaml"), option), "ScaledObject")

    def values(pool: str) -> dict[str, float]:
        found = triggers(scaled[f"worker-{pool}"])
        names = ["running", *(f"{klass} {what}" for klass in CLASSES for what in ("depth", "late"))]
        seen = {name: known(prometheus.of(one)) for name, one in zip(names, found, strict=True)}
        return {**seen, "depth": sum(seen[f"{klass} depth"] for klass in CLASSES)}

    def becomes(**expected: float) -> None:
        wait_until(lambda: expected.items() <= values("images").items(), 60, lambda: values("images"))

    idle = dict.fromkeys(values("images"), 0.0)
    assert values("images") == idle
    priorities = (0, 0, 5, 5, 5, 8)
    ids = [submit(system.process(f"g{n % 2 + 1}"), "images-model", one) for n, one in enumerate(priorities)]
    becomes(**{"running": 0, "high depth": 2, "medium depth": 3, "low depth": 1})
    becomes(**{"high late": 2, "medium late": 3, "low late": 1})
    assert values("chat") == idle

    worker(system, "w1", "images")
    becomes(**{"running": 4, "depth": 2, "high late": 0, "medium late": 1 + 4, "low late": 1 + 4})
    assert values("chat") == idle
    becomes(**idle)
    assert {system.process("g1").request(one, wait=30)["status"] for one in ids} == {"completed"}


@dataclass
class Pool:
    """The workers of a pool, as a Deployment has them, and what scales it."""

    system: System
    prometheus: Prometheus
    scaler: Scaler
    workers: list[Process] = field(default_factory=list)
    ended: list[Process] = field(default_factory=list)
    history: list[tuple[float, int]] = field(default_factory=list)
    """By time, how many workers there were from then on."""

    def scale(self) -> int:
        """Look at the metrics once, and start or stop workers. Returns how many there are."""
        values = [self.prometheus.of(one) for one in self.scaler.triggers]
        now_s = time.monotonic()
        replicas = self.scaler.replicas(values, now_s)
        while len(self.workers) < replicas:
            name = f"w{len(self.workers) + len(self.ended)}"
            self.workers.append(worker(self.system, name, "chat"))
        while len(self.workers) > replicas:
            self.ended.append(self.workers.pop())
            self.ended[-1].popen.terminate()
        if not self.history or self.history[-1][1] != replicas:
            self.history.append((now_s, replicas))
        return replicas

    def flaps(self, within_s: float) -> bool:
        """A worker ended, and so soon after it another one started."""
        changes = zip(self.history, self.history[1:], self.history[2:], strict=False)
        return any(
            before > after < later and later_s - after_s < within_s
            for (_, before), (after_s, after), (later_s, later) in changes
        )


STABLE_S = 8
IN_QUICK_MOTION = {
    "max": 3,
    "running": 4,
    "targets": '[{"class": "medium", "depth": 8, "oldestSeconds": 4}]',
    "idleSeconds": 6,
    "scaleUp": '{"pods": 1, "periodSeconds": 4}',
    "scaleDown": f'{{"pods": 1, "periodSeconds": 4, "stabilizationSeconds": {STABLE_S}}}',
}
WAVES = [[(4.0, 10), (26.0, 10)], [(4.0, 8)]]
"""Requests each second, and for how many seconds. A worker ends ten each second. Nothing comes until all have gone."""


def chat_in_quick_motion() -> Scaler:
    options = [f"--set-json=pools.chat.autoscaling.{name}={value}" for name, value in IN_QUICK_MOTION.items()]
    return Scaler(of_kind(rendered(values_file("values-gpu.yaml"), *options), "ScaledObject")["worker-chat"])


def test_one_late_request_starts_one_worker_which_stays_while_no_gateway_is_scraped(
    system: System, prometheus: Prometheus
) -> None:
    """No worker takes the request: a load may take so long."""
    scaler = chat_in_quick_motion()

    def values() -> list[float | None]:
        return [prometheus.of(one) for one in scaler.triggers]

    submit(system.process("g1"), "chat-model", 5)
    wait_until(lambda: values() == [0, 1, 1], 60, values)
    assert {scaler.replicas([0, 1, 1], now_s) for now_s in range(100)} == {1}
    for gateway in system.processes:
        gateway.kill9()
    wait_until(lambda: values() == [0, None, None], 60, values)
    assert scaler.replicas(values(), now_s=1_000) == 1
    assert scaler.replicas([0, 0, 0], now_s=1_000) == 0


def test_a_day_in_quick_motion_loses_nothing_and_does_not_flap(system: System, prometheus: Prometheus) -> None:
    """The scaler's formula, fed by the queries of the chart, starts and stops workers: from none, and to none."""
    pool, gateway, ids = Pool(system, prometheus, chat_in_quick_motion()), system.process("g1"), list[str]()
    most = 0
    assert pool.scale() == 0
    for wave in WAVES:
        pool.history.clear()
        for per_s, seconds in wave:
            began, sent = time.monotonic(), 0
            while (passed_s := time.monotonic() - began) < seconds:
                while sent < passed_s * per_s:
                    ids.append(submit(gateway, "chat-model", 5))
                    sent += 1
                pool.scale()
                time.sleep(0.5)
        wait_until(lambda: pool.scale() == 0, 180, lambda: pool.history, poll_s=0.5)
        assert not pool.flaps(STABLE_S), pool.history
        most = max(most, *(workers for _, workers in pool.history))
    assert most >= 2
    shown = [gateway.request(one) for one in ids]
    assert {one["status"] for one in shown} == {"completed"}, "all before the last worker left"
    for worker in pool.ended:  # one that had not started yet has no handler of the signal
        code, log = worker.wait_dead(), worker.log.read_text()
        assert code == 0 or (code == -signal.SIGTERM and "worker.started" not in log), (code, log)
