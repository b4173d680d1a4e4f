"""The shell around the webhooks: the result topic comes in, calls go out, and what became of them is kept on a topic.

A webhook is settled, so that its event's offset may be committed, once the broker has a record of it on
`inference.delivery`: of how it ended, or that it waits. A member that gets a partition reads that topic's partition
first. Decides nothing: `ResultLog`, `Deliveries` and `policy` do.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.deliveries import delivery_key
from penstock.common.group_consumer import GroupConsumer, Listener, Read
from penstock.common.log_records import LogRecords
from penstock.common.reader import Headers, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.callbacks import Callbacks, WebhooksSection
from penstock.gateway.group_work import GroupWork
from penstock.gateway.traces import begin_call
from penstock.gateway.webhooks.bodies import signed_headers, type_of, webhook_body, webhook_id
from penstock.gateway.webhooks.deliveries import Deliveries, Key, Room, key_of, partition_of
from penstock.gateway.webhooks.metrics import WebhookMetrics
from penstock.gateway.webhooks.policy import DELIVERED, DROPPED, FAILED, WAITING, Answer, RetryRules, decide
from penstock.gateway.webhooks.registry import decoded, when_there
from penstock.gateway.webhooks.results import ResultLog
from penstock.gateway.webhooks.sender import Header, Sender
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, PenstockError, WebhookUndeliverable, to_error_record
from penstock.schemas.records import (
    DeadLetter,
    DeliveryAttempt,
    Origin,
    Place,
    ResultEvent,
    StatusEvent,
    WebhookDelivery,
)
from penstock.schemas.topics import CONTROL_DAYS, HEADER_CALLBACK, TP

logger = logging.getLogger(__name__)


ERASED_MS = CONTROL_DAYS * 24 * 3_600_000
"""So long an erasure is remembered."""
IDLE_S = 0.5
LOOK_S = 5.0
"""Between looks whether there is room for what was left to its topic."""
AGAIN_S = 1.0
STOP_S = 5.0
MANY, FEW = 2_000, 1_000
"""Webhooks that are not kept yet, and records that were read: reading stops at MANY, and continues at FEW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """What the dispatcher works with."""

    kafka: KafkaSettings
    codec: Codec
    """For threads: it waits for the schema registry."""
    prompt: Codec
    """For the event loop: it does not."""
    transport: AsyncTransport
    records: LogRecords
    sender: Sender
    callbacks: Callbacks
    metrics: WebhookMetrics
    consumer: Callable[[Listener], GroupConsumer]
    """A member of the group that reads the result topic."""
    load: Callable[[Sequence[int]], list[WebhookDelivery]]
    """As `read_deliveries`, for partitions. For threads."""
    now_ms: Callable[[], int] = now_ms
    chance: Callable[[], float] = random.random
    """From 0 to 1: the part of the jitter in a wait."""


class Dispatcher:
    """`work.start`; then `cancel`, flush the transport, and `work.leave`. All on one event loop."""

    def __init__(self, tools: Tools, section: WebhooksSection, room: Room | None = None) -> None:
        self._tools, self._now_ms = tools, tools.now_ms
        self._rules = RetryRules(first_retry_s=section.first_retry_s, give_up_s=section.give_up_s)
        self._log = ResultLog()
        self._deliveries = Deliveries(room or Room(in_flight=section.max_in_flight))
        self._erased: dict[Key, int] = {}
        """With the time, the oldest first."""
        self._unsettled: set[Key] = set()
        self._parking: WeakValueDictionary[Key, asyncio.Lock] = WeakValueDictionary()
        """Held while a record of the webhook is being written."""
        self._owned: set[TP] = set()
        """As the group says; those in the log were loaded too."""
        self._read_here: set[TP] = set()
        """Those of which all was taken that was read since they came. Of one that was given away, the rest is left to
        its next owner, and is read again here if it comes back."""
        self._calls: dict[asyncio.Task[None], TP] = {}
        self._calling = BackgroundTasks()
        self._look_at = 0.0
        self.offsets = self._log.offsets
        self.work = GroupWork(tools.consumer, self, has_callback)
        tools.metrics.watch(
            waiting=lambda: len(self._deliveries),
            in_flight=lambda: self._deliveries.in_flight,
            oldest_s=self._oldest_s,
        )

    async def cancel(self) -> None:
        """Begin nothing more. Calls that do not end are cancelled; the next owner of the partitions repeats them."""
        await self.work.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=STOP_S)
        await self._calling.cancel()

    def erased(self, key: Key, at_ms: int) -> None:
        """Its request was erased: nobody hears of it any more."""
        self._erased.pop(key, None)
        self._erased[key] = at_ms
        while self._erased and self._erased[oldest := next(iter(self._erased))] < self._now_ms() - ERASED_MS:
            del self._erased[oldest]
        delivery = self._deliveries.find(key)
        if delivery is not None and not self._deliveries.flies(key):
            self._deliveries.end(delivery)
            self._spawn(partition_of(delivery), self._end(delivery, DROPPED))

    # -- what comes, in its order

    def assigned(self, partitions: list[TP]) -> None:
        self._owned.update(partitions)
        self._deliveries.stay(partitions)
        self.work.arrives(partial(self._load, partitions, new=True))

    async def revoked(self, partitions: list[TP]) -> None:
        """Nobody else gets them before their calls have ended, each within its time."""
        self._owned.difference_update(partitions)
        self._read_here.difference_update(partitions)
        self._deliveries.leave(partitions)
        calls = [task for task, tp in self._calls.items() if tp in partitions]
        await asyncio.gather(*calls, return_exceptions=True)
        self.work.commit()
        gone = [tp for tp in partitions if tp not in self._owned]  # a call took so long that some came back
        for tp in gone:
            self._log.revoke(tp)
        self._deliveries.revoke(gone)
        if back := [tp for tp in partitions if tp in self._owned]:
            self.work.arrives(partial(self._load, back, new=False))

    async def _load(self, partitions: Sequence[TP], *, new: bool) -> None:
        while wanted := [tp for tp in partitions if tp in self._owned]:
            try:
                found = await asyncio.to_thread(self._tools.load, [number for _, number in wanted])
            except PenstockError as error:
                self.work.reason = f"the deliveries are not read: {error}"
                logger.warning("webhooks.not_loaded error=%s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            self.work.reason = None
            still = {tp for tp in wanted if tp in self._owned}
            if new:
                self._read_here |= still
                self.offsets.assign(still)
            for delivery in sorted(found, key=lambda one: one.next_at or 0):  # whose turn is first gets the room
                if partition_of(delivery) in still and not self._deliveries.knows(
                    key_of(delivery), delivery.created_at
                ):
                    self._know(delivery)
            logger.info("webhooks.loaded partitions=%d found=%d held=%d", len(still), len(found), len(self._deliveries))
            return

    def _know(self, delivery: WebhookDelivery) -> None:
        if delivery.state != WAITING:
            self._deliveries.end(delivery)
        elif key_of(delivery) in self._erased:
            self._spawn(partition_of(delivery), self._end(delivery, DROPPED))
        else:
            self._deliveries.add(delivery)

    async def take(self, batch: Sequence[Read]) -> None:
        for read in batch:
            if read.tp not in self._read_here:
                continue  # another process has it now
            event = await decoded(self._tools.prompt, read.value or b"", ResultEvent, self.work)
            if event is None or read.tp not in self._read_here:  # it may have been given away meanwhile
                continue
            key = (event.tenant, event.request_id)
            if self._deliveries.knows(key, event.origin.append_time_ms):
                continue
            if self._log.on_event(read.tp, read.offset, read.timestamp_ms, event):
                self._outcome(read, event, key)

    def passed(self, tp: TP, position: int) -> None:
        if tp in self._read_here:  # what was left to others must not be committed here
            self._log.passed(tp, position, self._now_ms())

    def _outcome(self, read: Read, event: ResultEvent, key: Key) -> None:
        kind, at = type_of(event), self._now_ms()
        delivery = WebhookDelivery(
            webhook_id=webhook_id(event),
            request_id=event.request_id,
            tenant=event.tenant,
            type=kind,
            url=callback_of(read.headers) or "",
            state=WAITING,
            place=Place(topic=read.tp[0], partition=read.tp[1], offset=read.offset),
            created_at=at,
            updated_at=at,
            next_at=at,
        )
        self._unsettled.add(key)
        if key in self._erased:
            self._spawn(read.tp, self._end(delivery, DROPPED))
        elif not self._deliveries.add(delivery):
            self._spawn(read.tp, self._park(delivery))
        else:
            self._begin()
            if not self._deliveries.flies(key):
                self._spawn(read.tp, self._park(delivery))

    # -- what goes out

    def tend(self) -> float:
        self._begin()
        now = asyncio.get_running_loop().time()
        if now > self._look_at:
            self._look_at = now + LOOK_S
            if partitions := self._deliveries.to_load():
                self.work.arrives(partial(self._load, sorted(partitions), new=False))
        return IDLE_S

    def full(self, arriving: int, held: set[str]) -> set[str]:
        return many(self._tools.kafka.names.result, len(self._unsettled) + arriving, held)

    def _begin(self) -> None:
        for delivery in self._deliveries.begin(self._now_ms()):
            self._spawn(partition_of(delivery), self._call(delivery))

    def _spawn(self, tp: TP, work: Coroutine[Any, Any, None]) -> None:
        task = self._calling.start(work, "call of a webhook")
        self._calls[task] = tp
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._calls[task]
        self.work.woken.set()

    async def _call(self, delivery: WebhookDelivery) -> None:
        began, key = self._now_ms(), key_of(delivery)
        place = delivery.place
        outcome = await self._tools.records.read((place.topic, place.partition), place.offset)
        if began >= delivery.created_at + 1000 * self._rules.give_up_s:
            await self._fail_it(delivery, outcome, "its time is over")
            return
        answer = await self._answer(delivery, outcome)
        if answer is None:
            await self._end(delivery, DROPPED)
            return
        ended, took_ms = self._now_ms(), self._now_ms() - began
        self._tools.metrics.on_attempt(answer.status_code, took_ms / 1000)
        number = len(delivery.attempts) + 1
        attempt = DeliveryAttempt(
            attempt=number, at=began, duration_ms=took_ms, status_code=answer.status_code, error=answer.error
        )
        state, next_ms = decide(answer, number, ended, delivery.created_at, self._rules, self._tools.chance())
        delivery = replace(
            delivery, attempts=[*delivery.attempts, attempt], state=state, next_at=next_ms, updated_at=ended
        )
        logger.info(
            "webhooks.attempt request_id=%s attempt=%d status=%s error=%s state=%s",
            delivery.request_id, number, answer.status_code, answer.error, state,
        )  # fmt: skip
        if state == FAILED:
            why = answer.error or f"the receiver answered {answer.status_code}"
            await self._fail_it(delivery, outcome, f"{why}, at attempt {number}")
        elif state == WAITING and key in self._erased:
            await self._end(delivery, DROPPED)
        elif state == WAITING:
            await self._park(delivery)
            self._deliveries.wait(delivery)
        else:
            await self._end(delivery, DELIVERED)

    async def _answer(self, delivery: WebhookDelivery, outcome: RawMessage | None) -> Answer | None:
        """None when it was erased before it could be sent.

        What fails unexpectedly is tried again as a call is: it must not stop the webhooks of others.
        """
        try:
            return await self._sent(delivery, outcome)
        except Exception as error:
            return unsendable(delivery, error)

    async def _sent(self, delivery: WebhookDelivery, outcome: RawMessage | None) -> Answer | None:
        if not self._tools.callbacks.secrets(delivery.tenant):
            return unsigned(delivery)
        event = None if outcome is None else await self._event_of(outcome, delivery)
        if outcome is None or event is None:
            return Answer(error="the outcome is not on the result topic any more", final=True)
        signed = await signed_call(self._tools, delivery, event, self.work)
        if isinstance(signed, Answer):
            return signed
        if key_of(delivery) in self._erased:
            return None
        return await traced_post(self._tools.sender, delivery, *signed, outcome.headers)

    async def _event_of(self, outcome: RawMessage, delivery: WebhookDelivery) -> ResultEvent | None:
        """The event, if the log still holds this one there: the topic may have been made anew."""
        try:
            event = await when_there(
                lambda: asyncio.to_thread(self._tools.codec.decode, outcome.value or b"", ResultEvent), self.work
            )
        except DecodeError:
            return None
        return event if event.is_terminal and (event.tenant, event.request_id) == key_of(delivery) else None

    # -- what is kept

    async def _fail_it(self, delivery: WebhookDelivery, outcome: RawMessage | None, why: str) -> None:
        """The dead letter first: dying between the two writes it twice, and loses nothing.

        It holds no outcome: that may be erased later.
        """
        if key_of(delivery) in self._erased:
            await self._end(delivery, DROPPED)
            return
        error = to_error_record(WebhookUndeliverable(f"{delivery.type} was not delivered: {why}"))
        place = delivery.place
        letter = DeadLetter(
            request_id=delivery.request_id,
            tenant=delivery.tenant,
            reason_code=error.code,
            reason=error.message,
            original=b"",
            original_key=None if outcome is None else outcome.key,
            original_headers={HEADER_CALLBACK: delivery.url.encode()},
            origin=Origin(
                topic=place.topic,
                partition=place.partition,
                offset=place.offset,
                append_time_ms=delivery.created_at if outcome is None else outcome.timestamp_ms,
            ),
            worker_id=self._tools.kafka.client_id,
            attempts=len(delivery.attempts),
            created_at=self._now_ms(),
        )
        await self._kept(self._tools.kafka.names.dlq, self._tools.codec.encode(letter), outcome and outcome.key)
        await self._end(delivery, FAILED)

    async def _end(self, delivery: WebhookDelivery, state: str) -> None:
        delivery = replace(delivery, state=state, next_at=None, updated_at=self._now_ms())
        if state == DROPPED:
            delivery = replace(delivery, url="", attempts=[])
        await self._park(delivery)
        self._deliveries.end(delivery)
        self._tools.metrics.on_end(state)

    async def _park(self, delivery: WebhookDelivery) -> None:
        """Keep its state; from then on the event's offset is not needed for it.

        The last record of a webhook counts, so the broker must have each before the next one is sent.
        """
        key, tp = key_of(delivery), partition_of(delivery)
        value = self._tools.codec.encode(delivery)
        async with self._parking.setdefault(key, asyncio.Lock()):
            await self._kept(self._tools.kafka.names.delivery, value, delivery_key(*key), tp[1])
        self._log.settle(tp, key)
        self._unsettled.discard(key)

    async def _kept(self, topic: str, value: bytes, key: bytes | None, partition: int | None = None) -> None:
        """When the broker has it. While it is away everything here waits."""
        while True:
            try:
                await self._tools.transport.produce(topic, value, key=key, partition=partition)
            except PenstockError as error:
                self.work.reason = f"{topic} cannot be written: {error}"
                logger.warning("webhooks.not_kept topic=%s error=%s", topic, error)
                await asyncio.sleep(AGAIN_S)
            else:
                self.work.reason = None
                return

    def oldest_ms(self) -> int | None:
        """When the oldest webhook that waits here was first seen."""
        return self._deliveries.oldest_ms()

    def _oldest_s(self) -> float:
        oldest_ms = self.oldest_ms()
        return 0.0 if oldest_ms is None else max(0.0, (self._now_ms() - oldest_ms) / 1000)


def unsendable(delivery: WebhookDelivery, error: Exception) -> Answer:
    """The answer in place of a call that could not be made."""
    logger.error("webhooks.not_made request_id=%s", delivery.request_id, exc_info=error)
    return Answer(error=f"the call could not be made ({type(error).__name__})")


def unsigned(delivery: WebhookDelivery) -> Answer:
    """The answer in place of a call that nothing signs."""
    return Answer(error=f"nothing signs webhooks of {delivery.tenant}: set webhooks.secret", final=True)


async def signed_call(
    tools: Tools, delivery: WebhookDelivery, event: ResultEvent | StatusEvent, work: GroupWork
) -> tuple[Sequence[Header], bytes] | Answer:
    """The headers and the body of a call; an answer where nothing signs it."""
    if not (secrets := tools.callbacks.secrets(delivery.tenant)):
        return unsigned(delivery)
    origin = event.origin
    request = await tools.records.read((origin.topic, origin.partition), origin.offset)
    body = await when_there(lambda: asyncio.to_thread(webhook_body, delivery.place, event, request, tools.codec), work)
    return signed_headers(delivery.webhook_id, body, secrets, tools.now_ms()), body


async def traced_post(
    sender: Sender, delivery: WebhookDelivery, headers: Sequence[Header], body: bytes, of_event: Headers
) -> Answer:
    """The call. While traces are on the receiver gets its span; `of_event` are the headers of the event's record."""
    if (call := begin_call(delivery, of_event)) is None:
        return await sender.post(delivery.tenant, delivery.url, headers, body)
    answer = await sender.post(delivery.tenant, delivery.url, [*headers, call.header], body)
    call.ended(answer.status_code, answer.error)
    return answer


def many(topic: str, waiting: int, held: set[str]) -> set[str]:
    """The topic, if no more of it is to be read while so many wait."""
    return {topic} if waiting > (FEW if topic in held else MANY) else set()


def callback_of(headers: Headers) -> str | None:
    """Who is to be called back; None where nobody is."""
    value = next((content for name, content in headers if name == HEADER_CALLBACK), None)
    return None if value is None else value.decode("ascii", "replace")


def has_callback(headers: Headers) -> bool:
    """Asked of every record of the topic."""
    return any(name == HEADER_CALLBACK for name, _ in headers)
