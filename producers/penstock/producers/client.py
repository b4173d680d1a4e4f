"""The blocking client: submit requests to Kafka, follow them to their outcome, read conversations. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from contextlib import closing
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.common.artifacts import TenantArtifacts
from penstock.common.conversations import ConversationRecord, Turn
from penstock.common.outgoing import Outgoing
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Delivery
from penstock.producers.core import SILENCE_S, ClientCore, ClientOptions, Headers, Submitted, time_left
from penstock.producers.events import Event, Result, completed
from penstock.producers.images import Images
from penstock.producers.replay_plan import ReplayedRecord, ReplayOptions
from penstock.schemas.errors import BrokerUnavailable, InternalError
from penstock.schemas.records import InferenceRequest, ResultEvent


class Client:
    """Speaks to Kafka alone. See `ClientOptions` for what it can be told."""

    def __init__(self, settings: KafkaSettings | None = None, **options: Unpack[ClientOptions]) -> None:
        self._core = ClientCore(settings or KafkaSettings(), options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(
        self, *, task: str, payload: Mapping[str, Any], traceparent: str | None = None, **fields: Any
    ) -> Submitted:
        """Send a request; returns when the broker has acknowledged it. `fields` are those of the JSON form.

        Raises InvalidRequest (with `param`), TooLarge (naming the limit), Overloaded, NotFound for a missing topic, and
        BrokerUnavailable: then the request may or may not be on the topic, and sending it again with the same
        `request_id` is safe. With `artifacts=` a text over 256 KiB goes there; then StoreUnavailable too.
        """
        return self.send(self._core.request(task, payload, fields), traceparent=traceparent)

    def send(self, request: InferenceRequest, *, traceparent: str | None = None, headers: Headers = ()) -> Submitted:
        """Send a request that the caller has built and checked, of this client's tenant. Raises as `submit`.

        `headers` go with its record, beside Penstock's own.
        """
        record = self._core.outgoing(request, traceparent, headers)
        before = self._core.before(request.request_id)
        return self._core.submitted(request, self._send(record), before)

    def follow(
        self, request: Submitted | str, *, timeout: float | None = None, since_ms: int | None = None
    ) -> Generator[Event, None, None]:
        """Status, Chunk and Restarted events as they come, and the Result, the last one.

        A request that this client did not submit is looked for in all that the topics hold; `since_ms`, a time at which
        it was not yet submitted, shortens that. Raises TimeoutError after `timeout` seconds, NotFound for missing
        topics, Overloaded beyond `max_follows`, BrokerUnavailable when no broker answers.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        ready = threading.Event()
        following = self._core.follow(request, self._core.begin_of(request, since_ms), ready.set)
        try:
            while not following.done:
                ready.clear()
                events = following.step()
                yield from events
                if not events and not ready.wait(time_left(SILENCE_S, give_up, request)):
                    self._core.check_broker()
        finally:
            following.close()

    def result(
        self, request: Submitted | str, timeout: float | None = None, *, since_ms: int | None = None
    ) -> ResultEvent:
        """Wait for the outcome, with its whole output: one over 256 KiB is fetched from where artifacts lie.

        Raises the typed error of a request that did not complete, and as `follow`. For a large output also
        InvalidRequest when the client was made without `artifacts=`, and NotFound when it is not there (erased, or
        another place); `follow` gives the reference, `Result.artifact`, without fetching.
        """
        with closing(self.follow(request, timeout=timeout, since_ms=since_ms)) as events:
            for event in events:
                if isinstance(event, Result):
                    return self._core.with_output(completed(event.event))
        raise InternalError("a follow ended without a result")

    def cancel(self, request_id: str, *, reason: str | None = None) -> None:
        """Ask for a request to be cancelled; returns when the broker has it. Whether it was, the outcome tells."""
        self._send(self._core.cancelling(request_id, reason))

    def reprioritize(self, request_id: str, priority: int) -> None:
        """Give a request that waits another priority (0 is the most urgent); returns when the broker has it.

        It holds from then on, at every worker that gets the request. One that has ended stays as it is; one that runs
        has it when it must start again. A lifted turn of a conversation passes turns of less urgent classes: lift those
        before it first, or use the gateway, which does. Raises InvalidRequest, BrokerUnavailable.
        """
        self._send(self._core.reprioritizing(request_id, priority))

    def history(self, conversation_id: str | int) -> list[Turn]:
        """The messages of a conversation that count, in order. Raises NotFound, BrokerUnavailable."""
        return self._core.history(conversation_id)

    def replay(self, conversation_id: str | int, from_offset: int = 0) -> list[ConversationRecord]:
        """Every record of a conversation's topic from an offset on, tombstones too. Raises as `history`."""
        return self._core.replay(conversation_id, from_offset)

    def replay_conversations(
        self, pattern: str = "*", **options: Unpack[ReplayOptions]
    ) -> Generator[list[ReplayedRecord], None, None]:
        """Records of all conversations of this tenant whose ids match the glob, in batches of one conversation each.

        In order of the ids, or by partition where conversations share a topic; each conversation in order of its
        offsets, to the end that it had at the start, or on and on with `follow`. Messages that are erased by then do
        not come; their tombstones do. Asking for the next batch says that the one before is dealt with: with `group`
        its position is committed within a second, and a run that is killed is resumed behind it. So records may come
        twice, and none is left out. `ReplayOptions` has the rest.

        Raises InvalidRequest, BrokerUnavailable, Forbidden, RegistryUnavailable, and Conflict when somebody has
        subscribed to topics by the name of the group, or used it for another pattern or tenant in a shared topic.
        """
        replay = self._core.open_replay(pattern, options)
        try:
            while (records := self._core.step(replay)) is not None:
                if records:
                    yield records
                    replay.taken()
                if (wait_s := replay.wait_s()) > 0:  # a sleep of nothing costs a tenth of a millisecond
                    time.sleep(wait_s)
        finally:
            replay.close()

    @property
    def images(self) -> Images:
        """Requests about images, and fetching what was made."""
        return Images(self)

    @property
    def artifacts(self) -> TenantArtifacts:
        """put and get. Raises InvalidRequest when the client was made without a place for artifacts."""
        return self._core.artifacts()

    def flush(self, timeout: float = 10.0) -> int:
        """Wait until the broker has answered for all that was sent; for how many records it has not."""
        return self._core.transport.flush(timeout)

    def close(self, timeout: float = 10.0) -> None:
        """Deliver what was sent, then leave. Raises BrokerUnavailable when something was not delivered."""
        self._core.close(timeout)

    def _send(self, record: Outgoing) -> Delivery:
        done = threading.Event()
        found: list[Delivery] = []

        def delivered(delivery: Delivery) -> None:
            found.append(delivery)
            done.set()

        self._core.transport.send(
            record.topic, record.value, key=record.key, headers=record.headers, on_delivery=delivered
        )
        # librdkafka tells every outcome within its own timeout; the margin is for a busy machine.
        if not done.wait(self._core.timeout_s + 5):
            late = BrokerUnavailable(f"{record.topic} did not acknowledge within {self._core.timeout_s:.0f} s")
            raise self._core.away(late)
        error = found[0].error
        if isinstance(error, BrokerUnavailable):
            raise self._core.away(error) from error
        if error is not None:
            raise error
        return found[0]
