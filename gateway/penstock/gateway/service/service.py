"""The gateway's service: what routes and sockets call, parted by subject. No HTTP in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.sweeping import Sweeper
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.service.artifact_sweeps import ArtifactSweeps
from penstock.gateway.service.control import Control
from penstock.gateway.service.ending_lost import EndingLost
from penstock.gateway.service.facts import Facts
from penstock.gateway.service.lookups import Lookups
from penstock.gateway.service.model_orders import ModelOrders
from penstock.gateway.service.run_times import RunTimes
from penstock.gateway.service.submitting import Accepted, Submitter
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.service.withdrawing import Withdrawing
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.records import InferenceRequest


class Submits(Protocol):
    """What routes ask of `Submitter`."""

    async def submit(
        self, request: InferenceRequest, *, idempotency_key: str | None = None, traceparent: str | None = None
    ) -> Accepted: ...
    async def check(self, request: InferenceRequest) -> None: ...


class Controls(Protocol):
    """What routes ask of `Control`."""

    async def cancel(self, tenant: str, request_id: str, reason: str | None = None) -> tuple[Entry, bool]: ...
    async def cancel_ids(self, tenant: str, request_ids: Sequence[str]) -> list[str]: ...
    async def cancel_where(self, tenant: str, *, status: str | None, conversation_id: str | None) -> list[str]: ...
    async def erase(self, tenant: str, request_id: str) -> None: ...
    async def has_turns(self, tenant: str, conversation_id: str) -> bool: ...
    async def end_turns(self, tenant: str, conversation_id: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayService:
    """Made when the gateway is connected to its Kafka."""

    settings: GatewaySettings
    kafka: KafkaSettings
    artifacts: ArtifactStore
    codec: Codec
    """For threads: it may ask a registry."""
    facts: Facts
    submitting: Submits
    lookups: Lookups
    subscriptions: Subscriptions
    control: Controls
    ending_lost: EndingLost
    model_orders: ModelOrders
    withdrawing: Withdrawing
    sweeps: ArtifactSweeps
    threads: Threads = field(default_factory=Threads)

    @classmethod
    def compose(
        cls,
        settings: GatewaySettings,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        hub: Hub,
        codec: Codec,
        artifacts: ArtifactStore,
        threads: Threads,
        run_times: RunTimes,
    ) -> GatewayService:
        kafka = settings.kafka_settings()
        facts = Facts(view, follower, hub, settings.gateway.worker_late_s, run_times)
        lookups = Lookups(view, follower, hub, threads)
        orders = ModelOrders(transport, facts, kafka, codec, threads)
        control = Control(transport, view, follower, lookups, codec, kafka.names, artifacts)
        return cls(
            settings=settings,
            kafka=kafka,
            artifacts=artifacts,
            codec=codec,
            facts=facts,
            submitting=Submitter(settings, transport, view, follower, codec, facts.models, artifacts.check_place),
            lookups=lookups,
            subscriptions=Subscriptions(view, follower, hub, kafka.names, facts.waits_for_worker),
            control=control,
            ending_lost=EndingLost(view, follower, facts, control, kafka, threads),
            model_orders=orders,
            withdrawing=Withdrawing(facts, orders),
            sweeps=ArtifactSweeps(Sweeper(artifacts), view, kafka, threads, settings.gateway.sweep_artifacts_s),
            threads=threads,
        )
