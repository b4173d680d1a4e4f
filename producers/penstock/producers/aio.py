"""The same client for asyncio: the shared core decides, this only waits on the event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, Unpack

from penstock.common.artifacts import Artifact, Listed, TenantArtifacts
from penstock.common.conversations import ConversationRecord, Turn
from penstock.common.outgoing import Outgoing
from penstock.common.settings import KafkaSettings
from penstock.common.tasks import set_within
from penstock.common.transport import AsyncTransport, Delivery
from penstock.producers.core import SILENCE_S, ClientCore, ClientOptions, Headers, Submitted, time_left
from penstock.producers.events import Event, Result, completed
from penstock.producers.images import AsyncImages
from penstock.producers.replay_plan import ReplayedRecord, ReplayOptions
from penstock.schemas.errors import BrokerUnavailable, InternalError
from penstock.schemas.records import InferenceRequest, ResultEvent

logger = logging.getLogger(__name__)


class AsyncClient:
    """As `Client`, whose methods say what they raise, on an event loop."""

    def __init__(self, settings: KafkaSettings | None = None, **options: Unpack[ClientOptions]) -> None:
        self._core = ClientCore(settings or KafkaSettings(), options)
        # Made at the first send, not here: a client may be made before its loop runs.
        self._sender: tuple[asyncio.AbstractEventLoop, AsyncTransport] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def submit(
        self, *, task: str, payload: Mapping[str, Any], traceparent: str | None = None, **fields: Any
    ) -> Submitted:
        return await self.send(self._core.request(task, payload, fields), traceparent=traceparent)

    async def send(
        self, request: InferenceRequest, *, traceparent: str | None = None, headers: Headers = ()
    ) -> Submitted:
        core = self._core
        record = await asyncio.to_thread(core.outgoing, request, traceparent, headers)
        before = await asyncio.to_thread(core.before, request.request_id)
        return core.submitted(request, await self._send(record), before)

    async def follow(
        self, request: Submitted | str, *, timeout: float | None = None, since_ms: int | None = None
    ) -> AsyncGenerator[Event, None]:
        give_up = None if timeout is None else time.monotonic() + timeout
        ready = asyncio.Event()
        begin = await asyncio.to_thread(self._core.begin_of, request, since_ms)
        following = self._core.follow(request, begin, _from_thread(asyncio.get_running_loop(), ready.set))
        try:
            while not following.done:
                ready.clear()
                events = following.step()
                for event in events:
                    yield event
                if not events and not await set_within(ready, time_left(SILENCE_S, give_up, request)):
                    await asyncio.to_thread(self._core.check_broker)
        finally:
            following.close()

    async def result(
        self, request: Submitted | str, timeout: float | None = None, *, since_ms: int | None = None
    ) -> ResultEvent:
        async with aclosing(self.follow(request, timeout=timeout, since_ms=since_ms)) as events:
            async for event in events:
                if isinstance(event, Result):
                    outcome = completed(event.event)
                    if outcome.output_artifact is None:
                        return outcome
                    return await asyncio.to_thread(self._core.with_output, outcome)
        raise InternalError("a follow ended without a result")

    async def cancel(self, request_id: str, *, reason: str | None = None) -> None:
        await self._send(self._core.cancelling(request_id, reason))

    async def reprioritize(self, request_id: str, priority: int) -> None:
        await self._send(self._core.reprioritizing(request_id, priority))

    async def history(self, conversation_id: str | int) -> list[Turn]:
        return await asyncio.to_thread(self._core.history, conversation_id)

    async def replay(self, conversation_id: str | int, from_offset: int = 0) -> list[ConversationRecord]:
        return await asyncio.to_thread(self._core.replay, conversation_id, from_offset)

    async def replay_conversations(
        self, pattern: str = "*", **options: Unpack[ReplayOptions]
    ) -> AsyncGenerator[list[ReplayedRecord], None]:
        replay = await asyncio.to_thread(self._core.open_replay, pattern, options)
        try:
            while (records := await asyncio.to_thread(self._core.step, replay)) is not None:
                if records:
                    yield records
                    await asyncio.to_thread(replay.taken)
                await asyncio.sleep(replay.wait_s())
        finally:
            await asyncio.to_thread(replay.close)

    @property
    def images(self) -> AsyncImages:
        """Requests about images, and fetching what was made."""
        return AsyncImages(self, self._core.artifacts)

    @property
    def artifacts(self) -> AsyncArtifacts:
        """put and get. Raises InvalidRequest when the client was made without a place for artifacts."""
        return AsyncArtifacts(self._core.artifacts())

    async def flush(self, timeout: float = 10.0) -> int:
        return await asyncio.to_thread(self._core.transport.flush, timeout)

    async def close(self, timeout: float = 10.0) -> None:
        await asyncio.to_thread(self._core.close, timeout)

    async def _send(self, record: Outgoing) -> Delivery:
        loop = asyncio.get_running_loop()
        if self._sender is None or self._sender[0] is not loop:
            self._sender = (loop, AsyncTransport(self._core.transport, loop))
        try:
            return await self._sender[1].produce(record.topic, record.value, key=record.key, headers=record.headers)
        except BrokerUnavailable as error:
            raise self._core.away(error) from error


class AsyncArtifacts:
    """`TenantArtifacts`, off the event loop."""

    def __init__(self, artifacts: TenantArtifacts) -> None:
        self._artifacts = artifacts

    async def put(
        self, data: bytes, *, media_type: str = "application/octet-stream", ttl_s: float | None = None
    ) -> Artifact:
        return await asyncio.to_thread(self._artifacts.put, data, media_type=media_type, ttl_s=ttl_s)

    async def get(self, artifact_id: str, *, sha256: str | None = None) -> bytes:
        return await asyncio.to_thread(self._artifacts.get, artifact_id, sha256=sha256)

    async def describe(self, artifact_id: str) -> Artifact:
        return await asyncio.to_thread(self._artifacts.describe, artifact_id)

    async def list(self, *, after: str | None = None, limit: int = 20, newest_first: bool = True) -> Listed:
        return await asyncio.to_thread(self._artifacts.list, after=after, limit=limit, newest_first=newest_first)

    async def delete(self, artifact_id: str) -> None:
        await asyncio.to_thread(self._artifacts.delete, artifact_id)


def _from_thread(loop: asyncio.AbstractEventLoop, action: Callable[[], object]) -> Callable[[], None]:
    def call() -> None:
        try:
            loop.call_soon_threadsafe(action)
        except RuntimeError:  # the loop is closed: nobody waits any more
            logger.debug("follow.loop_closed")

    return call
