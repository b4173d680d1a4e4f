"""A real Prometheus that scrapes processes of a test, with the labels that they would have in Kubernetes."""

from __future__ import annotations

import subprocess
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import yaml

from kit.helm_chart import Trigger
from penstock.cli.paths import free_port
from stock_clients import tool
from support import wait_until

SCRAPES_MS = 500


class Prometheus:
    def __init__(self, url: str) -> None:
        self._url = url

    def of(self, trigger: Trigger) -> float | None:
        """The value of a trigger, as KEDA's scaler takes it; None is an error."""
        value = self.value(trigger.query)
        return 0.0 if value is None and trigger.ignores_null else value

    def value(self, query: str) -> float | None:
        """The one value of a query; None if it finds nothing."""
        answer = httpx.get(f"{self._url}/api/v1/query", params={"query": query}, timeout=20)
        answer.raise_for_status()
        samples = answer.json()["data"]["result"]
        assert len(samples) <= 1, f"KEDA takes one value: {query} has {samples}"
        return float(samples[0]["value"][1]) if samples else None


@contextmanager
def scraping(folder: Path, ports: Mapping[str, int], namespace: str) -> Generator[Prometheus]:
    """`ports`: by name of the pod, where its /metrics is."""
    port = free_port()
    targets = [
        {"targets": [f"127.0.0.1:{target}"], "labels": {"namespace": namespace, "pod": pod}}
        for pod, target in ports.items()
    ]
    config = {
        "global": {"scrape_interval": f"{SCRAPES_MS}ms", "scrape_timeout": f"{SCRAPES_MS}ms"},
        "scrape_configs": [{"job_name": "pods", "static_configs": targets}],
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


def _answers(prometheus: Prometheus) -> float:
    try:
        return prometheus.value("sum(up)") or 0
    except httpx.HTTPError:
        return 0
