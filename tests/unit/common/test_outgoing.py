"""Headers of what goes out: what the value is, CloudEvents, and the caller's trace."""

from __future__ import annotations

import re
from typing import Any

import pytest

from penstock.common.outgoing import control_record, request_record, valid_traceparent
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ControlCommand, InferenceRequest
from penstock.schemas.topics import TopicNames

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NAMES = TopicNames("p-")


def test_headers_of_requests_and_commands() -> None:
    turn: dict[str, Any] = {"task": "text_generation", "text_generation": {"prompt": "x"}, "conversation_id": "c1"}
    request = InferenceRequest(request_id="r", tenant="acme", priority=2, pool="big", created_at=1, **turn)
    command = ControlCommand(kind="cancel", request_id="r", tenant="default", created_at=1)
    asked = request_record(request, NAMES, default_codec(), source="s", traceparent=TRACE)
    sent = control_record(command, NAMES, default_codec(), source="s")
    common = {"content-type": b"application/avro", "ce_specversion": b"1.0", "ce_source": b"s"}
    kind = {"ce_id": b"r", "ce_type": b"penstock.v1.InferenceRequest", "traceparent": TRACE.encode()}
    assert dict(asked.headers) == {**common, **kind}
    assert (asked.topic, asked.key) == ("p-inference.request.high.big", b"acme.c1")
    assert default_codec().decode(asked.value, InferenceRequest).request_id == "r"
    assert dict(sent.headers) == {**common, "ce_id": b"r/cancel", "ce_type": b"penstock.v1.ControlCommand"}
    assert (sent.topic, sent.key) == ("p-inference.control", b"r/cancel")


def test_the_trace_of_a_caller_is_kept() -> None:
    assert valid_traceparent(TRACE) == TRACE
    assert valid_traceparent("01" + TRACE[2:] + "-more") == "01" + TRACE[2:] + "-more"


@pytest.mark.parametrize(
    "given",
    [
        None, "", "nonsense", TRACE.upper(), TRACE + "-more", "ff" + TRACE[2:], "00-" + "0" * 32 + TRACE[35:],
        TRACE[:36] + "0" * 16 + "-01", TRACE + "\n", "01" + TRACE[2:] + "-" + "x" * 300,
    ],
)  # fmt: skip
def test_an_invalid_trace_is_replaced(given: str | None) -> None:
    new = valid_traceparent(given)
    assert new != given
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", new)
    assert valid_traceparent(given) != new


def test_a_deletion_is_keyed_by_its_conversation() -> None:
    """The later of two replaces the earlier in the compacted topic, and no other command."""
    fields: dict[str, Any] = {"kind": "delete_conversation", "request_id": "", "created_at": 1, "conversation_id": "c1"}
    keys = [
        control_record(ControlCommand(tenant=tenant, **fields), TopicNames(), default_codec()).key
        for tenant in ("default", "acme")
    ]
    assert keys == [b"c1/delete_conversation", b"acme.c1/delete_conversation"]
