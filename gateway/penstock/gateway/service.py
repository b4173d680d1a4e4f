"""The gateway's service: submit, look up, wait, subscribe, cancel, erase, for one tenant at a time. No HTTP in it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.entries import Entry, Key, rfc3339
from penstock.gateway.follower import Follower, Readiness
from penstock.gateway.frames import Frame, ResultFrame
from penstock.gateway.hub import Client, Gone, Hub
from penstock.gateway.metrics import Gauges
from penstock.gateway.models import find_model
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.view import View
from penstock.producers.artifacts import ArtifactStore
from penstock.producers.clock import now_ms
from penstock.producers.transport import AsyncTransport
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.cursor import Cursor
from penstock.schemas.errors import (
    BrokerUnavailable,
    Conflict,
    IdempotencyKeyReused,
    InvalidRequest,
    NotFound,
    Overloaded,
)
from penstock.schemas.errors import (
    Gone as GoneError,
)
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import ControlCommand, InferenceRequest, ModelInfo
from penstock.schemas.requests import content_hash
from penstock.schemas.topics import TopicNames, request_key

logger = logging.getLogger(__name__)

CANCELS_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Accepted:
    """A request that stands on its topic; `replayed` when an Idempotency-Key named an earlier one."""

    request_id: str
    replayed: bool = False


class SlowConsumer(Exception):
    """The subscriber did not read; it was let go."""


class Stopping(Overloaded):
    """The gateway stops; what the subscriber follows goes on, and any gateway tells the rest."""


class Subscription:
    """One subscriber's frames as an async iterator. That of a single request ends with its outcome."""

    def __init__(self, service: GatewayService, *, single: bool) -> None:
        self._ready = asyncio.Event()
        self._gone = asyncio.Event()
        self._client: Client = service.hub.connect(self._on_news)
        self._hub = service.hub
        self._single = single

    def _on_news(self) -> None:
        self._ready.set()
        if self._client.gone is not None:
            self._gone.set()

    def push(self, frames: Iterable[Frame]) -> None:
        """Frames to be told before anything that is published from now on."""
        for frame in frames:
            self._client.push(frame)

    async def gone(self) -> Gone:
        """Wait until this subscriber was let go; why."""
        await self._gone.wait()
        assert self._client.gone is not None
        return self._client.gone

    @property
    def client(self) -> Client:
        return self._client

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Frame:
        frame = await self.next_frame()
        if frame is None:
            raise StopAsyncIteration
        return frame

    async def next_frame(self) -> Frame | None:
        """The next frame; None after the last of a single request. Raises SlowConsumer, Stopping."""
        while not self._client.frames:
            if self._client.gone is Gone.SLOW:
                raise SlowConsumer
            if self._client.gone is Gone.STOPPING:
                raise Stopping("the gateway restarts; follow on at any other", retry_after_s=1)
            if self._client.gone is not None:
                return None
            self._ready.clear()
            await self._ready.wait()
        frame = self._client.frames.popleft()
        if self._single and isinstance(frame, ResultFrame):
            frames = self._client.frames
            self.close()
            frames.clear()
        return frame

    def take_nowait(self) -> list[Frame]:
        """All frames that are queued now."""
        frames = list(self._client.frames)
        self._client.frames.clear()
        return frames

    def close(self) -> None:
        self._hub.drop(self._client, Gone.CLOSED)


class GatewayService:
    """What routes and sockets call. Tenants are checked by construction: every look-up names one."""

    def __init__(
        self,
        settings: GatewaySettings,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        hub: Hub,
        codec: Codec | None = None,
        *,
        artifacts: ArtifactStore,
    ) -> None:
        self.artifacts = artifacts
        self.settings = settings
        self.kafka = settings.kafka_settings()
        self.hub = hub
        self._transport = transport
        self._view = view
        self._follower = follower
        self._codec = codec or default_codec()
        self._names: TopicNames = self.kafka.names
        self._pending = 0
        self._same_key: dict[str, asyncio.Future[str]] = {}
        self.sockets = 0

    # -- facts

    def models(self) -> list[ModelInfo]:
        """The models that workers have told of."""
        return list(self._view.models.values())

    def readiness(self) -> Readiness:
        return self._follower.readiness()

    def gauges(self) -> Gauges:
        depths, ages = self._view.queue_depths(now_ms())
        memory: dict[tuple[str, str], int] = {}
        for worker in self._view.workers.values():
            for device in worker.devices:
                sizes = {"total": device.total_bytes, "reserved": device.reserved_bytes, "used": device.used_bytes}
                for kind, size in sizes.items():
                    memory[(device.device, kind)] = memory.get((device.device, kind), 0) + size
        running: dict[str, int] = {}
        for entry in self._view.live_entries():
            if entry.status_name == "running" and entry.model is not None:
                running[entry.model] = running.get(entry.model, 0) + 1
        return Gauges(
            queue_depth=depths,
            oldest_age_s=ages,
            inflight=self._view.live_count,
            ws_clients=self.sockets,
            device_memory=memory,
            running=running,
        )

    def stats(self) -> dict[str, Any]:
        """What operators look at first. Rates are means over the last minute."""
        at_ms = now_ms()
        depths, ages = self._view.queue_depths(at_ms)
        workers = sorted(self._view.workers.values(), key=lambda state: state.worker_id)
        return {
            "object": "stats",
            "queues": {name: {"depth": depths[name], "oldest_age_s": round(ages[name], 3)} for name in depths},
            "inflight": self._view.live_count,
            "rates": {
                "accepted_per_s": round(self._view.arrivals.per_s(at_ms), 3),
                "ended_per_s": round(self._view.endings.per_s(at_ms), 3),
            },
            "outcomes": dict(self._view.outcomes),
            "clients": {
                "connected": self.hub.connected,
                "dropped_slow": self.hub.dropped_slow,
                "sockets": self.sockets,
            },
            "workers": [_with_times(worker.to_dict()) for worker in workers],
            "models": [_with_times(model.to_dict()) for model in self.models()],
        }

    # -- submit

    async def submit(self, request: InferenceRequest, *, idempotency_key: str | None = None) -> Accepted:
        """Put a request on its topic and wait for the broker's word.

        Raises Overloaded, BrokerUnavailable, TooLarge, ModelNotFound, InvalidRequest (unknown pool) and
        IdempotencyKeyReused.
        """
        await self._check_pool(request)
        find_model(self.models(), request.task, request.model, request.pool)
        if idempotency_key is not None:
            return await self._submit_once(request, idempotency_key)
        await self._produce(request)
        return Accepted(request.request_id)

    async def _submit_once(self, request: InferenceRequest, key: str) -> Accepted:
        """A repeat of a key is the same request, at every gateway, while the horizon lasts."""
        if not 0 < len(key) <= 255:
            raise InvalidRequest("Idempotency-Key must have 1 to 255 characters", param="Idempotency-Key")
        request_id = idempotent_request_id(request.tenant, key)
        request = dataclasses.replace(request, request_id=request_id)
        running = self._same_key.get(request_id)
        if running is not None:
            self._check_same(await asyncio.shield(running), request)
            return Accepted(request_id, replayed=True)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._same_key[request_id] = future
        try:
            await self._follower.catch_up()
            found = self._view.find((request.tenant, request_id))
            if found is not None and found.erased:
                raise GoneError("the request of this Idempotency-Key was erased")
            if found is not None:
                future.set_result(found.content)
                self._check_same(found.content, request)
                return Accepted(request_id, replayed=True)
            await self._produce(request)
            future.set_result(content_hash(request))
            return Accepted(request_id)
        except BaseException as error:
            if not future.done():
                given_up = BrokerUnavailable("the first request with this Idempotency-Key was given up; try again")
                future.set_exception(given_up if isinstance(error, asyncio.CancelledError) else error)
                future.exception()  # nobody else may be waiting: it was told
            raise
        finally:
            del self._same_key[request_id]

    @staticmethod
    def _check_same(content: str, request: InferenceRequest) -> None:
        if content and content != content_hash(request):
            raise IdempotencyKeyReused("this Idempotency-Key was used with another body", param="Idempotency-Key")

    async def _check_pool(self, request: InferenceRequest) -> None:
        if request.pool is None:
            return
        topic = self._names.request(request.task, request.priority, request.pool)
        if not self._follower.known_topic(topic) and not await self._follower.add_topic_now(topic):
            raise InvalidRequest(f"there is no pool {request.pool}", param="pool")

    async def _produce(self, request: InferenceRequest) -> None:
        conf = self.settings.gateway
        if self._pending >= conf.max_pending_submits or self._view.live_count >= conf.max_live:
            raise Overloaded("the gateway holds as many requests as it may; try again", retry_after_s=1)
        topic = self._names.request(request.task, request.priority, request.pool)
        self._pending += 1
        try:
            await self._transport.produce(topic, self._codec.encode(request), key=request_key(request))
        finally:
            self._pending -= 1
        self._view.accepted(request)

    # -- look-ups

    async def find(self, tenant: str, request_id: str) -> Entry:
        """Raises NotFound for unknown and foreign alike (after catching up), Gone for an erased one."""
        key: Key = (tenant, request_id)
        entry = self._view.find(key)
        if entry is None or not (entry.content or entry.origin):
            try:
                await self._follower.catch_up()
            except BrokerUnavailable:
                if entry is None:
                    raise
            entry = self._view.find(key)
        if entry is None:
            raise NotFound("there is no such request")
        if entry.erased:
            raise GoneError("this request was erased")
        return entry

    async def wait(self, tenant: str, request_id: str, timeout_s: float) -> Entry:
        """The entry when it is done, or as it is after `timeout_s`."""
        entry = await self.find(tenant, request_id)
        if entry.done or timeout_s <= 0:
            return entry
        ready = asyncio.Event()
        client = self.hub.connect(ready.set)
        self.hub.subscribe(client, ("outcome", tenant, request_id))
        try:
            await asyncio.wait_for(ready.wait(), timeout_s)
        except TimeoutError:
            pass
        finally:
            self.hub.drop(client, Gone.CLOSED)
        found = self._view.find((tenant, request_id)) or entry
        if found.erased:
            raise GoneError("this request was erased")
        return found

    async def page(self, tenant: str, **options: Any) -> list[Entry]:
        """A page of the tenant's requests, as `Store.page` has it, with what has happened until now."""
        await self._written()
        found = await asyncio.to_thread(self._view.page, tenant, **options)
        return [self._view.find(entry.key) or entry for entry in found]

    async def _written(self) -> None:
        done = threading.Event()
        for _ in range(50):
            if self._view.flush(done):
                await asyncio.to_thread(done.wait, 2)
                return
            await asyncio.sleep(0.02)

    # -- subscriptions

    def subscribe(self, tenant: str, request_id: str, after: Cursor | None = None) -> Subscription:
        """Frames of one request that the view knows (just submitted, or found), to its outcome. Raises NotFound."""
        subscription = Subscription(self, single=True)
        self.follow(subscription, tenant, request_id, after)
        return subscription

    def follow(self, subscription: Subscription, tenant: str, request_id: str, after: Cursor | None = None) -> None:
        """Add a known request to a subscription. Raises NotFound, Gone."""
        entry = self._view.find((tenant, request_id))
        if entry is None:
            raise NotFound("there is no such request")
        if entry.erased:
            raise GoneError("this request was erased")
        entry.check_cursor(after)
        self.hub.subscribe(subscription.client, ("request", tenant, request_id))
        subscription.push(entry.opening(after))

    def follow_new(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        """Add a request that was just submitted. Who follows its conversation was told its beginning already."""
        entry = self._view.find((tenant, request_id))
        if entry is None or ("conversation", tenant, entry.conversation_id) not in subscription.client.subjects:
            self.follow(subscription, tenant, request_id)
        elif not entry.done:
            self.hub.subscribe(subscription.client, ("request", tenant, request_id))

    def unfollow(self, subscription: Subscription, tenant: str, request_id: str) -> None:
        self.hub.unsubscribe(subscription.client, ("request", tenant, request_id))

    def follow_conversation(self, subscription: Subscription, tenant: str, conversation_id: str) -> None:
        """Add all requests of a conversation: those that are under way, and those to come."""
        self.hub.subscribe(subscription.client, ("conversation", tenant, conversation_id))
        for entry in self._view.live_entries():
            known = ("request", *entry.key) in subscription.client.subjects
            if (entry.tenant, entry.conversation_id) == (tenant, conversation_id) and not known:
                subscription.push(entry.opening(None))

    def unfollow_conversation(self, subscription: Subscription, tenant: str, conversation_id: str) -> None:
        self.hub.unsubscribe(subscription.client, ("conversation", tenant, conversation_id))

    async def reach(self, after: Cursor | None) -> None:
        """Wait until this gateway's view is as far as the one that gave a cursor out (2 s at most)."""
        if after is None or after.offset < 0:
            return
        await self._follower.reached({(self._names.result, after.partition): after.offset + 1}, 2.0)

    # -- control

    async def cancel(self, tenant: str, request_id: str, reason: str | None = None) -> Entry:
        """Ask for a request's end; its entry, which is done already or will be. Raises NotFound."""
        entry = await self.find(tenant, request_id)
        if not entry.done:
            await self._command("cancel", entry, reason)
        return entry

    async def cancel_ids(self, tenant: str, request_ids: Sequence[str]) -> list[str]:
        """Ask for the end of those of these requests that run; their ids. Unknown and foreign ones are left out."""
        wanted = dict.fromkeys(request_ids)
        if any(self._view.find((tenant, one)) is None for one in wanted):
            await self._follower.catch_up()
        found = [self._view.find((tenant, one)) for one in wanted]
        return await self._cancel_all([entry for entry in found if entry is not None])

    async def cancel_where(self, tenant: str, *, status: str | None, conversation_id: str | None) -> list[str]:
        """The same for all of the tenant's requests in a status, in a conversation, or both."""
        return await self._cancel_all(
            [
                entry
                for entry in self._view.live_entries()
                if entry.tenant == tenant
                and (status is None or entry.status_name == status)
                and (conversation_id is None or entry.conversation_id == conversation_id)
            ]
        )

    async def _cancel_all(self, entries: Sequence[Entry]) -> list[str]:
        running = [entry for entry in entries if not entry.done and not entry.erased]
        for start in range(0, len(running), CANCELS_AT_ONCE):
            await asyncio.gather(
                *(self._command("cancel", entry, None) for entry in running[start : start + CANCELS_AT_ONCE])
            )
        return [entry.request_id for entry in running]

    def stop(self) -> None:
        """Let all go who wait or follow: their requests go on, and any gateway tells the rest."""
        self.hub.drop_all(Gone.STOPPING)

    async def erase(self, tenant: str, request_id: str) -> None:
        """Erase an ended request everywhere. Raises NotFound, Conflict while it runs, Gone when it is erased."""
        entry = await self.find(tenant, request_id)
        if not entry.done:
            raise Conflict("the request has not ended; cancel it first")
        offset = await self._command("erase", entry, None)
        kept = None if entry.terminal is None else entry.terminal.output_artifact
        if kept is not None:
            await asyncio.to_thread(self.artifacts.delete, tenant, kept.artifact_id)
        await self._follower.reached({(self._names.control, 0): offset + 1}, 2.0)

    async def _command(self, kind: str, entry: Entry, reason: str | None) -> int:
        command = ControlCommand(
            kind=kind,
            request_id=entry.request_id,
            tenant=entry.tenant,
            reason=reason,
            created_at=now_ms(),
            created_by="gateway",
            origin=entry.origin,
            conversation_id=entry.conversation_id,
        )
        key = f"{entry.request_id}/{kind}".encode()
        delivery = await self._transport.produce(self._names.control, self._codec.encode(command), key=key)
        return delivery.offset


def _with_times(facts: dict[str, Any]) -> dict[str, Any]:
    """A record's facts with its times as RFC 3339."""
    return {name: rfc3339(value) if name.endswith("_at") else value for name, value in facts.items()}
