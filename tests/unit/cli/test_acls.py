"""`penstock topics acls`: what it prints, as Kafka's tool and Strimzi take it, is the table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from kit.cli import invoke
from penstock.cli.rights import Installation, Right, Role
from penstock.schemas.topics import TopicNames

CONFIG = """
[kafka]
topic_prefix = "p."
[worker]
group_id = "crew"
[topics]
conversation_layout = "sharded"
[[queues]]
topic = "jobs"
result_topic = "answers"
"""
INSTALLATION = Installation(
    names=TopicNames("p."),
    groups={"worker": "crew", "conversations": "copies,others"},
    sharded=True,
    queues=["jobs"],
    queue_results=["answers"],
)
ARGUMENTS = ("topics", "acls", "--group", "copies", "--group", "others")
Printed = set[tuple[str, str, str, bool, str]]


@pytest.fixture(autouse=True)
def _config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)
    Path("penstock.toml").write_text(CONFIG)


def expected(*, cluster_name: bool = True) -> Printed:
    return {
        (f"User:penstock-{role}", *_resource(right, named=cluster_name), right.operation)
        for role in Role
        for right in INSTALLATION.rights(role)
    }


def _resource(right: Right, *, named: bool) -> tuple[str, str, bool]:
    return right.kind, right.name if named or right.kind != "cluster" else "", right.prefixed


def operation(camel: str) -> str:
    return "".join(f"_{one}" if one.isupper() else one.upper() for one in camel).strip("_").upper()


def test_json_has_the_whole_table() -> None:
    found = json.loads(invoke(*ARGUMENTS, "--json").stdout)
    printed = {
        (one["principal"], one["kind"], one["name"], one["pattern"] == "prefixed", one["operation"]) for one in found
    }
    assert printed == expected()
    assert len(found) == len(printed)


def test_a_shell_runs_the_commands(tmp_path: Path) -> None:
    """With a tool that writes down its arguments."""
    tool = tmp_path / "kafka-acls.sh"
    tool.write_text('#!/bin/sh\necho "$@"\n')
    tool.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "KAFKA_ACLS": str(tool), "BOOTSTRAP": "k:1", "CONFIG": "admin.properties"}
    script = invoke(*ARGUMENTS).stdout
    done = subprocess.run(["sh", "-eu", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
    printed: Printed = set()
    for line in done.stdout.splitlines():
        words = line.split()
        assert words[:6] == ["--bootstrap-server", "k:1", "--command-config", "admin.properties", "--add", "--force"]
        kind = next(word for word in ("topic", "group", "cluster") if f"--{word}" in words)
        name = "" if kind == "cluster" else words[words.index(f"--{kind}") + 1]
        operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
        principal = words[words.index("--allow-principal") + 1]
        printed |= {(principal, kind, name, "prefixed" in words, operation(one)) for one in operations}
    assert printed == expected(cluster_name=False)


def test_strimzi_users_hold_the_same_rules() -> None:
    printed: Printed = set()
    for user in yaml.safe_load_all(invoke(*ARGUMENTS, "--as", "strimzi", "--cluster", "main").stdout):
        assert user["metadata"]["labels"] == {"strimzi.io/cluster": "main"}
        for rule in user["spec"]["authorization"]["acls"]:
            where = rule["resource"]
            found = (where["type"], where.get("name", ""), where.get("patternType") == "prefix")
            printed |= {(f"User:{user['metadata']['name']}", *found, operation(one)) for one in rule["operations"]}
    assert printed == expected(cluster_name=False)


def test_one_role_and_principal_and_no_bridge_without_queues() -> None:
    said = invoke("topics", "acls", "--role", "producer", "--principal", "User:shop").stdout
    assert "# producer" in said
    assert "# gateway" not in said
    assert "allow User:shop --operation Read --topic p.inference.model\n" in said
    assert "# bridge" in invoke("topics", "acls").stdout
    Path("penstock.toml").write_text("")
    assert "# bridge" not in invoke("topics", "acls").stdout
    assert invoke("topics", "acls", "--role", "nobody").exit_code == 2
