"""Requests for summaries: one is sent, followed to its end, and sent again under the same id while Kafka is away."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing

from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.summarizer.settings import SummarizerSection
from penstock.gateway.summarizer.summary_scheduler import Key, Submit
from penstock.gateway.traces import end_summary, summary_traceparent
from penstock.producers import AsyncClient, Result
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    BrokerUnavailable,
    Forbidden,
    NotFound,
    Overloaded,
    PenstockError,
    RegistryUnavailable,
)

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
LATE_S = 60.0
"""So long after its time to live a request must have ended."""
CLOSE_S = 5.0
MOST_IDLE = 8
"""Clients without a request that are kept; each holds connections and threads."""
COMPLETED = "completed"
GONE, LOST, REFUSED = "gone", "lost", "refused"


class Requests:
    """On one event loop; a client for each tenant whose requests are under way, and for those of some ended last."""

    def __init__(
        self,
        kafka: KafkaSettings,
        codec: Codec,
        section: SummarizerSection,
        end: Callable[[Key, str], int | None],
    ) -> None:
        """`end`: see `Source`."""
        self._end = end
        self._kafka = kafka
        self._codec = codec
        self._section = section
        self._clients: dict[str, AsyncClient] = {}
        """By tenant, the one used last at the end."""
        self._under_way: Counter[str] = Counter()
        self.waits_for: str | None = None

    async def run(self, submit: Submit) -> tuple[str, int]:
        """How the request ended, and the end that the conversation's topic had afterwards.

        How: its status, or `gone` without its conversation, `refused`, `lost` without an end.
        """
        tenant, began_ns = submit.key.tenant, time.time_ns()
        self._under_way[tenant] += 1
        try:
            ended = await self._to_its_end(submit)
            end_summary(*submit.key, submit.request_id, began_ns, ended[0])
        finally:
            self._under_way[tenant] -= 1
        await self._close_idle()
        return ended

    async def _to_its_end(self, submit: Submit) -> tuple[str, int]:
        give_up = time.monotonic() + self._section.ttl_s + LATE_S
        while time.monotonic() < give_up:
            try:
                ended = await self._once(submit, give_up)
            except (BrokerUnavailable, Forbidden, NotFound, Overloaded, RegistryUnavailable) as error:
                # Under the same id it may be sent again: workers run it once.
                if not isinstance(error, NotFound):
                    if self.waits_for != error.message:
                        logger.warning("summarizer.waits error=%s reason=%s", error.code, error.message)
                    self.waits_for = error.message
                await asyncio.sleep(AGAIN_S)
            except TimeoutError:
                break
            except PenstockError as error:
                self.waits_for = None
                logger.warning(
                    "summarizer.refused request_id=%s error=%s reason=%s", submit.request_id, error.code, error.message
                )
                return REFUSED, 0
            else:
                self.waits_for = None
                return ended
        logger.warning("summarizer.lost request_id=%s", submit.request_id)
        return LOST, 0

    async def close(self) -> None:
        """Leave; what is under way goes on without this process."""
        clients, self._clients = self._clients, {}
        await asyncio.gather(*map(_close, clients.values()))

    async def _close_idle(self) -> None:
        self._under_way += Counter()  # without those that have none
        idle = [tenant for tenant in self._clients if tenant not in self._under_way]
        gone = [self._clients.pop(tenant) for tenant in idle[:-MOST_IDLE]]
        await asyncio.gather(*map(_close, gone))

    async def _once(self, submit: Submit, give_up: float) -> tuple[str, int]:
        if await asyncio.to_thread(self._end, submit.key, submit.topic_id) is None:
            return GONE, 0
        client = self._client(submit.key.tenant)
        payload = {"through_offset": submit.through}
        if self._section.max_tokens is not None:
            payload["max_tokens"] = self._section.max_tokens
        ttl_ms = int(self._section.ttl_s * 1000)
        sent = await client.submit(
            task="summarization",
            payload=payload,
            request_id=submit.request_id,
            conversation_id=submit.key.conversation_id,
            model=submit.model,
            priority=self._section.priority,
            ttl_ms=ttl_ms,
            traceparent=summary_traceparent(submit.key.tenant, submit.request_id),
        )
        # Of one that was sent before, the end may stand in the topics already.
        since = {"since_ms": now_ms() - ttl_ms} if submit.maybe_sent else {}
        what = submit.request_id if submit.maybe_sent else sent
        async with aclosing(client.follow(what, timeout=max(0.0, give_up - time.monotonic()), **since)) as events:
            async for event in events:
                if isinstance(event, Result):
                    if event.error is not None:
                        logger.warning(
                            "summarizer.not_summed_up request_id=%s status=%s error=%s reason=%s",
                            submit.request_id,
                            event.status,
                            event.error.code,
                            event.error.message,
                        )
                    end = await asyncio.to_thread(self._end, submit.key, submit.topic_id)
                    return (GONE, 0) if end is None else (event.status, end)
        return LOST, 0

    def _client(self, tenant: str) -> AsyncClient:
        client = self._clients.pop(tenant, None) or AsyncClient(self._kafka, tenant=tenant, codec=self._codec)
        self._clients[tenant] = client
        return client


async def _close(client: AsyncClient) -> None:
    try:
        await client.close(CLOSE_S)
    except PenstockError as error:
        logger.warning("summarizer.not_delivered error=%s", error)
