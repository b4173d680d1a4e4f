"""The record of what operators do: what of a call is kept, and how the topic is read in pages."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import CODEC
from penstock.common.reader import RawMessage
from penstock.gateway.access import audit_log
from penstock.gateway.access.audit_log import AuditLog, audit_event, audit_json
from penstock.gateway.edge.rules import Rules
from penstock.gateway.limits.callers import Caller
from penstock.schemas.records import AuditEvent

KEPT: list[tuple[str, str, Any]] = [
    ("", "", None),
    ("", "no json", None),
    ("?ticket=a&api-key=b&limit=3", "", {"query": {"ticket": "***", "api-key": "***", "limit": "3"}}),
    ("?id=of-query", '{"id": "of-body"}', {"query": {"id": "of-query"}, "body": {"id": "of-body"}}),
    ("", '{"a": {"access_key": "x", "Private-Key": "x", "passphrase": "x", "env": {"A": "x"}, "token": "x"}}',
     {"body": {"a": dict.fromkeys(("access_key", "Private-Key", "passphrase", "env", "token"), "***")}}),
    ("", '{"tokens_per_minute": 5, "api_key": null, "name": "hf://me:pw@host"}',
     {"body": {"tokens_per_minute": 5, "api_key": None, "name": "hf://***@host"}}),
    ("", r'{"\ud800": "\udfff", "n": [NaN, Infinity, 1.5]}', {"body": {"�": "�", "n": ["nan", "inf", 1.5]}}),
    ("", json.dumps({"ids": [*range(150)]}), {"body": {"ids": [*range(100), "… 50 more"]}}),
    ("", json.dumps({"ids": [*range(101)]}), {"body": {"ids": [*range(101)]}}),
    ("", json.dumps({"text": "x" * 300}), {"body": {"text": "x" * 200}}),
]  # fmt: skip


@pytest.mark.parametrize(("query", "body", "kept"), KEPT)
def test_what_is_kept_of_a_call(query: str, body: str, kept: Any) -> None:
    scope = {"method": "POST", "path": "/v1/admin/x", "query_string": query[1:].encode()}
    event = audit_event(scope, Rules(scope="admin"), Caller(), body.encode())
    shown = audit_json(CODEC.decode(CODEC.encode(event), AuditEvent), 7)
    assert shown["parameters"] == kept
    json.dumps(shown, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize("recorded", [r'{"x": "\ud800", "y": NaN}', "no json", "[" * 5_000, r'{"a\udfff": Infinity}'])
def test_a_record_of_another_release_is_shown(recorded: str) -> None:
    event = AuditEvent(id="a", at=1, action="x", parameters=recorded, target="t")
    json.dumps(audit_json(event, 7), ensure_ascii=False, allow_nan=False).encode()


def test_a_long_record_is_cut() -> None:
    body = json.dumps({f"name{number}": "x" * 190 for number in range(50)}).encode()
    event = audit_event({"method": "POST", "path": "/"}, Rules(scope="admin"), Caller(), body)
    assert len(audit_json(event, 0)["parameters"]["cut"]) == 4_000


def test_a_filter_that_matches_little_goes_through_all(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [  # each action has its record and, behind it, that of its outcome
        AuditEvent(id=str(number), at=number, action=action, status=status)
        for number, action in enumerate(["rare", *["often"] * 40, "rare", "rare"])
        for status in (None, 200)
    ]
    records = [RawMessage("audit", 0, at, 1, b"", CODEC.encode(event)) for at, event in enumerate(events)]
    kafka, tp = Mock(**{"names.audit": "audit", "partition_counts.return_value": {"audit": 1}}), ("audit", 0)
    kafka.begin_offsets.return_value, kafka.end_offsets.return_value = {tp: 0}, {tp: len(records)}
    monkeypatch.setattr(audit_log, "admin", kafka)
    monkeypatch.setattr(audit_log, "read_with", lambda _, ranges, __: records[slice(*ranges[tp])])
    monkeypatch.setattr(audit_log, "make_consumer", made := Mock(return_value=kafka))
    monkeypatch.setattr(audit_log, "CHUNK", 4)
    monkeypatch.setattr(audit_log, "MOST_READ", 10)
    log = AuditLog(Mock(), kafka, CODEC)
    pages: list[list[int]] = []
    before: int | None = None
    while True:
        found, before = log.read(before, 1, None, lambda event: event.action == "rare")
        pages.append([offset for offset, _ in found])
        assert all(event.status == 200 for _, event in found)
        if before is None:
            break
    assert pages[:2] == [[84], [82]]
    assert pages[-1] == [0]
    assert {len(page) for page in pages[2:-1]} == {0}
    assert made.call_count == kafka.close.call_count == len(pages)
