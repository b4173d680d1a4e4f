"""The AsyncAPI document by AsyncAPI's official parser, with its parser of Avro schemas."""

from __future__ import annotations

import functools
import json
import operator
import subprocess
from pathlib import Path
from typing import Any, get_args

from penstock.gateway.document.asyncapi import asyncapi
from penstock.gateway.queues.settings import QueueFormat, QueueSection
from stock_clients import installed_by_npm, tool

Json = dict[str, Any]
PARSER = "@asyncapi/parser@3.6.6 @asyncapi/avro-schema-parser@3.1.0"
SCRIPT = Path(__file__).with_name("parse.js")
PARSE_LIMIT_S = 300
REFERENCE = Path(__file__).parents[3] / "docs/reference/asyncapi.json"


def parsed(*paths: Path) -> list[Json]:
    program = installed_by_npm(PARSER, SCRIPT) / SCRIPT.name
    command = [tool("node"), program, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PARSE_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


INVALID: dict[str, tuple[tuple[str, ...], Any]] = {
    "asyncapi-document-resolved channels/model/messages/model/payload": (
        ("components", "messages", "model", "payload", "schema"),
        {"type": "record"},
    ),
    "invalid-ref operations/sendModel/channel": (("operations", "sendModel", "channel"), {"$ref": "#/channels/none"}),
}
"""By how a problem that the parser finds begins: what is put where."""


def part_of(document: Json) -> Json:
    """One topic of it, which is parsed in no time."""
    messages = {"model": document["components"]["messages"]["model"]}
    made = {**document, "components": {**document["components"], "schemas": {}, "messages": messages}}
    for kind, name in {"channels": "model", "operations": "sendModel"}.items():
        made[kind] = {name: document[kind][name]}
    return made


def test_the_official_parser_takes_it_and_refuses_invalid_ones(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.json" for number in range(2 + len(INVALID))]
    paths[0].write_text(REFERENCE.read_text())
    queues = [QueueSection(topic=form, format=form, result_topic="answers") for form in get_args(QueueFormat)]
    paths[1].write_text(json.dumps(asyncapi("team-", queues, webhooks=True)))
    for path, (place, value) in zip(paths[2:], INVALID.values(), strict=True):
        changed = part_of(json.loads(REFERENCE.read_text()))
        functools.reduce(operator.getitem, place[:-1], changed)[place[-1]] = value
        path.write_text(json.dumps(changed))
    valid, configured, *invalid = parsed(*paths)
    assert valid["problems"] == configured["problems"] == []
    assert {"receiveQueue-llm-d", "sendAnswers-answers", "sendDelivery"} < set(configured["operations"])
    assert set(valid["operations"]) == json.loads(REFERENCE.read_text())["operations"].keys()
    assert valid["schemas"] > 60, "the Avro schemas were parsed too"
    for problem, one in zip(INVALID, invalid, strict=True):
        assert [text for text in one["problems"] if text.startswith(problem)], one["problems"]
