"""From a Kafka record to a request or a reason why it is none: decoding, origin, attempt, class. No I/O, no waiting.

A record that starts with magic 0 is Avro, one that starts with `{` is the JSON form; all else is poison.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.processors.core.arrivals import Poison, Taken
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    DecodeError,
    InternalError,
    InvalidRequest,
    PenstockError,
    RegistryUnavailable,
    TooLarge,
    UnsupportedParameter,
    UnsupportedTask,
)
from penstock.schemas.ids import check_request_id, check_tenant, derived_request_id
from penstock.schemas.records import InferenceRequest, Origin
from penstock.schemas.requests import DEFAULT_LIMITS, Limits, parse_request_bytes, validate_request
from penstock.schemas.topics import (
    HEADER_ATTEMPT,
    HEADER_ORIGIN,
    TopicNames,
    conversation_key,
    partition_for,
    priority_class,
)

logger = logging.getLogger(__name__)

Headers = Sequence[tuple[str, bytes]]

MAX_ATTEMPT = 1_000


class Intake:
    """Reads records; raises RegistryUnavailable, which is no poison: the caller pauses and offers the record again."""

    def __init__(self, codec: Codec, names: TopicNames, partitions: Mapping[str, int], limits: Limits = DEFAULT_LIMITS):
        self._codec = codec
        self._partitions = partitions
        self._limits = limits
        self._class_of = {topic: names.class_of_topic(topic) for topic in partitions}

    def read(
        self, topic: str, partition: int, offset: int, append_ms: int, headers: Headers, value: bytes | None
    ) -> Taken | Poison:
        """What the record is. Whatever is wrong with it, this worker lives on: its next life would meet it again."""
        origin = Origin(topic=topic, partition=partition, offset=offset, append_time_ms=append_ms)
        attempt = 1
        try:
            if headers:
                origin, attempt = _from_headers(headers, origin)
            return self._read(topic, partition, offset, append_ms, origin, attempt, value)
        except RegistryUnavailable:
            raise
        except Exception as error:
            logger.exception("intake.unreadable topic=%s partition=%d offset=%d", topic, partition, offset)
            reason = InternalError(f"{type(error).__name__} while the record was read")
            return Poison(reason=reason, request_id=None, tenant=None, origin=origin, attempt=attempt)

    def _read(
        self,
        topic: str,
        partition: int,
        offset: int,
        append_ms: int,
        origin: Origin,
        attempt: int,
        value: bytes | None,
    ) -> Taken | Poison:
        try:
            request = self._decode(value, topic, partition, offset, append_ms)
        except (DecodeError, InvalidRequest, TooLarge) as error:
            request_id, tenant = _identity_of(value, topic, partition, offset, append_ms)
            if isinstance(error, UnsupportedParameter | UnsupportedTask) and request_id is not None:
                stub = _stub(request_id, tenant or "default", append_ms)
                return self._taken(stub, topic, partition, origin, attempt, error, value)
            return Poison(reason=error, request_id=request_id, tenant=tenant, origin=origin, attempt=attempt)
        try:
            validate_request(request, self._limits)
        except (UnsupportedParameter, UnsupportedTask) as error:
            return self._taken(request, topic, partition, origin, attempt, error, value)
        except PenstockError as error:
            request_id, tenant = _checked(request.request_id, request.tenant, None)
            return Poison(reason=error, request_id=request_id, tenant=tenant, origin=origin, attempt=attempt)
        return self._taken(request, topic, partition, origin, attempt, None, value)

    def _decode(self, value: bytes | None, topic: str, partition: int, offset: int, append_ms: int) -> InferenceRequest:
        if value and value[0] == 0x7B:  # {
            made_up = derived_request_id(topic, partition, offset, append_ms)
            return parse_request_bytes(value, request_id=made_up, now_ms=append_ms, limits=self._limits)
        return self._codec.decode(value or b"", InferenceRequest)

    def _taken(
        self,
        request: InferenceRequest,
        topic: str,
        partition: int,
        origin: Origin,
        attempt: int,
        error: PenstockError | None,
        value: bytes | None,
    ) -> Taken:
        line = belongs_on = None
        if request.conversation_id is not None and error is None:
            line = conversation_key(request.tenant, request.conversation_id)
            wanted = partition_for(line.encode(), self._partitions.get(topic, 1))
            belongs_on = None if wanted == partition else wanted
        ttl_ms = request.ttl_ms if request.ttl_ms is not None else self._limits.default_ttl_ms
        return Taken(
            request=request,
            origin=origin,
            klass=self._class_of.get(topic) or priority_class(request.priority),
            line=line,
            attempt=attempt,
            deadline_ms=origin.append_time_ms + ttl_ms,
            error=error,
            belongs_on=belongs_on,
            cost=cost_of(request),
            size_bytes=len(value or b""),
        )


def cost_of(request: InferenceRequest) -> int:
    """Estimated tokens: of the prompt by its length, and of the answer as far as its caller limits it. At least 1."""
    payload = request.payload
    texts = [payload.get("prompt"), payload.get("input")]
    texts += [message.get("content") for message in payload.get("messages") or ()]
    letters = sum(len(text) for text in texts if isinstance(text, str))
    letters += sum(len(text) for text in payload.get("input") or () if isinstance(text, str))
    return letters // 4 + (payload.get("max_tokens") or 0) + 1


def origin_header(origin: Origin) -> tuple[str, bytes]:
    """The header that carries a record's first place when it is put on another partition."""
    return HEADER_ORIGIN, f"{origin.topic}/{origin.partition}/{origin.offset}/{origin.append_time_ms}".encode()


def _from_headers(headers: Headers, origin: Origin) -> tuple[Origin, int]:
    """Origin and attempt as the headers have them; the record's own where a header is not ours to trust."""
    attempt = 1
    for name, value in headers:
        try:
            if name == HEADER_ATTEMPT:
                attempt = _number(value, 1, MAX_ATTEMPT)
            elif name == HEADER_ORIGIN:
                topic, partition, offset, append_ms = value.decode().rsplit("/", 3)
                origin = Origin(
                    topic=topic,
                    partition=_number(partition, 0, 2**31 - 1),
                    offset=_number(offset, 0, 2**63 - 1),
                    append_time_ms=_number(append_ms, 0, 2**63 - 1),
                )
        except ValueError:
            continue
    return origin, attempt


def _number(value: bytes | str, low: int, high: int) -> int:
    """Raises ValueError for what is no number from `low` to `high`."""
    if len(value) > 20 or not low <= (number := int(value)) <= high:
        raise ValueError("out of range")
    return number


def _checked(request_id: object, tenant: object, otherwise: str | None) -> tuple[str | None, str]:
    """An id and a tenant that can be published: where they are not valid, the id given instead and the default one."""
    try:
        known: str | None = check_request_id(request_id)
    except InvalidRequest:
        known = otherwise
    try:
        return known, check_tenant(tenant)
    except InvalidRequest:
        return known, "default"


def _identity_of(
    value: bytes | None, topic: str, partition: int, offset: int, append_ms: int
) -> tuple[str | None, str | None]:
    """(request_id, tenant) of a JSON object that is not a valid request, so that who waits for it hears of it."""
    if not value or value[0] != 0x7B:
        return None, None
    try:
        parsed: Any = json.loads(value)
    except (ValueError, RecursionError):
        return None, None
    found = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else {}
    made_up = derived_request_id(topic, partition, offset, append_ms)
    return _checked(found.get("request_id"), found.get("tenant"), made_up)


def _stub(request_id: str, tenant: str, created_at: int) -> InferenceRequest:
    """What is left of a request that cannot be run: enough to say so."""
    return InferenceRequest(request_id=request_id, tenant=tenant, task="text_generation", created_at=created_at)
