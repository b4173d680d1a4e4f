"""The tree of errors: its codes and statuses are a promise, and errors survive topics and pipes."""

from __future__ import annotations

import ast
import json
import pickle
from pathlib import Path

import pytest

from penstock.schemas.errors import (
    ERRORS_BY_CODE,
    BrokerRefused,
    DecodeError,
    EngineFailed,
    InsufficientCapacity,
    InternalError,
    InvalidRequest,
    PenstockError,
    error_body,
    error_record_body,
    from_error_record,
    to_error_record,
)
from penstock.schemas.records import ErrorInfo

# code → (HTTP status, retryable, type)
TABLE = {
    "invalid": (400, False, "invalid_request_error"),
    "unsupported_parameter": (400, False, "invalid_request_error"),
    "unsupported_task": (400, False, "invalid_request_error"),
    "context_length_exceeded": (400, False, "invalid_request_error"),
    "invalid_cursor": (400, False, "invalid_request_error"),
    "undecodable": (400, False, "invalid_request_error"),
    "wrong_magic": (400, False, "invalid_request_error"),
    "unknown_schema": (400, False, "invalid_request_error"),
    "bad_avro": (400, False, "invalid_request_error"),
    "bad_json": (400, False, "invalid_request_error"),
    "unauthenticated": (401, False, "authentication_error"),
    "forbidden": (403, False, "permission_error"),
    "not_found": (404, False, "invalid_request_error"),
    "model_not_found": (404, False, "invalid_request_error"),
    "cancelled": (409, False, "cancelled"),
    "conflict": (409, False, "invalid_request_error"),
    "gone": (410, False, "invalid_request_error"),
    "too_large": (413, False, "invalid_request_error"),
    "insufficient_capacity": (422, False, "invalid_request_error"),
    "idempotency_key_reused": (422, False, "invalid_request_error"),
    "tenant_limit": (429, True, "rate_limit_error"),
    "engine_failed": (500, False, "server_error"),
    "dead_lettered": (500, False, "server_error"),
    "stream_restarted": (500, True, "server_error"),
    "internal": (500, False, "server_error"),
    "overloaded": (503, True, "overloaded_error"),
    "broker_unavailable": (503, True, "overloaded_error"),
    "broker_refused": (503, True, "overloaded_error"),
    "registry_unavailable": (503, True, "overloaded_error"),
    "store_unavailable": (503, True, "overloaded_error"),
    "expired": (504, False, "timeout_error"),
    "execution_timeout": (504, False, "timeout_error"),
}


def test_the_table_is_complete() -> None:
    found = {code: (kind.http_status, kind.retryable, kind.type) for code, kind in ERRORS_BY_CODE.items()}
    assert all(issubclass(kind, PenstockError) for kind in ERRORS_BY_CODE.values())
    assert {code: found.get(code) for code in TABLE} == TABLE
    # Other rooms may add subclasses, which keep their parent's code or bring one of their own.
    assert ERRORS_BY_CODE["internal"] is InternalError
    assert ERRORS_BY_CODE["invalid"] is InvalidRequest
    assert ERRORS_BY_CODE["undecodable"] is DecodeError


@pytest.mark.parametrize("code", TABLE)
def test_errors_come_back_from_topics_and_pipes(code: str) -> None:
    error = ERRORS_BY_CODE[code]("what happened", param="payload.x", details={"need": 2}, retry_after_s=3)
    info = to_error_record(error)
    assert (info.code, info.type, info.retryable) == (code, error.type, error.retryable)
    for again in (from_error_record(ErrorInfo.from_dict(info.to_dict())), pickle.loads(pickle.dumps(error))):
        assert type(again) is type(error)
        assert (again.message, again.param, again.details) == ("what happened", "payload.x", {"need": 2})
    assert pickle.loads(pickle.dumps(error)).retry_after_s == 3


def test_the_cause_for_operators_crosses_a_pipe_and_is_on_no_record() -> None:
    error = EngineFailed("m could not be loaded", details={"need": 2}, cause="OSError: model.safetensors is missing")
    assert pickle.loads(pickle.dumps(error)).cause == "OSError: model.safetensors is missing"
    for told in (to_error_record(error).to_dict(), error_body(error)):
        assert "safetensors" not in json.dumps(told)
    assert from_error_record(to_error_record(error)).cause is None


def test_a_newer_releases_code_is_internal() -> None:
    error = from_error_record(ErrorInfo(code="quota_spent", message="m", type="t", details='{"left": 0}'))
    assert type(error) is InternalError
    assert error.details == {"left": 0, "code": "quota_spent"}


def test_of_a_foreign_error_only_the_type_is_told() -> None:
    info = to_error_record(KeyError("a secret prompt"))
    assert info.code == "internal"
    assert "KeyError" in info.message
    assert "secret" not in json.dumps(info.to_dict())


def test_the_one_json_shape() -> None:
    details = {"need": 2, "capacity": 1, "unit": "bytes"}
    known = {"message": "too big", "type": "invalid_request_error", "code": "insufficient_capacity"}
    error = {**known, "param": None, "request_id": "r", "retryable": False, "details": details}
    assert error_body(InsufficientCapacity("too big", details=details), "r") == {"error": error}


@pytest.mark.parametrize(("details", "told"), [("{no json", "{no json"), ("[1]", [1]), ('"text"', "text")])
def test_details_of_any_text_do_not_hide_the_outcome(details: str, told: object) -> None:
    for code in ("invalid", "of_a_newer_release"):
        info = ErrorInfo(code=code, message="m", type="t", details=details)
        assert error_record_body(info)["error"]["details"] == {"text": told}
        assert (from_error_record(info).details or {})["text"] == told


def test_only_operators_see_why_brokers_refuse_a_process() -> None:
    error = BrokerRefused('Kafka at kafka:9093 refuses this client; check kafka.security."sasl.password"', param="x")
    shown = error_body(error)["error"]
    assert (shown["code"], shown["message"], shown["param"]) == ("broker_refused", BrokerRefused.PUBLIC, None)


def test_no_exception_is_frozen() -> None:
    """Context managers set the traceback of what passes through them: a frozen one raises TypeError there."""
    roots = [
        Path(__file__).parents[3] / room for room in ("schemas", "common", "producers", "processors", "gateway", "cli")
    ]
    found = [
        f"{path.name}: {one.name}"
        for root in roots
        for path in root.rglob("*.py")
        for one in ast.walk(ast.parse(path.read_text()))
        if isinstance(one, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Exception", "Error")) for base in one.bases)
        and any("frozen=True" in ast.unparse(mark) or ast.unparse(mark) == "fixed" for mark in one.decorator_list)
    ]
    assert found == []


def test_a_message_shows_what_would_turn_the_text_behind_a_name_around() -> None:
    error = InvalidRequest("the model a\u202eb\u2066 is not served here")
    assert error.message == str(error) == r"the model a\u202eb\u2066 is not served here"
