"""The error tree: one class per stable code, each with its HTTP status and whether trying again can help.

PenstockError
 ├── InvalidRequest (invalid, 400)
 │    ├── UnsupportedParameter · UnsupportedTask · ContextLengthExceeded · InvalidCursor
 │    └── ModelNotFound (model_not_found, 404) · UnsupportedMediaType 415
 ├── Unauthenticated 401 · Forbidden 403 · NotFound 404 · Cancelled 409 · Conflict 409 · Gone 410
 ├── TooLarge 413 · InsufficientCapacity 422 · IdempotencyKeyReused 422 · TenantLimit 429
 ├── Overloaded 503 · RegistryUnavailable 503 · StoreUnavailable 503 · SourceUnavailable 502
 ├── BrokerUnavailable 503 (BrokerRefused)
 ├── Expired 504 · ExecutionTimeout 504
 ├── EngineFailed 500 · DeadLettered 500 · StreamRestarted 500 · InternalError 500 · WebhookUndeliverable 502
 └── DecodeError (undecodable, 400): WrongMagic · UnknownSchema · BadAvro · BadJson
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, ClassVar, cast

from penstock.schemas.records import ErrorInfo
from penstock.schemas.texts import encodable, in_one_direction


class RetryKind(StrEnum):
    """What a worker does with an accepted request whose attempt ends with an error."""

    PUT_BACK = "put back"  # what it needs is away or full: it waits, and no attempt is spent
    RETRIED = "retried"  # it runs again after a backoff, and an attempt is spent
    FINAL = "final"  # running it again cannot help


class PenstockError(Exception):
    """Root of all errors that a caller may see. Facts are attributes; the message is for people.

    `cause` is for operators alone: no event, no record of an error and no answer to a caller carries it.
    """

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    type: ClassVar[str] = "server_error"
    retry_kind: ClassVar[RetryKind] = RetryKind.FINAL

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        details: dict[str, Any] | None = None,
        retry_after_s: float | None = None,
        cause: str | None = None,
    ) -> None:
        self.message = in_one_direction(message)
        super().__init__(self.message)
        self.param = param
        self.details = details
        self.retry_after_s = retry_after_s
        self.cause = cause

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors cross the pipe between an engine's process and its worker.
        return _rebuild, (type(self), self.message, self.param, self.details, self.retry_after_s, self.cause)


def _rebuild(
    kind: type[PenstockError],
    message: str,
    param: str | None,
    details: dict[str, Any] | None,
    after: float | None,
    cause: str | None,
) -> PenstockError:
    return kind(message, param=param, details=details, retry_after_s=after, cause=cause)


class InvalidRequest(PenstockError):
    code, http_status, type = "invalid", 400, "invalid_request_error"


class UnsupportedParameter(InvalidRequest):
    code = "unsupported_parameter"


class UnsupportedTask(InvalidRequest):
    code = "unsupported_task"


class UnsupportedMediaType(InvalidRequest):
    code, http_status = "unsupported_media_type", 415


class ContextLengthExceeded(InvalidRequest):
    code = "context_length_exceeded"


class InvalidCursor(InvalidRequest):
    code = "invalid_cursor"


class ModelNotFound(InvalidRequest):
    code, http_status = "model_not_found", 404


class Unauthenticated(PenstockError):
    code, http_status, type = "unauthenticated", 401, "authentication_error"


class Forbidden(PenstockError):
    code, http_status, type = "forbidden", 403, "permission_error"


class NotFound(PenstockError):
    code, http_status, type = "not_found", 404, "invalid_request_error"


class Cancelled(PenstockError):
    code, http_status, type = "cancelled", 409, "cancelled"


def conversation_deleted() -> Cancelled:
    """How a turn ends when its conversation was deleted after it was sent."""
    return Cancelled("its conversation was deleted")


class Conflict(PenstockError):
    code, http_status, type = "conflict", 409, "invalid_request_error"


class Gone(PenstockError):
    code, http_status, type = "gone", 410, "invalid_request_error"


class TooLarge(PenstockError):
    code, http_status, type = "too_large", 413, "invalid_request_error"


class InsufficientCapacity(PenstockError):
    """What can never fit; `details` names `need` and `capacity`, in bytes or tokens as `unit` says."""

    code, http_status, type = "insufficient_capacity", 422, "invalid_request_error"


class IdempotencyKeyReused(PenstockError):
    code, http_status, type = "idempotency_key_reused", 422, "invalid_request_error"


class TenantLimit(PenstockError):
    code, http_status, type, retryable = "tenant_limit", 429, "rate_limit_error", True
    retry_kind = RetryKind.PUT_BACK


class Overloaded(PenstockError):
    code, http_status, type, retryable = "overloaded", 503, "overloaded_error", True
    retry_kind = RetryKind.PUT_BACK


class BrokerUnavailable(PenstockError):
    code, http_status, type, retryable = "broker_unavailable", 503, "overloaded_error", True
    retry_kind = RetryKind.PUT_BACK


class BrokerRefused(BrokerUnavailable):
    """Brokers refuse the connections of this client; `param` names the setting to correct.

    Message and `param` are for operators: answers over HTTP have `PUBLIC` in their place.
    """

    code = "broker_refused"
    PUBLIC: ClassVar[str] = "Kafka refuses the connections of this process"


class RegistryUnavailable(PenstockError):
    code, http_status, type, retryable = "registry_unavailable", 503, "overloaded_error", True
    retry_kind = RetryKind.PUT_BACK


class StoreUnavailable(PenstockError):
    """A store of artifacts did not take or give what it was asked for; the message names the place and the cause."""

    code, http_status, type, retryable = "store_unavailable", 503, "overloaded_error", True
    retry_kind = RetryKind.PUT_BACK


class SourceUnavailable(PenstockError):
    """Another server, from which something was to be fetched for a request, was not reached or could not answer."""

    code, http_status, type, retryable = "source_unavailable", 502, "server_error", True
    retry_kind = RetryKind.RETRIED


class Expired(PenstockError):
    code, http_status, type = "expired", 504, "timeout_error"


class ExecutionTimeout(PenstockError):
    code, http_status, type = "execution_timeout", 504, "timeout_error"
    retry_kind = RetryKind.RETRIED


class EngineFailed(PenstockError):
    code, http_status = "engine_failed", 500
    retry_kind = RetryKind.RETRIED


class DeadLettered(PenstockError):
    code, http_status = "dead_lettered", 500


class StreamRestarted(PenstockError):
    code, http_status, retryable = "stream_restarted", 500, True


class InternalError(PenstockError):
    code, http_status = "internal", 500


class WebhookUndeliverable(PenstockError):
    """Nobody took a webhook: the reason of its dead letter."""

    code, http_status = "webhook_undeliverable", 502


class DecodeError(PenstockError):
    """Bytes that are not a record of ours; its subclasses say why."""

    code, http_status, type = "undecodable", 400, "invalid_request_error"


class WrongMagic(DecodeError):
    code = "wrong_magic"


class UnknownSchema(DecodeError):
    code = "unknown_schema"


class BadAvro(DecodeError):
    code = "bad_avro"


class BadJson(DecodeError):
    code = "bad_json"


def _tree(root: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


ERRORS_BY_CODE: dict[str, type[PenstockError]] = {kind.code: kind for kind in reversed(list(_tree(PenstockError)))}
ERRORS_BY_CODE["internal"] = InternalError


def to_error_record(error: BaseException) -> ErrorInfo:
    """What is on a topic for an error. Of a foreign one only the type is named: its text may hold anything."""
    if not isinstance(error, PenstockError):
        error = InternalError(f"internal error ({type(error).__name__})")
    details = None if error.details is None else json.dumps(error.details, default=str)
    return ErrorInfo(
        code=error.code,
        message=encodable(error.message),
        type=error.type,
        param=None if error.param is None else encodable(error.param),
        retryable=error.retryable,
        details=details,
    )


def _details(info: ErrorInfo) -> dict[str, Any] | None:
    """The details as an object, whatever their writer put there: an outcome must stay readable."""
    if not info.details:
        return None
    try:
        found: Any = json.loads(info.details)
    except (ValueError, RecursionError):
        found = info.details
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {"text": found}


def from_error_record(info: ErrorInfo) -> PenstockError:
    """The typed error again; a code of a newer release becomes InternalError with that code in its details."""
    details = _details(info)
    kind = ERRORS_BY_CODE.get(info.code)
    if kind is None:
        return InternalError(info.message, param=info.param, details={**(details or {}), "code": info.code})
    return kind(info.message, param=info.param, details=details)


def error_body(error: BaseException, request_id: str | None = None) -> dict[str, Any]:
    """The one JSON shape of errors."""
    info = to_error_record(error)
    return error_record_body(info, request_id)


def error_record_body(info: ErrorInfo, request_id: str | None = None) -> dict[str, Any]:
    """The one JSON shape of errors, from an event's error record."""
    is_public = info.code != BrokerRefused.code
    return {
        "error": {
            "message": info.message if is_public else BrokerRefused.PUBLIC,
            "type": info.type,
            "code": info.code,
            "param": info.param if is_public else None,
            "request_id": request_id,
            "retryable": info.retryable,
            "details": _details(info),
        }
    }
