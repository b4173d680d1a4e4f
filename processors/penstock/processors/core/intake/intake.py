"""From a Kafka record to a request or a reason why it is none: decoding, origin, attempt, class. No I/O, no waiting.

A record that starts with magic 0 is Avro, a JSON object is the JSON form; all else is poison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.core.intake.pools import Pools
from penstock.schemas.aliases import identity
from penstock.schemas.codec import HEADER_SCHEMA_ID, NO_HEADER_IDS, SCHEMA_IDS, Codec, head_of_any_version
from penstock.schemas.costs import estimated_cost
from penstock.schemas.errors import (
    DecodeError,
    InternalError,
    InvalidRequest,
    PenstockError,
    RegistryUnavailable,
    TooLarge,
    UnsupportedParameter,
    UnsupportedTask,
    WrongMagic,
)
from penstock.schemas.ids import check_request_id, check_tenant
from penstock.schemas.json_records import json_text, legible_fields, object_in
from penstock.schemas.labels import CORRELATION_ID, NO_LABELS, Labels, labels_of
from penstock.schemas.lifetimes import check_start, deadline_of, with_header
from penstock.schemas.origins import first_place, made_up_id, number_in
from penstock.schemas.records import InferenceRequest, Origin
from penstock.schemas.requests import (
    check_callback_url,
    parse_request_bytes,
    prepare_validation,
    validate_request,
)
from penstock.schemas.tasks import takes_turn
from penstock.schemas.topics import (
    HEADER_ATTEMPT,
    TopicNames,
    conversation_key,
    kind_of_topic,
    partition_for,
    priority_class,
)

Headers = Sequence[tuple[str, bytes | None]]

_IDENTITIES = ("request_id", "tenant"), ("request_id",)
"""Fields that name the owner of a record: as many as can be read."""
MAX_ATTEMPT = 1_000
ANY_VERSION = bytes(1) + SCHEMA_IDS["InferenceRequest"][-1].to_bytes(4, "big")
"""Makes a body without its id legible up to the fields with which all versions begin."""
CLOCKS_DIFFER_MS = 5_000
"""By so much at most the clocks of a worker and of the broker are taken to differ."""


class Intake:
    """Reads records; raises RegistryUnavailable, which is no poison: the caller pauses and offers the record again."""

    def __init__(
        self,
        codec: Codec,
        names: TopicNames,
        partitions: Mapping[str, int],
        pools: Pools | None = None,
    ) -> None:
        self._codec = codec
        self._heads = {names: codec.head(InferenceRequest, *names) for names in _IDENTITIES}
        self._pools = pools
        self._partitions = dict(partitions)
        self._counted_at_ms = float("-inf")
        prepare_validation()  # not at the first record that needs it
        self._class_of = {topic: names.class_of_topic(topic) for topic in partitions}

    def learn_partitions(self, counts: Mapping[str, int], asked_at_ms: int) -> dict[str, int]:
        """How many partitions topics have, as the broker answered a question of that wall-clock time.

        Returns the former counts of those that changed.
        """
        known = self._partitions
        former = {topic: known[topic] for topic in known.keys() & counts.keys() if known[topic] != counts[topic]}
        self._partitions |= {topic: counts[topic] for topic in former}
        self._counted_at_ms = asked_at_ms
        return former

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        append_ms: int,
        headers: Headers,
        value: bytes | None,
        key: bytes | None = None,
    ) -> Taken | Poison:
        """What the record is. Whatever is wrong with it, this worker lives on: its next life would meet it again."""
        origin = Origin(topic=topic, partition=partition, offset=offset, append_time_ms=append_ms)
        place = origin
        attempt = 1
        try:
            size = len(value or b"") + len(key or b"")
            if headers:
                origin, attempt = first_place(headers, place), _attempt_in(headers)
                size += sum(len(name) + len(content or b"") for name, content in headers)
            found = self._read(place, origin, attempt, value, size)
            if isinstance(found, Poison) and any(name == HEADER_SCHEMA_ID for name, _ in headers):
                return self._without_id(found, value or b"")
            return found if isinstance(found, Poison) or not headers else self._with_start(found, headers)
        except RegistryUnavailable:
            raise
        except Exception as error:
            reason = InternalError(f"{type(error).__name__} while the record was read")
            return Poison(reason=reason, request_id=None, tenant=None, origin=origin, attempt=attempt, fault=error)

    def _read(self, place: Origin, origin: Origin, attempt: int, value: bytes | None, size: int) -> Taken | Poison:
        """`place` is the record's own, `origin` that of its first one."""
        try:
            if (text := json_text(value)) is not None:  # validated while it is parsed
                request = parse_request_bytes(
                    text,
                    request_id=partial(made_up_id, origin),
                    now_ms=place.append_time_ms,
                    topic_kind=kind_of_topic(place.topic),
                )
                return self._taken(request, place, origin, attempt, None, size)
            request = self._codec.decode(value or b"", InferenceRequest)
        except (DecodeError, InvalidRequest, TooLarge) as error:
            request_id, tenant, callback_url, labels = self._identity_of(value, origin)
            if isinstance(error, UnsupportedParameter | UnsupportedTask) and request_id is not None:
                stub = _stub(request_id, tenant or "default", place.append_time_ms, callback_url, labels)
                return self._taken(stub, place, origin, attempt, error, size)
            return Poison(
                reason=error,
                request_id=request_id,
                tenant=tenant,
                origin=origin,
                attempt=attempt,
                callback_url=callback_url,
                labels=labels,
            )
        try:
            validate_request(request)
            check_start(request, origin.append_time_ms, clocks_differ_ms=CLOCKS_DIFFER_MS)
        except (UnsupportedParameter, UnsupportedTask) as error:
            request = replace(request, callback_url=_callback(request.callback_url))
            return self._taken(request, place, origin, attempt, error, size)
        except PenstockError as error:
            return _refused(request, error, origin, attempt)
        return self._taken(request, place, origin, attempt, None, size)

    def _without_id(self, found: Poison, value: bytes) -> Poison:
        """The poison that a record is whose schema id is in a header, named so if that is why it cannot be read."""
        if not value or not isinstance(found.reason, WrongMagic):
            return found
        reason = WrongMagic(
            f"the header {HEADER_SCHEMA_ID} names the schema, which is read in the value. {NO_HEADER_IDS}"
        )
        request_id, tenant = self._head_of(ANY_VERSION + value)
        return replace(found, reason=reason, request_id=request_id, tenant=tenant)

    def _taken(
        self,
        request: InferenceRequest,
        place: Origin,
        origin: Origin,
        attempt: int,
        error: PenstockError | None,
        size: int,
    ) -> Taken:
        conversation = belongs_on = None
        moved = origin is not place
        pool = None if self._pools is None or error is not None else self._pools.other_pool(request, moved=moved)
        if request.conversation_id is not None and error is None:
            key = conversation_key(request.tenant, request.conversation_id)
            belongs_on = None if pool is not None else self._belongs_on(key, place, moved=moved)
            conversation = key if takes_turn(request.task) else None
        return Taken(
            request=request,
            origin=origin,
            klass=self._class_of.get(place.topic) or priority_class(request.priority),
            conversation=conversation,
            attempt=attempt,
            deadline_ms=deadline_of(request, origin.append_time_ms),
            error=error,
            belongs_on=belongs_on,
            cost=1 if error is not None else estimated_cost(request),
            size_bytes=size,
            pool=pool,
            names_deadline=request.ttl_ms is not None or request.start_after is not None,
            start_after_ms=request.start_after,
        )

    def _with_start(self, found: Taken, headers: Headers) -> Taken | Poison:
        """The same with the start that its headers name."""
        appended_ms = found.origin.append_time_ms
        try:
            request = with_header(found.request, headers, appended_ms)
        except InvalidRequest as error:
            return _refused(found.request, error, found.origin, found.attempt)
        if request is found.request:
            return found
        return replace(
            found,
            request=request,
            start_after_ms=request.start_after,
            deadline_ms=deadline_of(request, appended_ms),
            names_deadline=True,
        )

    def _identity_of(self, value: bytes | None, origin: Origin) -> tuple[str | None, str | None, str | None, Labels]:
        """(request_id, tenant, callback_url, labels) of what is no valid request, as far as it is legible.

        Its caller gets an outcome. A whole JSON object without an id has the one that is made up of its origin.
        """
        whole = object_in(value or b"")
        body = legible_fields(value) if whole is None else whole
        if body is None:
            return *self._head_of(value or b""), None, NO_LABELS
        found = identity(body)
        otherwise = None if whole is None else made_up_id(origin)
        return *_checked(found.request_id, found.tenant, otherwise), _callback(found.callback_url), found.labels

    def _head_of(self, value: bytes) -> tuple[str | None, str | None]:
        """(request_id, tenant) of an Avro record of which the beginning can be read.

        Headers have the id without the tenant, and the key may be that of a conversation.
        """
        for names, read in self._heads.items():
            try:
                found = read(value)
            except PenstockError:
                found = head_of_any_version(value, InferenceRequest, *names)
            if found is not None:
                return _checked(found[0], found[1] if len(names) > 1 else None, None)
        return None, None

    def _belongs_on(self, key: str, place: Origin, *, moved: bool) -> int | None:
        """The partition of its conversation, when that is another one and this worker knows it for sure.

        Workers learn of partitions that are added at different times. One that knows fewer would move a record back,
        and the other would move it on again, for ever. So a record that was moved already is moved by counts alone
        that are newer than the record: those of the worker that moved it can be no newer.
        """
        count = self._partitions.get(place.topic, 1)
        wanted = partition_for(key.encode(), count)
        if wanted == place.partition or place.partition >= count:
            return None
        if moved and self._counted_at_ms <= place.append_time_ms + CLOCKS_DIFFER_MS:
            return None
        return wanted


def _refused(request: InferenceRequest, error: PenstockError, origin: Origin, attempt: int) -> Poison:
    """What is legible of a request that cannot be taken: its caller gets an outcome."""
    request_id, tenant = _checked(request.request_id, request.tenant, None)
    return Poison(
        reason=error,
        request_id=request_id,
        tenant=tenant,
        origin=origin,
        attempt=attempt,
        callback_url=_callback(request.callback_url),
        labels=labels_of(request),
    )


def _attempt_in(headers: Headers) -> int:
    """1 where the header is not ours to trust."""
    attempt = 1
    for name, value in headers:
        if name == HEADER_ATTEMPT and value is not None:
            try:
                attempt = number_in(value, 1, MAX_ATTEMPT)
            except ValueError:
                continue
    return attempt


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


def _callback(url: object) -> str | None:
    """The URL, if it is one that may be called: an invalid request has a callback too."""
    if not isinstance(url, str):
        return None
    try:
        check_callback_url(url)
    except InvalidRequest:
        return None
    return url


def _stub(request_id: str, tenant: str, created_at: int, callback_url: str | None, labels: Labels) -> InferenceRequest:
    """What is left of a request that cannot be run: enough to say so."""
    return InferenceRequest(
        request_id=request_id,
        tenant=tenant,
        task="text_generation",
        created_at=created_at,
        callback_url=callback_url,
        user_id=labels.user_id,
        session_id=labels.session_id,
        metadata={} if labels.correlation_id is None else {CORRELATION_ID: labels.correlation_id},
    )
