"""The shell around the statuses that receivers hear of: the status topic comes in, calls go out.

Decides nothing: `StatusNews` does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from penstock.common.background import BackgroundTasks
from penstock.common.group_consumer import Listener, Read
from penstock.common.tasks import set_within
from penstock.gateway.callbacks import WebhooksSection
from penstock.gateway.webhooks.bodies import signed_headers, webhook_body
from penstock.gateway.webhooks.deliveries import Key, Room
from penstock.gateway.webhooks.dispatcher import (
    BATCH,
    Backpressure,
    Consumer,
    Tools,
    callback_of,
    has_callback,
    unsendable,
)
from penstock.gateway.webhooks.news import StatusNews
from penstock.gateway.webhooks.policy import Answer, RetryRules
from penstock.gateway.webhooks.registry import when_there
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import StatusEvent, WebhookDelivery
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

IDLE_S = 0.5
SHARE = 4
"""Of `max_in_flight` statuses have this part, besides the calls for outcomes."""
HELD = Room(in_flight=1, held=20_000, held_per_tenant=10_000, held_per_group=5_000)


class StatusCalls:
    """`start`; then `cancel` and `leave`. All on one event loop."""

    def __init__(self, tools: Tools, section: WebhooksSection, consumer: Callable[[Listener], Consumer]) -> None:
        self._tools = tools
        room = Room(
            in_flight=max(2, section.max_in_flight // SHARE),
            held=HELD.held,
            held_per_tenant=HELD.held_per_tenant,
            held_per_group=HELD.held_per_group,
        )
        rules = RetryRules(first_retry_s=section.first_retry_s, give_up_s=section.give_up_s)
        self._news = StatusNews(room, rules)
        self._arriving: asyncio.Queue[Coroutine[Any, Any, None]] = asyncio.Queue()
        self._background = BackgroundTasks()
        self._woken = asyncio.Event()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why no status is sent any more."""
        self.waits_for: str | None = None
        self._consumer = consumer(
            Listener(
                on_batch=lambda batch: self._arrives(self._take(batch)),
                on_assigned=self._assigned,
                on_revoked=self._revoked,
                on_failure=self._fail,
                wants=has_callback,
                on_passed=lambda offsets: self._arrives(self._passed(offsets)),
            )
        )
        self._backpressure = Backpressure(self._consumer, tools.kafka.names.status)

    def start(self) -> None:
        self._spawn(self._arrive())
        self._spawn(self._tend())
        self._consumer.start()

    async def cancel(self) -> None:
        """Break off what is open: the next owner of the partitions repeats it."""
        await self._background.cancel()
        while not self._arriving.empty():
            self._arriving.get_nowait().close()

    async def leave(self) -> None:
        """Commit what was delivered and leave the group."""
        self._consumer.commit(self._news.commits())
        await self._consumer.stop()

    def erased(self, key: Key) -> None:
        """Its request was erased: nobody hears of it any more."""
        self._news.drop(key)

    def _assigned(self, partitions: list[TP]) -> None:
        for tp in partitions:
            self._news.assign(tp)

    async def _revoked(self, partitions: list[TP]) -> None:
        self._consumer.commit(self._news.commits())
        for tp in partitions:
            self._news.revoke(tp)

    def _arrives(self, work: Coroutine[Any, Any, None]) -> None:
        self._arriving.put_nowait(work)
        self._backpressure.look(BATCH * self._arriving.qsize())

    async def _arrive(self) -> None:
        while True:
            await (await self._arriving.get())
            self._backpressure.look(BATCH * self._arriving.qsize())

    async def _take(self, batch: Sequence[Read]) -> None:
        for read in batch:
            url = callback_of(read.headers)
            if url is None or read.value is None or read.tp not in self._news:
                continue

            async def decode(value: bytes = read.value) -> StatusEvent:
                return self._tools.prompt.decode(value, StatusEvent)

            try:
                event = await when_there(decode, self._waits)
            except DecodeError:
                continue  # other readers pass over it too
            if read.tp in self._news:  # not lost meanwhile
                self._count(self._news.on_status(read.tp, read.offset, event, url, self._tools.now_ms()))
        self._woken.set()

    async def _passed(self, offsets: Mapping[TP, int]) -> None:
        for tp, offset in offsets.items():
            self._news.passed(tp, offset)

    async def _tend(self) -> None:
        while True:
            self._woken.clear()
            for delivery, event in self._news.begin(self._tools.now_ms()):
                self._spawn(self._call(delivery, event))
            if due := self._news.commits():
                self._consumer.commit(due)
            await set_within(self._woken, IDLE_S)

    async def _call(self, delivery: WebhookDelivery, event: StatusEvent) -> None:
        tools, began = self._tools, self._tools.now_ms()
        answer = await self._answer(delivery, event)
        ended = tools.now_ms()
        tools.metrics.on_attempt(answer.status_code, (ended - began) / 1000)
        self._count(self._news.ended(delivery, answer, ended, tools.chance()))
        self._woken.set()

    async def _answer(self, delivery: WebhookDelivery, event: StatusEvent) -> Answer:
        try:
            return await self._sent(delivery, event)
        except Exception as error:  # it must not stop the webhooks of others
            return unsendable(delivery, error)

    async def _sent(self, delivery: WebhookDelivery, event: StatusEvent) -> Answer:
        tools, origin = self._tools, event.origin
        secrets = tools.callbacks.secrets(delivery.tenant)
        if not secrets:
            return Answer(error=f"nothing signs webhooks of {delivery.tenant}", final=True)
        request = await tools.records.read((origin.topic, origin.partition), origin.offset)
        body = await when_there(
            lambda: asyncio.to_thread(webhook_body, delivery.place, event, request, tools.codec), self._waits
        )
        headers = signed_headers(delivery.webhook_id, body, secrets, tools.now_ms())
        if not self._news.holds(delivery):
            return Answer(error="it was erased, or has ended", final=True)
        return await tools.sender.post(delivery.tenant, delivery.url, headers, body)

    def _count(self, state: str | None) -> None:
        if state is not None:
            self._tools.metrics.on_status(state)

    def _waits(self, reason: str | None) -> None:
        self.waits_for = reason

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._background.start(work, "calls with statuses")

    def _fail(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)
