"""The shell around the statuses that receivers hear of: the status topic comes in, calls go out.

Decides nothing: `StatusNews` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.common.background import BackgroundTasks
from penstock.common.group_consumer import GroupConsumer, Listener, Read
from penstock.gateway.callbacks import WebhooksSection
from penstock.gateway.group_work import GroupWork
from penstock.gateway.webhooks.deliveries import Key, Room
from penstock.gateway.webhooks.dispatcher import (
    IDLE_S,
    Tools,
    callback_of,
    has_callback,
    many,
    signed_call,
    traced_post,
    unsendable,
)
from penstock.gateway.webhooks.news import News, StatusNews
from penstock.gateway.webhooks.policy import Answer, RetryRules
from penstock.gateway.webhooks.registry import decoded
from penstock.schemas.records import StatusEvent
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

SHARE = 4
"""Of `max_in_flight` statuses have this part, besides the calls for outcomes."""
HELD = Room(in_flight=1, held=20_000, held_per_tenant=10_000, held_per_group=5_000)


class StatusCalls:
    """`work.start`; then `cancel` and `work.leave`. All on one event loop."""

    def __init__(self, tools: Tools, section: WebhooksSection, consumer: Callable[[Listener], GroupConsumer]) -> None:
        self._tools = tools
        room = replace(HELD, in_flight=max(2, section.max_in_flight // SHARE))
        rules = RetryRules(first_retry_s=section.first_retry_s, give_up_s=section.give_up_s)
        self._news = StatusNews(room, rules)
        self._calls = BackgroundTasks()
        self.offsets = self._news.offsets
        self.work = GroupWork(consumer, self, has_callback)

    async def cancel(self) -> None:
        """Break off what is open: the next owner of the partitions repeats it."""
        await self.work.cancel()
        await self._calls.cancel()

    def erased(self, key: Key) -> None:
        """Its request was erased: nobody hears of it any more."""
        self._news.drop(key)

    def assigned(self, partitions: list[TP]) -> None:
        self.offsets.assign(partitions)

    async def revoked(self, partitions: list[TP]) -> None:
        self.work.commit()
        for tp in partitions:
            self._news.revoke(tp)

    async def take(self, batch: Sequence[Read]) -> None:
        for read in batch:
            url = callback_of(read.headers)
            if url is None or read.value is None or read.tp not in self.offsets:
                continue
            event = await decoded(self._tools.prompt, read.value, StatusEvent, self.work)
            if event is not None and read.tp in self.offsets:  # not lost meanwhile
                now_ms = self._tools.now_ms()
                self._count(self._news.on_status(read.tp, read.offset, event, url, now_ms, read.headers))

    def passed(self, tp: TP, position: int) -> None:
        self.offsets.passed(tp, position)

    def tend(self) -> float:
        for news in self._news.begin(self._tools.now_ms()):
            self._calls.start(self._call(news), "call with a status")
        return IDLE_S

    def full(self, arriving: int, held: set[str]) -> set[str]:
        return many(self._tools.kafka.names.status, arriving, held)

    async def _call(self, news: News) -> None:
        tools, began = self._tools, self._tools.now_ms()
        answer = await self._answer(news)
        ended = tools.now_ms()
        tools.metrics.on_attempt(answer.status_code, (ended - began) / 1000)
        self._count(self._news.ended(news.delivery, answer, ended, tools.chance()))
        self.work.woken.set()

    async def _answer(self, news: News) -> Answer:
        try:
            return await self._sent(news)
        except Exception as error:  # it must not stop the webhooks of others
            return unsendable(news.delivery, error)

    async def _sent(self, news: News) -> Answer:
        signed = await signed_call(self._tools, news.delivery, news.event, self.work)
        if isinstance(signed, Answer):
            return signed
        if not self._news.holds(news.delivery):
            return Answer(error="it was erased, or has ended", final=True)
        return await traced_post(self._tools.sender, news.delivery, *signed, news.headers)

    def _count(self, state: str | None) -> None:
        if state is not None:
            self._tools.metrics.on_status(state)
