"""The Grafana dashboards: their form, and data for each query at a real Prometheus under load."""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kit.prometheus import RULES, Prometheus
from penstock.gateway.edge.keys import create_key
from support import wait_until
from system import NOOP, Process, System
from worker_requests import send

pytestmark = pytest.mark.slow

FOLDER = RULES.parent / "grafana"
NAMES = ("devices", "queues", "service", "tenants")
UNITS = {"none", "reqps", "s", "bytes", "percentunit"}
DATA_S = 60.0
SYSTEM = {
    "models": [{**NOOP, "options": {"delay_ms": 20}}, {**NOOP, "id": "other"}],
    "devices": [{"kind": "cpu"}, {"kind": "simulated", "name": "card", "total_bytes": 24 * 10**9}],
}


def dashboard(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "deploy"))
    from dashboards import files  # type: ignore[import-not-found]

    return files()


def test_the_files_are_those_that_the_generator_writes(generated: dict[str, str]) -> None:
    assert {path.name: path.read_text() for path in FOLDER.iterdir()} == generated, "run deploy/dashboards.py"


def test_installations_are_added_up_but_for_ages_and_pauses(generated: dict[str, str]) -> None:
    queries = re.findall(r'"expr": "(max by .*?)", "legend', "".join(generated.values()))
    assert len(queries) == 3
    assert all("oldest_age" in query or "paused" in query for query in queries)


@pytest.mark.parametrize("name", NAMES)
def test_a_dashboard_has_its_form(name: str) -> None:
    found = dashboard(name)
    assert (found["uid"], found["title"]) == (f"penstock-{name}", f"Penstock: {name}")
    assert found["schemaVersion"] >= 36
    assert [one["name"] for one in found["templating"]["list"]] == ["datasource", "namespace"]
    panels = found["panels"]
    for key in ("id", "title"):
        assert len({one[key] for one in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (one["gridPos"] for one in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len({*cells}) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) == 23
    for panel in panels:
        assert panel["type"] in {"stat", "timeseries"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"]) > 0


@pytest.fixture
def load(system: System, later_gateway: int, tmp_path: Path) -> Iterator[None]:
    """Two tenants ask for both models; some calls and requests are refused, expire, or cannot be read."""
    key = create_key(tmp_path / "keys.json", tenant="acme")
    first = system.process("g1")
    second = system.gateway("x2", port=later_gateway, env={"PENSTOCK_AUTH__KEYS_FILE": str(tmp_path / "keys.json")})
    second.wait_ready()
    ended = threading.Event()
    thread = threading.Thread(target=repeat, args=(lambda: ask(system, first, second, key), ended))
    thread.start()
    yield
    ended.set()
    thread.join()


def repeat(act: Callable[[], object], ended: threading.Event) -> None:
    while not ended.wait(0.2):
        act()


def ask(system: System, first: Process, second: Process, key: str) -> None:
    acme = httpx.Client(base_url=second.url, headers={"authorization": f"Bearer {key}"})
    body: dict[str, Any] = {"task": "text_generation", "payload": {"prompt": "go"}}
    with acme:
        for model, priority in itertools.product(("noop", "other"), (1, 5)):
            first.submit(model=model, priority=priority, stream=True)
            assert acme.post("/v1/requests", json={**body, "model": model}).status_code == 202
        assert acme.post("/v1/requests", json={"task": "none"}).status_code == 400
        assert httpx.get(f"{second.url}/v1/requests").status_code == 401
        httpx.post(f"{first.url}/v1/admin/models/other/unload").raise_for_status()
        first.submit(priority=9, ttl_ms=1)
    httpx.post(f"{first.url}/v1/admin/classes/low/pause").raise_for_status()
    send(system, {"task": "no such task"})


def without_data(prometheus: Prometheus) -> list[str]:
    """The queries that find no number."""
    queries = {
        f"{name}, {panel['title']}: {target['expr']}": target["expr"]
        for name in NAMES
        for panel in dashboard(name)["panels"]
        for target in panel["targets"]
    }
    variables = {"$namespace": ".*", "$__rate_interval": "30s"}

    def finds(query: str) -> bool:
        for variable, value in variables.items():
            query = query.replace(variable, value)
        return any(math.isfinite(float(one["value"][1])) for one in prometheus.samples(query))

    return [shown for shown, query in queries.items() if not finds(query)]


@pytest.mark.usefixtures("load")
def test_each_query_finds_data_under_load(prometheus: Prometheus) -> None:
    wait_until(lambda: not without_data(prometheus), DATA_S, lambda: "\n".join(without_data(prometheus)), poll_s=1)
