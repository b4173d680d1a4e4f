"""Writes the Grafana dashboards into the chart: `python deploy/dashboards.py`. Tests hold them against it.

Counters and histograms of gateways count every outcome at each gateway, so queries take the maximum over the gateways
of an installation and add up installations, or take quantiles, which are the same at each. `penstock_streams` is of
gateways alone and `penstock_running` of workers alone: they separate metrics that both have.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent / "helm" / "penstock" / "files" / "grafana"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS, HEIGHT = 24, 8
GATEWAYS, WORKERS = " and on (instance) penstock_streams", " and on (instance) penstock_running"


class Panel(NamedTuple):
    title: str
    unit: str
    width: int
    queries: dict[str, str]
    """By legend."""
    description: str = ""
    type: str = "timeseries"


def per_s(labels: str, metric: str) -> str:
    return f"sum by ({labels}) (rate({metric}[$__rate_interval]))"


def of_one(labels: str, metric: str) -> str:
    """The same of one gateway of each installation, as each has the whole."""
    return whole(labels, per_s(f"namespace, instance, {labels}", metric))


def whole(labels: str, metric: str) -> str:
    """The sum over installations of what each gateway of one has."""
    return f"sum by ({labels}) (max by (namespace, {labels}) ({metric}))"


def largest(labels: str, metric: str) -> str:
    return f"max by ({labels}) ({metric})"


def quantile(q: float, metric: str, labels: str = "") -> str:
    labels += ", le" if labels else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket[$__rate_interval]){GATEWAYS}))"


def quantiles(metric: str) -> dict[str, str]:
    return {f"p{q * 100:g}": quantile(q, metric) for q in (0.5, 0.95)}


def memory(kind: str) -> str:
    return f'sum by (instance, device) (penstock_device_memory_bytes{{kind="{kind}"}}{WORKERS})'


def stat(title: str, unit: str, query: str) -> Panel:
    return Panel(title, unit, 4, {title.lower(): query}, type="stat")


TOKENS = "penstock_model_tokens_total"
QUEUE, QUEUE_LEGEND = "class, model, pool", "{{class}} {{model}} {{pool}}"
V1 = '{route=~"/v1/.+"}'
SLOWEST = f"histogram_quantile(0.95, {per_s('method, route, le', f'penstock_http_seconds_bucket{V1}')})"
PROBLEMS = "problem, subject, pool"
MEAN_LOAD = " / ".join(f"sum by (model) (penstock_model_load_seconds_{part})" for part in ("sum", "count"))
UNSUCCESSFUL = 'penstock_tenant_requests_total{outcome!~"completed|cancelled"}'
DASHBOARDS: dict[str, list[Panel]] = {
    "service": [
        stat("Gateways", "none", "count(penstock_streams)"),
        stat("Problems", "none", f"count({largest(f'namespace, {PROBLEMS}', 'penstock_problems')}) or vector(0)"),
        stat("Requests in flight", "none", f"sum(max by (namespace) (penstock_inflight{GATEWAYS}))"),
        stat("Requests ended", "reqps", of_one("job", "penstock_model_requests_total")),
        stat("Tokens", "none", of_one("job", TOKENS)),
        stat("Open streams", "none", "sum(penstock_streams)"),
        Panel(
            "Problems by kind",
            "none",
            12,
            {"{{problem}} {{subject}} {{pool}}": whole(PROBLEMS, "penstock_problems")},
            "The list of GET /v1/admin/problems. Empty while all is well.",
        ),
        Panel("Requests by outcome", "reqps", 12, {"{{outcome}}": of_one("outcome", "penstock_model_requests_total")}),
        Panel("Time to the run", "s", 8, quantiles("penstock_wait_seconds")),
        Panel("Time to the first token", "s", 8, quantiles("penstock_first_token_seconds")),
        Panel("Time between tokens", "s", 8, quantiles("penstock_token_gap_seconds")),
        Panel("HTTP calls by status", "reqps", 8, {"{{status}}": per_s("status", f"penstock_http_requests_total{V1}")}),
        Panel("HTTP calls by route, p95", "s", 8, {"{{method}} {{route}}": SLOWEST}),
        Panel("Dead letters by reason", "none", 8, {"{{reason}}": whole("reason", "penstock_dlq_letters")}),
    ],
    "queues": [
        Panel("Waiting by class", "none", 12, {"{{class}}": whole("class", f"penstock_queue_depth{GATEWAYS}")}),
        Panel("Oldest by class", "s", 12, {"{{class}}": largest("class", f"penstock_oldest_age_seconds{GATEWAYS}")}),
        Panel("Waiting by model", "none", 12, {QUEUE_LEGEND: whole(QUEUE, "penstock_model_depth")}),
        Panel("Oldest by model", "s", 12, {QUEUE_LEGEND: largest(QUEUE, "penstock_model_oldest_age_seconds")}),
        Panel("Time to the run by class, p95", "s", 8, {"{{class}}": quantile(0.95, "penstock_wait_seconds", "class")}),
        Panel(
            "What requests wait for",
            "none",
            8,
            {"{{reason}}": "sum by (reason) (penstock_waiting)"},
            "Requests near the front, as workers report them.",
        ),
        Panel("Paused", "none", 8, {QUEUE_LEGEND: largest(QUEUE, "penstock_model_paused")}),
        Panel(
            "Parked by class",
            "none",
            8,
            {"{{class}}": "sum by (class) (penstock_parked)"},
            "Their bytes are read again when their turn is near.",
        ),
        Panel(
            "Beyond the span",
            "none",
            8,
            {"{{instance}}": "penstock_beyond_span"},
            "Records of paused partitions that a worker does not see yet.",
        ),
        Panel(
            "Oldest record that Kafka has not acknowledged",
            "s",
            8,
            {"{{instance}}": "penstock_unacknowledged_age_seconds"},
        ),
    ],
    "devices": [
        Panel(
            "Memory by device",
            "bytes",
            12,
            {"{{kind}}, {{device}} of {{instance}}": f"penstock_device_memory_bytes{WORKERS}"},
        ),
        Panel(
            "Reserved share of the memory",
            "percentunit",
            12,
            {"{{device}} of {{instance}}": f"{memory('reserved')} / {memory('limit')}"},
        ),
        Panel("Running by worker", "none", 8, {"{{instance}}": "penstock_running"}),
        Panel("Running by model", "none", 8, {"{{model}}": f"sum by (model) (penstock_batch_size{WORKERS})"}),
        Panel("Utilisation of engines", "percentunit", 8, {"{{model}} of {{instance}}": "penstock_engine_utilisation"}),
        Panel("Run by model, p95", "s", 8, {"{{model}}": quantile(0.95, "penstock_run_seconds", "model")}),
        Panel("Tokens by model", "none", 8, {"{{model}} {{kind}}": of_one("model, kind", TOKENS)}),
        Panel("Mean load by model", "s", 8, {"{{model}}": MEAN_LOAD}),
        Panel(
            "Loads and unloads in an hour",
            "none",
            12,
            {
                "loads of {{model}}": "sum by (model) (increase(penstock_model_loads_total[1h]))",
                "unloads, {{reason}}": "sum by (reason) (increase(penstock_model_unloads_total[1h]))",
            },
        ),
        Panel(
            "Memory of requests at workers",
            "bytes",
            12,
            {"waiting, {{instance}}": "penstock_intake_bytes", "outputs, {{instance}}": "penstock_output_bytes"},
        ),
    ],
    "tenants": [
        Panel("Requests", "reqps", 12, {"{{tenant}}": of_one("tenant", "penstock_tenant_requests_total")}),
        Panel(
            "Unsuccessful requests", "reqps", 12, {"{{tenant}} {{outcome}}": of_one("tenant, outcome", UNSUCCESSFUL)}
        ),
        Panel("Tokens", "none", 12, {"{{tenant}} {{kind}}": of_one("tenant, kind", "penstock_tenant_tokens_total")}),
        Panel(
            "Time to the run, p95", "s", 12, {"{{tenant}}": quantile(0.95, "penstock_tenant_wait_seconds", "tenant")}
        ),
        Panel("Refused calls", "reqps", 12, {"{{tenant}} {{code}}": per_s("tenant, code", "penstock_refused_total")}),
        Panel("Calls without a good key", "reqps", 12, {"{{sent}}": per_s("sent", "penstock_auth_failures_total")}),
    ],
}


def in_namespace(query: str) -> str:
    """The query with the variable `namespace` in each of its selectors."""
    return re.sub(
        r"(penstock_\w+)(\{)?", lambda one: f'{one[1]}{{namespace=~"$namespace"{"," if one[2] else "}"}', query
    )


def panel_json(number: int, panel: Panel, place: tuple[int, int]) -> dict[str, Any]:
    x, y = place
    options: dict[str, Any] = {"legend": {"showLegend": True, "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.type,
        "title": panel.title,
        "description": panel.description,
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": HEIGHT if panel.type == "timeseries" else HEIGHT // 2},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": options if panel.type == "timeseries" else {"reduceOptions": {"calcs": ["lastNotNull"]}},
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": SOURCE, "expr": in_namespace(query), "legendFormat": legend}
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def placed(panels: list[Panel]) -> list[dict[str, Any]]:
    """From left to right; a panel that finds no room begins a row."""
    found: list[dict[str, Any]] = []
    x = y = below = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, below
        found.append(panel_json(number, panel, (x, y)))
        x, below = x + panel.width, y + found[-1]["gridPos"]["h"]
    return found


def dashboard(name: str) -> dict[str, Any]:
    namespaces = {"query": "label_values(penstock_streams, namespace)", "refId": "namespaces"}
    every = {"includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2}
    return {
        "uid": f"penstock-{name}",
        "title": f"Penstock: {name}",
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [
            {"type": "dashboards", "tags": ["penstock"], "title": "Penstock", "keepTime": True, "includeVars": True}
        ],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {"name": "namespace", "type": "query", "datasource": SOURCE, "query": namespaces, **every},
            ]
        },
        "panels": placed(DASHBOARDS[name]),
    }


def files() -> dict[str, str]:
    """By name of the file, its text: a panel a line."""
    texts: dict[str, str] = {}
    for name in DASHBOARDS:
        found = dashboard(name)
        panels = ",\n  ".join(json.dumps(one) for one in found["panels"])
        head = json.dumps({**found, "panels": []}, indent=1)
        texts[f"{name}.json"] = head.replace('"panels": []', f'"panels": [\n  {panels}\n ]') + "\n"
    return texts


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
