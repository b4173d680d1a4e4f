"""The alerting rules, evaluated by promtool: for each one series with which it fires and ends, and no other does."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from kit.prometheus import RULES
from stock_clients import tool

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
COMPOSE = ROOT / "deploy" / "prometheus" / "compose.yml"
RULE_LIST: list[dict[str, Any]] = [
    rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"] if "alert" in rule
]
CODES = {
    rule["alert"]: re.findall(r"\w+", found[1])
    for rule in RULE_LIST
    if (found := re.search(r'penstock_problems\{problem=~?"([^"]*)"', rule["expr"]))
}
MINUTES = {"s": 0, "m": 1, "h": 60}
LASTS = 30
"""Minutes from the start of a fault until the cure, beside the `for` of its alert."""
AT_WORK = {"penstock_streams": "1x300"}
TWO = {f'penstock_streams{{instance="{name}"}}': "1x300" for name in ("g1", "g2")}
BEHIND = 'penstock_problems{problem="gateway_behind",instance="%s"}'
NIGHT = 'penstock_problems{problem="pool_without_worker",subject="night",pool="night"}'
HIGH = 'penstock_model_oldest_age_seconds{class="high",model="m",pool=""}'
OUTCOMES = 'penstock_model_requests_total{model="m",outcome="%s"}'
CALLS = 'penstock_http_requests_total{route="%s",status="%s"}'


class Case(NamedTuple):
    series: Mapping[str, str]
    """A sample each minute."""
    firing: Mapping[int, Sequence[str]]
    """By minute, all alerts that fire."""


def minutes(rule: dict[str, Any]) -> int:
    number, unit = re.fullmatch(r"(\d+)([smh])", rule["for"]).groups()
    return int(number) * MINUTES[unit]


def of_problem(rule: dict[str, Any], code: str) -> Case:
    """Two gateways of three see it; one alert for each subject, or for each gateway if it is the gateway's own."""
    waits = minutes(rule)
    seen = 'penstock_problems{problem="%s",subject="s",pool="",instance="%s"}'
    series = {seen % (code, name): f"1x{waits + LASTS} stale" for name in ("g1", "g2")}
    alerts = [rule["alert"]] * (1 if "max by" in rule["expr"] else 2)
    return Case({**AT_WORK, **series}, {waits - 1: [], waits: alerts, waits + LASTS: alerts, waits + LASTS + 2: []})


CASES = {
    **{
        f"{rule['alert']} {code}": of_problem(rule, code) for rule in RULE_LIST for code in CODES.get(rule["alert"], ())
    },
    "a store that a worker finds unusable": Case(
        {**AT_WORK, 'penstock_outputs_not_stored{instance="w"}': "0x9 1x20 0x9"},
        {9: [], 12: ["PenstockArtifactsUnusable"], 31: []},
    ),
    "no gateway": Case({"penstock_streams": "0x9 stale _x9 0x9"}, {9: [], 12: ["PenstockNoGateway"], 21: []}),
    "no gateway from the start": Case({"penstock_streams": "_x9 0x9"}, {0: [], 1: ["PenstockNoGateway"], 12: []}),
    "no gateway of one installation": Case(
        {'penstock_streams{namespace="a"}': "0x9 stale", 'penstock_streams{namespace="b"}': "0x1600"},
        {9: [], 12: ["PenstockNoGateway"], 1_400: ["PenstockNoGateway"], 1_500: []},
    ),
    "a class that is served late, at two gateways": Case(
        {**AT_WORK, **{f'{HIGH[:-1]},instance="{name}"}}': "0x9 61x20 1x9" for name in ("g1", "g2")}},
        {15: [], 16: ["PenstockRequestsWait"], 31: []},
    ),
    "other classes may wait longer": Case(
        {**AT_WORK, HIGH.replace("high", "medium"): "600x40", HIGH.replace("high", "low"): "21600x40"}, {40: []}
    ),
    "all classes too late": Case(
        {**AT_WORK, HIGH.replace("high", "medium"): "601x40", HIGH.replace("high", "low"): "21601x40"},
        {40: ["PenstockRequestsWait"] * 2},
    ),
    "a paused model": Case({**AT_WORK, HIGH: "61x40", HIGH.replace("oldest_age_seconds", "paused"): "1x40"}, {40: []}),
    "late for a reason": Case(
        {**AT_WORK, HIGH: "61x40", 'penstock_problems{problem="no_worker"}': "1x40"},
        {4: [], 5: ["PenstockNoWorker"], 40: ["PenstockNoWorker"]},
    ),
    "late, and no gateway of two works": Case(
        {**TWO, HIGH: "61x40", **{BEHIND % name: "1x40" for name in ("g1", "g2")}}, {40: ["PenstockGatewayBehind"] * 2}
    ),
    "late, and one gateway of two is behind": Case(
        {**TWO, HIGH: "61x40", BEHIND % "g1": "1x40"}, {40: ["PenstockGatewayBehind", "PenstockRequestsWait"]}
    ),
    "late, and gateways start again and again": Case(
        {**TWO, HIGH: "61x40", BEHIND % "g1": "1 stale _ 1 stale _ 1 stale _ 1 stale"}, {7: ["PenstockRequestsWait"]}
    ),
    "late, and a tenant floods": Case(
        {**AT_WORK, HIGH: "61x40", 'penstock_problems{problem="tenant_floods"}': "1x40"},
        {40: ["PenstockRequestsWait", "PenstockTenantFloods"]},
    ),
    "late in a pool without a worker": Case(
        {**AT_WORK, HIGH.replace('pool=""', 'pool="night"'): "61x40", NIGHT: "1x40"}, {40: ["PenstockNoWorker"]}
    ),
    "late in the common pool, and another has no worker": Case(
        {**AT_WORK, HIGH: "61x40", NIGHT: "1x40"}, {40: ["PenstockNoWorker", "PenstockRequestsWait"]}
    ),
    "6 of 100 fail": Case(
        {**AT_WORK, OUTCOMES % "completed": "0+94x90", OUTCOMES % "failed": "0+6x30 186+0x60"},
        {4: [], 10: ["PenstockRequestsFail"], 30: ["PenstockRequestsFail"], 45: []},
    ),
    "4 of 100 fail": Case({**AT_WORK, OUTCOMES % "completed": "0+96x90", OUTCOMES % "expired": "0+4x90"}, {30: []}),
    "a few requests, all fail": Case({**AT_WORK, OUTCOMES % "dead_lettered": "0+1x90"}, {30: []}),
    "requests without a model fail": Case(
        {**AT_WORK, OUTCOMES.replace('"m"', '"none"') % "failed": "0+9x90"}, {30: []}
    ),
    "6 of 100 calls get 503": Case(
        {**AT_WORK, CALLS % ("/v1/requests", "202"): "0+94x90", CALLS % ("/v1/requests", "503"): "0+6x30 186+0x60"},
        {4: [], 10: ["PenstockServerErrors"], 30: ["PenstockServerErrors"], 45: []},
    ),
    "a model fails, and so do calls": Case(
        {**AT_WORK, OUTCOMES % "failed": "0+60x90", CALLS % ("/v1/chat/completions", "502"): "0+60x90"},
        {20: ["PenstockRequestsFail"]},
    ),
    "calls fail, and later a model": Case(
        {**AT_WORK, OUTCOMES % "failed": "0x6 0+60x90", CALLS % ("/v1/chat/completions", "502"): "0+60x90"},
        {8: ["PenstockServerErrors"], 20: ["PenstockRequestsFail"]},
    ),
    "probes get 503": Case({**AT_WORK, CALLS % ("/readyz", "503"): "0+60x90"}, {30: []}),
    "records that were deleted": Case(
        {**AT_WORK, 'penstock_offset_resets_total{reason="records_deleted"}': "0x9 1x90"},
        {9: [], 12: ["PenstockRecordsLost"], 80: []},
    ),
    "records that a worker misses as it starts": Case(
        {**AT_WORK, 'penstock_offset_resets_total{reason="records_deleted"}': "_x9 1x90"},
        {8: [], 9: ["PenstockRecordsLost"], 60: ["PenstockRecordsLost"], 80: []},
    ),
}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("promtool"), *arguments], capture_output=True, text=True, timeout=120, check=False)


def rule_test(name: str, case: Case) -> dict[str, Any]:
    """One in promtool's form: all alerts that fire at each of the moments."""
    expressions = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{minute}m",
            "exp_samples": [
                {"labels": f'{{alertname="{alert}"}}', "value": alerts.count(alert)} for alert in sorted({*alerts})
            ],
        }
        for minute, alerts in case.firing.items()
    ]
    series = [{"series": one, "values": values} for one, values in case.series.items()]
    return {"name": name, "interval": "1m", "input_series": series, "promql_expr_test": expressions}


def test_the_rules_and_the_configuration_for_compose_have_their_form() -> None:
    for form, path in (("rules", RULES), ("config", COMPOSE)):
        done = promtool("check", form, "--lint=all", "--lint-fatal", str(path))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def tested(tmp_path: Path) -> Any:
    def run(cases: Mapping[str, Case]) -> str:
        """What promtool finds wrong."""
        path = tmp_path / "alerts_test.yml"
        tests = [rule_test(name, case) for name, case in cases.items()]
        # Else promtool evaluates the groups in a random order, and what explains an alert fires one look later.
        order = [group["name"] for group in yaml.safe_load(RULES.read_text())["groups"]]
        path.write_text(yaml.safe_dump({"rule_files": [str(RULES)], "group_eval_order": order, "tests": tests}))
        done = promtool("test", "rules", str(path))
        return "" if done.returncode == 0 else done.stdout + done.stderr

    return run


def test_each_alert_fires_and_ends_and_no_other_does(tested: Any) -> None:
    assert not tested(CASES)
    fired = {alert for case in CASES.values() for alerts in case.firing.values() for alert in alerts}
    assert fired == {rule["alert"] for rule in RULE_LIST}


def test_a_wrong_expectation_is_found(tested: Any) -> None:
    wrong = CASES["no gateway"]._replace(firing={12: ["PenstockNoWorker"]})
    assert "PenstockNoGateway" in tested({"wrong": wrong})


def test_each_problem_of_the_console_has_one_alert() -> None:
    table = (DOCS / "reference/http.md").read_text().partition("| `problem` | when |")[2].partition("\n\n")[0]
    problems = [code for row in re.findall(r"^\| (`[^|]*`) \|", table, re.M) for code in re.findall(r"`(\w+)`", row)]
    assert sorted(code for codes in CODES.values() for code in codes) == sorted(problems)


@pytest.mark.parametrize("rule", RULE_LIST, ids=lambda rule: rule["alert"])
def test_each_alert_has_its_entry_in_the_runbook(rule: dict[str, Any]) -> None:
    page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
    headings = re.findall(r"^#+ (\w+)$", (DOCS.parent / page).read_text(), re.M)
    assert anchor == rule["alert"].lower()
    assert rule["alert"] in headings
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}
    assert {"summary", "description"} < rule["annotations"].keys()
