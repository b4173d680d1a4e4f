"""Clients of Kafka write their log lines where logging says: never to the terminal of whoever runs a command."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
CLIENTS = {"Consumer", "Producer", "AdminClient"}


def made(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that make a client of confluent_kafka, whose first argument is its configuration."""
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("confluent_kafka")
        for name in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLIENTS & imported:
            yield node


def test_each_client_of_kafka_is_given_a_logger() -> None:
    rooms = ("common", "producers", "processors", "gateway", "cli")
    files = [path for room in rooms for path in ROOT.glob(f"{room}/**/*.py")]
    calls = [(path, call) for path in files for call in made(ast.parse(path.read_text()))]
    assert len(calls) > 10
    bare = [(path, call) for path, call in calls if "logger" not in {keyword.arg for keyword in call.keywords}]
    assert [f"{path.relative_to(ROOT)}:{call.lineno}" for path, call in bare] == []
