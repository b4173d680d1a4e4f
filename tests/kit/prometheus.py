"""A real Prometheus that scrapes processes of a test, with the labels that they would have in Kubernetes.

Its alerts are those of `deploy/helm/penstock/files/alerts.yml`, each after a thirtieth of its `for`.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from kit.helm_chart import Trigger
from penstock.cli.paths import free_port
from stock_clients import tool
from support import wait_until

SCRAPES_MS = 1_000
RULES = Path(__file__).parents[2] / "deploy" / "helm" / "penstock" / "files" / "alerts.yml"
FASTER = 30
STATES = ("firing",), ("firing", "pending")
FIRES_S = 45.0
"""Within so long after its fault an alert fires, and ends after the cure: reports come late on a busy machine."""


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url
        self._expected: Set[str] | None = None
        """By the last call of `fires`."""

    def of(self, trigger: Trigger) -> float | None:
        """The value of a trigger, as KEDA's scaler takes it; None is an error."""
        value = self.value(trigger.query)
        return 0.0 if value is None and trigger.ignores_null else value

    def value(self, query: str) -> float | None:
        """The one value of a query; None if it finds nothing."""
        samples = self.samples(query)
        assert len(samples) <= 1, f"KEDA takes one value: {query} has {samples}"
        return float(samples[0]["value"][1]) if samples else None

    def samples(self, query: str) -> list[dict[str, Any]]:
        return self._data("query", query=query)["result"]

    def alerts(self) -> tuple[Set[str], Set[str]]:
        """The names of the alerts that fire, and of all whose condition holds."""
        found = self._data("alerts")["alerts"]
        return tuple({one["labels"]["alertname"] for one in found if one["state"] in states} for states in STATES)

    def fires(self, *alerts: str, within_s: float = FIRES_S) -> None:
        """Each of these fires; no other does since the last call, or is about to. An empty list: all end."""
        expected, before = {f"Penstock{name}" for name in alerts}, self._expected
        give_up = time.monotonic() + within_s
        ending = (self.alerts()[0] if before is None else before) - expected  # what fired before may still end
        self._expected = expected
        while (found := self.alerts()) != (expected, expected):
            firing = found[0]
            assert firing <= expected | ending, f"{sorted(firing)} fire, expected are {sorted(expected)}"
            ending &= firing
            assert time.monotonic() < give_up, f"{found} fire and hold, not {expected}: {self._data('alerts')}"
            time.sleep(0.2)

    def _data(self, of: str, **params: str) -> dict[str, Any]:
        answer = httpx.get(f"{self._url}/api/v1/{of}", params=params, timeout=20)
        answer.raise_for_status()
        return answer.json()["data"]


@contextmanager
def scraping(
    folder: Path, ports: Mapping[str, int], namespace: str, later: Mapping[str, int] | None = None
) -> Generator[Prometheus]:
    """`ports`: by name of the pod, where its /metrics is. `later`: the same of pods that do not run yet."""
    port = free_port()
    targets = [
        {"targets": [f"127.0.0.1:{target}"], "labels": {"namespace": namespace, "pod": pod}}
        for pod, target in {**ports, **(later or {})}.items()
    ]
    config = {
        "global": dict.fromkeys(["scrape_interval", "scrape_timeout", "evaluation_interval"], f"{SCRAPES_MS}ms"),
        "rule_files": [str(_faster_rules(folder))],
        "scrape_configs": [{"job_name": "penstock", "static_configs": targets}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{port}"
    options = [f"--storage.tsdb.path={folder / 'samples'}", f"--web.listen-address={url.removeprefix('http://')}"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [tool("prometheus"), f"--config.file={path}", *options], stdout=log, stderr=subprocess.STDOUT
        )
    try:
        found = Prometheus(url)
        wait_until(lambda: _answers(found) == len(ports), 60, lambda: (folder / "prometheus.log").read_text())
        yield found
    finally:
        process.kill()
        process.wait(20)


def _faster_rules(folder: Path) -> Path:
    """The rules with every `for` shorter; their expressions stay."""

    def shorter(found: re.Match[str]) -> str:
        return f"for: {int(found[1]) * {'s': 1, 'm': 60, 'h': 3600}[found[2]] * 1000 // FASTER}ms"

    path = folder / "alerts.yml"
    rules, changed = re.subn(r"for: (\d+)([smh])$", shorter, RULES.read_text(), flags=re.MULTILINE)
    assert changed == rules.count(" for: "), "each alert waits shorter"
    path.write_text(rules)
    return path


def _answers(prometheus: Prometheus) -> float:
    try:
        return prometheus.value("sum(up)") or 0
    except httpx.HTTPError:
        return 0
