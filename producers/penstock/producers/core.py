"""What both clients share: building records, knowing where to follow from, opening follows. No waiting in here
except for Kafka's metadata, each time bounded by `timeout_s`.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypedDict, TypeVar

from penstock.common import admin
from penstock.common.artifacts import ArtifactStore, TenantArtifacts
from penstock.common.artifacts.inputs import keep_input
from penstock.common.clock import now_ms
from penstock.common.conversations import ConversationRecord, Turn, fold_messages, read_conversation
from penstock.common.kafka_errors import missing_topic, too_large
from penstock.common.model_pools import ModelPools
from penstock.common.outgoing import Outgoing, control_record, request_record
from penstock.common.settings import KafkaSettings
from penstock.common.telemetry import current_traceparent
from penstock.common.transport import Delivery, Transport
from penstock.producers.events import Event, EventFold
from penstock.producers.follow import Follow
from penstock.producers.follower import Follower
from penstock.producers.replay import ConversationReplay
from penstock.producers.replay_plan import ReplayedRecord, ReplayOptions
from penstock.producers.replay_topics import ReplayTopics
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import BrokerUnavailable, InternalError, InvalidRequest, TooLarge
from penstock.schemas.ids import DEFAULT_TENANT, check_request_id, check_tenant
from penstock.schemas.large_inputs import MEDIA_TYPE, take_text
from penstock.schemas.records import PAYLOAD_FIELDS, ControlCommand, InferenceRequest, ResultEvent
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import MOST_PRIORITY, TP, partition_for

Headers = Sequence[tuple[str, bytes]]

_COUNTS_TTL_S = 30.0
_ENDS_TTL_S = 1.0
_CLOCK_MARGIN_MS = 60_000
"""Result records carry their worker's clock; `since_ms` is somebody else's."""
_REMEMBERED = 10_000
SILENCE_S = 15.0
"""After so long without a record a follow asks whether the broker is there at all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Before:
    """Offsets on a request's result and status partitions, from before it was sent."""

    result: int
    status: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A request that the broker has acknowledged, and from where its events can be followed.

    `append_time_ms` is the broker's time of the record: the request's deadline counts from it.
    """

    request_id: str
    tenant: str
    topic: str
    partition: int
    offset: int
    append_time_ms: int
    before: Before


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of both clients."""

    tenant: str
    """Whose requests and conversations these are; "default" when not given."""
    timeout_s: float
    """Bounds every wait for the broker (10); waits for outcomes have their own."""
    artifacts: ArtifactStore | str | Path | None
    """Where artifacts lie, as the worker's `[artifacts]` says: a folder, a URL, or a store (`configured_store()`).
    Texts and outputs over 256 KiB lie there."""
    codec: Codec | None
    """Another than the package's, to write or read ids of a registry."""
    max_follows: int
    """How many requests may be followed at a time (1000), all through one consumer."""
    queue_max_messages: int
    """How many records may wait for the broker (100,000)."""


class Following:
    """One open follow: `step` gives what has come, without waiting."""

    def __init__(self, follower: Follower, follow: Follow, fold: EventFold) -> None:
        self._follower = follower
        self._follow = follow
        self._fold = fold

    @property
    def done(self) -> bool:
        return self._fold.done

    def step(self) -> list[Event]:
        """New events in order. Raises InternalError when following has failed."""
        self._follower.check()
        return [event for message in self._follower.take(self._follow) for event in self._fold.apply(message)]

    def close(self) -> None:
        self._follower.close(self._follow)


P = ParamSpec("P")
T = TypeVar("T")


def naming_kafka(ask: Callable[Concatenate[ClientCore, P], T]) -> Callable[Concatenate[ClientCore, P], T]:
    """A method whose BrokerUnavailable names where the client looked for Kafka."""

    @wraps(ask)
    def named(core: ClientCore, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(core, *args, **kwargs)
        except BrokerUnavailable as error:
            raise core.away(error) from error

    return named


class ClientCore:
    """Shared by the sync and the async client; thread-safe."""

    def __init__(self, settings: KafkaSettings, options: ClientOptions) -> None:
        self.settings = settings
        self.tenant = check_tenant(options.get("tenant", DEFAULT_TENANT))
        self.timeout_s = options.get("timeout_s", 10.0)
        self._names = settings.names
        self._codec = options.get("codec") or default_codec()
        self._pools = ModelPools(settings, self._codec, self.timeout_s)
        self._artifacts = options.get("artifacts")
        self._max_follows = options.get("max_follows", 1000)
        self._lock = threading.Lock()
        self._follower: Follower | None = None
        self._closed = False
        self._counts: dict[str, tuple[float, int]] = {}
        self._ends: tuple[float, dict[TP, int]] = (float("-inf"), {})
        self._before: OrderedDict[str, Before] = OrderedDict()
        self.transport = Transport(
            settings,
            delivery_timeout_s=self.timeout_s,
            queue_max_messages=options.get("queue_max_messages", 100_000),
        )

    def request(self, task: str, payload: Mapping[str, Any], fields: Mapping[str, Any]) -> InferenceRequest:
        """A validated request; `fields` are those of the JSON form. Raises InvalidRequest with `param`."""
        body = {"task": task, "payload": payload, **fields}
        if "tenant" in body:
            raise InvalidRequest("the tenant is the client's", param="tenant")
        return parse_request(body, tenant=self.tenant, now_ms=now_ms())

    def away(self, error: BrokerUnavailable) -> BrokerUnavailable:
        """The error with the addresses of the brokers that were asked."""
        told = f"{error.message} (Kafka at {self.settings.bootstrap_servers})"
        return BrokerUnavailable(told, details=error.details, retry_after_s=error.retry_after_s)

    @naming_kafka
    def outgoing(self, request: InferenceRequest, traceparent: str | None, headers: Headers = ()) -> Outgoing:
        """The record of a request, on a topic that exists: of its pool, else of its model's. A text over 256 KiB is put
        among the artifacts, if the client has a place for them.

        Raises NotFound, BrokerUnavailable, InvalidRequest for a request of another tenant, and as the store.
        """
        if request.tenant != self.tenant:
            raise InvalidRequest(f"this client is the tenant {self.tenant}'s", param="tenant")
        if self._artifacts is not None:
            request = self._with_text_stored(request)
        if request.pool is None and request.model is not None:
            request = replace(request, pool=self._pools.of(request.task, request.model))
        record = request_record(
            request,
            self._names,
            self._codec,
            source=self.settings.client_id,
            traceparent=traceparent or current_traceparent(),
        )
        if self._artifacts is None and len(record.value) > self.settings.max_record_bytes:
            error = too_large(record.topic, len(record.value), self.settings.max_record_bytes)
            hint = "; a client with `artifacts=` puts large texts there"
            raise TooLarge(error.message + hint, details=error.details)
        self._count(record.topic)
        return replace(record, headers=[*record.headers, *headers])

    def _with_text_stored(self, request: InferenceRequest) -> InferenceRequest:
        left, text = take_text(request)
        if text is not None and left.input_artifact is not None:
            keep_input(
                self._store(),
                self.tenant,
                request.request_id,
                text,
                artifact_id=left.input_artifact.artifact_id,
                media_type=MEDIA_TYPE,
            )
        return left

    def cancelling(self, request_id: str, reason: str | None) -> Outgoing:
        """The record that cancels a request of this tenant."""
        return self._command("cancel", request_id, reason=reason)

    def reprioritizing(self, request_id: str, priority: int) -> Outgoing:
        """The record that gives a request of this tenant another priority. Raises InvalidRequest."""
        if not 0 <= priority <= MOST_PRIORITY:
            raise InvalidRequest(f"priority must be 0 to {MOST_PRIORITY}", param="priority")
        return self._command("reprioritize", request_id, priority=priority)

    def _command(
        self, kind: str, request_id: str, *, reason: str | None = None, priority: int | None = None
    ) -> Outgoing:
        command = ControlCommand(
            kind=kind,
            request_id=check_request_id(request_id),
            tenant=self.tenant,
            priority=priority,
            reason=reason,
            created_at=now_ms(),
            created_by=self.settings.client_id,
        )
        return control_record(command, self._names, self._codec)

    @naming_kafka
    def before(self, request_id: str) -> Before:
        """Offsets below which the request cannot have events. Ask before sending.

        Any end that was seen earlier is such an offset, so it is looked up at most once a second for all partitions;
        what the follower has read up to by now is a closer one. For an id that was sent before, the first answer holds.
        """
        looked_up, ends = self._ends
        if (moment := time.monotonic()) - looked_up > _ENDS_TTL_S:
            topics = (self._names.result, self._names.status)
            partitions = [(topic, number) for topic in topics for number in range(self._count(topic))]
            ends = admin.end_offsets(self.settings, partitions, self.timeout_s)
            self._ends = (moment, ends)
        read = {} if self._follower is None else self._follower.positions()
        result, status = self._places(request_id)
        now = Before(
            result=max(ends.get(result, 0), read.get(result, 0)), status=max(ends.get(status, 0), read.get(status, 0))
        )
        with self._lock:
            first = self._before.setdefault(request_id, now)
            while len(self._before) > _REMEMBERED:
                self._before.popitem(last=False)
        return first

    def submitted(self, request: InferenceRequest, delivery: Delivery, before: Before) -> Submitted:
        return Submitted(
            request_id=request.request_id,
            tenant=request.tenant,
            topic=delivery.topic,
            partition=delivery.partition,
            offset=delivery.offset,
            append_time_ms=delivery.timestamp_ms,
            before=before,
        )

    @naming_kafka
    def begin_of(self, what: Submitted | str, since_ms: int | None) -> dict[TP, int]:
        """Where to begin to follow. Raises NotFound for missing topics, BrokerUnavailable."""
        request_id = id_of(what)
        places = self._places(request_id)
        if since_ms is not None:
            return admin.offsets_at(self.settings, places, since_ms - _CLOCK_MARGIN_MS, self.timeout_s)
        with self._lock:
            known = what.before if isinstance(what, Submitted) else self._before.get(request_id)
        if known is not None:
            return {places[0]: known.result, places[1]: known.status}
        return admin.begin_offsets(self.settings, places, self.timeout_s)

    def follow(self, what: Submitted | str, begin: Mapping[TP, int], ready: Callable[[], None]) -> Following:
        """Begin to follow; does not wait. `ready` runs on another thread. Raises Overloaded, InternalError."""
        request_id = id_of(what)
        follower = self._shared_follower()
        fold = EventFold(request_id, self.tenant, self._names, self._codec)
        return Following(follower, follower.open(request_id.encode(), begin, ready), fold)

    @naming_kafka
    def check_broker(self) -> None:
        """Raises BrokerUnavailable when no broker answers."""
        admin.end_offsets(self.settings, [(self._names.result, 0)], self.timeout_s)

    @naming_kafka
    def replay(self, conversation_id: str | int, from_offset: int) -> list[ConversationRecord]:
        """Every record of a conversation from an offset on. Raises NotFound, BrokerUnavailable."""
        return read_conversation(
            self.settings, self.tenant, conversation_id, from_offset, codec=self._codec, deadline_s=self.timeout_s
        )

    def open_replay(self, pattern: str, options: ReplayOptions) -> ConversationReplay:
        """Of this tenant's conversations. Reads nothing yet. Raises InvalidRequest."""
        topics = ReplayTopics(self.settings, self.tenant, pattern, self.timeout_s)
        return ConversationReplay(self.settings, self._codec, topics, options, timeout_s=self.timeout_s)

    @naming_kafka
    def step(self, replay: ConversationReplay) -> list[ReplayedRecord] | None:
        """See `ConversationReplay.step`."""
        return replay.step()

    def history(self, conversation_id: str | int) -> list[Turn]:
        """The messages that count. Raises NotFound, BrokerUnavailable."""
        return fold_messages(self.replay(conversation_id, 0))

    def artifacts(self) -> TenantArtifacts:
        """Raises InvalidRequest when the client was made without a place for artifacts."""
        return TenantArtifacts(self._store(), self.tenant)

    def _store(self) -> ArtifactStore:
        with self._lock:
            if self._artifacts is None:
                raise InvalidRequest("this client was made without `artifacts=`, a folder or an s3:// URL")
            if not isinstance(self._artifacts, ArtifactStore):
                self._artifacts = ArtifactStore(self._artifacts)
            return self._artifacts

    def with_output(self, outcome: ResultEvent) -> ResultEvent:
        """A completed outcome with its output, fetched when it is kept as an artifact. Raises as `Client.result`."""
        kept = outcome.output_artifact
        if kept is None or outcome.task not in PAYLOAD_FIELDS:
            return outcome
        if self._artifacts is None:
            raise InvalidRequest(
                f"the output of {outcome.request_id} ({kept.size_bytes} bytes) is an artifact: make the client with"
                " `artifacts=`, the place of the worker's artifacts.location, or take the reference from `follow`",
                param="artifacts",
                details={"artifact": kept.to_dict()},
            )
        output = json.loads(self.artifacts().get(kept.artifact_id, sha256=kept.sha256))
        return replace(outcome, **{outcome.task: output})

    @naming_kafka
    def close(self, timeout_s: float) -> None:
        """Deliver what was sent, then stop both threads. Raises BrokerUnavailable when something was not delivered."""
        left = self.transport.close(timeout_s)
        with self._lock:
            self._closed = True
            follower = self._follower
        if follower is not None:
            follower.stop()
        if left:
            raise BrokerUnavailable(f"{left} records were not acknowledged within {timeout_s:.0f} s")

    def _places(self, request_id: str) -> tuple[TP, TP]:
        """The partitions of the request's results and statuses."""
        key, names = request_id.encode(), self._names
        return (
            (names.result, partition_for(key, self._count(names.result))),
            (names.status, partition_for(key, self._count(names.status))),
        )

    def _count(self, topic: str) -> int:
        """The topic's number of partitions, looked up again now and then. Raises NotFound, BrokerUnavailable."""
        known = self._counts.get(topic)
        if known is None or time.monotonic() - known[0] > _COUNTS_TTL_S:
            counts = admin.partition_counts(self.settings, [topic], self.timeout_s)
            if topic not in counts:
                raise missing_topic(topic)
            known = self._counts[topic] = (time.monotonic(), counts[topic])
        return known[1]

    def _shared_follower(self) -> Follower:
        with self._lock:
            if self._closed:
                raise InternalError("the client is closed")
            failed = self._follower if self._follower is not None and self._follower.failed else None
            if self._follower is None or failed is not None:
                self._follower = Follower(self.settings, max_follows=self._max_follows)
            follower = self._follower
        if failed is not None:
            # One of its threads may go on, and takes its time to end: nobody waits for that.
            threading.Thread(target=failed.stop, name="penstock-follower-stop", daemon=True).start()
        return follower


def id_of(what: Submitted | str) -> str:
    """The request id. Raises InvalidRequest."""
    return what.request_id if isinstance(what, Submitted) else check_request_id(what)


def time_left(wait_s: float, give_up: float | None, request: Submitted | str) -> float:
    """How long to wait now, at most `wait_s`. Raises TimeoutError when `give_up` (monotonic) has passed."""
    if give_up is None:
        return wait_s
    left = give_up - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"request {id_of(request)} has no outcome yet")
    return min(wait_s, left)
